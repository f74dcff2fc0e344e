"""Predicts how long a signature's program takes: on a machine that was measured, or on one that is not here.

An entry and what is known of a machine come in; the program is traced, as for the prediction of its memory, and
`cost.time` is asked.
"""

from __future__ import annotations

import dataclasses
import os

from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.memory import placed_program
from splitjax.cost.time import Machine, StepTime, predict_time
from splitjax.errors import CalibrationError
from splitjax.machines import Target, parse_target
from splitjax.machines.calibration import Calibration

# What users give for a machine: a calibration or its file, a target or its text.
On = Calibration | Target | str | os.PathLike[str]


def program_time(recipe: Recipe, entry: CompiledEntry, on: On) -> StepTime:
    """Predicts the time of the program that runs once the warm-up of partial backpropagation is over, or at once where
    there is none.

    **Arguments:** `recipe`: the step. `entry`: a signature of it. `on`: the machine: a calibration or the path of its
    file, or a target or its text.

    Raises `CalibrationError` for what is no machine and for a file that cannot be read, `TargetError` for a target
    that does not fit the mesh, `UnavailableError` for a step that runs as several programs, one a worker. A calibration
    of another number of devices is taken as it is: the mesh may be larger than what could be measured."""
    mesh = entry.plan.mesh
    machine = _machine(on, dict(mesh.axes), f"{recipe.name}.time(on=)")
    # The kernels are those of the machine's own compiler, which need not be that of the mesh's devices.
    placed = dataclasses.replace(placed_program(recipe, entry, "time"), platform=machine.platform)
    return predict_time(placed, machine)


def _machine(on: On, sizes: dict[str, int], place: str) -> Machine:
    if isinstance(on, str) and ":" in on:
        on = parse_target(on, place)
    if isinstance(on, Target):
        return Machine.published(on, sizes)
    if isinstance(on, (str, os.PathLike)):
        on = Calibration.load(on)
    if not isinstance(on, Calibration):
        raise CalibrationError(
            "a machine is a calibration, its file, or a target",
            value=on,
            place=place,
            remedy='run `splitjax calibrate` and give its file, or a target such as "tpu:v5e:4x4"',
        )
    return Machine.measured(on, sizes)
