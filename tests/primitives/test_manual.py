"""A user's own `shard_map` inside a step: its specs are links, so that the layers around it stay tied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType, PartitionSpec

import splitjax
from splitjax.errors import MicrobatchError
from splitjax.primitives.table import OPERATIONS

AXES = ("data", "model")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)


def labels_of(mesh, body, shapes, in_specs, out_specs):
    """The `DimMap` of a `shard_map`, and of its equation the parameters."""
    run = jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    (eqn,) = jax.make_jaxpr(run)(*(jnp.ones(shape) for shape in shapes)).eqns
    results = [v.aval.shape for v in eqn.outvars]
    return OPERATIONS["shard_map"].dims(shapes, results, eqn.params)


def test_what_the_body_hands_on_is_linked(mesh):
    both = PartitionSpec("data", "model")
    found = labels_of(mesh, jnp.tanh, [(8, 16)], both, both)
    assert found.inputs == found.outputs and not found.mixing
    assert len(set(found.inputs[0])) == 2 and all(len(dim) == 1 for dim in found.inputs[0])


def test_a_weight_as_long_as_the_batch_is_not_linked_with_it(mesh):
    rows = PartitionSpec("data")

    def gathered(x, w):
        return x @ lax.all_gather(w, "data", tiled=True)

    found = labels_of(mesh, gathered, [(8, 8), (8, 16)], (rows, rows), rows)
    (x, w), (out,) = found.inputs, found.outputs
    assert out[0] == x[0] != w[0]  # all three are split over data, and have size 8
    assert out[1] == w[1] and found.mixing


def test_loops_branches_and_sums_are_seen_through(mesh):
    spec = PartitionSpec("data", "model")

    def body(x, w):
        def step(carry, row):
            return carry + row, carry.sum()

        total, _ = lax.scan(step, x, jnp.ones((3, *x.shape)))
        total = lax.cond(x.sum() > 0, jnp.sin, jnp.cos, total)
        return lax.psum(lax.fori_loop(0, 2, lambda _, y: 2 * y, total) @ w, "model")

    found = labels_of(mesh, body, [(8, 16), (16, 32)], (spec, PartitionSpec("model")), PartitionSpec("data"))
    (x, w), (out,) = found.inputs, found.outputs
    assert out == (x[0], w[1]) and x[1] == w[0]


def test_a_dim_that_is_reshaped_is_led_by_its_split_factor(mesh):
    heads = PartitionSpec("data", "model", None)

    def body(x):
        return x.reshape(*x.shape[:1], -1, 4)

    found = labels_of(mesh, body, [(8, 32)], PartitionSpec("data", "model"), heads)
    ((x,), (out,)) = found.inputs, found.outputs
    assert x[0] == out[0] and x[1][0] == out[1][0] and len(x[1]) == 2
    assert found.sizes[x[1][0]] == 8 and found.sizes[x[1][1]] == 4


def test_where_the_body_hides_something_the_specs_have_to_do(mesh):
    def kernel(x_ref, out_ref):
        out_ref[...] = jnp.tanh(x_ref[...])

    def body(x):
        return pl.pallas_call(kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    both = PartitionSpec("data", "model")
    found = labels_of(mesh, body, [(8, 16)], both, both)
    assert found.inputs == found.outputs and found.mixing
    other = labels_of(mesh, body, [(8, 16)], both, PartitionSpec("data"))
    assert other.inputs[0][0] == other.outputs[0][0] and other.inputs[0][1] != other.outputs[0][1]


def mlp(activation):
    """A training step of a column-split layer, `activation` and a row-split layer."""

    def loss_fn(params, batch):
        hidden = activation(batch["x"] @ params["up"])
        return ((hidden @ params["down"] - batch["y"]) ** 2).mean()

    def step(params, batch):
        loss, gradients = splitjax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


def test_megatron_sends_as_much_with_a_shard_map_around_the_activation(mesh):
    rng = np.random.default_rng(0)
    params = {"up": rng.normal(size=(16, 64)).astype("f"), "down": rng.normal(size=(64, 16)).astype("f")}
    batch = {"x": rng.normal(size=(32, 16)).astype("f"), "y": rng.normal(size=(32, 16)).astype("f")}
    spec = PartitionSpec("data", "model")
    own = jax.shard_map(jax.nn.gelu, mesh=mesh, in_specs=spec, out_specs=spec)
    plans, compiled, results = [], [], []
    for activation in (jax.nn.gelu, own):
        parallel = splitjax.parallelize(mlp(activation), mesh=mesh, rules="megatron", donate=False)
        state = parallel.place(params, example=(batch,))
        plans.append(parallel.plan(state, batch))
        report = parallel.report(state, batch)
        compiled.append({key: (total.compiled_count, total.compiled_bytes) for key, total in report.by_op.items()})
        assert report.missing == () and all(extra.compiled.shape == () for extra in report.unplanned)
        results.append(parallel(state, batch))
    plain, plan = plans
    assert plain.spec("up") == PartitionSpec(None, "model")
    assert [plan.spec(path) for path in params] == [plain.spec(path) for path in params]
    assert [c.op for c in plan.collectives] == [c.op for c in plain.collectives]
    assert sum(c.bytes for c in plan.collectives) == sum(c.bytes for c in plain.collectives)
    assert compiled[0] == compiled[1] and any(key[1] == "model" for key in compiled[0])
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5)


def test_what_a_shard_map_takes_whole_of_a_split_dim_is_said(mesh):
    params = {"up": np.ones((16, 64), "f"), "down": np.ones((64, 16), "f")}
    batch = {"x": np.ones((32, 16), "f"), "y": np.ones((32, 16), "f")}
    rows = PartitionSpec("data")
    own = jax.shard_map(jax.nn.gelu, mesh=mesh, in_specs=rows, out_specs=rows)
    plan = splitjax.parallelize(mlp(own), mesh=mesh, rules="megatron").plan(params, batch)
    (note,) = [note for note in plan.notes if "shard_map" in note]
    assert "test_manual.py" in note and "dim 1 of operand 0 is gathered over model" in note
    split = PartitionSpec("data", "model")
    own = jax.shard_map(jax.nn.gelu, mesh=mesh, in_specs=split, out_specs=split)
    plan = splitjax.parallelize(mlp(own), mesh=mesh, rules="megatron").plan(params, batch)
    assert not [note for note in plan.notes if "shard_map" in note]


def test_a_shard_map_of_the_batch_does_not_run_in_microbatches(mesh):
    spec = PartitionSpec("data", "model")
    own = jax.shard_map(jax.nn.gelu, mesh=mesh, in_specs=spec, out_specs=spec)

    def step(params, batch):
        loss_fn = lambda params, batch: (own(batch["x"] @ params["up"]) ** 2).mean()
        return params, splitjax.value_and_grad(loss_fn, microbatches=2)(params, batch)[0]

    parallel = splitjax.parallelize(step, mesh=mesh, rules="megatron", donate=False)
    with pytest.raises(MicrobatchError):
        parallel.plan({"up": np.ones((16, 64), "f")}, {"x": np.ones((32, 16), "f")})
