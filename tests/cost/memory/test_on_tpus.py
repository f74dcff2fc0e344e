"""What programs are expected to store on a TPU, by what modules of libtpu show."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import splitjax
from splitjax.cost.memory.compilers import TPU
from splitjax.cost.memory.lifetimes import PlacedProgram, predict_program_memory, predict_timeline
from splitjax.cost.memory.orders import frees_soon
from splitjax.cost.memory.program import Kind, Node, views_of
from splitjax.cost.memory.schedule import Schedule, Step
from splitjax.cost.memory.timeline import combined
from tests.cost.memory.on_a_gpu import temporaries

MIB = 2**20


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def timeline(function, *arguments):
    """What a program is expected to store at each moment."""
    jaxpr = jax.make_jaxpr(function)(*arguments)
    return predict_timeline(PlacedProgram(jaxpr, [None] * len(arguments), [None], {}, {"data": 1}, "tpu"))


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
    # The sum of its sines is computed where the product is made (`sine_reduce_fusion`, with 8192 rows for v5p).
    both = lambda x, up, down: layers(x, up, down) + jnp.sum(jnp.sin(x @ up))
    assert temporaries(both, *arguments, platform="tpu") == 2 * hidden + 4 * result + 4 * 128


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
    assert timeline(twice, f32(2**14, 64), ids, ids).operations.count("rows") == 1


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


def test_a_converted_stack_lies_as_the_stack_that_it_is_made_of():
    """An argument is filled up as little as can be, along any two dims, and so is what is converted of it: of operands
    of products with these dims an eighth of each tile would be used."""

    def blocks(weights, x):
        block = lambda x, w: (x + jnp.einsum("bi,hio->bo", x, w.astype(jnp.bfloat16)).sum(), None)
        return jax.lax.scan(block, x.astype(jnp.bfloat16), weights)[0].sum()

    arguments = f32(16, 64, 4096, 4), f32(8, 4096)
    stored = [span.array for span in timeline(blocks, *arguments).spans if span.array.made_by == "convert"]
    assert [array.num_bytes for array in stored] == [2 * 16 * 64 * 4096 * 4]


@pytest.mark.parametrize(("num_arrays", "stored"), [(1, 0), (2, 2)])
def test_what_is_made_of_one_large_array_is_weighed_by_its_full_bytes(num_arrays, stored):
    """A loop of one array that several products read is computed in each of them. One of two arrays reads twice as much
    as it writes, even more so in two bytes an element: it is stored for two products."""
    elements = 512 * 4096

    def products(arrays, weights):
        hidden = sum(arrays) if len(arrays) > 1 else jnp.maximum(arrays[0], 0)
        return sum((hidden @ weight).sum() for weight in weights)

    arrays = [f32(512, 4096)] * num_arrays
    weights = [f32(4096, 8)] * (4 if num_arrays == 1 else 2)
    flat = lambda *leaves: products(leaves[:num_arrays], leaves[num_arrays:])
    expected = stored * elements
    assert expected <= temporaries(flat, *arrays, *weights, platform="tpu") < expected + 0.5 * elements


def test_a_map_converts_its_stack_too_and_a_slice_that_is_handed_on_stays():
    mapped = lambda x, w: jax.lax.map(lambda one: x.astype(jnp.bfloat16) @ one.astype(jnp.bfloat16), w)
    arguments = f32(8, 256), f32(64, 256, 256)
    assert temporaries(mapped, *arguments, platform="tpu") >= 2 * 64 * 256 * 256

    def handed_on(x, w):
        block = lambda carry, one: ((jnp.tanh(carry[0] @ one.astype(jnp.bfloat16)), one), None)
        return jax.lax.scan(block, (x.astype(jnp.bfloat16), w[0]), w)[0]

    only_one = lambda x, w: handed_on(x, w)[1]
    assert temporaries(only_one, *arguments, platform="tpu") < 64 * 256 * 256


def test_one_element_added_to_each_row_is_no_scatter():
    """As the gradient of a cross-entropy does: each element's number is compared. Several in a row are a scatter."""
    add = jax.vmap(lambda ids, values: jnp.zeros(4096).at[ids].add(values))
    total = lambda ids, values: jnp.sin(add(ids, values)).sum()
    whole = 4 * 1024 * 4096
    of_each = lambda count: (jax.ShapeDtypeStruct((1024, count), jnp.int32), f32(1024, count))
    assert temporaries(total, *of_each(1), platform="tpu") < 0.1 * whole
    assert temporaries(total, *of_each(5), platform="tpu") >= whole


def test_a_narrow_costly_loop_is_stored_for_the_products_that_read_it():
    def shared(x, up, down, other):
        hidden = jnp.exp(x @ up).astype(jnp.bfloat16)
        return (hidden @ down).sum() + (hidden @ other).sum() + hidden.astype(jnp.float32).sum()

    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    arguments = f32(512, 256), f32(256, 4096), bf16(4096, 8), bf16(4096, 8)
    stored = [(span.array.made_by, span.array.num_bytes) for span in timeline(shared, *arguments).spans]
    assert ("convert_element_type", 2 * 512 * 4096) in stored


