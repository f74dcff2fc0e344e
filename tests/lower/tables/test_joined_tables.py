"""Tables that are looked up by the same ids and owned by the same workers: one request, and rows in one message."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax.plan import ROW_EXCHANGE, Plan
from splitjax.sync import ByRows, RowExchange

ROWS, WIDTH, EXAMPLES, COLUMNS = 127, 8, 24, 5
TX = optax.chain(optax.clip_by_global_norm(0.5), optax.adagrad(0.1))


def same(batch):
    return batch["ids"], batch["ids"]


def other_columns(batch):
    return batch["ids"], batch["ids"][:, ::-1]


def make_step(ids_of=same, microbatches=None, in_jit=False):
    def loss_fn(params, batch):
        ids, others = ids_of(batch)
        factors, linear = params["factors"][ids], params["linear"][others]
        total = factors.sum(axis=1)
        first = (jnp.square(total) - jnp.square(factors).sum(axis=1)).sum(axis=-1)
        return jnp.mean((first + linear.sum(axis=(1, 2)) - batch["y"]) ** 2)

    loss_fn = jax.jit(loss_fn) if in_jit else loss_fn

    def step(state, batch):
        loss, grads = splitjax.value_and_grad(loss_fn, microbatches=microbatches)(state["params"], batch)
        updates, opt = TX.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def init(key):
    first, second = jax.random.split(key)
    params = {
        "factors": 0.3 * jax.random.normal(first, (ROWS, WIDTH)),
        "linear": jax.random.normal(second, (ROWS, 1)),
    }
    return {"params": params, "opt": TX.init(params)}


def batches(number=6):
    draws = np.random.default_rng(0)
    for k in range(number):
        # The last steps touch more rows than those that were observed.
        ids = draws.integers(0, ROWS if k >= 4 else 24, (EXAMPLES, COLUMNS)).astype(np.int32)
        ids[0, 0], ids[1, 1] = -1, -ROWS
        yield {"ids": ids, "y": draws.normal(size=EXAMPLES).astype(np.float32)}


def train(step, **options):
    decorated = splitjax.parallelize(step, **({"rules": "embedding_owner", "uneven": "pad"} | options))
    state, losses = decorated.init(init, jax.random.key(0), example=(next(batches()),)), []
    for batch in batches():
        state, loss = decorated(state, batch)
        losses.append(float(loss))
    return losses, jax.tree.map(lambda x: np.asarray(x)[:ROWS] if x.ndim == 2 else np.asarray(x), state), decorated


@pytest.fixture(scope="module")
def reference():
    state, losses = init(jax.random.key(0)), []
    step = jax.jit(make_step())
    for batch in batches():
        state, loss = step(state, batch)
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, state)


@pytest.fixture(scope="module")
def joined():
    return train(make_step(), mesh={"data": 4})


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    for one, other in zip(jax.tree.leaves(found[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


def test_the_numbers_of_one_device(reference, joined):
    losses, state, decorated = joined
    assert_same((losses, state), reference)
    plan = decorated.plan(state_of(decorated), next(batches()))
    factors, linear = plan.syncs
    assert "looked up by the ids of params/factors" in linear.why and "looked up" not in factors.why
    assert factors.capacities == linear.capacities and 0 < linear.bytes < factors.bytes / 4


def state_of(decorated):
    return decorated.init(init, jax.random.key(0), example=(next(batches()),))


@pytest.mark.parametrize("in_jit", [False, True])
def test_one_request_one_answer_and_one_push(in_jit, joined):
    decorated = joined[2] if not in_jit else train(make_step(in_jit=True), mesh={"data": 4})[2]
    state, batch = state_of(decorated), next(batches())
    plan, report = decorated.plan(state, batch), decorated.report(state, batch)
    (rows,) = [each for each in plan.collectives if each.op == ROW_EXCHANGE]
    assert rows.purpose.leaf == "params/factors" and rows.bytes == sum(sync.bytes for sync in plan.syncs)
    assert not report.missing
    exchanged = [each for each in report.collectives if each.planned is not None]
    assert sum(each.bytes for each in exchanged) == rows.bytes
    apart = train(make_step(other_columns), mesh={"data": 4})[2]
    assert num_exchanges(decorated) == 3 and num_exchanges(apart) == 6


def num_exchanges(decorated):
    """All-to-alls of a step in which everything has room."""
    state = state_of(decorated)
    collectives = decorated.report(state, next(batches())).collectives
    return sum(each.op == "all_to_all" and each.planned is not None for each in collectives)


@pytest.mark.parametrize(
    ("options", "mesh"),
    [({}, {"data": 2, "model": 2}), ({"microbatches": 2}, {"data": 4}), ({}, {"data": 8})],
    ids=["beside another axis", "in microbatches", "on eight workers"],
)
def test_on_other_meshes_and_in_microbatches(options, mesh, reference):
    found = train(make_step(**options), mesh=mesh)
    assert_same(found[:2], reference)
    assert any("looked up by the ids" in sync.why for sync in found[2].plan(state_of(found[2]), next(batches())).syncs)


def test_tables_with_ids_of_their_own_travel_alone():
    losses, state, decorated = train(make_step(other_columns), mesh={"data": 4})
    one = init(jax.random.key(0))
    for batch, loss in zip(batches(), losses, strict=True):
        one, expected = jax.jit(make_step(other_columns))(one, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    plan = decorated.plan(state_of(decorated), next(batches()))
    assert not any("looked up by" in sync.why for sync in plan.syncs)
    assert len([each for each in plan.collectives if each.op == ROW_EXCHANGE]) == 2


def test_what_is_rounded_on_the_wire_travels_alone():
    rounded = {"params/linear": ByRows(RowExchange(wire_dtype="bfloat16")), "**": "auto"}
    decorated = train(make_step(), mesh={"data": 4}, sync=rounded)[2]
    plan = decorated.plan(state_of(decorated), next(batches()))
    assert not any("looked up by" in sync.why for sync in plan.syncs)


def test_a_pinned_plan_says_as_much(joined):
    _, state, decorated = joined
    plan = Plan.from_json(decorated.plan(state_of(decorated), next(batches())).to_json())
    again = splitjax.parallelize(make_step(), mesh={"data": 4}, plan=plan, uneven="pad")
    found = again.plan(again.init(init, jax.random.key(0), example=(next(batches()),)), next(batches()))
    assert found.syncs == plan.syncs
    assert [each for each in found.collectives if each.op == ROW_EXCHANGE] == [
        each for each in plan.collectives if each.op == ROW_EXCHANGE
    ]
    # Capacities that differ are each table's own: such a plan is run as it says.
    larger = dataclasses.replace(
        plan.syncs[1], capacities={**plan.syncs[1].capacities, "push": plan.syncs[1].capacities["push"] + 1}
    )
    apart = splitjax.parallelize(
        make_step(), mesh={"data": 4}, plan=dataclasses.replace(plan, syncs=(plan.syncs[0], larger)), uneven="pad"
    )
    state = apart.init(init, jax.random.key(0), example=(next(batches()),))
    found = apart.plan(state, next(batches()))
    assert len([each for each in found.collectives if each.op == ROW_EXCHANGE]) == 2
    assert not any("looked up by" in sync.why for sync in found.syncs)


def test_a_plan_that_is_pinned_to_other_ids_says_what_is_so_here(joined):
    plan = joined[2].plan(state_of(joined[2]), next(batches()))
    other = splitjax.parallelize(make_step(other_columns), mesh={"data": 4}, plan=plan, uneven="pad")
    found = other.plan(other.init(init, jax.random.key(0), example=(next(batches()),)), next(batches()))
    assert len([each for each in found.collectives if each.op == ROW_EXCHANGE]) == 2
    assert not any("looked up by" in sync.why for sync in found.syncs)


def test_tables_of_different_dtypes_stay_together_once_they_were_observed():
    def narrow(key):
        state = init(key)
        params = {**state["params"], "linear": state["params"]["linear"].astype(jnp.bfloat16)}
        return {"params": params, "opt": TX.init(params)}

    decorated = splitjax.parallelize(make_step(), mesh={"data": 4}, rules="embedding_owner", uneven="pad")
    state = decorated.init(narrow, jax.random.key(0), example=(next(batches()),))
    for batch in batches(4):
        state, _ = decorated(state, batch)
    plan = decorated.plan(state, next(batches()))
    assert all(sync.is_decided for sync in plan.syncs)
    assert len([each for each in plan.collectives if each.op == ROW_EXCHANGE]) == 1
