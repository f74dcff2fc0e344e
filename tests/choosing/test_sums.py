"""The prices of changes as sums, against those of whole predictions."""

from __future__ import annotations

import random

import pytest

from splitjax.choosing.domain import groups_of, rule_set
from splitjax.choosing.layering import Pricing, changes, laid_out
from splitjax.choosing.prices import Prices
from splitjax.choosing.sums import StepSums
from splitjax.machines.links import Link
from splitjax.mesh import MeshShape
from tests.cost.test_prediction import traced_model

MESH, PRICES = MeshShape.of({"data": 2, "model": 4}), Prices(1e11, 1e10, Link(1e-6, 1e9))


# Of the second one the convolutions with groups depend on all leaves together.
@pytest.mark.parametrize("model", ["transformer", "mobilenet_v2"])
@pytest.mark.parametrize("mode", ["all", "data"])
def test_sums_are_those_of_whole_predictions(model, mode):
    _, traced = traced_model(model)
    pricing = Pricing(traced.graph, MESH, PRICES, {}, True)
    groups, draws, num_met = groups_of(traced.graph, MESH, mode), random.Random(0), 0
    base = laid_out(pricing, rule_set(groups, [0] * len(groups), mode))
    assert base.structure.adds_up == (model != "mobilenet_v2")
    priced, before = StepSums(base, PRICES), PRICES.seconds(base)
    found = changes(pricing, groups, mode, base)
    seconds = lambda leaves: PRICES.seconds(base.changed(leaves)) - before
    near = lambda value: pytest.approx(value, rel=1e-9, abs=1e-12 * before)
    for _ in range(60):
        first, second = draws.sample(range(len(groups)), 2) if draws.random() < 0.5 else near_groups(draws, len(groups))
        leaves = [found[number][draws.randrange(len(groups[number].ways))] for number in (first, second)]
        one, two = (priced.change(base.difference(each)) for each in leaves)
        for change, each in zip((one, two), leaves, strict=True):
            assert priced.seconds(change.sums) == near(seconds(each))
            assert priced.peak_bytes(change) == base.changed(each).memory.peak_bytes - base.memory.peak_bytes
        both = {leaf.path: leaf for each in leaves for leaf in each}.values()
        met = priced.meeting_seconds(one, two)
        assert met == near(seconds(both) - seconds(leaves[0]) - seconds(leaves[1]))
        num_met += met != 0.0
    assert num_met, "no two changes meet"


def near_groups(draws, count):
    """The numbers of two groups that follow each other."""
    first = draws.randrange(count - 1)
    return first, first + 1
