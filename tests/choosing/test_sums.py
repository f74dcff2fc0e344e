"""The prices of changes as sums, against those of whole predictions."""

from __future__ import annotations

import itertools
import random

import pytest

import splitjax
from benchmarks.modern.models import Decoder, make_step, state_of
from splitjax.choosing.domain import groups_of, rule_set
from splitjax.choosing.layering import Pricing, changes, laid_out
from splitjax.choosing.prices import Prices
from splitjax.choosing.sums import StepSums
from splitjax.machines.links import Link
from splitjax.mesh import MeshShape
from splitjax.step.arguments import bind
from splitjax.step.traced import trace_step
from tests.cost.test_prediction import traced_model

MESH, PRICES = MeshShape.of({"data": 2, "model": 4}), Prices(1e11, 1e10, Link(1e-6, 1e9))
SMALL = {"layers": 2, "width": 32, "hidden": 64, "vocab": 64, "seq": 8, "examples": 8, "heads": 4, "head_dim": 8}
DECODERS = {"decoder": {"kv_heads": 2}, "experts": {"kv_heads": 4, "experts": 4}}


def graph_of(model):
    """The traced step of a shipped model, or of a scanned decoder whose heads share keys and values, or that has
    experts."""
    if model not in DECODERS:
        return traced_model(model)[1].graph
    decoder = Decoder(**SMALL, **DECODERS[model])
    recipe = splitjax.parallelize(make_step(decoder, splitjax.value_and_grad), mesh={"data": 2, "model": 4})._recipe
    return trace_step(recipe, bind(recipe.fn, recipe.options, (state_of(decoder), decoder.batch()))).graph


class Sides:
    """The changes of every group of a step, with both accounts of what they cost."""

    def __init__(self, graph, mesh, mode, shards_state=False):
        pricing = Pricing(graph, mesh, PRICES, {}, True, shards_state)
        self.groups = groups_of(graph, mesh, mode)
        self.base = laid_out(pricing, rule_set(self.groups, [0] * len(self.groups), mode))
        self.priced, self.before = StepSums(self.base, PRICES), PRICES.seconds(self.base)
        self.found = changes(pricing, self.groups, mode, self.base)

    def seconds(self, leaves):
        return PRICES.seconds(self.base.changed(leaves)) - self.before

    def near(self, value):
        return pytest.approx(value, rel=1e-9, abs=1e-12 * self.before)

    def check(self, first, second):
        """Holds two changes, each a group and its value, and what they make of each other, against predictions of the
        whole step; returns their ways and whether they meet."""
        leaves = [self.found[group][value] for group, value in (first, second)]
        one, two = (self.priced.change(self.base.difference(each)) for each in leaves)
        for change, each in zip((one, two), leaves, strict=True):
            assert self.priced.seconds(change.sums) == self.near(self.seconds(each))
            peak_bytes = self.base.changed(each).memory.peak_bytes - self.base.memory.peak_bytes
            assert self.priced.peak_bytes(change) == peak_bytes
        both = {leaf.path: leaf for each in leaves for leaf in each}.values()
        met = self.priced.meeting_seconds(one, two)
        assert met == self.near(self.seconds(both) - self.seconds(leaves[0]) - self.seconds(leaves[1]))
        return (one.way, two.way), met != 0.0

    def check_drawn(self, number):
        """Checks a `number` of drawn pairs; returns how many meet."""
        draws, num_met = random.Random(0), 0
        for _ in range(number):
            near = draws.random() < 0.5
            pair = near_groups(draws, len(self.groups)) if near else draws.sample(range(len(self.groups)), 2)
            num_met += self.check(*((group, draws.randrange(len(self.groups[group].ways))) for group in pair))[1]
        return num_met


# Of the second one the convolutions with groups depend on all leaves together.
@pytest.mark.parametrize("model", ["transformer", "mobilenet_v2", "decoder"])
@pytest.mark.parametrize("mode", ["all", "data"])
def test_sums_are_those_of_whole_predictions(model, mode):
    sides = Sides(graph_of(model), MESH, mode)
    assert sides.base.structure.adds_up == (model != "mobilenet_v2")
    assert sides.check_drawn(60), "no two changes meet"


@pytest.mark.parametrize("axis", ["fsdp", "expert"])
def test_sums_on_a_mesh_with_a_third_axis(axis):
    sides = Sides(graph_of("experts"), MeshShape.of({"data": 2, axis: 2, "model": 2}), "data")
    assert sides.check_drawn(60), "no two changes meet"


def test_sums_where_state_lies_in_parts():
    """A gradient is whole for a moment before it is summed into parts: the largest counts for the peak, not the sum."""
    sides = Sides(graph_of("decoder"), MESH, "data", shards_state=True)
    assert any(leaf.unsummed for leaf in sides.base.bytes_by_leaf)
    assert sides.check_drawn(60), "no two changes meet"


@pytest.mark.parametrize("model", ["transformer", "decoder"])
def test_what_meets_as_others_did_costs_what_the_whole_says(model):
    """All values of groups that follow each other: those that split a layer alike, stored in parts or whole, meet the
    next layer at its uses as the one before them did."""
    sides = Sides(graph_of(model), MESH, "data")
    ways, num_met = [], 0
    for first in range(len(sides.groups) - 1):
        second = first + 1
        if sides.groups[first].layers[0].kind == sides.groups[second].layers[0].kind == "dense":
            values = itertools.product(*(range(1, len(sides.groups[group].ways)) for group in (first, second)))
            found = [sides.check((first, i), (second, j)) for i, j in values]
            ways += [way for way, _ in found]
            num_met += sum(meets for _, meets in found)
    assert num_met >= 8, "hardly any two changes meet"
    assert len(set(ways)) < len(ways) / 2, "hardly a meeting is like one before it"


def near_groups(draws, count):
    """The numbers of two groups that follow each other."""
    first = draws.randrange(count - 1)
    return first, first + 1
