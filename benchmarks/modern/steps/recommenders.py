"""Steps over tables of categories."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

import splitjax
from benchmarks.modern.steps._drawn import Drawn
from benchmarks.modern.steps._parts import apply_perceptron, perceptron
from benchmarks.modern.steps.case import ModernStep, Problem

WIDTH = 16


def dlrm(dtype: str) -> Problem:
    """Tables of several sizes, dot products of every pair of features, and a perceptron below and above."""
    sizes = (64, 128, 32, 256)
    drawn = Drawn.of(dtype, 50)
    pairs = (len(sizes) + 1) * len(sizes) // 2
    params = {
        "tables": [drawn.normal(size, WIDTH, scale=size**-0.5) for size in sizes],
        "bottom": perceptron(drawn, 8, 64, WIDTH),
        "top": perceptron(drawn, WIDTH + pairs, 64, 32, 1),
    }
    tx = optax.multi_transform(
        {"table": optax.adagrad(0.05), "dense": optax.adam(1e-3)},
        {"tables": "table", "bottom": "dense", "top": "dense"},
    )

    def forward(params: Any, batch: Any) -> jax.Array:
        dense = apply_perceptron(params["bottom"], batch["dense"])
        rows = [table[batch["categories"][:, i]] for i, table in enumerate(params["tables"])]
        features = jnp.stack([dense, *rows], 1)
        products = jnp.einsum("bid,bjd->bij", features, features)
        first, second = jnp.tril_indices(features.shape[1], -1)
        return apply_perceptron(params["top"], jnp.concatenate([dense, products[:, first, second]], -1))[:, 0]

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            return optax.sigmoid_binary_cross_entropy(forward(params, batch), batch["clicked"]).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    def draw() -> Any:
        categories = [drawn.integers(size, 16, 1) for size in sizes]
        return {
            "dense": drawn.normal(16, 8),
            "categories": np.concatenate(categories, 1),
            "clicked": drawn.integers(2, 16).astype(dtype),
        }

    return Problem(train_step, {"params": params, "opt": tx.init(params)}, tuple(draw() for _ in range(2)))


class DeepFM(nn.Module):
    """A factorisation machine and a perceptron over the same table, which holds all fields one after another."""

    fields: int = 8
    buckets: int = 32

    @nn.compact
    def __call__(self, ids: jax.Array) -> jax.Array:
        ids = ids + self.buckets * jnp.arange(self.fields, dtype=ids.dtype)
        first = nn.Embed(self.fields * self.buckets, 1, name="first_order")(ids)[..., 0].sum(-1)
        v = nn.Embed(self.fields * self.buckets, WIDTH, name="factors")(ids)
        second = 0.5 * (v.sum(1) ** 2 - (v**2).sum(1)).sum(-1)
        x = v.reshape(v.shape[0], -1)
        for width in (64, 32):
            x = nn.relu(nn.Dense(width)(x))
        return first + second + nn.Dense(1)(x)[:, 0] + self.param("bias", nn.initializers.zeros, ())


def deepfm(dtype: str) -> Problem:
    drawn = Drawn.of(dtype, 51)
    model = DeepFM()
    draw = lambda: {"ids": drawn.integers(32, 16, 8), "clicked": drawn.integers(2, 16).astype(dtype)}
    batches = tuple(draw() for _ in range(2))
    params = drawn.linen(model, batches[0]["ids"])["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.lion(1e-4))

    def train_step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = state.apply_fn({"params": params}, batch["ids"])
            penalty = 1e-5 * (params["factors"]["embedding"] ** 2).sum()
            return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean() + penalty, logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss, "mean_score": jax.nn.sigmoid(logits).mean()}

    return Problem(train_step, state, batches)


def two_towers(dtype: str) -> Problem:
    """Users and items meet in one dot product; other items of the batch are negatives, corrected by how often they
    are drawn. A user's history is a bag of items from the same table, padded with item 0."""
    users, items = 128, 256
    drawn = Drawn.of(dtype, 52)
    params = {
        "users": drawn.normal(users, WIDTH, scale=0.1),
        "items": drawn.normal(items, WIDTH, scale=0.1),
        "user_tower": perceptron(drawn, 2 * WIDTH, 64, 32),
        "item_tower": perceptron(drawn, WIDTH, 64, 32),
    }
    tx = optax.adagrad(0.05)

    def unit(x: jax.Array) -> jax.Array:
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    def train_step(state: Any, batch: Any) -> Any:
        params, opt = state

        def loss_fn(params: Any) -> jax.Array:
            real = (batch["history"] > 0).astype(dtype)[..., None]
            history = (params["items"][batch["history"]] * real).sum(1) / jnp.maximum(real.sum(1), 1)
            user = jnp.concatenate([params["users"][batch["user"]], history], -1)
            user = unit(apply_perceptron(params["user_tower"], user))
            item = unit(apply_perceptron(params["item_tower"], params["items"][batch["item"]]))
            logits = user @ item.T / 0.1 - jnp.log(batch["frequency"])
            same = batch["item"][:, None] == batch["item"]
            other = ~jnp.eye(logits.shape[0], dtype=bool)
            logits = jnp.where(same & other, -1e9, logits)  # an item is no negative of itself
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(logits.shape[0]))
            return (losses * batch["weight"]).sum() / batch["weight"].sum()

        loss, grads = splitjax.value_and_grad(loss_fn)(params)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt), {"loss": loss}

    draw = lambda: {
        "user": drawn.integers(users, 16),
        "item": drawn.integers(items, 16),
        "history": drawn.integers(items, 16, 5) * drawn.integers(2, 16, 5),
        "frequency": 0.01 + drawn.uniform(16),
        "weight": 0.5 + drawn.uniform(16),
    }
    return Problem(train_step, (params, tx.init(params)), tuple(draw() for _ in range(2)))


STEPS: tuple[ModernStep, ...] = (
    ModernStep("DLRM", "DLRM", dlrm, ("table", "splitjax gradient", "adagrad", "multi_transform", "pairs")),
    ModernStep("DeepFM", "DeepFM", deepfm, ("table", "TrainState", "aux", "lion")),
    ModernStep(
        "two towers, sampled softmax",
        "recommender",
        two_towers,
        ("table", "splitjax gradient", "negatives in the batch", "bags"),
    ),
)
