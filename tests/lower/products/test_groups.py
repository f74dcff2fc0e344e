"""Group communication: what a step with split layers really sends, and that its numbers are one device's."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import splitjax
from splitjax.mesh import MeshShape
from splitjax.report.hlo import compiled_collectives

WHOLE = splitjax.Rule(name="whole", path="**conv**", shard=[])
COLUMNS = splitjax.Rule(name="columns", kind="dense", shard=[{"out": "model"}, {"in": "model"}], ties="hard")
ROWS_BEHIND = splitjax.Rule(name="rows", path="**rows**", shard=[{"in": "model"}], ties="hard")


def rules(*more):
    return splitjax.RuleSet(name="crossing", rules=(WHOLE, *more, COLUMNS), replicated_batch="all")


def params(*names, width=64):
    keys = jax.random.split(jax.random.key(0), len(names))
    return {
        name: jax.random.normal(key, (width, 10 if name == "logits" else width)) / 8
        for name, key in zip(names, keys, strict=True)
    }


def chain(*names):
    def forward(p, x):
        for name in names:
            x = x @ p[name]
            x = x if name == "logits" else jnp.tanh(x)
        return x

    return forward


def step_of(forward):
    def step(state, batch):
        def loss(p):
            return optax.softmax_cross_entropy_with_integer_labels(forward(p, batch["x"]), batch["y"]).mean()

        value, grads = splitjax.value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value

    return step


def heads(p, x):
    """Three products of one crossing, whose results meet again."""
    x = jnp.tanh(x @ p["conv"])
    return (jnp.tanh(x @ p["q"]) * jnp.tanh(x @ p["k"]) + x @ p["v"]) @ p["logits"]


def batch(num=32, width=64):
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(num, width)).astype(np.float32), "y": rng.integers(0, 10, num).astype(np.int32)}


CASES = {
    "columns": (None, ("conv", "d1", "d2", "logits"), ()),
    "rows behind columns": (None, ("conv", "d1", "rows", "d2", "logits"), (ROWS_BEHIND,)),
    "rows first": (None, ("conv", "rows", "d2", "logits"), (ROWS_BEHIND,)),
    "back to whole": (None, ("conv", "d1", "rows", "conv2", "logits"), (ROWS_BEHIND,)),
    "the batch is there already": (None, ("d1", "d2", "logits"), ()),
    "one crossing, three products": (heads, ("conv", "q", "k", "v", "logits"), ()),
}
MESHES = ({"data": 4, "model": 2}, {"data": 2, "model": 4}, {"data": 1, "model": 8})


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"K={mesh['model']}")
@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_one_device(case, mesh):
    forward, names, more = CASES[case]
    step, state = step_of(forward or chain(*names)), params(*names)
    # Columns of `logits` divide by 2; by rows otherwise.
    parallel = splitjax.parallelize(step, mesh=mesh, rules=rules(*more), donate=False)
    want_state, want = jax.jit(step)(state, batch())
    got_state, got = parallel(state, batch())
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for name in names:
        np.testing.assert_allclose(got_state[name], want_state[name], atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_what_is_sent_is_what_was_planned(case):
    """Op, axes and bytes of every collective above a kilobyte, to the byte: each reduce-scatter is one, and nothing is
    sent twice."""
    forward, names, more = CASES[case]
    mesh = {"data": 2, "model": 4}
    step = splitjax.parallelize(step_of(forward or chain(*names)), mesh=mesh, rules=rules(*more))
    plan = step.plan(params(*names), batch())
    compiled = step.lower(params(*names), batch()).compile()
    sent, planned = collections.Counter(), collections.Counter()
    for one in compiled_collectives(compiled, MeshShape.of(mesh)):
        if one.bytes > 1024:
            sent[one.op, one.axis] += one.bytes
    for one in plan.collectives:
        if one.bytes > 1024:
            planned[one.op, one.axis] += one.bytes
    assert sent == planned
    if case.startswith("the batch"):
        assert not any(one.op == "all_gather" and one.layer == "d1" for one in plan.collectives)
    if case.startswith("one crossing"):
        assert sum(one.op == "reduce_scatter" for one in plan.collectives) == 1


def test_what_a_loop_gathers_of_a_value_from_outside_stays_in_the_loop():
    """A value that layers of a scan read, and a product behind the scan too (what conditions a DiT), is gathered in
    the loop for the former and outside of it for the latter."""

    def forward(p, x):
        given = jnp.tanh(x @ p["conv"])
        layer = lambda h, w: (jnp.tanh(h * (given @ w)), None)
        h, _ = jax.lax.scan(layer, jnp.ones_like(given), p["layers"])
        return h * jnp.tanh(given @ p["q"]) @ p["logits"]

    state = params("conv", "q", "logits") | {"layers": params("a")["a"] * jnp.ones((2, 1, 1))}
    batch = {"x": jax.random.normal(jax.random.key(1), (16, 64)), "y": jnp.arange(16) % 10}
    want = jax.jit(step_of(forward))(state, batch)
    step = splitjax.parallelize(step_of(forward), mesh={"data": 2, "model": 4}, rules=rules(), donate=False)
    leaves = {leaf.path.rpartition("/")[2]: leaf for leaf in step.plan(state, batch).leaves}
    assert "model" in str(leaves["layers"].spec) and "model" in str(leaves["q"].spec)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), step(state, batch), want)
