"""Defines what a model is trained for and judged by: which call of it a batch asks for, what the results are worth.

A `ModelSpec` and the name of a loss go in, an `Objective` comes out, of which `splitjax.models.steps` makes a step.

Batches are those of `splitjax.models.steps`. Means are over all examples of the batch, weighted by its mask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax

from splitjax.errors import DataError
from splitjax.models._common import ModelError, at_least_float32
from splitjax.models.lstm import Sampled
from splitjax.models.sampled_softmax import LogProbability, log_uniform, sampled_cross_entropy
from splitjax.models.spec import ModelSpec

Batch: TypeAlias = dict[str, jax.Array]
Metrics: TypeAlias = dict[str, jax.Array]
# ([..., classes] logits, i32[...] labels) -> [...] losses; for clicks ([B] logits, i32[B] labels) -> [B]
Loss: TypeAlias = Callable[[jax.Array, jax.Array], jax.Array]
LOSSES: tuple[str, ...] = ("cross_entropy", "sampled_softmax")


@dataclasses.dataclass(frozen=True)
class Objective:
    """Holds how a batch becomes a loss.

    **Attributes:**

    - `arguments`: batch -> what the model is given.
    - `judge`: (what it returns, batch) -> the mean loss f32[], and metrics.
    - `method`: which of the model's methods is called; None for the model itself.
    """

    arguments: Callable[[Batch], tuple[jax.Array, ...]]
    judge: Callable[[Any, Batch], tuple[jax.Array, Metrics]]
    method: str | None = None


def cross_entropy(logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0) -> jax.Array:
    """Returns the negative log-likelihood of each label, in nats: [...], at least float32.

    From `logits` [..., classes] and `labels` i32[...].

    With `label_smoothing` s the target is 1 - s + s/classes on the label and s/classes elsewhere (Szegedy et al.
    2015, arXiv 1512.00567, section 7).
    """
    logits = at_least_float32(logits)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if label_smoothing:
        uniform = jax.nn.logsumexp(logits, axis=-1) - jnp.mean(logits, axis=-1)
        losses = (1 - label_smoothing) * losses + label_smoothing * uniform
    return losses


def log_loss(logits: jax.Array, labels: jax.Array, *, label_smoothing: float = 0.0) -> jax.Array:
    """Returns the cross-entropy of two classes of which the logits are the second's, in nats: [...], at least float32.

    From `logits` [...] and `labels` i32[...]; `label_smoothing` as of `cross_entropy`.
    """
    logits = at_least_float32(logits)
    targets = labels.astype(logits.dtype)
    return optax.sigmoid_binary_cross_entropy(logits, (1 - label_smoothing) * targets + label_smoothing / 2)


def area_under_curve(scores: np.ndarray, labels: np.ndarray) -> float:
    """Computes the area under the receiver operating characteristic exactly, in [0, 1].

    It is the probability that a random example of label 1 has a higher score than an example of label 0, half of the
    ties counted. `scores` and `labels` are [N], the labels of both kinds.

    By ranks: Mann and Whitney 1947, "On a test of whether one of two random variables is stochastically larger than the
    other"."""
    positive = np.asarray(labels) == 1
    num, num_positive = len(positive), int(positive.sum())
    _, place, count = np.unique(np.asarray(scores, np.float64), return_inverse=True, return_counts=True)
    ranks = (np.cumsum(count) - (count - 1) / 2)[place]  # equal scores share the mean of their ranks
    return float(
        (ranks[positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * (num - num_positive))
    )


def training(
    spec: ModelSpec, loss: str | Loss | None, label_smoothing: float, log_probability: LogProbability | None = None
) -> Objective:
    """Returns the objective of a training step of `spec`.

    `loss`, `label_smoothing` and `log_probability`, and what is raised, are those of `make_step`; None for the loss:
    the model's own.
    """
    if loss is None:
        loss = "sampled_softmax" if spec.num_negatives else "cross_entropy"
    if loss == "sampled_softmax":
        return _sampled(spec, label_smoothing, log_probability)
    loss_of = _loss_function(spec, loss, label_smoothing)

    def judge(logits: jax.Array, batch: Batch) -> tuple[jax.Array, Metrics]:
        labels, weights = _targets(spec, batch)
        return _mean(loss_of(logits, labels), weights), {"accuracy": _mean(_hits(spec, logits, labels), weights)}

    return Objective(lambda batch: _inputs(spec, batch), judge)


def evaluation(spec: ModelSpec, loss: str | Loss | None) -> Objective:
    """Returns the objective of an evaluation step of `spec`: the whole softmax, no smoothing.

    `loss` is that of `make_step`. The metrics hold the loss too, and for clicks the logits. Raises `ModelError` for an
    unknown loss.
    """
    loss_of = _loss_function(spec, loss if callable(loss) else "cross_entropy", 0.0)

    def judge(logits: jax.Array, batch: Batch) -> tuple[jax.Array, Metrics]:
        labels, weights = _targets(spec, batch)
        value, hits = _mean(loss_of(logits, labels), weights), _hits(spec, logits, labels)
        correct = jnp.sum(hits if weights is None else hits * weights)
        metrics = {"loss": value, "accuracy": _mean(hits, weights), "correct": correct}
        return value, {**metrics, "logits": at_least_float32(logits)} if spec.reads == "clicks" else metrics

    return Objective(lambda batch: _inputs(spec, batch), judge)


def _sampled(spec: ModelSpec, label_smoothing: float, log_probability: LogProbability | None) -> Objective:
    if not spec.num_negatives or label_smoothing:
        raise ModelError(
            "the sampled softmax is the LSTM's, and has no label smoothing",
            value=(spec.name, label_smoothing),
            place="splitjax.models.make_step, option 'loss'",
            remedy="pass loss='cross_entropy' for the whole softmax",
        )
    log_probability = log_probability or log_uniform(spec.num_classes)

    def arguments(batch: Batch) -> tuple[jax.Array, ...]:
        return (*_inputs(spec, batch), _targets(spec, batch)[0], _entry(spec, batch, "negatives"))

    def judge(compared: Sampled, batch: Batch) -> tuple[jax.Array, Metrics]:
        _, weights = _targets(spec, batch)
        # Which word is the likeliest of all is not known here: there is no accuracy.
        return _mean(sampled_cross_entropy(*compared, log_probability), weights), {}

    return Objective(arguments, judge, "sampled")


def _loss_function(spec: ModelSpec, loss: str | Loss, label_smoothing: float) -> Loss:
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
            remedy=f"pass one of {', '.join(map(repr, LOSSES))}, or a function (logits, labels) -> losses",
        )
    loss_of = log_loss if spec.reads == "clicks" else cross_entropy
    return lambda logits, labels: loss_of(logits, labels, label_smoothing=label_smoothing)


