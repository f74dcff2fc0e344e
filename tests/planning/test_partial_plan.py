"""What partial backpropagation sends for gradients of layers beside split ones: as the workers' loops add them up."""

from __future__ import annotations

import pytest

from benchmarks.corpus.cells import Cell
from benchmarks.corpus.steps import parallel, ready
from splitjax.plan import DENSE_GRADIENTS


def sent_for(cell, param):
    """(operation, axes, bytes) of what is sent for the gradient of a parameter."""
    cell = Cell.parse(cell)
    made = ready(cell.unit)
    plan = parallel(cell, made).plan(*made.arguments)
    return [
        (one.op, one.axis, one.bytes)
        for one in plan.collectives
        if one.purpose.leaf == param and one.purpose.kind in DENSE_GRADIENTS
    ]


@pytest.mark.parametrize("state", ["whole", "sharded"])
def test_what_a_whole_group_computes_together_is_exchanged_among_workers_alone(state):
    """Each device of a group has all of its examples in a norm between split layers, and a quarter of the features: of
    128 bytes of gradient it has 32, which one of two workers computes. They are brought together for a state that is
    whole, and are sent to where a state lies that is split over all devices."""
    cell = f"transformer/linen/splitbrain/2x4/dense/branches/gather/1/{state}"
    behind = ("all_gather", "model", 96) if state == "whole" else ("collective_permute", "data+model", 16)
    assert sent_for(cell, "params/block1/norm1/scale") == [("collective_permute", "data", 16), behind]


def test_a_worker_with_a_loss_of_its_own_sums_over_its_devices_first():
    """Behind batch norm each device of a group has its own examples: 8 numbers, which one of two workers computes."""
    cell = "resnet18/linen/splitbrain/2x4/dense/branches/gather/1/whole"
    assert sent_for(cell, "params/stem_norm/scale") == [("collective_permute", "data", 16), ("all_reduce", "model", 24)]


def test_replicated_layers_beside_split_ones_sum_over_all_devices_at_once():
    cell = "vgg16/linen/splitbrain/2x4/dense/branches/gather/1/whole"
    assert sent_for(cell, "params/conv1_1/bias") == [("all_reduce", "data+model", 28)]
