"""`profile` of steps over Flax Linen, Flax NNX and Equinox modules: their lookups are tables, and objects stay as they
are."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import splitjax
import splitjax.equinox
import splitjax.nnx
from splitjax.errors import DonatedStateError, ProfileError

VOCABULARY, WIDTH, NUM_WORKERS = 24, 4, 4
MESH = {"data": 2, "model": 2}
TX = optax.sgd(0.1)
BATCHES = [
    {"ids": np.random.default_rng(seed).integers(0, VOCABULARY, (8, 3)), "y": np.ones((8, 2), np.float32)}
    for seed in range(2)
]
ROWS = [[list(np.unique(batch["ids"][2 * i : 2 * i + 2])) for i in range(NUM_WORKERS)] for batch in BATCHES]


def rows_of(profile, path):
    return [[list(rows) for rows in step] for step in profile.sparsity(path).samples]


class LinenModel(linen.Module):
    @linen.compact
    def __call__(self, ids):
        return linen.Dense(2)(linen.Embed(VOCABULARY, WIDTH)(ids).mean(1))


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 2, rngs=rngs)

    def __call__(self, ids):
        return self.head(self.drop(self.embed(ids).mean(1)))


class EquinoxModel(eqx.Module):
    embed: eqx.nn.Embedding
    head: eqx.nn.Linear

    def __init__(self, key):
        self.embed, self.head = eqx.nn.Embedding(VOCABULARY, WIDTH, key=key), eqx.nn.Linear(WIDTH, 2, key=key)

    def __call__(self, ids):
        return self.head(self.embed.weight[ids].mean(0))


def test_linen():
    model = LinenModel()

    @splitjax.parallelize(mesh=MESH)  # splitbrain: every device is a worker
    def step(state, batch):
        loss, grads = splitjax.value_and_grad(lambda p: ((model.apply(p, batch["ids"]) - batch["y"]) ** 2).mean())(
            state["params"]
        )
        updates, opt = TX.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    def init(key):
        made = model.init(key, BATCHES[0]["ids"])
        return {"params": made, "opt": TX.init(made)}

    state = step.init(init, jax.random.key(0), example=(BATCHES[0],))
    profile = step.profile(state, BATCHES)
    assert profile.num_workers == NUM_WORKERS
    assert rows_of(profile, "params/params/Embed_0/embedding") == ROWS
    assert profile.tensor("params/params/Dense_0/kernel").density == 1.0


def test_nnx():
    def loss_fn(model, batch):
        return ((model(batch["ids"]) - batch["y"]) ** 2).mean()

    @splitjax.nnx.parallelize(mesh=MESH)
    def step(model, optimizer, batch):
        loss, grads = splitjax.nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    model = NNXModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    profile = step.profile(model, optimizer, BATCHES)
    (table,) = profile.tables
    # each example's dropout may drop a whole sum of rows, but no row comes from nowhere
    assert all(
        set(ours) <= set(all_of)
        for step, whole in zip(rows_of(profile, table.path), ROWS)
        for ours, all_of in zip(step, whole)
    )
    assert sum(map(len, rows_of(profile, table.path)[0])) > sum(map(len, ROWS[0])) / 2
    # workers have dropout masks of their own: with equal ones the same columns would be zero on all
    head = profile.tensor("model/head/kernel")
    assert head.shape == (WIDTH, 2) and 0 < head.density <= 1
    jax.tree.map(
        np.testing.assert_array_equal, before, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    )
    with pytest.raises(ProfileError, match="no batch to profile"):
        step.profile(model, optimizer, [])


def test_equinox():
    def loss_fn(model, batch):
        return ((jax.vmap(model)(batch["ids"]) - batch["y"]) ** 2).mean()

    @splitjax.equinox.parallelize(mesh=MESH, state_argnums=(0, 1), batch_argnums=2)
    def step(model, opt, batch):
        loss, grads = splitjax.equinox.value_and_grad(loss_fn)(model, batch)
        updates, opt = TX.update(grads, opt)
        return eqx.apply_updates(model, updates), opt, loss

    model = EquinoxModel(jax.random.key(0))
    opt = TX.init(eqx.filter(model, eqx.is_array))
    profile = step.profile(model, opt, BATCHES)
    (table,) = profile.tables
    assert rows_of(profile, table.path) == ROWS and table.path.startswith("model/embed")
    placed = step.place(model, opt, example=(BATCHES[0],))
    step(*placed, jax.tree.map(jnp.asarray, BATCHES[0]))
    with pytest.raises(DonatedStateError):
        step.profile(*placed, BATCHES)
