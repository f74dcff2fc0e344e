"""A traced `pallas_call` is split along grid dims that allow it, and refused with a line to paste along all others."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import splitjax
from splitjax.errors import UnknownPrimitiveError
from splitjax.primitives.foreign.grids import split_dims
from tests.step.pallas_kernels import attention, rms_norm

MESHES = {"data_parallel": {"data": 4}, "megatron": {"data": 2, "model": 2}}


def train(attend, norm=lambda x, scale: x * scale, differentiate=jax.value_and_grad):
    def loss_fn(params, batch):
        x = norm(batch, params["scale"])
        q, k, v = (jnp.einsum("bsf,fhd->bshd", x, params[name]) for name in ("q", "k", "v"))
        return (jnp.einsum("bshd,hdf->bsf", attend(q, k, v), params["out"]) ** 2).mean()

    def step(params, batch):
        loss, gradients = differentiate(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype("f") * 0.3
    params = {"scale": draw(16), "q": draw(16, 4, 8), "k": draw(16, 4, 8), "v": draw(16, 4, 8), "out": draw(4, 8, 16)}
    return params, draw(8, 6, 16)


def params_of(kernel, shapes, out, grid, in_specs, out_specs):
    run = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct(out, "float32"),
        grid=grid,
        in_specs=[pl.BlockSpec(*spec) for spec in in_specs],
        out_specs=pl.BlockSpec(*out_specs),
        interpret=True,
    )
    (eqn,) = jax.make_jaxpr(run)(*(jnp.ones(shape) for shape in shapes)).eqns
    return eqn.params


def copy(x_ref, out_ref):
    out_ref[...] = x_ref[...]


def add(x_ref, y_ref, out_ref):
    out_ref[...] = x_ref[...] + y_ref[...]


def numbered(x_ref, out_ref):
    out_ref[...] = x_ref[...] + pl.program_id(0)


each = ((1, 1, 8), lambda i, j: (i, j, 0))


@pytest.mark.parametrize(
    ("kernel", "shapes", "in_specs", "out_specs", "allowed"),
    [
        (copy, [(4, 6, 8)], [each], each, (0, 1)),
        (copy, [(4, 6, 8)], [((None, 1, 8), lambda i, j: (i, j, 0))], ((None, 1, 8), each[1]), (0, 1)),
        (copy, [(4, 6, 8)], [((1, 3, 8), each[1])], ((1, 3, 8), each[1]), (0,)),  # a block of three
        (copy, [(4, 6, 8)], [((1, 1, 8), lambda i, j: (3 - i, j, 0))], each, (1,)),  # the other way round
        (copy, [(4, 6, 8)], [each], ((1, 1, 8), lambda i, j: (i, 0, 0)), (0,)),  # not in the result
        (add, [(4, 6, 8), (6, 8)], [each, ((None, 8), lambda i, j: (j, 0))], each, (0, 1)),
        (add, [(4, 6, 8), (3, 8)], [each, ((None, 8), lambda i, j: (j // 2, 0))], each, (0,)),
        (numbered, [(4, 6, 8)], [each], each, (1,)),  # the kernel counts
    ],
)
def test_which_grid_dims_may_be_split(kernel, shapes, in_specs, out_specs, allowed):
    params = params_of(kernel, shapes, (4, 6, 8), (4, 2 if in_specs[0][0][1] == 3 else 6), in_specs, out_specs)
    assert split_dims(params) == allowed


@pytest.mark.parametrize("rules", [pytest.param("data_parallel", marks=pytest.mark.slow), "megatron"])
def test_calls_run_on_parts(rules, data):
    """Plain `jax.grad` traces the forward and the backward call into the step, where lowering reaches them."""
    expected = jax.jit(train(attention))(*data)
    step = splitjax.parallelize(train(attention), mesh=MESHES[rules], rules=rules, donate=False)
    state = step.place(data[0], example=(data[1],))
    for a, b in zip(jax.tree.leaves(step(state, data[1])), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)
    assert step.plan(state, data[1]).gathered == ()
    assert "all-gather" not in step.lower(state, data[1]).compile().as_text()


def refusal(step, *arguments):
    with pytest.raises(UnknownPrimitiveError) as caught:
        step.plan(*arguments)
    return caught.value


def test_in_a_derivative_rule_it_is_refused_with_the_line_to_paste(data):
    step = splitjax.parallelize(
        train(attention, differentiate=splitjax.value_and_grad), mesh=MESHES["megatron"], rules="megatron"
    )
    error = refusal(step, *data)
    assert (
        "inside a function with a derivative rule" in error.message and error.value == "pallas_call:attention_forward"
    )
    assert "pallas_kernels.py" in error.place or "test_grids.py" in error.place
    line = 'attention = splitjax.kernel(attention, dims="b a c d, b a c e, b a c f -> b a c d", whole="a d")'
    assert line in error.remedy
    assert "for float32[8,6,4,8], float32[8,6,4,8], float32[8,6,4,8] -> float32[8,6,4,8]" in error.remedy
    dims, whole = re.search('dims="(.*?)", whole="(.*?)"', error.remedy).groups()
    kept = splitjax.kernel(attention, dims=dims, whole=whole)  # as pasted
    pasted = splitjax.parallelize(
        train(kept, differentiate=splitjax.value_and_grad), mesh=MESHES["megatron"], rules="megatron", donate=False
    )
    expected = jax.jit(train(attention))(*data)
    state = pasted.place(data[0], example=(data[1],))
    assert any("b over data, c over model" in note for note in pasted.plan(state, data[1]).notes)
    np.testing.assert_allclose(pasted(state, data[1])[1], expected[1], rtol=1e-5)


def test_along_a_block_it_is_refused_or_gathered(data):
    step = splitjax.parallelize(train(attention, rms_norm), mesh=MESHES["data_parallel"], rules="data_parallel")
    error = refusal(step, *data)
    assert "dim 0 of its operand 0, which is split over data" in error.message
    assert "float32[8,6,16], float32[16] -> float32[8,6,16]" in error.remedy
    gathered = splitjax.parallelize(
        train(attention, rms_norm), mesh=MESHES["data_parallel"], rules="data_parallel", unknown="gather", donate=False
    )
    state = gathered.place(data[0], example=(data[1],))
    assert any("rms_norm" in text for text in gathered.plan(state, data[1]).gathered)
    expected = jax.jit(train(attention, rms_norm))(*data)
    for a, b in zip(jax.tree.leaves(gathered(state, data[1])), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


def summed_up(reset):
    """A running sum of rows [n, m], in scratch, over a grid of n by m."""

    def kernel(x_ref, flag_ref, out_ref, sum_ref):
        if reset == "by index":
            pl.when(pl.program_id(1) == 0)(lambda: sum_ref.__setitem__(..., jnp.zeros_like(sum_ref)))
        else:
            sum_ref[...] = jnp.where(flag_ref[...] == 1, 0, sum_ref[...])
        sum_ref[...] += x_ref[...]
        out_ref[...] = sum_ref[...]

    block = pl.BlockSpec((1, 1), lambda i, j: (i, j))

    def running_sum(x, flag):
        return pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=x.shape,
            in_specs=[block, block],
            out_specs=block,
            scratch_shapes=[pltpu.VMEM((1, 1), jnp.float32)],
            interpret=True,
        )(x, flag)

    def step(params, batch):
        loss_fn = lambda p: ((running_sum(*batch) @ p) ** 2).mean()
        loss, gradient = splitjax.value_and_grad(loss_fn)(params)
        return params - 0.1 * gradient, loss

    return step


def rows():
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("f")
    first = np.zeros((8, 4), "f")
    first[0, 0] = first[5, 0] = 1
    return np.ones((4, 2), "f"), (x, first)


def test_scratch_that_begins_anew_in_every_part_may_be_split():
    step = splitjax.parallelize(summed_up("by index"), mesh={"data": 4}, rules="data_parallel", donate=False)
    expected = jax.jit(summed_up("by index"))(*rows())
    # A parameter is 1 less a tenth of its gradient, and one of them ends at -0.008: what float32 rounds 1 to is 1.5e-5
    # of that, and processors without fused multiply-adds round elsewhere than those that have them.
    for a, b in zip(step(*rows()), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-7)
    assert step.plan(*rows()).gathered == ()


def test_scratch_that_carries_rows_on_is_refused_or_gathered():
    step = splitjax.parallelize(summed_up("by data"), mesh={"data": 4}, rules="data_parallel")
    error = refusal(step, *rows())
    assert "its kernel may read scratch, or an operand, that an earlier step of the grid" in error.message
    # the examples are whole, too: nothing says that they have nothing to do with each other
    line = 'running_sum = splitjax.kernel(running_sum, dims="b a, b c -> b a", whole="a b")'
    assert line in error.remedy
    gathered = splitjax.parallelize(
        summed_up("by data"), mesh={"data": 4}, rules="data_parallel", unknown="gather", donate=False
    )
    for a, b in zip(gathered(*rows()), jax.jit(summed_up("by data"))(*rows()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
