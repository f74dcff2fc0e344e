"""Times collectives: among each number of devices of a process, and between processes, each kind at several sizes.

A `Timer` comes in, times come out, with a latency and a rate that fit them, which is what alpha-beta models are made of
(Hockney 1994, "The communication challenge for MPP"). A line does not fit messages between processes of all sizes, so
that predictions go by the times themselves there. Within a process the line is nearer to what steps take: large
messages of a loop that does nothing else find less in caches than those of a step do.

What a step sends its devices have just computed, and what it receives they read next, so that messages change caches on
the way. Turns do both, and what they take that send nothing is taken off.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from splitjax.cost.ring import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, reduce_scatter_bytes
from splitjax.machines.calibration import CollectiveTime
from splitjax.machines.links import Link
from splitjax.measure.calibrating.timing import Timer

# Elements of what a device has before the collective.
LENGTHS = (1 << 8, 1 << 12, 1 << 15, 1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 21)
# Where a message takes so long, no larger ones are sent: latencies no longer show in them.
_ENOUGH_SECONDS = 0.02
_AXIS = "group"


def collective_times(timer: Timer, num_processes: int, lengths: Sequence[int] = LENGTHS) -> Iterator[CollectiveTime]:
    """Yields the fits of all kinds of collectives.

    **Arguments:** `timer`: times turns of all devices. `num_processes`: of the run. `lengths`: elements of a message,
    as float32, which have to be multiples of the number of devices."""
    devices = len(timer.devices)
    within = devices // num_processes
    groups = [(size, False) for size in _powers(within)]
    if num_processes > 1:
        groups += [(num_processes, True)] + ([(devices, True)] if within > 1 else [])
    for size, between in groups:
        mesh = timer.mesh(size, across=between and size == num_processes)
        for op, (turn, sent) in _turns(size).items():
            points = []
            for length in lengths:
                message = (jax.ShapeDtypeStruct((length,), jnp.float32),)
                whole, alone = (timer.seconds(_made_and_read(each), message, mesh) for each in (turn, _ALONE[op](size)))
                # What noise made the one without messages take longer still takes something.
                seconds = max(whole - alone, whole / 10)
                points.append((float(sent(4 * length)), seconds))
                if seconds > _ENOUGH_SECONDS and len(points) > 1:
                    break
            yield CollectiveTime(op, size, between, fit(points), tuple(rising(points)) if between else ())


def _powers(most: int) -> list[int]:
    found, size = [], 2
    while size < most:
        found += [size] if most % size == 0 else []
        size *= 2
    return found + ([most] if most > 1 else [])


def _turns(size: int) -> dict[str, tuple[Callable[[Any], Any], Callable[[int], float]]]:
    """Returns by kind of collective what a device does with its message, and the bytes that it sends of it."""
    ring = [(i, (i + 1) % size) for i in range(size)]
    scatter = lambda x: lax.psum_scatter(x, _AXIS, tiled=True)
    swap = lambda x: lax.all_to_all(x.reshape(size, -1), _AXIS, 0, 0).reshape(-1)
    return {
        "all_reduce": (lambda x: lax.psum(x, _AXIS), lambda held: all_reduce_bytes(size, held)),
        "all_gather": (
            lambda x: lax.all_gather(x, _AXIS, tiled=True),
            lambda held: all_gather_bytes(size, size * held),
        ),
        "reduce_scatter": (scatter, lambda held: reduce_scatter_bytes(size, held)),
        "all_to_all": (swap, lambda held: all_to_all_bytes(size, held)),
        "permute": (lambda x: lax.ppermute(x, _AXIS, ring), lambda held: held),
    }


# By kind of collective and number of participants what has the shape of its result and is sent by nobody.
_ALONE: Mapping[str, Callable[[int], Callable[[Any], Any]]] = {
    "all_reduce": lambda size: lambda x: x,
    "all_gather": lambda size: lambda x: jnp.tile(x, size),
    "reduce_scatter": lambda size: lambda x: x[: len(x) // size],
    "all_to_all": lambda size: lambda x: x,
    "permute": lambda size: lambda x: x,
}


def _made_and_read(turn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns a `turn` on a message that the device computes before, and whose result it reads after."""

    def whole(x: Any) -> Any:
        made = lax.optimization_barrier(x + 1.0)
        return lax.optimization_barrier(turn(made)) * 0.5

    return whole


def rising(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Orders (bytes, seconds) by bytes. No message counts as slower than a larger one of its kind: what made it slower
    was other work."""
    ordered = sorted(points)
    for number in reversed(range(len(ordered) - 1)):
        sent, seconds = ordered[number]
        ordered[number] = sent, min(seconds, ordered[number + 1][1])
    return ordered


def fit(points: Sequence[tuple[float, float]]) -> Link:
    """Fits (bytes, seconds) by a latency and a rate, neither of them negative. The smallest message takes what it was
    measured to take, since steps send many small ones; the rate is the median of those from there to each larger one,
    of which none counts as faster than a smaller one (`rising`)."""
    (least, shortest), *others = rising(points)
    slopes = [(seconds - shortest) / (sent - least) for sent, seconds in others]
    slope = max(statistics.median(slopes) if slopes else 0.0, 1e-15)
    return Link(max(shortest - slope * least, 0.0), 1 / slope)
