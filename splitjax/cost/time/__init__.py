"""Predicts how long a step takes, before it is compiled, on this machine or on one that is not here.

`work` says what a device does in a step: operations of kinds and sizes, collectives over mesh axes. `machine` says how
long each takes, by a calibration or by a vendor's figures, `schedule` what of it goes on at once, and `prediction` puts
them together into a `StepTime`, to which `planned` adds what only the plan knows to be sent. `oracle` has the closed
forms of the ParaDL Oracle, which are the baseline.
"""

from splitjax.cost.time.machine import Machine
from splitjax.cost.time.planned import with_planned
from splitjax.cost.time.prediction import LayerCost, StepTime, predict_time

__all__ = ["LayerCost", "Machine", "StepTime", "predict_time", "with_planned"]
