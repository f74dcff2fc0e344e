"""What programs are expected to store on a TPU, by what modules of libtpu show."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import splitjax
from splitjax.cost.memory.orders import frees_soon
from splitjax.cost.memory.program import Kind, Node, views_of
from splitjax.cost.memory.schedule import Schedule, Step
from tests.cost.memory.on_a_gpu import temporaries

MIB = 2**20


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_a_table_of_few_columns_is_copied_into_rows():
    look_up = lambda table, ids: table[ids]
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows, found = 4 * 2**14 * 128, 4 * 8 * 128
    assert temporaries(look_up, f32(2**14, 64), ids, platform="tpu") == pytest.approx(rows + found, rel=0.01)
    assert temporaries(look_up, f32(2**14, 64), ids, platform="cpu") < 4 * 2**14 * 64
    # Whole rows of 128 columns lie so already.
    assert temporaries(look_up, f32(2**14, 128), ids, platform="tpu") < 0.1 * rows


def test_products_compute_what_they_read_and_round_it():
    """A rectifier between two products is stored once, in two bytes an element, as products alone read it."""
    layers = lambda x, up, down: jnp.maximum(x @ up, 0) @ down
    arguments = f32(512, 256), f32(256, 4096), f32(4096, 256)
    hidden, result = 512 * 4096, 512 * 256
    assert temporaries(layers, *arguments, platform="tpu") == 2 * hidden + 4 * result
    # A sum that reads it too needs all four bytes.
    both = lambda x, up, down: (layers(x, up, down) + jnp.sum(jnp.sin(x @ up)),)[0]
    assert temporaries(both, *arguments, platform="tpu") >= 4 * hidden


@pytest.mark.parametrize("case", ["precise", "whole numbers"])
def test_other_products_round_nothing(case):
    """libtpu keeps `f32[512,4096]` for products of the highest precision, and `s32[512,4096]` of whole numbers."""
    options = {"precision": "highest"} if case == "precise" else {}
    layers = lambda x, up, down: jnp.dot(jnp.maximum(jnp.dot(x, up, **options), 0), down, **options)
    dtype = jnp.float32 if case == "precise" else jnp.int32
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((512, 256), (256, 4096), (4096, 256))]
    assert temporaries(layers, *arguments, platform="tpu") >= 4 * 512 * 4096


def test_columns_that_are_looked_up_are_transposed_into_rows():
    look_up = lambda table, ids: table[:, ids]
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows = 4 * 2**14 * 128
    assert temporaries(look_up, f32(64, 2**14), ids, platform="tpu") == pytest.approx(rows, rel=0.02)


def test_a_table_is_laid_out_once_for_all_its_lookups():
    twice = lambda table, ids, more: table[ids].sum() + table[more].sum()
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows = 4 * 2**14 * 128
    assert temporaries(twice, f32(2**14, 64), ids, ids, platform="tpu") == pytest.approx(rows, rel=0.02)


@pytest.mark.parametrize("added", ["add", "set", "subtract"])
def test_what_is_added_into_a_table_leaves_it_as_it_lies(added):
    write = lambda table, ids, rows: getattr(table.at[ids], added)(rows)
    arguments = f32(2**14, 64), jax.ShapeDtypeStruct((8,), jnp.int32), f32(8, 64)
    assert temporaries(write, *arguments, platform="tpu") <= 1.1 * 4 * 2**14 * 64


def test_stacked_weights_are_converted_in_front_of_their_loop():
    def blocks(weights, x):
        block = lambda x, w: (jnp.tanh(x @ w.astype(jnp.bfloat16)), None)
        return jax.lax.scan(block, x.astype(jnp.bfloat16), weights)[0]

    arguments = f32(64, 256, 256), f32(8, 256)
    assert temporaries(blocks, *arguments, platform="tpu") == pytest.approx(2 * 64 * 256 * 256, rel=0.05)
    assert temporaries(blocks, *arguments, platform="gpu") < 64 * 256 * 256


def test_a_map_converts_its_stack_too_and_a_slice_that_is_handed_on_stays():
    mapped = lambda x, w: jax.lax.map(lambda one: x.astype(jnp.bfloat16) @ one.astype(jnp.bfloat16), w)
    arguments = f32(8, 256), f32(64, 256, 256)
    assert temporaries(mapped, *arguments, platform="tpu") >= 2 * 64 * 256 * 256

    def handed_on(x, w):
        block = lambda carry, one: ((jnp.tanh(carry[0] @ one.astype(jnp.bfloat16)), one), None)
        return jax.lax.scan(block, (x.astype(jnp.bfloat16), w[0]), w)[0]

    only_one = lambda x, w: handed_on(x, w)[1]
    assert temporaries(only_one, *arguments, platform="tpu") < 64 * 256 * 256


def test_the_gradient_of_a_cross_entropy_is_no_scatter():
    """One element of each row is compared with its number; on other devices zeros are stored and added into."""

    def loss(logits, targets):
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[:, None], axis=1)
        return -jnp.sum(picked)

    arguments = f32(1024, 2048), jax.ShapeDtypeStruct((1024,), jnp.int32)
    stored = {platform: temporaries(jax.grad(loss), *arguments, platform=platform) for platform in ("tpu", "cpu")}
    whole = 4 * 1024 * 2048
    assert stored["tpu"] < 2.5 * whole and stored["tpu"] <= stored["cpu"]


def test_large_sums_stay_apart():
    from splitjax.cost.memory.compilers import TPU
    from splitjax.cost.memory.timeline import combined

    step = lambda name, number: Step(name, [number], [number + 1], combines=("all_reduce", "data"))
    schedule = Schedule([step("all_reduce", 0), step("all_reduce", 2), step("all_reduce", 4)], [1, 3, 5], [])
    names = lambda size: [
        one.name for one in combined(schedule, dict.fromkeys(range(6), size), TPU.combines_bytes).steps
    ]
    assert names(64 * MIB) == ["all_reduce"] * 3 and names(MIB) == ["all_reduces"]


def test_what_frees_memory_runs_soon_and_before_the_next_loop():
    """Of two readers of a large array the one that is not waited for would run last: it runs before the loop, or when
    it could have for long enough."""
    steps = [
        Step("large", [0], [1]),
        Step("passed_on", [1], [2]),
        Step("loop", [2], [3], inside=(Schedule([], [], []),)),
        Step("summed", [1], [4]),
        Step("grows", [0], [5]),
    ]
    sizes = {0: 1, 1: 100, 2: 10, 3: 10, 4: 1, 5: 50}
    assert frees_soon(steps, range(5), sizes, [3, 4, 5], {0}, 100) == [0, 1, 3, 2, 4]
    steps[2] = Step("product", [2], [3])
    order = [0, 1, 2, 4, 3]
    assert frees_soon(steps, order, sizes, [3, 4, 5], {0}, 100) == order
    assert frees_soon(steps, order, sizes, [3, 4, 5], {0}, 1) == [0, 1, 2, 3, 4]


def test_views_of_several_values_look_at_their_own():
    """`optimization_barrier`, which keeps rematerialised layers apart, has a result for each operand."""
    barrier = Node("optimization_barrier", Kind.VIEW, [3, 4, 3], [5, 6, 7])
    assert views_of(barrier, 3) == [5, 7] and views_of(barrier, 4) == [6]

    def program(x):
        small, large = jax.lax.optimization_barrier((jnp.sort(x[0]), jnp.sort(x)))
        later = jnp.sort(jnp.sort(small)[None] + jnp.zeros_like(x))
        return large.sum() + later.sum()

    def freed_first(x):
        small, large = jax.lax.optimization_barrier((jnp.sort(x[0]), jnp.sort(x)))
        return large.sum() + small.sum()

    whole = 4 * 64 * 1024
    assert temporaries(program, f32(64, 1024), platform="cpu") >= whole
    assert temporaries(freed_first, f32(64, 1024), platform="cpu") < 1.2 * whole


@pytest.mark.tpu_aot
def test_arguments_and_lookups_are_those_of_the_compiler():
    """A table of 40 columns, which an argument need not fill up and a lookup does, and a sum of the rows that it
    finds."""
    step = splitjax.parallelize(
        lambda state, batch: ({"table": state["table"] * 0.5}, {"loss": jnp.sum(state["table"][batch["ids"]] ** 2)}),
        mesh={"data": 4}, rules="data_parallel", target="tpu:v5e:2x2",
    )  # fmt: skip
    arguments = {"table": f32(100_003, 40)}, {"ids": jax.ShapeDtypeStruct((64,), jnp.int32)}
    check = step.check_target(*arguments)
    memory = step.memory(*arguments)
    assert memory.argument_bytes == check.compiled.argument_bytes == 4 * 40 * 100_096 + 4 * 128
    assert memory.temporary_bytes >= 4 * 100_003 * 128
    assert memory.bound_bytes >= check.needed_bytes


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_empty_arrays_and_integers_without_derivatives(platform):
    assert temporaries(lambda x: x @ x.T, f32(0, 30), platform=platform) <= 512
    assert temporaries(lambda x: jnp.sort(x, axis=1), f32(0, 64, 64), platform=platform) == 0
    grads = jax.grad(lambda x, i: (x[i] ** 2).sum(), argnums=(0, 1), allow_int=True)
    only_first = lambda x, i: grads(x, i)[0]
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    assert temporaries(only_first, f32(64, 16), ids, platform=platform) >= 4 * 64 * 16
