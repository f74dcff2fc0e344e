"""Shares of examples for workers of unequal depths, worked out by hand."""

from __future__ import annotations

from splitjax import PartialBackprop
from splitjax.partial.balance import balanced_examples
from splitjax.partial.depths import choose_depths
from splitjax.partial.stages import BackpropStages, Stage


def depths_of(num_workers, forward, *times):
    """Linear depths of a chain of layers that take `times` to go back through."""
    stages = tuple(Stage(f"layer{k}", (k,), 4, float(time), 1, 4) for k, time in enumerate(times))
    return choose_depths(BackpropStages(stages, float(forward)), PartialBackprop(), num_workers, "here")


def test_deep_workers_get_fewer_examples():
    # An example takes the shallow worker 1 + 1 and the deep one 1 + 2.
    assert balanced_examples(depths_of(2, 1, 1, 1), 50, "here") == (30, 20)


def test_linear_depths_reach_the_first_layer():
    depths = depths_of(4, 2, 1, 1, 1, 1)
    assert [len(depths.contributors(number)) for number in range(4)] == [1, 2, 3, 4]
    assert [depths.backward(slot) for slot in range(4)] == [1, 2, 3, 4]
