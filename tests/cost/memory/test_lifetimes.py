"""The memory of traced programs by lifetimes: by hand where that is possible, and against what XLA compiles."""

from __future__ import annotations

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest

import splitjax
import splitjax.compile.memory as memory_module
from splitjax.cost.memory.lifetimes import PlacedProgram, predict_program_memory
from splitjax.errors import UnavailableError

MEMORY_SCHEDULER = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
N = 64


def placed(fn, *shapes, splits=None, results=1, donated=None, axes=None):
    jaxpr = jax.make_jaxpr(fn)(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))
    splits = splits or [((),) * len(shape) for shape in shapes]
    return PlacedProgram(jaxpr, splits, [None] * results, donated or {}, axes or {"data": 1}, "cpu")


def test_donated_arguments_are_not_counted_twice():
    program = placed(lambda w, g: w - 0.1 * g, (N, N), (N, N), donated={0: 0})
    kept = dataclasses.replace(program, donated={})
    whole = N * N * 4
    memory = predict_program_memory(program)
    assert (memory.argument_bytes, memory.temporary_bytes) == (2 * whole, 0)
    assert predict_program_memory(kept).temporary_bytes == whole


def test_a_product_over_a_split_dim_is_summed_into_an_array_of_its_own():
    split = [(("data",), ()), (("data",), ())]
    memory = predict_program_memory(
        placed(lambda x, y: x.T @ y, (N, N), (N, N), splits=split, axes={"data": 4}),
    )
    assert memory.argument_bytes == 2 * N * N * 4 // 4
    assert memory.temporary_bytes == 2 * N * N * 4  # the part of a device, and the sum


def test_loops_over_elements_are_not_stored():
    one = predict_program_memory(placed(lambda x: jnp.exp(x) * 2 + 1, (N, N)))
    assert one.temporary_bytes == N * N * 4
    assert [array.shape for array in one.at_peak] == [(N, N)] and "16.0 KiB" in str(one)


def test_what_no_result_depends_on_takes_nothing():
    def fn(x):
        _unread = jnp.sort(x @ x)
        return x.sum()

    assert predict_program_memory(placed(fn, (N, N))).temporary_bytes < N * N


def test_a_scan_keeps_its_residuals_stacked_and_remat_only_its_carry():
    def loss(w, x, remat):
        block = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w), None)
        return jax.lax.scan(jax.checkpoint(block) if remat else block, x, w)[0].sum()

    grad = lambda remat: lambda w, x: jax.grad(loss)(w, x, remat)
    layers, width, batch = 16, 8, 512
    bytes_of = lambda remat: (
        predict_program_memory(placed(grad(remat), (layers, width, width), (batch, width))).temporary_bytes
    )
    carry = layers * batch * width * 4
    assert carry <= bytes_of(True) < 1.6 * carry
    assert 2.5 * carry < bytes_of(False)


def test_manual_regions_have_the_shapes_of_parts():
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def fn(x, w):
        spec = jax.sharding.PartitionSpec("data")
        gather = lambda x, w: x @ jax.lax.all_gather(w, "data", tiled=True)
        return jax.shard_map(gather, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check_vma=False)(x, w)

    split = [(("data",), ()), (("data",), ())]
    memory = predict_program_memory(placed(fn, (N, N), (N, N), splits=split, axes={"data": 4}))
    assert memory.temporary_bytes == N * N * 4 + N * N * 4 // 4  # the gathered weight, and a part of the result


