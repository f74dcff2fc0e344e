"""Small training steps written as a user would write them, for tests: `from tests.steps import ...`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import splitjax


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A step with its initial state and batches. `step(state, batch) -> (state, metrics)`. Equal to itself alone, so
    that its numbers can be kept."""

    step: Callable
    init: Callable  # key -> state
    batches: Any  # list of batches


class Conv(nn.Module):
    """Convolutions, batch norm, pooling, a dense head whose last layer does not divide by 4."""

    batch_norm: bool = True
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(8, (3, 3), param_dtype=x.dtype)(x)
        if self.batch_norm:
            x = nn.BatchNorm(use_running_average=not train, param_dtype=x.dtype)(x)
        x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
        x = nn.relu(nn.Conv(16, (3, 3), param_dtype=x.dtype)(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(64, param_dtype=x.dtype)(x))
        x = nn.Dropout(self.dropout, deterministic=not train or not self.dropout)(x)
        x = nn.relu(nn.Dense(32, param_dtype=x.dtype)(x))
        return nn.Dense(10, param_dtype=x.dtype)(x)


class Attention(nn.Module):
    """Two pre-norm blocks over a learned embedding."""

    vocab: int = 64
    dropout: float = 0.0

    @nn.compact
    def __call__(self, ids, train=True):
        dtype = jnp.result_type(float)
        x = nn.Embed(self.vocab, 32, param_dtype=dtype)(ids)
        for _ in range(2):
            h = nn.LayerNorm(param_dtype=dtype)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=4, param_dtype=dtype)(h, h)
            h = nn.LayerNorm(param_dtype=dtype)(x)
            h = nn.gelu(nn.Dense(64, param_dtype=dtype)(h))
            x = x + nn.Dropout(self.dropout, deterministic=not train or not self.dropout)(
                nn.Dense(32, param_dtype=dtype)(h)
            )
        return nn.Dense(self.vocab, param_dtype=dtype)(x)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum()


def linen_case(model, inputs, labels, tx, *, value_and_grad=splitjax.value_and_grad, microbatches=None) -> Case:
    """A step with batch statistics where the model has some, dropout where it draws some, and an uneven mask."""
    options = {} if microbatches is None else {"microbatches": microbatches}

    def init(key):
        # Numbers from numpy: compiling real initialisers would be most of the suite's time.
        variables = jax.eval_shape(lambda k: model.init({"params": k, "dropout": k}, inputs[0]), key)
        params = jax.tree.map(_numbers, variables["params"])
        variables = {"batch_stats": jax.tree.map(lambda x: jnp.ones(x.shape), variables.get("batch_stats", {}))}
        return {
            "params": params,
            "stats": variables.get("batch_stats", {}),
            "opt": tx.init(params),
            "step": jnp.zeros((), jnp.int32),
        }

    def step(state, batch):
        def loss_fn(params):
            variables = {"params": params, **({"batch_stats": state["stats"]} if state["stats"] else {})}
            rngs = {"dropout": jax.random.fold_in(jax.random.key(7), state["step"])}
            logits, changed = model.apply(variables, batch["x"], rngs=rngs, mutable=["batch_stats"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
            mask = jnp.broadcast_to(batch["mask"].reshape(-1, *[1] * (losses.ndim - 1)), losses.shape)
            correct = masked_mean((logits.argmax(-1) == batch["y"]).astype(losses.dtype), mask)
            return masked_mean(losses, mask), (changed.get("batch_stats", {}), correct)

        (loss, (stats, correct)), grads = value_and_grad(loss_fn, has_aux=True, **options)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        new = {
            "params": optax.apply_updates(state["params"], updates),
            "stats": stats,
            "opt": opt,
            "step": state["step"] + 1,
        }
        return new, {"loss": loss, "accuracy": correct}

    batches = [{"x": x, "y": y, "mask": _mask(len(x), k)} for k, (x, y) in enumerate(zip(inputs, labels, strict=True))]
    return Case(step, init, batches)


def _numbers(leaf: Any) -> jax.Array:
    """Weights scaled to their fan-in; biases and scales near 0.5, so that none is a fixed point."""
    rng = np.random.default_rng(leaf.size)
    fan_in = max(1, int(np.prod(leaf.shape[:-1])))
    values = (
        rng.normal(size=leaf.shape) / fan_in**0.5 if len(leaf.shape) > 1 else 0.5 + 0.1 * rng.normal(size=leaf.shape)
    )
    return jnp.asarray(values, leaf.dtype)


def _mask(size: int, seed: int) -> np.ndarray:
    """Zeros where a padded batch would have them: at the end, so that devices hold unequal numbers of examples."""
    mask = np.ones(size)
    mask[size - 3 - seed % 3 :] = 0
    return mask


def conv_case(tx=None, *, steps=3, dtype=np.float32, batch_norm=True, dropout=0.0, size=16, **options) -> Case:
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(size, 8, 8, 3)).astype(dtype) for _ in range(steps)]
    labels = [rng.integers(0, 10, size) for _ in range(steps)]
    return linen_case(
        Conv(batch_norm=batch_norm, dropout=dropout), inputs, labels, tx or optax.sgd(0.05, momentum=0.9), **options
    )


def attention_case(tx=None, *, steps=3, dropout=0.0, size=16, **options) -> Case:
    rng = np.random.default_rng(1)
    inputs = [rng.integers(0, 64, (size, 12)) for _ in range(steps)]
    labels = [rng.integers(0, 64, (size, 12)) for _ in range(steps)]
    return linen_case(Attention(dropout=dropout), inputs, labels, tx or optax.sgd(0.05, momentum=0.9), **options)


def train(step: Callable, state: Any, batches) -> tuple[Any, list[float]]:
    losses = []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return state, losses


def largest_difference(a: Any, b: Any) -> float:
    """The largest absolute difference between the floating-point leaves of two pytrees of one structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(
        float(np.max(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)), initial=0.0)) for x, y in pairs
    )