def test_what_is_spread_is_made_in_the_loops_that_read_it():
    def loop(row):
        spread = jnp.broadcast_to(row[None, :], (2048, 2048))
        return jax.lax.scan(lambda carry, _: (carry + jnp.sum(jnp.sin(spread + carry)), None), 0.0, length=8)[0]

    assert temporaries(loop, f32(2048), platform="tpu") < 4 * 2048 * 2048


def test_a_wide_stack_goes_when_it_is_converted():
    def blocks(weights, x):
        stack = jnp.sort(weights, axis=0)

        def block(carry, w):
            product = carry @ w.astype(jnp.bfloat16)
            # stored before and behind it is sorted
            large = jnp.sort(jnp.broadcast_to(product[0].astype(jnp.float32)[:, None], (256, 65536)) + carry[0, 0])
            return product + large.sum().astype(jnp.bfloat16), None

        return jax.lax.scan(block, x.astype(jnp.bfloat16), stack)[0]

    narrow, large = 2 * 64 * 256 * 256, 4 * 256 * 65536
    stored = temporaries(blocks, f32(64, 256, 256), f32(8, 256), platform="tpu")
    assert stored < 1.02 * (narrow + 2 * large), (
        "the stack of four bytes an element is not there beside the large array"
    )


def on_eight(function, in_specs, out_specs, *arguments):
    """The bytes that a function over the axis `data` of eight TPUs is expected to store beside its arguments."""
    mesh = jax.sharding.AbstractMesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = PlacedProgram(
        jax.make_jaxpr(jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs))(*arguments),
        [tuple((axis,) if axis else () for axis in spec) for spec in in_specs],
        [None], {}, {"data": 8}, "tpu",
    )  # fmt: skip
    return predict_program_memory(placed).temporary_bytes


@pytest.mark.parametrize(("rows", "copies"), [(8, 1), (3, 2)])
def test_pieces_that_do_not_begin_where_tiles_do_are_laid_out_anew(rows, copies):
    """An all-gather of three rows from each device writes the whole twice; of eight rows, once."""
    gather = lambda x: jnp.max(jax.lax.all_gather(x, "data", tiled=True), axis=0, keepdims=True)
    stored = on_eight(gather, (P("data", None),), P("data", None), f32(8 * rows, 65536))
    whole = 4 * 8 * rows * 65536
    assert copies * whole <= stored < (copies + 0.9) * whole


@pytest.mark.parametrize(("rows", "wholes"), [(8, 1), (3, 2)])
def test_a_reduce_scatter_of_such_pieces_sums_the_whole(rows, wholes):
    scatter = lambda x: jax.lax.psum_scatter(jnp.sort(x, axis=0), "data", tiled=True)
    stored = on_eight(scatter, (P("data", None),), P("data", None), f32(64 * rows, 65536))
    whole = 4 * 8 * rows * 65536
    assert wholes * whole <= stored < (wholes + 0.9) * whole


def test_a_summed_gradient_of_a_lookup_stays_in_rows():
    def summed(ids, rows):
        gradient = jnp.zeros((2**14, 64)).at[ids].add(rows)
        return jnp.max(jax.lax.psum(gradient, "data"), axis=0)

    arguments = jax.ShapeDtypeStruct((64,), jnp.int32), f32(64, 64)
    stored = on_eight(summed, (P("data"), P("data", None)), P(None), *arguments)
    assert stored >= 2 * 4 * 2**14 * 128, "both the gradient and its sum are filled up to 128 columns"


def test_large_sums_stay_apart():
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


def test_what_reads_a_buffer_last_together_runs_before_a_loop():
    """Neither of the two frees the logits' gradient alone (`all-reduce.31` of `gpt2_xl/zero/128` is behind the first,
    and in front of the loop)."""
    loop = Step("scan", [1], [5], inside=(Schedule([], [], []),))
    steps = [
        Step("made", [0], [1, 2]), loop, Step("weight", [2], [3]), Step("picked", [2], [4]),
    ]  # fmt: skip
    sizes = {0: 1, 1: 1, 2: 100, 3: 30, 4: 1, 5: 50}
    assert frees_soon(steps, range(4), sizes, [3, 4, 5], {0}, 100) == [0, 2, 3, 1]
    sizes[3] = 120
    assert frees_soon(steps, range(4), sizes, [3, 4, 5], {0}, 100) == [0, 1, 2, 3], "they write more than they free"


def test_a_sum_of_what_a_product_makes_is_written_over_it():
    """`all-reduce.194` of `gpt2_medium/megatron/32`; sums of what is scattered are not."""
    arguments = f32(256, 1024), f32(1024, 4096)
    specs, out = (P(None, "data"), P("data", None)), P(None, None)
    logits = on_eight(lambda x, w: jax.lax.psum(x @ w, "data").max(axis=0, keepdims=True), specs, out, *arguments)
    other = lambda x, w: jax.lax.psum(jnp.sort(x @ w, axis=0), "data").max(axis=0, keepdims=True)
    size = 4 * 256 * 4096
    assert size <= logits < 1.2 * size
    assert 2 * size <= on_eight(other, specs, out, *arguments) < 2.2 * size
