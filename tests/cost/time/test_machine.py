"""What tasks take: by published figures and by measured ones, by hand; and the Oracle's closed forms."""

from __future__ import annotations

import dataclasses
import math
import pathlib

import pytest

from splitjax.cost.time import oracle
from splitjax.cost.time.machine import Machine
from splitjax.cost.time.work import Load, Task
from splitjax.errors import TargetError
from splitjax.machines import Link, parse_target
from splitjax.machines.calibration import Calibration, Curve, OperationKind, Point

DATA = pathlib.Path(__file__).parents[2] / "codec" / "data"


def test_a_published_machine_is_a_roofline():
    machine = Machine.published(parse_target("gpu:h200:8"), {"data": 8})
    assert machine.seconds(Task("dot", flops=989.5e12, num_bytes=1, dtype="bfloat16")) == pytest.approx(1)
    assert machine.seconds(Task("dot", flops=494.7e12, num_bytes=1)) == pytest.approx(1)  # TF32
    assert machine.seconds(Task("add", flops=1, num_bytes=4.8e12)) == pytest.approx(1)
    with pytest.raises(TargetError, match="has to be measured"):
        Machine.published(parse_target("cpu:8"), {"data": 8})


def test_rings_and_trees():
    machine = Machine.published(parse_target("gpu:h200:8"), {"data": 8})
    large = Task("sum", op="all_reduce", axes=("data",), sent_bytes=450e9)
    assert machine.seconds(large) == pytest.approx(1 + 14 * 3.4e-6)  # 14 steps of a ring
    small = Task("sum", op="all_reduce", axes=("data",), sent_bytes=14.0)
    assert machine.seconds(small) == pytest.approx(6 * 3.4e-6, rel=1e-3)  # three steps up a tree, three down
    gather = Task("gather", op="all_gather", axes=("data",), sent_bytes=14.0)
    assert machine.seconds(gather) == pytest.approx(7 * 3.4e-6, rel=1e-3)


def test_slow_axes_carry_their_share():
    machine = Machine.published(parse_target("gpu:h200:2x8"), {"data": 2, "model": 8})
    both = Task("sum", op="all_gather", axes=("data", "model"), sent_bytes=15e9)
    # Of fifteen blocks each device sends eight over the network between hosts, and seven within its own.
    assert machine.seconds(both) == pytest.approx(8e9 / 50e9 + 7e9 / 450e9, rel=1e-2)
    assert machine.places(both) == {"hosts", "switch"}


def test_a_measured_machine_is_asked_by_kind_and_size():
    calibration = Calibration.load(DATA / "calibration.json")
    machine = Machine.measured(calibration, {"data": 2})
    one = Load(OperationKind.PRODUCT, 1e6, 32)
    seconds = calibration.seconds(OperationKind.PRODUCT, 1e6, 32)
    assert machine.seconds(Task("dot", loads=(one,), repeats=3)) == pytest.approx(3 * seconds)
    # A product of few flops over a large matrix waits for memory.
    moved = calibration.seconds(OperationKind.ELEMENTWISE, 1e9)
    assert machine.seconds(Task("dot", loads=(one,), num_bytes=1e9)) == pytest.approx(moved) and moved > seconds
    assert not machine.overlaps and machine.seconds(Task("sum", op="all_reduce", axes=())) == 0


def test_what_is_sent_apart_waits_for_each_message():
    machine = Machine.measured(Calibration.load(DATA / "calibration.json"), {"data": 2})
    one, five = (
        machine.seconds(Task("sum", op="all_reduce", axes=("data",), sent_bytes=1e6, num_messages=number))
        for number in (1, 5)
    )
    waits = machine.seconds(Task("sum", op="all_reduce", axes=("data",)))
    assert waits > 0 and five - one == pytest.approx(4 * waits)


def test_new_memory_is_what_was_measured_of_it():
    known = Calibration.load(DATA / "calibration.json")
    assert Machine.measured(known, {"data": 2}).new_memory_seconds(1e9) == 0  # measured before there was such a kind
    points = (Point(0, 28 * 2.0**20, 1e-9), Point(0, 40 * 2.0**20, 4e-3))
    curve = Curve(OperationKind.NEW_MEMORY, "float32", points)
    machine = Machine.measured(dataclasses.replace(known, curves=(*known.curves, curve)), {"data": 2})
    assert machine.new_memory_seconds(400 * 2**20) == pytest.approx(4e-2)
    assert machine.new_memory_seconds(2**20) == 1e-9 and machine.new_memory_seconds(0) == 0
    assert Machine.published(parse_target("gpu:h200:8"), {"data": 8}).new_memory_seconds(1e9) == 0


def test_waits_are_those_of_processes_and_grow_no_further_than_was_measured():
    known = Calibration.load(DATA / "calibration.json")
    curve = Curve(OperationKind.WAITING, "float32", (Point(0, 1e-3, 1e-4), Point(0, 1e-2, 1e-3)))
    known = dataclasses.replace(known, num_processes=2, devices_per_process=4)
    machine = Machine.measured(dataclasses.replace(known, curves=(*known.curves, curve)), {"data": 2, "model": 4})
    summed = {axis: Task("sum", op="all_reduce", axes=(axis,)) for axis in ("data", "model")}
    assert machine.has_waits(summed["data"]) and not machine.has_waits(summed["model"])
    assert not machine.has_waits(Task("dot", axes=("data",)))
    assert not dataclasses.replace(machine, overlaps=True).has_waits(summed["data"])
    waits = [machine.waiting_seconds(seconds) for seconds in (0.0, 5e-4, 1e-3, 1e-2, 1.0)]
    assert waits == [0, *map(pytest.approx, (5e-5, 1e-4, 1e-3, 1e-3))]
    # measured before there was such a kind
    assert Machine.measured(known, {"data": 2, "model": 4}).waiting_seconds(1e-2) == 0


def test_small_convolutions_that_were_not_measured_count_as_others():
    known = Calibration.load(DATA / "calibration.json")
    curves = tuple(curve for curve in known.curves if curve.kind is not OperationKind.SMALL_CONVOLUTION)
    known = dataclasses.replace(known, curves=curves)
    of_kind = lambda kind: known.seconds(kind, 1e8, 64)
    assert of_kind(OperationKind.SMALL_CONVOLUTION) == of_kind(OperationKind.CONVOLUTION) > 0


def test_which_axes_leave_a_process():
    calibration = Calibration.load(DATA / "calibration.json")
    assert calibration.devices_per_process == 2
    machine = Machine.measured(calibration, {"data": 2, "model": 2})
    assert machine.crosses_processes("data") and not machine.crosses_processes("model")


def test_the_oracle_by_hand():
    link = Link(1e-3, 1e6)
    assert oracle.data_seconds(8.0, 4, 4e6, link) == pytest.approx(2 + 2 * 3 * (1e-3 + 1.0))
    assert oracle.filter_seconds(8.0, 4, [4e6, 8e6], link) == pytest.approx(2 + 3 * 3 * (2e-3 + 3.0))
    both = oracle.data_filter_seconds(8.0, (2, 4), 8e6, [8e6], link)
    assert both == pytest.approx(1 + 3 * 3 * (1e-3 + 1.0) + 2 * (1e-3 + 1.0))
    assert oracle.accuracy(0.8, 1.0) == pytest.approx(0.8) and math.isclose(oracle.accuracy(1.2, 1.0), 0.8)
