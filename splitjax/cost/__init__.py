"""Predicts what a plan costs: collectives and memory.

A traced step (`Graph`), the layout of its leaves and a mesh shape come in; what one device sends in each collective of
a step, and the bytes that it holds, come out. It is arithmetic on shapes: nothing is compiled and no device is touched,
so that plans can be compared before any of them runs.
"""

from splitjax.cost.memory import predict_memory
from splitjax.cost.parts import Manner
from splitjax.cost.prediction import LaidOutStep, Prediction, predict_collectives, predict_step, replaced

__all__ = [
    "LaidOutStep",
    "Manner",
    "Prediction",
    "predict_collectives",
    "predict_memory",
    "predict_step",
    "replaced",
]
