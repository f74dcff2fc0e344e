"""Measures a machine: how long operations and collectives take, by kind and size (`splitjax calibrate`)."""

from splitjax.measure.calibrating.calibrating import calibrate

__all__ = ["calibrate"]
