"""What is printed of predicted times and of the calibration that they go by."""

from __future__ import annotations

import dataclasses
import pathlib

from splitjax.cost.time.prediction import StepTime
from splitjax.machines.calibration import Calibration, Curve, OperationKind, Point

DATA = pathlib.Path(__file__).parents[1] / "codec" / "data"


def test_waiting_is_told_where_there_is_any():
    time = StepTime(0.012, 0.008, 0.004, 0.0, 0.0, (), False, waiting_seconds=0.0015)
    assert "1.50 ms are spent waiting for the last process to come" in str(time).replace("\n", " ")
    assert "waiting" not in str(dataclasses.replace(time, waiting_seconds=0.0))


def test_a_calibration_tells_waits_apart_from_rates():
    known = Calibration.load(DATA / "calibration.json")
    curve = Curve(OperationKind.WAITING, "float32", (Point(0, 1e-3, 2e-5), Point(0, 3e-2, 2e-3)))
    text = str(dataclasses.replace(known, curves=(*known.curves, curve)))
    assert "20 us after 1.00 ms of computing" in text and "2.00 ms after 30.0 ms of computing" in text
    assert not any("waiting" in line and "float32" in line for line in text.splitlines())
    assert "waiting for others" not in str(known)
