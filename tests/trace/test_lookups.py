"""Tables that are only looked up in: found through what libraries and transformations make of a lookup, dense with a
reason otherwise."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import splitjax

NUM_ROWS, WIDTH = 16, 4
IDS = jax.ShapeDtypeStruct((8, 2), jnp.int32)


def tables(loss_fn, params=None, tx=None):
    """The tables of an ordinary step with this loss, `loss_fn(params, ids)`."""
    tx = tx or optax.adagrad(0.1)
    params = params or {"table": jnp.ones((NUM_ROWS, WIDTH)), "w": jnp.ones((WIDTH, 2))}

    @splitjax.parallelize(mesh={"data": 2}, rules="data_parallel")
    def step(state, batch):
        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"], batch["ids"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return step.graph({"params": params, "opt": tx.init(params)}, {"ids": IDS}).tables


@jax.custom_vjp
def custom_lookup(table, ids):
    return table[ids]


custom_lookup.defvjp(
    lambda table, ids: (table[ids], (table, ids)), lambda kept, g: (jnp.zeros_like(kept[0]).at[kept[1]].add(g), None)
)

SPARSE = {
    "take": (lambda p, ids: jnp.take(p["table"], ids, axis=0).sum(), [(16, "fill_or_drop", "float32", 1)]),
    "indexing": (lambda p, ids: (p["table"][ids] @ p["w"]).sum(), [(16, "promise_in_bounds", "float32", 1)]),
    "clip": (lambda p, ids: p["table"].at[ids].get(mode="clip").sum(), [(16, "clip", "float32", 1)]),
    "several": (
        lambda p, ids: p["table"][ids].sum() + p["table"][ids[:, 0]].sum(),
        [(16, "promise_in_bounds", "float32", 1), (8, "promise_in_bounds", "float32", 1)],
    ),
    "vmap": (
        lambda p, ids: jax.vmap(lambda one: p["table"][one])(ids).sum(),
        [(16, "promise_in_bounds", "float32", 1)],
    ),
    "jit": (
        lambda p, ids: jax.jit(lambda t, i: t[i])(p["table"], ids).sum(),
        [(16, "promise_in_bounds", "float32", 1)],
    ),
    "remat": (
        lambda p, ids: jax.checkpoint(lambda t, i: jnp.sin(t[i]))(p["table"], ids).sum(),
        [(16, "promise_in_bounds", "float32", 1)],
    ),
    "scan": (
        lambda p, ids: jax.lax.scan(lambda c, i: (c + p["table"][i].sum(), None), 0.0, ids)[0],
        [(16, "promise_in_bounds", "float32", 8)],
    ),
    "bfloat16": (
        lambda p, ids: p["table"].astype(jnp.bfloat16)[ids].sum().astype(jnp.float32),
        [(16, "promise_in_bounds", "bfloat16", 1)],
    ),
}
DENSE = {
    "tied logits": (lambda p, ids: (p["table"][ids] @ p["table"].T).sum(), "also read by transpose"),
    "decay in the loss": (lambda p, ids: p["table"][ids].sum() + (p["table"] ** 2).sum(), "also read by"),
    "a branch": (
        lambda p, ids: jax.lax.cond(ids[0, 0] > 0, lambda: p["table"][ids], lambda: 2 * p["table"][ids]).sum(),
        "stands in a condition",
    ),
    "a custom derivative": (lambda p, ids: custom_lookup(p["table"], ids).sum(), "inside a custom derivative rule"),
}
NONE = {
    "one-hot products": lambda p, ids: (jax.nn.one_hot(ids, NUM_ROWS) @ p["table"]).sum(),
    "columns": lambda p, ids: p["table"][:, ids[:, 0]].sum(),
    "single elements": lambda p, ids: p["table"][ids[:, 0], ids[:, 1]].sum(),
}


@pytest.mark.parametrize("name", SPARSE)
def test_lookups_are_found_through_transformations(name):
    loss_fn, lookups = SPARSE[name]
    (table,) = tables(loss_fn)
    assert table.is_sparse and table.param == "params/table" and table.num_rows == NUM_ROWS
    assert [(one.num_ids, one.mode, one.operand_dtype, one.trips) for one in table.lookups] == lookups
    assert table.update is not None and len(table.update.leaves) == 2
    assert all("test_lookups.py" in one.source for one in table.lookups)


@pytest.mark.parametrize("name", DENSE)
def test_other_uses_make_the_gradient_dense_and_say_so(name):
    loss_fn, reason = DENSE[name]
    (table,) = tables(loss_fn)
    assert not table.is_sparse and table.update is None
    assert reason in table.reason and "test_lookups.py" in table.reason


@pytest.mark.parametrize("name", NONE)
def test_what_does_not_pick_whole_rows_is_no_lookup(name):
    assert tables(NONE[name]) == ()


def test_the_update_decides_too():
    (table,) = tables(SPARSE["take"][0], tx=optax.adam(0.1))
    assert table.lookups and not table.is_sparse and "opt/0/mu/table changes, by mul" in table.reason


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_embeddings_of_flax(dtype):
    module = linen.Embed(NUM_ROWS, WIDTH, dtype=dtype)
    params = module.init(jax.random.key(0), jnp.zeros(1, jnp.int32))
    (table,) = tables(lambda p, ids: module.apply(p, ids).astype(jnp.float32).sum(), params)
    assert table.is_sparse and table.param.endswith("embedding")

    @splitjax.nnx.parallelize(mesh={"data": 2}, rules="data_parallel")
    def step(model, optimizer, batch):
        loss, grads = splitjax.nnx.value_and_grad(lambda m: m(batch["ids"]).astype(jnp.float32).sum())(model)
        optimizer.update(model, grads)
        return {"loss": loss}

    model = nnx.Embed(NUM_ROWS, WIDTH, dtype=dtype, rngs=nnx.Rngs(0))
    (table,) = step.graph(model, nnx.Optimizer(model, optax.adagrad(0.1), wrt=nnx.Param), {"ids": IDS}).tables
    assert table.is_sparse and table.param.endswith("embedding")