def _shifted(spec: ModelSpec, batch: Batch) -> bool:
    """Tells whether each token is what the one before it is to predict, as the batch has no labels."""
    return spec.reads == "text" and "label" not in batch


def _inputs(spec: ModelSpec, batch: Batch) -> tuple[jax.Array, ...]:
    """Returns the arrays of the batch that the model reads, in its arguments' order."""
    inputs = tuple(_entry(spec, batch, name) for name in spec.inputs)
    _targets(spec, batch)  # a batch that lacks its labels is refused before the model sees it
    return (inputs[0][:, :-1],) if _shifted(spec, batch) else inputs


def _targets(spec: ModelSpec, batch: Batch) -> tuple[jax.Array, jax.Array | None]:
    """Returns the batch's labels, and the weight of each of them, of equal shape (None: all equal)."""
    mask = batch.get("mask")
    if _shifted(spec, batch):
        labels = _entry(spec, batch, "tokens")[:, 1:]
        mask = mask[:, 1:] if mask is not None and mask.ndim == 2 else mask
    else:
        labels = _entry(spec, batch, "label")
    if mask is None:
        return labels, None
    mask = mask.reshape(mask.shape + (1,) * (labels.ndim - mask.ndim))
    return labels, jnp.broadcast_to(mask, labels.shape).astype(jnp.float32)


def _entry(spec: ModelSpec, batch: Batch, name: str) -> jax.Array:
    """Returns an entry of the batch, or raises `DataError` that says which it lacks."""
    if name not in batch:
        raise DataError(
            f"the batch has no entry {name!r}",
            value=sorted(batch),
            place=f"a batch for model {spec.name!r}",
            remedy=f"give the step a dict with the entries of {sorted(spec.example())}",
        )
    return batch[name]


def _mean(values: jax.Array, weights: jax.Array | None) -> jax.Array:
    """Returns the mean f32[] of `values`, weighted where there are weights of their shape."""
    if weights is None:
        return jnp.mean(values)
    weights = weights.astype(values.dtype)
    # A batch of padding alone has no mean; 0 keeps it from turning an average over batches into NaN.
    total = jnp.sum(weights)
    return jnp.sum(values * weights) / jnp.where(total > 0, total, jnp.ones_like(total))


def _hits(spec: ModelSpec, logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns 1.0 where the likeliest class is the label, else 0.0, in the shape of `labels`."""
    if spec.reads == "clicks":
        return ((logits > 0) == (labels == 1)).astype(jnp.float32)
    return (jnp.argmax(logits, axis=-1) == labels).astype(jnp.float32)
