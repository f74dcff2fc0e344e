"""Adds to a step's time what its plan sends and no equation of its program shows.

How XLA's partitioner moves rows that are looked up or picked, and what it makes of them in a backward pass, is known to
the plan alone. The times of a program and the collectives of a plan come in, a `StepTime` that has both comes out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.cost.time.machine import Machine
from splitjax.cost.time.prediction import LayerCost, StepTime, TimedPart, together
from splitjax.cost.time.work import Task
from splitjax.plan import Collective

NAME = "planned_moves"
# A plan and a program may differ by so many bytes: scalars that are summed, such as a loss.
_ROUNDING_BYTES = 1 << 10


def with_planned(time: StepTime, collectives: Sequence[Collective], machine: Machine) -> StepTime:
    """Returns `time` with what the plan sends beyond it, as parts named `planned_moves`, one for the axes that they go
    over; nothing is computed meanwhile.

    **Arguments:** `collectives`: of the plan. `machine`: that the time was predicted for."""
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


def _axes(collective: Collective) -> frozenset[str]:
    return frozenset(collective.axis.split("+"))


def _shared(
    layers: Sequence[LayerCost], collectives: Sequence[Collective], seconds: float, num_bytes: float
) -> tuple[LayerCost, ...]:
    """Returns the costs of `layers` with so many seconds and bytes more, which are those of layers that send less than
    is planned of them."""
    lacks: dict[str, float] = {}
    for each in collectives:
        lacks[each.layer] = lacks.get(each.layer, 0.0) + each.bytes
    costs = {each.layer: each for each in layers}
    for layer in lacks:
        lacks[layer] -= costs[layer].sent_bytes if layer in costs else 0.0
    lacks = {layer: lack for layer, lack in lacks.items() if lack > 0}
    for layer, lack in lacks.items():
        share, have = lack / sum(lacks.values()), costs.get(layer, LayerCost(layer, 0.0, 0.0))
        costs[layer] = dataclasses.replace(
            have, seconds=have.seconds + share * seconds, sent_bytes=have.sent_bytes + share * num_bytes
        )
    return tuple(costs.values())
