"""Batches that do not divide, and batches whose arrays have leading dims of their own: laid out array by array where
the layout alone is asked for, and refused where examples must be told apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import splitjax
from splitjax.errors import BatchError


def loss(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def graph_loss(params, batch):
    """A message passing network: nodes [N], edges [E], and graphs [G]."""
    nodes = jnp.tanh(batch["nodes"] @ params["up"] + params["bias"])
    messages = jnp.tanh(nodes[batch["senders"]] @ params["down"]) * batch["weights"][:, None]
    nodes = nodes @ params["down"] + jax.ops.segment_sum(messages, batch["receivers"], nodes.shape[0])
    pooled = jax.ops.segment_sum(nodes, batch["graph_of"], batch["y"].shape[0])
    return jnp.mean((pooled - batch["y"]) ** 2)


def training(loss, **options):
    def step(params, batch):
        value, grads = splitjax.value_and_grad(loss, **options)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def parameters(width=64):
    rng = np.random.default_rng(0)
    make = lambda *shape: jnp.asarray(rng.normal(size=shape) / 8)
    return {"up": make(width, width), "bias": make(width), "down": make(width, width)}


def examples(number, width=64):
    rng = np.random.default_rng(1)
    return {name: jnp.asarray(rng.normal(size=(number, width))) for name in ("x", "y")}


def graphs(num_nodes, num_edges, num_graphs, width=64):
    rng = np.random.default_rng(1)
    return {
        "nodes": jnp.asarray(rng.normal(size=(num_nodes, width))),
        "senders": jnp.asarray(rng.integers(0, num_nodes, num_edges)),
        "receivers": jnp.asarray(rng.integers(0, num_nodes, num_edges)),
        "weights": jnp.asarray(rng.normal(size=num_edges)),
        "graph_of": jnp.asarray(np.sort(rng.integers(0, num_graphs, num_nodes))),
        "y": jnp.asarray(rng.normal(size=(num_graphs, width))),
    }


def assert_as_one_device(step, params, batch, mesh, rules):
    parallel = splitjax.parallelize(step, mesh=mesh, rules=rules)
    expected = jax.jit(step)(params, batch)
    plan = parallel.plan(params, batch)
    found = parallel(jax.tree.map(jnp.array, params), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10), found, expected)
    return plan, parallel


@pytest.mark.parametrize(
    ("number", "mesh", "rules", "axes"),
    [
        (6, {"data": 4}, "data_parallel", ()),
        (6, {"data": 2, "model": 4}, "splitbrain", ("data",)),
        (6, {"data": 2, "fsdp": 2, "tensor": 2}, "transformer", ("data",)),
        (7, {"data": 4}, "fsdp", ()),
        (7, {"data": 2, "model": 2}, "megatron", ()),
    ],
)
def test_a_batch_lies_over_the_axes_that_divide_it_with_a_note(number, mesh, rules, axes):
    with jax.enable_x64(True):
        batch = examples(number)
        plan, parallel = assert_as_one_device(training(loss), parameters(), batch, mesh, rules)
        assert plan.batch_axes == axes
        assert any(f"{number} examples do not divide by" in note for note in plan.notes)
        compute = parallel.report(parameters(), batch).compute
    # What the plan says of the work that devices repeat is what XLA compiles.
    assert compute.compiled == pytest.approx(plan.compute.flops, rel=0.01)
    repeated = [warning for warning in plan.warnings if warning.kind == "compute"]
    assert (plan.compute.over_ideal > 1.1) == bool(repeated)
    assert all("examples" in warning.remedy for warning in repeated)


@pytest.mark.parametrize(
    ("sizes", "mesh", "rules"),
    [
        ((24, 64, 8), {"data": 4}, "data_parallel"),
        ((22, 64, 8), {"data": 4}, "fsdp"),
        ((24, 61, 8), {"data": 2, "model": 2}, "splitbrain"),
        ((22, 64, 7), {"data": 2, "fsdp": 2, "tensor": 2}, "transformer"),
    ],
)
def test_the_arrays_of_graphs_are_laid_out_one_by_one(sizes, mesh, rules):
    with jax.enable_x64(True):
        batch = graphs(*sizes)
        plan, _ = assert_as_one_device(training(graph_loss), parameters(), batch, mesh, rules)
    by_path = {leaf.path: leaf for leaf in plan.leaves if leaf.role == "batch"}
    for name, array in batch.items():
        assert array.shape[0] % by_path[f"batch/{name}"].num_shards(plan.mesh) == 0
    assert max(leaf.num_shards(plan.mesh) for leaf in by_path.values()) == 4


APART = {
    "microbatches=2": ({"microbatches": 2}, {}),
    "group_comm='modulo'": ({}, {"group_comm": "modulo"}),
    "partial backpropagation": ({}, {"backprop": splitjax.PartialBackprop()}),
    "a table that is synchronised by rows": ({}, {"sync": "row_exchange"}),
}


@pytest.mark.parametrize("reason", APART)
@pytest.mark.parametrize("batch", [examples(6), graphs(24, 64, 8)], ids=["six", "graphs"])
def test_what_needs_to_tell_examples_apart_is_refused_with_that_reason(reason, batch):
    of_gradient, of_step = APART[reason]
    step = training(graph_loss if "nodes" in batch else loss, **of_gradient)
    parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 2}, rules="splitbrain", **of_step)
    with pytest.raises(BatchError) as caught:
        parallel.plan(parameters(), batch)
    assert reason in str(caught.value) and caught.value.remedy


@pytest.mark.parametrize(("size", "nearest"), [(6, "16"), (12, "16"), (42, "32 or 48")])
def test_the_size_that_helps_is_one_that_microbatches_divide_too(size, nearest):
    parallel = splitjax.parallelize(training(loss, microbatches=2), mesh={"data": 8}, rules="data_parallel")
    with pytest.raises(BatchError) as caught:
        parallel.plan(parameters(), examples(size))
    assert caught.value.remedy.startswith(f"use {nearest} examples, or a mesh in which data times 2 microbatches")
    parallel.plan(parameters(), examples(16))


def test_a_pinned_plan_of_an_uneven_batch_names_its_size():
    """The plan has no axis for such a batch, so that its devices looked like a single worker."""
    batch, make = examples(10), lambda **options: splitjax.parallelize(training(loss), mesh={"data": 4}, **options)
    pinned = make(rules="data_parallel").plan(parameters(), batch)
    with pytest.raises(BatchError, match="10 examples do not divide by data=4, and partial backpropagation") as caught:
        make(plan=pinned, backprop=splitjax.PartialBackprop()).plan(parameters(), batch)
    assert "8 or 12 examples" in caught.value.remedy
    assert make(plan=pinned).plan(parameters(), batch).batch_axes == ()
