"""Makes ordinary training steps for the models: no decorator, no mesh, no collective.

A `ModelSpec` and an optax optimizer go in; functions that make, train and evaluate a state come out.

A step is written for the whole batch, so its means are over all examples. To train one in parallel, decorate it, and
give it the boundary through `value_and_grad`:

    init_fn, train_step, eval_step = make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    train_step = splitjax.parallelize(train_step, mesh={"data": 2, "model": 4})

Batches are dicts. Images: `{"image": f32[B, H, W, C], "label": i32[B]}`. Tokens: `{"tokens": i32[B, T]}`, where
position t predicts token t + 1, or with `"label": i32[B, T]` what position t is to predict; where the softmax is
sampled in training (LSTM), training batches have `"negatives": i32[B, S]` too. Clicks:
`{"ids": i32[B, F], "values": f32[B, D], "label": i32[B]}`. An optional `"mask"`, f32[B] (or f32[B, T] for tokens),
weighs the examples: means are weighted means, so padding with mask 0 counts nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from splitjax.models._common import ModelError
from splitjax.models.objectives import Batch, Loss, Metrics, evaluation, training
from splitjax.models.sampled_softmax import LogProbability
from splitjax.models.spec import ModelSpec

# "params", "opt", "step", and what the model has beside them; each a pytree of arrays.
State: TypeAlias = dict[str, Any]
InitFn: TypeAlias = Callable[[jax.Array], State]
TrainStep: TypeAlias = Callable[[State, Batch], tuple[State, Metrics]]
EvalStep: TypeAlias = Callable[[State, Batch], Metrics]
NnxInitFn: TypeAlias = Callable[[jax.Array], tuple[nnx.Module, nnx.Optimizer[nnx.Module]]]
NnxTrainStep: TypeAlias = Callable[[nnx.Module, nnx.Optimizer[nnx.Module], Batch], Metrics]
NnxEvalStep: TypeAlias = Callable[[nnx.Module, Batch], Metrics]
# As `jax.value_and_grad`: (function, has_aux=True) -> a function that returns ((value, auxiliary), gradients)
ValueAndGrad: TypeAlias = Callable[..., Callable[..., Any]]


def make_step(
    spec: ModelSpec,
    optimizer: optax.GradientTransformation,
    *,
    loss: str | Loss | None = None,
    label_smoothing: float = 0.0,
    log_probability: LogProbability | None = None,
    value_and_grad: ValueAndGrad = jax.value_and_grad,
) -> tuple[InitFn, TrainStep, EvalStep]:
    """Returns functions that make a state, train it by a batch, and evaluate it, for a Linen model.

    **Arguments:**

    - `spec`: a model of `build(..., library="linen")`.
    - `optimizer`: any optax optimizer.
    - `loss`: `"cross_entropy"` (of two classes for clicks), the LSTM's `"sampled_softmax"`, or a function from [...,
      classes] logits and i32[...] labels to [...] losses. None: the sampled softmax where the model has it, the
      cross-entropy elsewhere.
    - `label_smoothing`: in [0, 1), for the cross-entropy in training; evaluation has none.
    - `log_probability`: for the sampled softmax, of a word in one draw of negatives; None:
      `splitjax.models.log_uniform`.
    - `value_and_grad`: `jax.value_and_grad` or what replaces it.

    **Returns:**

    - `init_fn(key) -> state`: a dict of `"params"`, `"opt"` and `"step"` i32[], `"batch_stats"` where there is batch
      norm, `"key"` (constant: each step folds its number in) where there is dropout.
    - `train_step(state, batch) -> (state, {"loss": f32[], "accuracy": f32[]})`; with a sampled softmax no accuracy.
    - `eval_step(state, batch) -> {"loss": f32[], "accuracy": f32[], "correct": f32[]}`: weighted means, and the
      weighted number of right answers; for clicks `"logits": f32[B]` too.

    Raises `ModelError` for an NNX model, an unknown loss, or a mask in training with batch norm; `DataError`, when
    traced, for a batch that lacks an entry.
    """
    _check_library(spec, "linen", "make_step", "make_nnx_step")
    trained, judged = training(spec, loss, label_smoothing, log_probability), evaluation(spec, loss)

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
        inputs = trained.arguments(batch)
        options: dict[str, Any] = {"method": trained.method}
        if spec.has_dropout:
            options["rngs"] = {"dropout": jax.random.fold_in(state["key"], state["step"])}

        def loss_fn(params):
            outputs, updated = spec.apply(
                variables_of(state, params), *inputs, train=True, mutable=["batch_stats"], **options
            )
            value, metrics = trained.judge(outputs, batch)
            return value, (metrics, updated)

        (value, (metrics, updated)), grads = value_and_grad(loss_fn, has_aux=True)(state["params"])
        updates, opt = optimizer.update(grads, state["opt"], state["params"])
        state = {**state, **updated, "params": optax.apply_updates(state["params"], updates), "opt": opt}
        state["step"] = state["step"] + 1
        return state, {"loss": value, **metrics}

    def eval_step(state, batch):
        logits = spec.apply(variables_of(state, state["params"]), *judged.arguments(batch))
        return judged.judge(logits, batch)[1]

    return init_fn, train_step, eval_step


def make_nnx_step(
    spec: ModelSpec,
    optimizer: optax.GradientTransformation,
    *,
    loss: str | Loss | None = None,
    label_smoothing: float = 0.0,
    log_probability: LogProbability | None = None,
    value_and_grad: ValueAndGrad = nnx.value_and_grad,
) -> tuple[NnxInitFn, NnxTrainStep, NnxEvalStep]:
    """Returns what `make_step` does, for an NNX model, whose step changes the model and the optimizer in place.

    **Arguments:**

    - `spec`: a model of `build(..., library="nnx")`.
    - `optimizer`, `loss`, `label_smoothing`, `log_probability`: as of `make_step`.
    - `value_and_grad`: `nnx.value_and_grad` or what replaces it.

    **Returns:**

    - `init_fn(key) -> (model, optimizer)`, an `nnx.Module` and its `nnx.Optimizer`.
    - `train_step(model, optimizer, batch) -> {"loss": f32[], "accuracy": f32[]}`.
    - `eval_step(model, batch) -> {"loss": f32[], "accuracy": f32[], "correct": f32[]}`; for clicks `"logits": f32[B]`
      too.

    Raises as `make_step`, with the libraries exchanged.
    """
    _check_library(spec, "nnx", "make_nnx_step", "make_step")
    trained, judged = training(spec, loss, label_smoothing, log_probability), evaluation(spec, loss)

    def init_fn(key):
        params_key, dropout_key = jax.random.split(key)
        model = spec.make(nnx.Rngs(params=params_key, dropout=dropout_key))
        return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)

    def train_step(model, optimizer, batch):
        _check_training_mask(spec, batch)
        inputs = trained.arguments(batch)

        def loss_fn(model):
            called = model if trained.method is None else getattr(model, trained.method)
            return trained.judge(called(*inputs, train=True), batch)

        (value, metrics), grads = value_and_grad(loss_fn, has_aux=True)(model)
        optimizer.update(model, grads)
        return {"loss": value, **metrics}

    def eval_step(model, batch):
        return judged.judge(model(*judged.arguments(batch)), batch)[1]

    return init_fn, train_step, eval_step


def _check_library(spec: ModelSpec, library: str, here: str, there: str) -> None:
    if spec.library != library:
        raise ModelError(
            f"{here} is for models of library {library!r}",
            value=spec.library,
            place=f"splitjax.models.{here}, model {spec.name!r}",
            remedy=f"call {there}, or build({spec.name!r}, library={library!r})",
        )


def _check_training_mask(spec: ModelSpec, batch: Batch) -> None:
    if spec.has_batch_stats and "mask" in batch:
        raise ModelError(
            "masked examples would enter the statistics of batch norm, where the mask does not reach",
            value="mask",
            place=f"the training batch of model {spec.name!r}",
            remedy="train on full batches (splitjax.data.epoch_batches gives only those)",
        )
