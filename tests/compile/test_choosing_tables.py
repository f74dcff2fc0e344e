"""`rules="auto"` where tables go by rows: what they send decides, and tables of any size may have owners."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax

ROWS, WIDTH, EXAMPLES, WORDS = 50_001, 32, 256, 64
MESH = {"data": 4}
TX = optax.adagrad(0.1)


def loss_of(params, batch):
    rows = params["table"][batch["ids"]]
    return jnp.mean((rows @ params["head"]).sum(axis=(1, 2)) ** 2)


def step(state, batch):
    loss, grads = splitjax.value_and_grad(loss_of)(state["params"], batch)
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def init(key):
    params = {"table": jax.random.normal(key, (ROWS, WIDTH)), "head": jax.random.normal(key, (WIDTH, 64)) / 8}
    return {"params": params, "opt": TX.init(params)}


def batch():
    return {"ids": np.random.default_rng(0).integers(0, ROWS, (EXAMPLES, WORDS)).astype(np.int32)}


def candidates(**options):
    """Milliseconds by rule set of all that was compared, and what was refused."""
    decorated = splitjax.parallelize(step, mesh=MESH, rules="auto", **options)
    decorated.plan(jax.eval_shape(init, jax.random.key(0)), batch())
    choice = decorated.choice
    return choice.best.rules.name, {one.rules.name: 1e3 * one.seconds for one in choice.candidates}, choice.refused


def test_tables_of_any_size_get_owners_where_padding_is_allowed():
    best, found, refused = candidates(sync="auto", uneven="pad")
    assert best == "embedding_owner" and not refused
    assert found["embedding_owner"] == min(found.values())
    # Without padding the rows do not divide among the workers.
    best, _, refused = candidates(sync="auto")
    assert best != "embedding_owner" and "embedding_owner" in {each.rules for each in refused}


def test_a_table_that_goes_by_rows_is_not_priced_as_if_all_of_it_were_sent():
    (_, dense, _), (_, rows, _) = candidates(uneven="pad"), candidates(sync="auto", uneven="pad")
    assert rows["data_parallel"] < 0.5 * dense["data_parallel"]
    # Its own rule set exchanges rows whether or not the user asks for it.
    assert dense["embedding_owner"] == pytest.approx(rows["embedding_owner"])


def test_the_numbers_of_one_device():
    decorated = splitjax.parallelize(step, mesh=MESH, rules="auto", sync="auto", uneven="pad")
    state, one = decorated.init(init, jax.random.key(0), example=(batch(),)), init(jax.random.key(0))
    for _ in range(5):
        state, loss = decorated(state, batch())
        one, expected = jax.jit(step)(one, batch())
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(state["params"]["table"][:ROWS], one["params"]["table"], rtol=1e-4, atol=1e-6)
    (table,) = decorated.plan(state, batch()).syncs
    assert table.scheme == "owner_sharded" and table.bytes
