"""What a Pallas kernel may hand on in memory from one step of its grid to the next: scratch, and inputs it writes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from splitjax.primitives.foreign.carried import carried_dims
from splitjax.primitives.foreign.grids import split_dims

GRID = (4, 2, 6)
BLOCK = pl.BlockSpec((1, 1, 1, 8), lambda i, j, k: (i, j, k, 0))
ONE = pl.BlockSpec((1, 8), lambda i, j, k: (0, 0))


def params_of(kernel, vmap=False):
    run = pl.pallas_call(
        kernel,
        jax.ShapeDtypeStruct((*GRID, 8), "float32"),
        grid=GRID,
        in_specs=[BLOCK, ONE],
        out_specs=BLOCK,
        scratch_shapes=[pltpu.VMEM((1, 1, 1, 8), jnp.float32)],
        interpret=True,
    )
    run = jax.vmap(run, in_axes=(0, None)) if vmap else run
    (eqn,) = jax.make_jaxpr(run)(jnp.ones((3,) * vmap + (*GRID, 8)), jnp.ones((1, 8))).eqns
    return eqn.params


def written_first(x, one, out, kept):
    kept[...] = x[...] * one[0, 0]
    kept[0, 0, 0, :4] = kept[0, 0, 0, 4:]
    out[...] = kept[...]


def reset(*dims):
    def kernel(x, one, out, kept):
        first = pl.program_id(dims[0]) == 0
        for dim in dims[1:]:
            first = jnp.logical_and(first, pl.program_id(dim) == 0)

        @pl.when(first)
        def _():
            kept[...] = jnp.zeros_like(kept)

        kept[...] += x[...]
        out[...] = kept[...]

    return kernel


def by_data(x, one, out, kept):
    kept[...] = jnp.where(one[0, 0] == 1, 0.0, kept[...]) + x[...]
    out[...] = kept[...]


def under_a_condition_on_data(x, one, out, kept):
    @pl.when(x[0, 0, 0, 0] > 0)
    def _():
        kept[...] = x[...]

    out[...] = kept[...]


def in_both_branches(x, one, out, kept):
    def write(value):
        kept[...] = value

    lax.cond(x[0, 0, 0, 0] > 0, lambda: write(x[...]), lambda: write(-x[...]))
    out[...] = kept[...]


def at_index_one(x, one, out, kept):
    @pl.when(pl.program_id(2) == 1)
    def _():
        kept[...] = x[...]

    out[...] = kept[...]


def in_part(x, one, out, kept):
    kept[0, 0, 0, :4] = x[0, 0, 0, :4]
    out[...] = kept[...]


def written_last(x, one, out, kept):
    out[...] = x[...] + kept[...]
    kept[...] = x[...]


def exchanged(x, one, out, kept):
    out[...] = jax.ref.swap(kept, ..., x[...])


def only_written(x, one, out, kept):
    kept[...] = x[...]
    out[...] = x[...]


def in_a_loop(x, one, out, kept):
    def turn(i, total):
        kept[...] = x[...] * i
        return total + kept[...]

    out[...] = lax.fori_loop(0, 3, turn, jnp.zeros_like(x))
    out[...] += kept[...]


def across_a_loop(x, one, out, kept):
    def turn(i, total):
        total = total + kept[...]
        kept[...] = x[...] * i
        return total

    out[...] = lax.fori_loop(0, 3, turn, jnp.zeros_like(x))


def counted_by_a_loop(x, one, out, kept):
    def turn(i, total):
        @pl.when(pl.program_id(2) == i + 0)
        def _():
            kept[...] = x[...]

        return total

    lax.fori_loop(1, 3, turn, 0)
    out[...] = kept[...]


def by_itself(x, one, out, kept):
    pltpu.sync_copy(x, kept)
    out[...] = kept[...]


def into_an_input(x, one, out, kept):
    out[...] = x[...] + one[0, 0]
    one[...] = one[...] * 0.5


def at_random(x, one, out, kept):
    out[...] = x[...] + pltpu.prng_random_bits((1, 1, 1, 8)).astype(jnp.float32)


def at_random_with_a_seed(x, one, out, kept):
    pltpu.prng_seed(3)
    at_random(x, one, out, kept)


@pytest.mark.parametrize(
    ("kernel", "carried"),
    [
        (written_first, set()),
        (in_both_branches, set()),
        (only_written, set()),
        (in_a_loop, set()),
        (at_random_with_a_seed, set()),
        (reset(2), {2}),
        (reset(1), {1, 2}),
        (reset(1, 2), {1, 2}),
        (reset(0), {0, 1, 2}),
        (reset(0, 2), {0, 1, 2}),
        (by_data, {0, 1, 2}),
        (under_a_condition_on_data, {0, 1, 2}),
        (at_index_one, {0, 1, 2}),
        (in_part, {0, 1, 2}),
        (written_last, {0, 1, 2}),
        (exchanged, {0, 1, 2}),
        (across_a_loop, {0, 1, 2}),
        (counted_by_a_loop, {0, 1, 2}),
        (by_itself, {0, 1, 2}),
        (into_an_input, {0, 1, 2}),
        (at_random, {0, 1, 2}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_is_carried(kernel, carried):
    assert carried_dims(params_of(kernel)) == carried


def test_it_is_not_split_along_what_is_carried():
    assert split_dims(params_of(written_first)) == (0, 1, 2)
    assert split_dims(params_of(reset(2))) == (0, 1)
    assert split_dims(params_of(by_data)) == ()


def test_dims_that_vmap_adds_come_first():
    assert carried_dims(params_of(reset(2), vmap=True)) == {3}
    assert carried_dims(params_of(by_data, vmap=True)) == {0, 1, 2, 3}


def test_an_operand_that_is_the_memory_of_a_result_has_the_same_part_of_it():
    def kernel(x, whole, out):
        out[...] = x[...] + whole[0, 0]

    def split(aliases):
        row = pl.BlockSpec((1, 8), lambda i: (i, 0))
        run = pl.pallas_call(
            kernel,
            jax.ShapeDtypeStruct((4, 8), "float32"),
            grid=(4,),
            in_specs=[row, pl.BlockSpec((4, 8), lambda i: (0, 0))],
            out_specs=row,
            input_output_aliases=aliases,
            interpret=True,
        )
        (eqn,) = jax.make_jaxpr(run)(jnp.ones((4, 8)), jnp.ones((4, 8))).eqns
        return split_dims(eqn.params)

    assert split({}) == split({0: 0}) == (0,)
    assert split({1: 0}) == ()
