"""Ordinary training steps for the models: no decorator, no mesh, no collective.

A step is written for the whole batch, so its means are over all examples. To train one in parallel, decorate it, and
give it the boundary through `value_and_grad`:

    init_fn, train_step, eval_step = make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    train_step = splitjax.parallelize(train_step, mesh={"data": 2, "model": 4})

Batches are dicts. Images: `{"image": f32[B, H, W, C], "label": i32[B]}`. Tokens: `{"tokens": i32[B, T]}`, where
position t predicts token t + 1, or with `"label": i32[B, T]` what position t is to predict. An optional `"mask"`,
f32[B] (or f32[B, T] for tokens), weighs the examples: means are weighted means, so padding with mask 0 counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from splitjax.errors import DataError
from splitjax.models._common import ModelError, at_least_float32
from splitjax.models.registry import ModelSpec

Batch = dict[str, jax.Array]
Metrics = dict[str, jax.Array]
# ([..., classes] logits, i32[...] labels) -> [...] losses
Loss = Callable[[jax.Array, jax.Array], jax.Array]


def cross_entropy(logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0) -> jax.Array:
    """The negative log-likelihood of each label, in nats: ([..., classes], i32[...]) -> [...], at least float32.

    With `label_smoothing` s the target is 1 - s + s/classes on the label and s/classes elsewhere (Szegedy et al.
    2015, arXiv 1512.00567, section 7).
    """
    logits = at_least_float32(logits)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if label_smoothing:
        uniform = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
        losses = (1 - label_smoothing) * losses + label_smoothing * uniform
    return losses


def make_step(
    spec: ModelSpec,
    optimizer: optax.GradientTransformation,
    *,
    loss: str | Loss = "cross_entropy",
    label_smoothing: float = 0.0,
    value_and_grad: Callable = jax.value_and_grad,
) -> tuple[Callable, Callable, Callable]:
    """Functions that make a state, train it by a batch, and evaluate it, for a Linen model.

    **Arguments:**

    - `spec`: a model of `build(..., library="linen")`.
    - `optimizer`: any optax optimizer.
    - `loss`: `"cross_entropy"`, or a function from [..., classes] logits and i32[...] labels to [...] losses.
    - `label_smoothing`: in [0, 1), for the cross-entropy in training; evaluation has none.
    - `value_and_grad`: `jax.value_and_grad` or what replaces it.

    **Returns:**

    - `init_fn(key) -> state`: a dict of `"params"`, `"opt"` and `"step"` i32[], `"batch_stats"` where there is batch
      norm, `"key"` (constant: each step folds its number in) where there is dropout.
    - `train_step(state, batch) -> (state, {"loss": f32[], "accuracy": f32[]})`.
    - `eval_step(state, batch) -> {"loss": f32[], "accuracy": f32[], "correct": f32[]}`: weighted means, and the
      weighted number of right answers.

    Raises `ModelError` for an NNX model, an unknown loss, or a mask in training with batch norm; `DataError`, when
    traced, for a batch that lacks an entry.
    """
    _check_library(spec, "linen", "make_step", "make_nnx_step")
    loss_of = _loss_function(loss, label_smoothing)
    eval_loss_of = _loss_function(loss, 0.0)

    def init_fn(key):
        params_key, dropout_key = jax.random.split(key)
        variables = spec.init(params_key)
        state = {"params": variables["params"], "opt": optimizer.init(variables["params"])}
        state["step"] = jnp.zeros((), jnp.int32)
        if spec.has_batch_stats:
            state["batch_stats"] = variables["batch_stats"]
        if spec.has_dropout:
            state["key"] = dropout_key
        return state

    def variables_of(state, params):
        variables = {"params": params}
        if spec.has_batch_stats:
            variables["batch_stats"] = state["batch_stats"]
        return variables

    def train_step(state, batch):
        _check_training_mask(spec, batch)
        inputs, labels, weights = _read(spec, batch)
        options = {}
        if spec.has_dropout:
            options["rngs"] = {"dropout": jax.random.fold_in(state["key"], state["step"])}

        def loss_fn(params):
            logits, updated = spec.apply(variables_of(state, params), inputs, train=True, mutable=["batch_stats"], **options)
            value = _mean(loss_of(logits, labels), weights)
            return value, (_mean(_hits(logits, labels), weights), updated)

        (value, (accuracy, updated)), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        state = {**state, **updated, "params": optax.apply_updates(state["params"], updates), "opt": opt}
        state["step"] = state["step"] + 1
        return state, {"loss": value, "accuracy": accuracy}

    def eval_step(state, batch):
        inputs, labels, weights = _read(spec, batch)
        logits = spec.apply(variables_of(state, state["params"]), inputs)
        return _evaluation(eval_loss_of, logits, labels, weights)

    return init_fn, train_step, eval_step


def make_nnx_step(
    spec: ModelSpec,
    optimizer: optax.GradientTransformation,
    *,
    loss: str | Loss = "cross_entropy",
    label_smoothing: float = 0.0,
    value_and_grad: Callable = nnx.value_and_grad,
) -> tuple[Callable, Callable, Callable]:
    """As `make_step`, for an NNX model, whose step changes the model and the optimizer in place.

    **Arguments:** as of `make_step`; `value_and_grad` is `nnx.value_and_grad` or what replaces it.

    **Returns:**

    - `init_fn(key) -> (model, optimizer)`, an `nnx.Module` and its `nnx.Optimizer`.
    - `train_step(model, optimizer, batch) -> {"loss": f32[], "accuracy": f32[]}`.
    - `eval_step(model, batch) -> {"loss": f32[], "accuracy": f32[], "correct": f32[]}`.

    Raises as `make_step`, with the libraries exchanged.
    """
    _check_library(spec, "nnx", "make_nnx_step", "make_step")
    loss_of = _loss_function(loss, label_smoothing)
    eval_loss_of = _loss_function(loss, 0.0)

    def init_fn(key):
        params_key, dropout_key = jax.random.split(key)
        model = spec.make(nnx.Rngs(params=params_key, dropout=dropout_key))
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    def train_step(model, optimizer, batch):
        _check_training_mask(spec, batch)
        inputs, labels, weights = _read(spec, batch)

        def loss_fn(model):
            logits = model(inputs, train=True)
            return _mean(loss_of(logits, labels), weights), _mean(_hits(logits, labels), weights)

        (value, accuracy), grads = value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return {"loss": value, "accuracy": accuracy}

    def eval_step(model, batch):
        inputs, labels, weights = _read(spec, batch)
        return _evaluation(eval_loss_of, model(inputs), labels, weights)

    return init_fn, train_step, eval_step


def _check_library(spec: ModelSpec, library: str, here: str, there: str) -> None:
    if spec.library != library:
        raise ModelError(
            f"{here} is for models of library {library!r}",
            value=spec.library,
            place=f"splitjax.models.{here}, model {spec.name!r}",
            remedy=f"call {there}, or build({spec.name!r}, library={library!r})",
        )


def _loss_function(loss: str | Loss, label_smoothing: float) -> Loss:
    if not 0 <= label_smoothing < 1:
        raise ModelError(
            "label_smoothing is the share of the target given to all classes: it lies in [0, 1)",
            value=label_smoothing,
            place="splitjax.models.make_step, option 'label_smoothing'",
            remedy="pass label_smoothing=0.0 for none, 0.1 as is common",
        )
    if callable(loss):
        if label_smoothing:
            raise ModelError(
                "label_smoothing belongs to the cross-entropy, not to a loss of your own",
                value=label_smoothing,
                place="splitjax.models.make_step, option 'label_smoothing'",
                remedy="smooth inside the loss function, and leave label_smoothing at 0",
            )
        return loss
    if loss != "cross_entropy":
        raise ModelError(
            "no such loss",
            value=loss,
            place="splitjax.models.make_step, option 'loss'",
            remedy="pass 'cross_entropy', or a function (logits, labels) -> losses",
        )
    return lambda logits, labels: cross_entropy(logits, labels, label_smoothing=label_smoothing)


def _check_training_mask(spec: ModelSpec, batch: Batch) -> None:
    if spec.has_batch_stats and "mask" in batch:
        raise ModelError(
            "masked examples would enter the statistics of batch norm, where the mask does not reach",
            value="mask",
            place=f"the training batch of model {spec.name!r}",
            remedy="train on full batches (splitjax.data.epoch_batches gives only those)",
        )


def _read(spec: ModelSpec, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The batch's inputs, labels, and the weight of each label (None: all equal), the latter two of equal shape."""
    inputs, mask = _entry(spec, batch, spec.input_name), batch.get("mask")
    if spec.input_name == "tokens" and "label" not in batch:
        inputs, labels = inputs[:, :-1], inputs[:, 1:]
        mask = mask[:, 1:] if mask is not None and mask.ndim == 2 else mask
    else:
        labels = _entry(spec, batch, "label")
    if mask is None:
        return inputs, labels, None
    mask = mask.reshape(mask.shape + (1,) * (labels.ndim - mask.ndim))
    return inputs, labels, jnp.broadcast_to(mask, labels.shape).astype(jnp.float32)


def _entry(spec: ModelSpec, batch: Batch, name: str) -> jax.Array:
    if name not in batch:
        raise DataError(
            f"the batch has no entry {name!r}",
            value=sorted(batch),
            place=f"a batch for model {spec.name!r}",
            remedy=f"give the step a dict with the entries of {sorted(spec.example())}",
        )
    return batch[name]


def _mean(values: jax.Array, weights: jax.Array | None) -> jax.Array:
    if weights is None:
        return jnp.mean(values)
    weights = weights.astype(values.dtype)
    # A batch of padding alone has no mean; 0 keeps it from turning an average over batches into NaN.
    total = jnp.sum(weights)
    return jnp.sum(values * weights) / jnp.where(total > 0, total, jnp.ones_like(total))


def _hits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)


def _evaluation(loss_of: Loss, logits: jax.Array, labels: jax.Array, weights: jax.Array | None) -> Metrics:
    hits = _hits(logits, labels)
    return {
        "loss": _mean(loss_of(logits, labels), weights),
        "accuracy": _mean(hits, weights),
        "correct": jnp.sum(hits if weights is None else hits * weights),
    }