def scanned_step(layers=6, width=64, heads=4, length=32):
    """A scanned Transformer of rematerialised blocks, its state and batch as shapes."""
    tx = optax.adamw(1e-3)

    def init(key):
        shapes = {"qkv": (width, 3, heads, width // heads), "o": (heads, width // heads, width)}
        shapes |= {"up": (width, 4 * width), "down": (4 * width, width)}
        params = {name: jax.random.normal(key, (layers, *shape)) for name, shape in shapes.items()}
        return {"params": params, "opt": tx.init(params)}

    def block(x, p):
        q, k, v = jnp.moveaxis(jnp.einsum("btd,dchk->btchk", x, p["qkv"]), 2, 0)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        x = x + jnp.einsum("bthk,hkd->btd", jnp.einsum("bhqk,bkhd->bqhd", weights, v), p["o"])
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    def step(state, batch):
        loss_fn = lambda p: jnp.mean(jax.lax.scan(jax.checkpoint(block), batch, p)[0] ** 2)
        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    state = jax.eval_shape(init, jax.random.key(0))
    return step, state, jax.ShapeDtypeStruct((64, length, width), jnp.float32)


def compiled_bytes(step, *args):
    sizes = step.lower(*args).compile(compiler_options=MEMORY_SCHEDULER).memory_analysis()
    total = sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + sizes.output_size_in_bytes
    return total - sizes.alias_size_in_bytes, sizes.argument_size_in_bytes


def test_a_scanned_rematerialised_transformer_under_megatron():
    """The sum of terms is several times what is compiled; by lifetimes it is near."""
    step, *args = scanned_step()
    parallel = splitjax.parallelize(step, mesh={"data": 2, "model": 4}, rules="megatron")
    memory, (compiled, arguments) = parallel.memory(*args), compiled_bytes(parallel, *args)
    assert memory.argument_bytes == pytest.approx(arguments, rel=1e-3)
    assert 0.8 * compiled < memory.estimate_bytes < 1.25 * compiled
    assert compiled <= memory.bound_bytes < 1.7 * compiled
    assert parallel._programs.entry(args).summed.peak_bytes > 2 * compiled
    planned = parallel.plan(*args).memory
    assert (planned.peak_bytes, planned.bound_bytes) == (memory.estimate_bytes, memory.bound_bytes)
    assert (planned.argument_bytes, planned.activation_bytes) == (memory.argument_bytes, memory.temporary_bytes)
    assert planned.at_peak == memory.at_peak and {array.layer for array in planned.at_peak} > {
        "params/down",
        "params/o",
    }


def test_the_memory_of_a_plan_is_predicted_when_it_is_looked_at(monkeypatch):
    """Planning does not wait for it; who looks twice, at the plan or at a copy of it, has it predicted once."""
    step, *args = scanned_step(layers=2)
    asked, predict = [], memory_module.predict_program_memory
    monkeypatch.setattr(memory_module, "predict_program_memory", lambda placed: asked.append(1) or predict(placed))
    plan = splitjax.parallelize(step, mesh={"data": 2}, rules="data_parallel").plan(*args)
    assert plan.layers and plan.collectives and not asked
    copy = pickle.loads(pickle.dumps(plan))
    assert copy.memory == plan.memory and copy == plan and copy.digest == plan.digest and len(asked) == 1
    assert "peak, at most (upper bound)" in str(plan) and len(asked) == 1


def test_open_dims_of_a_constraint_are_split_as_what_runs_along_them():
    """A dim that a constraint leaves open follows its neighbours; a dim that it names stays whole."""
    mesh = jax.sharding.AbstractMesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def fn(spec, x):
        held = jax.lax.with_sharding_constraint(jnp.sin(x), jax.sharding.NamedSharding(mesh, spec))
        return held @ held.T

    bytes_with = lambda spec: (
        predict_program_memory(
            placed(functools.partial(fn, spec), (N, N), splits=[(("data",), ())], axes={"data": 4})
        ).temporary_bytes
    )
    is_open, whole = (
        jax.sharding.PartitionSpec(jax.sharding.PartitionSpec.UNCONSTRAINED, None),
        jax.sharding.PartitionSpec(None),
    )
    assert bytes_with(is_open) < bytes_with(whole)


def test_a_dim_that_a_reshape_cuts_is_split_over_the_axes_of_its_factors():
    split = [(("data", "model"), ())]
    fn = lambda x: jnp.sort(jnp.sin(x).reshape(2, 4, 8, N), axis=-1)
    memory = predict_program_memory(placed(fn, (N, N), splits=split, axes={"data": 2, "model": 4}))
    assert memory.temporary_bytes == 2 * N * N * 4 // 8, "what is sorted, and the result: an eighth of each"


def test_programs_of_workers_are_refused():
    step, state, batch = scanned_step(layers=2)
    alone = splitjax.PartialBackprop(depths=(0.5, 1.0) * 4, execution="program")
    parallel = splitjax.parallelize(step, mesh={"data": 8}, rules="data_parallel", backprop=alone)
    with pytest.raises(UnavailableError, match="programs of their own"):
        parallel.memory(state, batch)
    assert parallel.plan(state, batch).memory == parallel._programs.entry((state, batch)).summed, "which has no bound"
