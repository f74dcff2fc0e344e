"""Predicts how long a signature's program takes: on a machine that was measured, or on one that is not here.

An entry and what is known of a machine come in; the program is traced, as for the prediction of its memory, and
`cost.time` is asked.
"""

from __future__ import annotations

import dataclasses
import os

from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.memory import placed_program
from splitjax.cost.memory.lifetimes import PlacedProgram, predict_timeline
from splitjax.cost.time import LayerCost, Machine, StepTime, predict_time, with_planned
from splitjax.errors import CalibrationError
from splitjax.machines import Target, parse_target
from splitjax.machines.calibration import Calibration

# What users give for a machine: a calibration or its file, a target or its text.
On = Calibration | Target | str | os.PathLike[str]


def program_time(recipe: Recipe, entry: CompiledEntry, on: On, layered: bool = False) -> StepTime:
    """Predicts the time of the program that runs once the warm-up of partial backpropagation is over, or at once where
    there is none.

    **Arguments:** `recipe`: the step. `entry`: a signature of it. `on`: the machine: a calibration or the path of its
    file, or a target or its text. `layered`: whether to say what each layer costs, too.

    Raises `CalibrationError` for what is no machine and for a file that cannot be read, `TargetError` for a target
    that does not fit the mesh, `UnavailableError` for a step that runs as several programs, one a worker. A calibration
    of another number of devices is taken as it is: the mesh may be larger than what could be measured."""
    mesh = entry.plan.mesh
    machine = _machine(on, dict(mesh.axes), f"{recipe.name}.time(on=)")
    # The kernels are those of the machine's own compiler, which need not be that of the mesh's devices. A machine that
    # was measured does not say its kind: where its platform is the mesh's, it is taken for the mesh's kind.
    placed = placed_program(recipe, entry, "time")
    if machine.platform != placed.platform or machine.device_kind:
        placed = dataclasses.replace(placed, platform=machine.platform, device_kind=machine.device_kind)
    time = with_planned(predict_time(placed, machine, layered), entry.plan.collectives, machine)
    return dataclasses.replace(time, layers=_with_bytes(time.layers, placed, entry)) if layered else time


def _with_bytes(layers: tuple[LayerCost, ...], placed: PlacedProgram, entry: CompiledEntry) -> tuple[LayerCost, ...]:
    """Returns what layers cost with the bytes that a device holds for each, the one that takes longest first. What was
    named after a parameter, or what follows one, counts for its layer."""
    owners = {path: layer.name for layer in entry.plan.layers for path in layer.params}
    owners |= {leaf.path: owners[leaf.follows] for leaf in entry.graph.leaves if leaf.follows in owners}
    known = {layer.name for layer in entry.plan.layers}
    found: dict[str, LayerCost] = {}

    def add(name: str, more: LayerCost) -> None:
        name = name if name in known else owners.get(name, "")
        have = found.get(name, LayerCost(name, 0.0, 0.0))
        found[name] = LayerCost(
            name, have.seconds + more.seconds, have.sent_bytes + more.sent_bytes,
            have.state_bytes + more.state_bytes, have.stored_bytes + more.stored_bytes,
        )  # fmt: skip

    for each in layers:
        add(each.layer, each)
    for leaf in entry.plan.leaves:
        if leaf.is_state:
            add(leaf.path, LayerCost("", 0.0, 0.0, state_bytes=leaf.bytes_per_device))
    for array in predict_timeline(placed).at_peak:
        add(array.layer, LayerCost("", 0.0, 0.0, stored_bytes=array.num_bytes))
    return tuple(sorted(found.values(), key=lambda each: -each.seconds))


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
