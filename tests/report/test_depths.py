"""Reports of partial backpropagation: what the plan says is sent is what the compiled program sends, a branch counted
by its frequency."""

from __future__ import annotations

import numpy as np
import pytest

import splitjax
from splitjax import PartialBackprop
from splitjax.report.value import Report
from tests.partial.steps import LAYERS, abstract, make_batch, make_state, make_step

ARGUMENTS = abstract(make_state(dtype=np.float32)), abstract(make_batch(dtype=np.float32))


def report_of(backprop, mesh=None, rules="data_parallel"):
    step = splitjax.parallelize(make_step(), mesh={"data": 4} if mesh is None else mesh, rules=rules, backprop=backprop)
    return step.plan(*ARGUMENTS), step.report(*ARGUMENTS)


def sent(collectives, layer):
    """(summed, handed) bytes of a layer's gradients."""
    mine = [one for one in collectives if one.layer == layer]
    return tuple(sum(one.bytes for one in mine if one.op == op) for op in ("all_reduce", "collective_permute"))


@pytest.fixture(
    scope="module", params=[{}, {"rotate": False}, {"execution": "program"}], ids=["rotating", "fixed", "programs"]
)
def spatial(request):
    return request.param.get("rotate", True), *report_of(PartialBackprop(**request.param))


def test_plan_and_program_send_the_same(spatial):
    _, plan, report = spatial
    assert report.missing == ()
    for layer in LAYERS:
        planned, compiled = sent(plan.collectives, layer), sent(report.collectives, layer)
        assert compiled == pytest.approx(planned, rel=0.01, abs=2) and planned[0] > 0
    # By hand: who contributes to d0 are 2 of 4 workers, so each sends 2 (2 - 1) / 4 of it to add up, and the two others
    # get it once each.
    counts = {name: segment.contributors for segment in plan.partial.segments for name in segment.layers}
    for layer in LAYERS:
        size = sum(
            leaf.bytes_per_device for leaf in plan.leaves if leaf.role == "param" and leaf.path.startswith(layer)
        )
        n = counts[layer]
        assert sent(plan.collectives, layer) == pytest.approx((2 * (n - 1) / 4 * size, (4 - n) / 4 * size), abs=1)


def test_what_is_planned_is_not_unplanned(spatial):
    rotates, _, report = spatial
    # the loss and its mask's sum
    assert all(one.compiled.shape == () for one in report.unplanned) and not report.unattributed
    assert not any(one.differs for one in report.collectives)
    shares = {one.compiled.share for one in report.collectives if one.planned is not None}
    assert shares == ({0.25} if rotates else {1.0})
    assert {one.axis for one in report.collectives} == {"data"}
    groups = {tuple(map(len, one.compiled.groups)) for one in report.collectives if one.compiled.groups}
    assert {tuple(sorted(sizes)) for sizes in groups} == {(1, 1, 2), (1, 3)}


def test_depths_are_shown_with_their_branches(spatial):
    _, plan, report = spatial
    assert [one.layer for one in report.depths] == [
        plan.partial.segments[first].layers[0] for first in plan.partial.first
    ]

    # Four products forward; each layer backward a product for its weight and, unless it is the last one back, one for
    # its input.
    def products(first):
        return 4 + 2 * (4 - first) - 1

    assert [one.num_products for one in report.depths] == [products(LAYERS.index(one.layer)) for one in report.depths]
    text = str(report)
    assert "depths in the first step" in text and "gradient of w, handed to workers" in " ".join(text.split())
    assert "depths in the first step" in report._repr_html_()
    assert Report.from_json(report.to_json()) == report


def test_weights_that_are_stored_in_parts_are_gathered_once():
    plan, report = report_of(PartialBackprop(), rules="fsdp")
    assert report.missing == () and all(one.compiled.shape == () for one in report.unplanned)
    assert report.by_op["all_gather", "data"].compiled_bytes == report.by_op["all_gather", "data"].predicted_bytes > 0


def test_layers_that_are_split_add_up_among_their_own_workers():
    plan, report = report_of(PartialBackprop(), mesh={"data": 2, "model": 2}, rules="splitbrain")
    assert report.missing == ()
    gradients = [one for one in report.collectives if one.planned is not None and one.cause.startswith("gradient of")]
    planned = sum(one.bytes for one in plan.collectives if one.why.startswith("gradient of"))
    assert sum(one.bytes for one in gradients) == pytest.approx(planned, rel=0.01)


def test_depths_in_turn_count_by_their_turns():
    plan, report = report_of(PartialBackprop(assignment="temporal"))
    assert report.missing == () and all(one.compiled.shape == () for one in report.unplanned)
    for layer in LAYERS:
        assert sent(report.collectives, layer) == pytest.approx(sent(plan.collectives, layer), rel=0.01, abs=4)
    assert [one.num_products for one in report.depths] == [None] * 4
