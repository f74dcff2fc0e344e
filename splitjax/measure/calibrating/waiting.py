"""Times what processes wait for each other at a collective after they computed for a while.

Collectives that are timed alone, one right behind the other, find all processes there. In a step each process has
computed meanwhile, none for exactly as long as another: other threads run in between, and may have the core that a
process needs when it goes on. Turns compute for a while and then add up a few numbers over the processes; what they
take longer than the computing and the sum alone is the wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from scipy.optimize import isotonic_regression

from splitjax.machines.calibration import Curve, OperationKind, Point
from splitjax.measure.calibrating.timing import LEAST_SECONDS, Timer

# Seconds of computing. Behind the last waits count as growing no more.
COMPUTED_SECONDS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
_AXIS = "group"
_SIZE = 128  # of the matrices that are multiplied meanwhile: a core's caches hold them
_MESSAGE = jax.ShapeDtypeStruct((256,), jnp.float32)
_MATRIX = jax.ShapeDtypeStruct((_SIZE, _SIZE), jnp.float32)
_TRIAL_PRODUCTS = 64
_ENOUGH_SECONDS = 0.08


def waiting_curve(timer: Timer, num_processes: int, computed_seconds: Sequence[float] = COMPUTED_SECONDS) -> Curve:
    """Returns for how many seconds the processes of a run wait for each other at a collective, by for how many seconds
    they computed since the collective before. All processes have to call it at the same time, and get what process 0
    measured.

    **Arguments:** `timer`: of all devices, by the wall's clock. `num_processes`: of the run. `computed_seconds`: about
    how long to compute, for each point of the curve."""
    timer = dataclasses.replace(timer, enough_seconds=_ENOUGH_SECONDS)
    mesh = timer.mesh(num_processes, across=True)
    seconds = lambda turn: timer.seconds(turn, (_MATRIX, _MATRIX, _MESSAGE), mesh)
    of_product = seconds(_turn(_TRIAL_PRODUCTS, False)) / _TRIAL_PRODUCTS
    of_sum = seconds(_turn(0, True))
    found = []
    for aimed in computed_seconds:
        num_products = max(round(aimed / of_product), 1)
        both, computed = (seconds(_turn(num_products, sums)) for sums in (True, False))
        found.append((computed, both - computed - of_sum))
    return rising_waits(found)


def _turn(num_products: int, sums: bool) -> Callable[..., Any]:
    """Returns a turn of so many products, one behind the other, and, where it `sums`, of a sum over the processes that
    waits for them."""

    def turn(x: Any, weights: Any, message: Any) -> Any:
        x = lax.fori_loop(0, num_products, lambda _, each: jnp.tanh(each @ weights), x)
        x, message = lax.optimization_barrier((x, message + x[0, 0]))
        if sums:
            message = lax.psum(message, _AXIS)
        return lax.optimization_barrier(x + 1e-9 * message[0])

    return turn


def rising_waits(waits: Sequence[tuple[float, float]]) -> Curve:
    """Returns the curve nearest to (seconds computed, seconds waited) on which no wait is shorter than one after less
    computing: what is so was made by noise."""
    ordered = sorted(waits)
    fitted = isotonic_regression([waited for _, waited in ordered]).x
    points = [
        Point(0, computed, max(float(waited), LEAST_SECONDS))
        for (computed, _), waited in zip(ordered, fitted, strict=True)
    ]
    return Curve(OperationKind.WAITING, "float32", tuple(points))
