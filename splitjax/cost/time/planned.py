"""Adds to a step's time what its plan sends and no equation of its program shows, and takes away what it does not.

How XLA's partitioner moves rows that are looked up or picked, and what it makes of them in a backward pass, is known to
the plan alone; and where arrays lie between operations, the reading of a program guesses. The times of a program and
the collectives of a plan come in, a `StepTime` that has both comes out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.cost.time.machine import Machine
from splitjax.cost.time.prediction import LayerCost, StepTime, TimedPart, together
from splitjax.cost.time.work import Task
from splitjax.plan import Collective

NAME = "planned_moves"
# What reading a program calls an array that seems to change its layout between two operations (`cost.memory.moves`).
_GUESSED = "move"
# A plan and a program may differ by so many bytes: scalars that are summed, such as a loss.
_ROUNDING_BYTES = 1 << 10


def with_planned(time: StepTime, collectives: Sequence[Collective], machine: Machine) -> StepTime:
    """Returns `time` with what the plan sends beyond it, as parts named `planned_moves`, one for the axes that they go
    over; nothing is computed meanwhile. Where the program seems to send more than the plan, moves that are guessed are
    left out as far as the plan has no bytes for them.

    **Arguments:** `collectives`: of the plan. `machine`: that the time was predicted for."""
    time = _without_guesses(time, collectives)
    planned: dict[frozenset[str], float] = {}
    for each in collectives:
        planned[_axes(each)] = planned.get(_axes(each), 0.0) + each.bytes
    seen: dict[frozenset[str], float] = {}
    for part in time.collectives:
        axes = frozenset(part.axes)
        seen[axes] = seen.get(axes, 0.0) + part.sent_bytes
    missing = {axes: sent - seen.get(axes, 0.0) for axes, sent in planned.items() if sent > seen.get(axes, 0.0)}
    # What goes over one axis in the plan may go over several in the program, and the other way round.
    beyond = sum(planned.values()) - sum(seen.values())
    if beyond <= _ROUNDING_BYTES:
        return time
    share = min(1.0, beyond / sum(missing.values()))
    added = []
    for axes, sent in missing.items():
        most = max((each for each in collectives if _axes(each) == axes), key=lambda each: each.bytes)
        op = "permute" if most.op == "collective_permute" else most.op
        names = tuple(axis for axis in machine.sizes if axis in axes)
        task = Task(NAME, op=op, axes=names, sent_bytes=share * sent)
        added.append(TimedPart(NAME, (), machine.seconds(task), 1, 0.0, 0.0, op, names, task.sent_bytes))
    seconds, num_bytes = sum(part.seconds for part in added), sum(part.sent_bytes for part in added)
    return dataclasses.replace(
        time,
        seconds=time.seconds + seconds,
        sending_seconds=time.sending_seconds + seconds,
        parts=together((*time.parts, *added)),
        layers=_shared(time.layers, collectives, seconds, num_bytes) if time.layers else (),
    )


def _without_guesses(time: StepTime, collectives: Sequence[Collective]) -> StepTime:
    """Returns `time` without those guessed moves that are more than a plan with these `collectives` sends."""
    guessed = [part for part in time.collectives if part.name == _GUESSED]
    num_bytes = sum(part.sent_bytes for part in guessed)
    beyond = sum(part.sent_bytes for part in time.collectives) - sum(each.bytes for each in collectives)
    if beyond <= _ROUNDING_BYTES or not num_bytes:
        return time
    left = max(1 - beyond / num_bytes, 0.0)
    seconds = (1 - left) * sum(part.seconds for part in guessed)
    kept = [
        dataclasses.replace(part, seconds=left * part.seconds, sent_bytes=left * part.sent_bytes)
        if part.name == _GUESSED
        else part
        for part in time.parts
    ]
    hidden = min(seconds, time.hidden_seconds) if time.hidden_seconds else 0.0
    return dataclasses.replace(
        time,
        seconds=time.seconds - (seconds - hidden),
        sending_seconds=time.sending_seconds - seconds,
        hidden_seconds=time.hidden_seconds - hidden,
        parts=together([part for part in kept if part.seconds or part.sent_bytes or not part.op]),
        layers=_shared(time.layers, collectives, -seconds, -(1 - left) * num_bytes) if time.layers else (),
    )


def _axes(collective: Collective) -> frozenset[str]:
    return frozenset(collective.axis.split("+"))


def _shared(
    layers: Sequence[LayerCost], collectives: Sequence[Collective], seconds: float, num_bytes: float
) -> tuple[LayerCost, ...]:
    """Returns the costs of `layers` with so many seconds and bytes more, which are those of layers that send less than
    is planned of them; or so many less, of layers that send more."""
    lacks: dict[str, float] = {}
    for each in collectives:
        lacks[each.layer] = lacks.get(each.layer, 0.0) + each.bytes
    costs = {each.layer: each for each in layers}
    for layer, cost in costs.items():
        lacks[layer] = lacks.get(layer, 0.0) - cost.sent_bytes
    sign = 1 if num_bytes > 0 else -1
    lacks = {layer: sign * lack for layer, lack in lacks.items() if sign * lack > 0}
    for layer, lack in lacks.items():
        share, have = lack / sum(lacks.values()), costs.get(layer, LayerCost(layer, 0.0, 0.0))
        costs[layer] = dataclasses.replace(
            have, seconds=max(have.seconds + share * seconds, 0.0), sent_bytes=have.sent_bytes + share * num_bytes
        )
    return tuple(costs.values())
