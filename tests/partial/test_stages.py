"""Where a backward pass can end: stages of chains, residual and branching networks, tied weights, loops and
rematerialised blocks."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from splitjax import PartialBackprop
from splitjax.errors import PartialError
from splitjax.partial.depths import choose_depths
from splitjax.partial.stages import find_stages, with_times

WIDTH, EXAMPLES = 64, 256
WEIGHT = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((EXAMPLES, WIDTH), jnp.float32)
PRODUCT = 2 * EXAMPLES * WIDTH * WIDTH  # flops


def stages_of(loss, **weights):
    """The stages of `loss(weights, x)`, one layer per weight."""
    weights = weights or dict.fromkeys("abcd", WEIGHT)
    closed = jax.make_jaxpr(loss)(weights, X)
    names = dict(enumerate(sorted(weights)))
    return find_stages(closed, list(names), names)


def layer(x, w):
    return jnp.tanh(x @ w)


def chain(p, x):
    for name in "abcd":
        x = layer(x, p[name])
    return x.mean()


def names(found):
    return "".join(stage.name for stage in found.stages)


def crossings(found):
    return [stage.crossing_values for stage in found.stages]


def test_a_chain_is_cut_between_its_layers():
    found = stages_of(chain)
    assert names(found) == "abcd" and crossings(found) == [0, 1, 1, 1]
    assert [stage.crossing_bytes for stage in found.stages] == [0, *[4 * EXAMPLES * WIDTH] * 3]
    assert [stage.num_bytes for stage in found.stages] == [4 * WIDTH * WIDTH] * 4
    # The last layer's own gradient is one product; each step further back needs another layer's cotangent and one more
    # gradient.
    last, *rest = [stage.backward for stage in reversed(found.stages)]
    pointwise = found.forward - 4 * PRODUCT
    assert PRODUCT <= last < PRODUCT + pointwise and all(2 * PRODUCT <= one < 2 * PRODUCT + pointwise for one in rest)
    assert found.share(0) == 1.0 and found.backward == pytest.approx(sum(stage.backward for stage in found.stages))


def test_a_residual_block_is_cut_inside_and_between():
    def loss(p, x):
        x = x + layer(layer(x, p["a"]), p["b"])
        return (x + layer(layer(x, p["c"]), p["d"])).mean()

    found = stages_of(loss)
    # Between the blocks one value crosses, inside a block the branch and what goes around it.
    assert names(found) == "abcd" and crossings(found) == [0, 1, 1, 2]


def test_branches_are_cut_side_by_side():
    def loss(p, x):  # a, b in one branch, c beside them, then d
        return layer(layer(layer(x, p["a"]), p["b"]) + layer(x, p["c"]), p["d"]).mean()

    found = stages_of(loss)
    assert names(found) in ("abcd", "acbd") and found.stages[0].name == "a", "c is as near to the loss as b"
    assert found.stages[-1].crossing_values == 1 or found.stages[-1].crossing_values == 2
    # Going back to the branches is cheaper than all of the way: only a needs the second cotangent.
    assert found.stages[0].backward > 0 and found.share(1) < 1


def test_a_weight_that_is_used_twice_counts_where_it_is_farthest():
    def loss(p, x):
        x = layer(x, p["a"])
        for name in "bcd":
            x = layer(x, p[name])
        return (x @ p["a"].T).mean()

    found = stages_of(loss)
    assert names(found) == "abcd"
    # Its product at the end has the gradient of both operands as soon as anything in front is differentiated.
    assert found.stages[-1].backward >= 2 * PRODUCT


def test_layers_of_a_loop_are_one_stage():
    stacked = jax.ShapeDtypeStruct((3, WIDTH, WIDTH), jnp.float32)

    def loss(p, x):
        x, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), layer(x, p["a"]), p["b"])
        return layer(x, p["c"]).mean()

    found = stages_of(loss, a=WEIGHT, b=stacked, c=WEIGHT)
    assert names(found) == "abc"
    a, b, c = (stage.backward for stage in found.stages)
    assert b > 2.5 * c and b > 2.5 * a, "three times as much as one of them"
    alone = stages_of(lambda p, x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, p["b"])[0].mean(), b=stacked)
    counted = stages_of(
        lambda p, x: (layer(layer(x, p["a"]), p["b"]) * (jnp.arange(WIDTH) < 3)).mean(), a=WEIGHT, b=WEIGHT
    )
    assert names(counted) == "ab", "operations without operands are no products"
    with pytest.raises(PartialError, match="no legal cut"):
        choose_depths(alone, PartialBackprop(), 4, "here")


def test_rematerialised_blocks_are_cut_like_others():
    def loss(p, x):
        for name in "abcd":
            x = jax.checkpoint(layer)(x, p[name])
        return x.mean()

    found, plain = stages_of(loss), stages_of(chain)
    assert names(found) == "abcd" and crossings(found) == crossings(plain)
    assert [stage.backward for stage in found.stages] == [stage.backward for stage in plain.stages]


def test_what_the_loss_does_not_depend_on_costs_nothing():
    found = stages_of(lambda p, x: layer(layer(x, p["a"]), p["b"]).mean() + 0 * jax.lax.stop_gradient(p["d"]).sum())
    assert names(found)[:2] == "ab" and [stage.backward for stage in found.stages[2:]] == [0.0, 0.0]


def test_measured_times_move_the_cuts():
    found = stages_of(chain)
    slow_front = with_times(found, {"a": 7.0, "b": 1.0, "c": 1.0, "d": 1.0}, 5.0)
    cuts = lambda stages: [
        "".join(stage.name for stage in segment.stages)
        for segment in choose_depths(stages, PartialBackprop(), 2, "here").segments
    ]
    assert cuts(slow_front) == ["abcd"], "half of the time ends inside the first layer, and a depth is rounded up"
    assert cuts(with_times(found, {"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, 2.0)) == ["ab", "cd"]
    assert cuts(found) != ["abcd"]
