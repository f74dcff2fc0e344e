"""Puts a step's time together: what the device computes, what it sends, what of that is hidden, and which parts count.

A program with its layout and a machine come in, a `StepTime` comes out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from splitjax.cost.memory.lifetimes import PlacedProgram, temporary_bytes
from splitjax.cost.time.machine import Machine
from splitjax.cost.time.schedule import Timed, simulate
from splitjax.cost.time.work import tasks_of
from splitjax.display import registry


@dataclasses.dataclass(frozen=True)
class TimedPart:
    """Is one operation or collective of the step.

    **Attributes:** `name`: of the operation. `shape`: of its whole result. `seconds`: of all of its `times` together.
    `flops`, `num_bytes`: of a device, likewise. `op`, `axes`, `sent_bytes`: of a collective, what it is, the mesh axes
    that it goes over, and what a device sends; empty and 0 for what is none."""

    name: str
    shape: tuple[int, ...]
    seconds: float
    times: int
    flops: float
    num_bytes: float
    op: str = ""
    axes: tuple[str, ...] = ()
    sent_bytes: float = 0.0


@dataclasses.dataclass(frozen=True)
class LayerCost:
    """Says what a layer costs a device in a step.

    **Attributes:** `layer`: its name; empty for what belongs to none, such as the loss. `seconds`: of its operations
    and collectives, forward, backward and update, one after the other: what is hidden counts. `sent_bytes`: what the
    device sends for it. `state_bytes`: what the device holds of its states. `stored_bytes`: what the device stores for
    it beside the arguments at the predicted peak."""

    layer: str
    seconds: float
    sent_bytes: float
    state_bytes: int = 0
    stored_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Holds the predicted seconds of a step.

    **Attributes:**

    - `seconds`: of the whole step.
    - `computing_seconds`: that its devices compute. `sending_seconds`: that collectives take. `waiting_seconds`: of
      these, what processes wait for the last one to come to a collective, where that was measured.
    - `hidden_seconds`: of these, what goes on while the device computes.
    - `call_seconds`: what the call takes besides. `new_memory_seconds`: of it, what the system takes to make the
      memory that the call asks it for.
    - `parts`: every operation and collective, the longest first.
    - `is_lower_bound`: whether nothing was measured of the machine, so that everything is taken to run at the figures
      that its vendor publishes: the time is a lower bound, for the kernels and rings that are predicted.
    - `layers`: what each layer costs, the one that takes longest first.
    """

    seconds: float
    computing_seconds: float
    sending_seconds: float
    hidden_seconds: float
    call_seconds: float
    parts: tuple[TimedPart, ...]
    is_lower_bound: bool
    layers: tuple[LayerCost, ...] = ()
    new_memory_seconds: float = 0.0
    waiting_seconds: float = 0.0

    @property
    def collectives(self) -> tuple[TimedPart, ...]:
        """The collectives among the parts, the longest first."""
        return tuple(part for part in self.parts if part.op)

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)


def predict_time(placed: PlacedProgram, machine: Machine, layered: bool = False) -> StepTime:
    """Predicts what a step takes.

    **Arguments:** `placed`: its program, with where its arguments live. `machine`: what it runs on, for the mesh that
    the program is laid out on. `layered`: whether to add up by layers, too."""
    timed, end = simulate(tasks_of(placed, layered), machine)
    parts = list(_parts(timed, 1))
    computing = sum(part.seconds for part in parts if not part.op)
    sending = sum(part.seconds for part in parts if part.op)
    # Temporaries take as long to predict as the tasks: only where the machine was asked what memory costs.
    is_known = machine.new_memory_seconds(1.0) > 0
    new_memory = machine.new_memory_seconds(temporary_bytes(placed)) if is_known else 0.0
    call = machine.call_seconds + new_memory
    return StepTime(
        seconds=end + call,
        computing_seconds=computing,
        sending_seconds=sending,
        hidden_seconds=max(computing + sending - end, 0.0),
        call_seconds=call,
        parts=together(parts),
        is_lower_bound=machine.calibration is None,
        layers=tuple(LayerCost(layer, *sums) for layer, sums in _by_layer(timed, 1).items()) if layered else (),
        new_memory_seconds=new_memory,
        waiting_seconds=_waiting(timed),
    )


def _waiting(timed: Sequence[Timed]) -> float:
    return sum(each.task.turns * _waiting(each.inside) if each.inside else each.waiting_seconds for each in timed)


def _by_layer(timed: Sequence[Timed], times: int) -> dict[str, tuple[float, float]]:
    """Returns the seconds and the sent bytes of every layer; a run of the tasks is one of so many (`times`)."""
    found: dict[str, tuple[float, float]] = {}
    for each in timed:
        task = each.task
        if task.inside:
            added = [(layer, *sums) for layer, sums in _by_layer(each.inside, times * task.turns).items()]
        else:
            whose = task.layers or (("", 1.0),)
            added = [(layer, times * each.seconds * part, times * task.sent_bytes * part) for layer, part in whose]
        for layer, seconds, sent in added:
            before = found.get(layer, (0.0, 0.0))
            found[layer] = before[0] + seconds, before[1] + sent
    return found


def _parts(timed: Sequence[Timed], times: int) -> Iterator[TimedPart]:
    for each in timed:
        task = each.task
        if task.inside:
            yield from _parts(each.inside, times * task.turns)
        else:
            yield TimedPart(
                task.name, task.shape, times * each.seconds, times, times * task.flops, times * task.num_bytes,
                task.op, task.axes, times * task.sent_bytes,
            )  # fmt: skip


def together(parts: Sequence[TimedPart]) -> tuple[TimedPart, ...]:
    """Adds up parts of one name, shape and kind; the longest first."""
    found: dict[tuple[object, ...], TimedPart] = {}
    for part in parts:
        key = part.name, part.shape, part.op, part.axes
        known = found.get(key)
        if known is None:
            found[key] = part
            continue
        found[key] = dataclasses.replace(
            known,
            seconds=known.seconds + part.seconds,
            times=known.times + part.times,
            flops=known.flops + part.flops,
            num_bytes=known.num_bytes + part.num_bytes,
            sent_bytes=known.sent_bytes + part.sent_bytes,
        )
    return tuple(sorted(found.values(), key=lambda part: -part.seconds))
