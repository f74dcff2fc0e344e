"""Which sizes a step shrinks to: equal dims alike, with the divisors they have, and only where every operation takes
it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from splitjax import _compat
from splitjax.verify.dim_classes import Misfit, analyse
from splitjax.verify.rewriting import Rewriter
from splitjax.verify.sizes import choose_sizes, local_sizes, smallest, transferred

F = jnp.float32


def shapes_of(fun, *arguments, devices=8, frozen=None):
    """New shapes of a function's arguments and results, once it runs at the sizes that were chosen."""
    types = [jax.ShapeDtypeStruct(shape, F) for shape in arguments]
    closed, _ = _compat.trace(fun, *types)
    analysis = analyse(closed)
    num_constants = len(_compat.open_jaxpr(closed)[0].constvars)
    choice = choose_sizes(analysis, num_constants, devices, {}, frozen or {})
    sized = analysis.sized(choice.new, num_constants)
    results = jax.eval_shape(
        lambda *values: Rewriter(sized, False).run(closed, values),
        *(jax.ShapeDtypeStruct(shape, F) for shape in sized.inputs),
    )
    return list(sized.inputs), [one.shape for one in results], choice


@pytest.mark.parametrize("size, devices, small", [
    (1, 8, 1), (2, 8, 2), (3, 8, 3), (10, 8, 2), (12, 8, 4), (1000, 8, 8), (50257, 8, 3), (768, 6, 6),
    (5, 1, 2), (7, 7, 7), (64, 4, 4),
])  # fmt: skip
def test_the_smallest_size_divides_as_the_given_one_does(size, devices, small):
    assert smallest(size, devices) == small
    assert math.gcd(small, devices) == math.gcd(size, devices)


def test_dims_that_meet_shrink_alike():
    ins, outs, choice = shapes_of(lambda x, w, b: jnp.tanh(x @ w + b) @ w.T, (64, 96), (96, 48), (48,))
    assert ins == [(8, 8), (8, 8), (8,)] and outs == [(8, 8)] and not choice.kept


def test_fused_projections_and_heads_keep_their_parts():
    def attention(x, w):
        q, k, v = jnp.split(x @ w, 3, axis=-1)
        heads = lambda y: y.reshape(*y.shape[:-1], 12, 64)
        return jnp.einsum("bqhd,bkhd->bhqk", heads(q), heads(k)), heads(v) * x.reshape(*x.shape[:-1], 12, 64)

    ins, outs, choice = shapes_of(attention, (16, 128, 768), (768, 2304))
    assert ins == [(8, 8, 32), (32, 96)] and outs == [(8, 4, 8, 8), (8, 8, 4, 8)] and not choice.kept


def test_halves_are_rotated_and_laid_together():
    ins, _, choice = shapes_of(lambda x: jnp.concatenate([-x[..., 32:], x[..., :32]], axis=-1) * x, (16, 64))
    assert ins == [(8, 16)] and not choice.kept


def test_slices_that_leave_out_the_ends_keep_their_distance():
    ins, outs, choice = shapes_of(lambda x, y: (x[:, :-1] * y, x[:, 1:] + 1.0), (16, 1024), (16, 1023))
    assert ins == [(8, 8), (8, 7)] and outs == [(8, 7), (8, 7)] and not choice.kept


def test_groups_of_a_convolution_follow_its_channels():
    numbers = ("NHWC", "HWIO", "NHWC")

    def depthwise(x, k):
        return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=64)

    ins, outs, _ = shapes_of(depthwise, (16, 32, 32, 64), (3, 3, 1, 64))
    assert ins[1] == (3, 3, 1, 8) and ins[0][3] == outs[0][3] == 8


def test_windows_that_tile_shrink_with_what_they_tile():
    pool = lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    ins, outs, choice = shapes_of(lambda x: pool(pool(x)), (16, 56, 56, 64))
    assert ins == [(8, 8, 8, 8)] and outs == [(8, 2, 2, 8)] and not choice.kept  # 14 x 2 x 2 -> 2 x 2 x 2


def test_loops_lookups_and_stacks():
    def stacked(x, layers, table):
        ids = jnp.arange(x.shape[0])
        return jax.lax.scan(lambda x, w: (x @ w, x.sum(0)), x + table[ids], layers)

    ins, outs, _ = shapes_of(stacked, (16, 32), (12, 32, 32), (50257, 32))
    assert ins == [(8, 8), (4, 8, 8), (3, 8)] and outs == [(8, 8), (4, 8)]


def test_what_an_operation_pins_keeps_its_size_and_says_why():
    ins, _, choice = shapes_of(lambda x: jnp.fft.rfft(x, axis=-1).real, (16, 96))
    assert ins == [(8, 96)]
    assert choice.kept and all(
        one.size in (96, 49) and one.why.startswith("fft at ") and "test_sizes.py" in one.why for one in choice.kept
    )


@pytest.mark.parametrize("transform", [jnp.fft.fft, jnp.fft.ifft, jnp.fft.fft2])
def test_a_transform_is_as_long_as_its_shrunken_dims(transform):
    ins, outs, choice = shapes_of(lambda x: transform(x).real, (16, 64, 96))
    assert ins == outs == [(8, 8, 8)] and not choice.kept


def test_constants_are_cut_and_random_bits_drawn_for_the_new_shape():
    mask = np.tril(np.ones((128, 128), np.float32))
    ins, outs, _ = shapes_of(lambda x: x * mask + jax.random.normal(jax.random.key(0), (128, 128)), (128, 128))
    assert ins == [(8, 8)] and outs == [(8, 8)]


def test_frozen_classes_stay():
    closed, _ = _compat.trace(lambda x: x * 2, jax.ShapeDtypeStruct((16, 96), F))
    analysis = analyse(closed)
    ((_,), (label,)) = analysis.dims[analysis.flat.inputs[0]]
    ins, _, choice = shapes_of(lambda x: x * 2, (16, 96), frozen={label: "wanted"})
    assert ins == [(8, 96)] and choice.kept[0].why == "wanted"


def test_another_number_of_examples_takes_the_same_widths():
    step = lambda x, w: (jnp.tanh(x @ w).reshape(-1), x.mean(0))
    trace = lambda n: analyse(
        _compat.trace(step, jax.ShapeDtypeStruct((n, 96), F), jax.ShapeDtypeStruct((96, 48), F))[0]
    )
    whole, part = trace(64), trace(4)
    examples = lambda one: {one.dims[one.flat.inputs[0]][0][0]}
    choice = choose_sizes(whole, 0, 8, dict.fromkeys(examples(whole), 16), {})
    sized = part.sized(transferred(choice, part, examples(part)), 0)
    assert sized.inputs == ((4, 8), (8, 8))
    other = analyse(
        _compat.trace(lambda x, w: x @ w, jax.ShapeDtypeStruct((4, 96), F), jax.ShapeDtypeStruct((96, 48), F))[0]
    )
    with pytest.raises(Misfit, match="another program"):
        transferred(choice, other, examples(other))


def test_derivative_rules_take_the_sizes_of_their_operands():
    closed, _ = _compat.trace(
        lambda x, t: (jnp.tanh(x), (1 - jnp.tanh(x) ** 2) * t), *[jax.ShapeDtypeStruct((64, 32), F)] * 2
    )
    assert local_sizes(closed, [(64, 32)] * 2) is None
    assert local_sizes(closed, [(8, 4)] * 2).inputs == ((8, 4), (8, 4))
    with pytest.raises(Misfit):
        local_sizes(closed, [(8, 4), (8, 2)])
