"""Times what processes wait for each other at a collective after they computed for a while.

Collectives that are timed alone, one right behind the other, find all processes there. In a step each process has
computed meanwhile, none for exactly as long as another: other threads run in between, and may have the core that a
process needs when it goes on. Turns compute for a while and then add up a few numbers over the processes; what they
take longer than the computing and the sum alone is the wait.

On a shared machine seconds of one program drift by more than a wait from one moment to the next. So turns with and
without the sum are called right behind each other, and what counts is the median of their differences. The sum alone
goes by its fastest rounds, as in all that is calibrated of collectives: two processes on a shared machine of two cores
were seen to take 0.6 ms for it and 3 ms, for seconds at a time, and what it takes beyond the former is waiting, too.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from scipy.optimize import isotonic_regression

from splitjax.machines.calibration import Curve, OperationKind, Point
from splitjax.measure.calibrating.timing import AXES, LEAST_SECONDS, Timer, turns_alone
from splitjax.sync.link import of_process_0

# Seconds of computing. Behind the last waits count as growing no more.
COMPUTED_SECONDS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_SIZE = 128  # of the matrices that are multiplied meanwhile: a core's caches hold them
_MESSAGE_SIZE = 256  # numbers that are added up
_TRIAL_PRODUCTS, _TRIAL_TURNS = 64, 16
_ROUNDS, _ROUND_SECONDS = 20, 0.03
_QUARTILES = 4
# Calls so many turns of so many products, and returns the seconds of one.
_Turns = Callable[[int, int], float]


@dataclasses.dataclass(frozen=True)
class Wait:
    """Is what was measured behind one length of computing, in seconds. `spread_seconds`: between the quartiles of what
    was `waited_seconds` in the median."""

    computed_seconds: float
    waited_seconds: float
    spread_seconds: float


def waiting_curve(timer: Timer, num_processes: int, computed_seconds: Sequence[float] = COMPUTED_SECONDS) -> Curve:
    """Returns for how many seconds the processes of a run wait for each other at a collective, by for how many seconds
    they computed since the collective before. All processes have to call it at the same time, and get what process 0
    measured.

    **Arguments:** `timer`: of all devices. `num_processes`: of the run. `computed_seconds`: about how long to compute,
    for each point of the curve."""
    mesh = timer.mesh(num_processes, across=True)
    with_sum, without = (_turns(mesh, sums) for sums in (True, False))
    for each in (with_sum, without):
        each(1, 1)  # compiles it
    (of_product,) = of_process_0([without(_TRIAL_TURNS, _TRIAL_PRODUCTS) / _TRIAL_PRODUCTS])
    alone: list[tuple[float, float]] = []
    found = []
    for aimed in computed_seconds:
        alone += _rounds(with_sum, without, 0)
        rounds = _rounds(with_sum, without, max(round(aimed / of_product), 1))
        low, middle, high = statistics.quantiles([both - computed for both, computed in rounds], n=_QUARTILES)
        computed_median = statistics.median(computed for _, computed in rounds)
        found.append(Wait(*of_process_0([computed_median, middle, high - low])))
    # As `Timer.seconds` counts what a collective takes: by its fastest rounds.
    (sum_seconds,) = of_process_0([turns_alone(alone)])
    return rising_waits([dataclasses.replace(each, waited_seconds=each.waited_seconds - sum_seconds) for each in found])


def _rounds(with_sum: _Turns, without: _Turns, num_products: int) -> list[tuple[float, float]]:
    """Returns by round the seconds of a turn of so many products with a sum, and without one."""
    (trial,) = of_process_0([max(with_sum(_TRIAL_TURNS, num_products), LEAST_SECONDS)])
    num_turns = max(math.ceil(_ROUND_SECONDS / trial), 2)
    return [(with_sum(num_turns, num_products), without(num_turns, num_products)) for _ in range(_ROUNDS)]


def _turns(mesh: Mesh, sums: bool) -> _Turns:
    """Returns what calls a program of turns: products, one behind the other, and, where it `sums`, a sum over the
    processes that waits for them."""

    def turn(num_products: Any, x: Any, weights: Any, message: Any) -> Any:
        x = lax.fori_loop(0, num_products, lambda _, each: jnp.tanh(each @ weights), x)
        x, message = lax.optimization_barrier((x, message + x[0, 0]))
        if sums:
            message = lax.psum(message, AXES[1])
        return lax.optimization_barrier(x + 1e-9 * message[0])

    def program(num_turns: Any, num_products: Any) -> Any:
        values = jnp.full((_SIZE, _SIZE), 1 / _SIZE), jnp.zeros(_MESSAGE_SIZE)
        return lax.fori_loop(0, num_turns, lambda _, x: turn(num_products, x, *values), values[0])[None]

    spec = PartitionSpec()
    whole = jax.jit(
        jax.shard_map(program, mesh=mesh, in_specs=(spec, spec), out_specs=PartitionSpec(AXES), check_vma=False)
    )

    def seconds(num_turns: int, num_products: int) -> float:
        started = time.perf_counter()
        jax.block_until_ready(whole(np.int32(num_turns), np.int32(num_products)))
        return (time.perf_counter() - started) / num_turns

    return seconds


def rising_waits(waits: Sequence[Wait]) -> Curve:
    """Returns the curve nearest to `waits`, the surer ones first, on which no wait is shorter than one after less
    computing: what is so was made by noise."""
    ordered = sorted(waits, key=lambda each: each.computed_seconds)
    weights = [1 / max(each.spread_seconds, LEAST_SECONDS) ** 2 for each in ordered]
    fitted = isotonic_regression([each.waited_seconds for each in ordered], weights=weights).x
    points = [
        Point(0, each.computed_seconds, max(float(waited), LEAST_SECONDS))
        for each, waited in zip(ordered, fitted, strict=True)
    ]
    return Curve(OperationKind.WAITING, "float32", tuple(points))
