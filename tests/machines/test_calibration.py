"""What was measured of a machine: between its points, beyond them, and as a file."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import pytest

from splitjax.errors import CalibrationError
from splitjax.machines.calibration import Calibration, CollectiveTime, Curve, OperationKind, Point
from splitjax.machines.links import Link

PRODUCTS = Curve(
    OperationKind.PRODUCT,
    "float32",
    (Point(8, 1e3, 1e-6), Point(8, 1e5, 1e-4), Point(128, 1e3, 1e-7), Point(128, 1e5, 1e-6)),
)


@pytest.fixture
def calibration():
    path = pathlib.Path(__file__).parents[1] / "codec" / "data" / "calibration.json"
    return Calibration.load(path)


def test_between_points_logarithms_are_lines():
    assert PRODUCTS.seconds(1e4, 8) == pytest.approx(1e-5)
    assert PRODUCTS.seconds(1e4, 32) == pytest.approx((1e-5 * 10**-6.5) ** 0.5)  # half way from 8 to 128
    # No operation is faster than the smallest, and the largest's rate goes on.
    assert PRODUCTS.seconds(10, 8) == 1e-6 and PRODUCTS.seconds(1e7, 8) == pytest.approx(1e-2)
    assert PRODUCTS.seconds(1e3, 1) == 1e-6 and PRODUCTS.seconds(1e5, 4096) == 1e-6


def test_collectives_of_other_numbers_of_participants(calibration):
    fits = (
        CollectiveTime("all_reduce", 2, False, Link(1e-5, 1e9)),
        CollectiveTime("all_reduce", 4, True, Link(1.0, 1)),
    )
    own = dataclasses.replace(calibration, collectives=fits)
    assert own.collective_seconds("all_reduce", 2, False, 1e9) == pytest.approx(1 + 1e-5)
    assert own.collective_seconds("all_reduce", 4, False, 0) == pytest.approx(3e-5)  # three steps of a ring for one
    assert own.collective_seconds("permute", 4, True, 5) == 6.0  # what is known between processes
    assert own.collective_seconds("all_reduce", 1, False, 1e9) == 0
    with pytest.raises(CalibrationError, match="no collective was measured"):
        dataclasses.replace(calibration, collectives=()).collective_seconds("all_reduce", 2, False, 1)


def test_a_collective_takes_what_was_measured_of_its_size(calibration):
    points = ((1e3, 1e-5), (1e5, 1e-4), (1e6, 2e-3))
    each = CollectiveTime("all_gather", 2, False, Link(1e-5, 1e9), points)
    own = dataclasses.replace(calibration, collectives=(each,))
    assert own.collective_seconds("all_gather", 2, False, 1e5) == pytest.approx(1e-4)
    assert own.collective_seconds("all_gather", 2, False, 1e4) == pytest.approx((1e-5 * 1e-4) ** 0.5)
    assert own.collective_seconds("all_gather", 2, False, 10) == 1e-5
    assert own.collective_seconds("all_gather", 2, False, 1e7) == pytest.approx(2e-2)
    # Two further messages, and two further steps of a ring, wait as long as the smallest.
    assert own.collective_seconds("all_gather", 2, False, 1e5, 3) == pytest.approx(1e-4 + 2e-5)
    assert own.collective_seconds("all_gather", 4, False, 1e5) == pytest.approx(1e-4 + 2e-5)
    assert Calibration.from_json(own.to_json()) == own


def test_a_file_from_before_collectives_had_points_is_read():
    text = (pathlib.Path(__file__).parents[1] / "codec" / "data" / "calibration.json").read_text()
    assert '"points"' not in json.dumps(json.loads(text)["calibration"]["collectives"])
    assert Calibration.from_json(text).collectives[0].points == ()


def test_a_kind_that_was_not_measured(calibration):
    with pytest.raises(CalibrationError, match="sort were not measured"):
        dataclasses.replace(calibration, curves=(PRODUCTS,)).seconds(OperationKind.SORT, 10)


def test_read_again(calibration, tmp_path):
    assert Calibration.from_json(calibration.to_json()) == calibration
    calibration.save(tmp_path / "own.json")
    assert Calibration.load(tmp_path / "own.json") == calibration
    assert "product " in str(calibration) and "float32" in str(calibration)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda it: it["calibration"].update(call_seconds=1.0), "checksum"),
        (lambda it: it["calibration"]["curves"][0]["points"][0].update(seconds=1e-9), "checksum"),
        (lambda it: it.update(sha256="0" * 64), "checksum"),
        (lambda it: it["calibration"].update(clock=3), "clock"),
        (lambda it: it["calibration"]["curves"][0].update(kind="cooking"), "kind"),
        (lambda it: it.update(format=2), "format"),
    ],
)
def test_a_changed_file_is_refused(calibration, change, message):
    values = json.loads(calibration.to_json())
    change(values)
    with pytest.raises(CalibrationError, match=message):
        Calibration.from_json(json.dumps(values))


def test_figures_that_cannot_be_are_refused(calibration):
    curves = (dataclasses.replace(PRODUCTS, points=PRODUCTS.points[::-1]),)
    with pytest.raises(CalibrationError, match="points in order"):
        Calibration.from_json(dataclasses.replace(calibration, curves=curves).to_json())
    alone = (CollectiveTime("all_reduce", 1, False, Link(0.0, 1.0)),)
    with pytest.raises(CalibrationError, match="two participants"):
        Calibration.from_json(dataclasses.replace(calibration, collectives=alone).to_json())
    backwards = (CollectiveTime("all_reduce", 2, False, Link(0.0, 1.0), ((2.0, 1.0), (1.0, 1.0))),)
    with pytest.raises(CalibrationError, match="points of a collective"):
        Calibration.from_json(dataclasses.replace(calibration, collectives=backwards).to_json())
