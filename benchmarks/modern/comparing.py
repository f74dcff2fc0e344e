"""Runs a step on one device and under splitjax, and says how far apart the two are."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import splitjax
from benchmarks.modern.cells import MESHES, Cell
from benchmarks.modern.steps.case import ModernStep, Problem

SAME, REFUSED, WRONG, RAISED = "same", "refused", "wrong", "raised"
TEETH = 10  # how many times its tolerance a step has to move its state, for a comparison that can fail


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a cell.

    - `status`: `same` numbers as one device's; `refused` by a typed error; `wrong` numbers; `raised` another error, or
      a process that died or took too long.
    - `difference`: the largest of any loss or leaf of the state, absolute below one and relative above; None where
      nothing was compared, or where it is no finite number.
    - `where`: the loss or the leaf that differs most.
    - `text`: the error.
    - `seconds`: by the clock, compiling included.
    """

    step: str
    rules: str
    mesh: str
    axes: str
    status: str
    difference: float | None = None
    where: str = ""
    text: str = ""
    seconds: float = 0.0

    @property
    def cell(self) -> Cell:
        """The cell that it is of."""
        return Cell(self.step, self.rules, self.mesh, self.axes)


@dataclasses.dataclass(frozen=True)
class Run:
    """The numbers of a run: losses and the leaves of the last state, by name."""

    values: Mapping[str, np.ndarray]


class NoReferenceError(Exception):
    """A step that is no measure of anything: on one device its numbers are not finite, or hardly move."""


def reference_of(step: ModernStep, problem: Problem) -> Run:
    """Runs a step on one device.

    Raises `NoReferenceError` where the numbers are not finite, and where no leaf of the state has moved by `TEETH`
    times the step's tolerance: another run would agree whatever it did."""
    run = _run(jax.jit(problem.step), problem.state, problem)
    infinite = [name for name, value in run.values.items() if not np.isfinite(value).all()]
    if infinite:
        raise NoReferenceError(f"on one device {', '.join(infinite[:5])} are not finite")
    before = _leaves(problem.state)
    moved = max((distance(run.values[name], value) for name, value in before.items()), default=0.0)
    if moved < TEETH * step.tolerance:
        raise NoReferenceError(f"on one device no leaf moves by more than {moved:.1e}")
    return run


def compare(step: ModernStep, problem: Problem, want: Run, cell: Cell) -> Outcome:
    """Runs a step under splitjax as `cell` says, and compares it with `want`, one device's run."""
    began = time.perf_counter()
    outcome = Outcome(*dataclasses.astuple(cell), status=SAME)
    try:
        got = _under_splitjax(problem, cell)
    except splitjax.SplitjaxError as error:
        outcome = dataclasses.replace(outcome, status=REFUSED, text=f"{type(error).__name__}: {error}")
    except Exception:
        outcome = dataclasses.replace(outcome, status=RAISED, text=traceback.format_exc()[-6000:])
    else:
        outcome = _judged(outcome, got, want, step.tolerance)
    return dataclasses.replace(outcome, seconds=round(time.perf_counter() - began, 2))


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """The largest difference of two arrays, relative for what is above one in `want`; infinite where shapes differ or
    something is not a number."""
    if got.shape != want.shape:
        return float("inf")
    if not want.size:
        return 0.0
    wide = np.complex128 if np.iscomplexobj(want) or np.iscomplexobj(got) else np.float64
    here, there = np.asarray(got, wide), np.asarray(want, wide)
    apart = np.abs(here - there) / np.maximum(1.0, np.abs(there))
    return float(np.max(np.where(np.isnan(apart), np.inf, apart)))


def _judged(outcome: Outcome, got: Run, want: Run, tolerance: float) -> Outcome:
    if got.values.keys() != want.values.keys():
        other = sorted(got.values.keys() ^ want.values.keys())
        return dataclasses.replace(outcome, status=WRONG, text=f"the state has not the same leaves: {other[:5]}")
    apart = {name: distance(got.values[name], value) for name, value in want.values.items()}
    where = max(apart, key=apart.__getitem__)
    most = apart[where]
    status = SAME if most <= tolerance else WRONG
    return dataclasses.replace(
        outcome, status=status, difference=most if np.isfinite(most) else None, where=where if most else ""
    )


def _under_splitjax(problem: Problem, cell: Cell) -> Run:
    sizes = MESHES[cell.mesh]
    types = (AxisType[cell.axes],) * len(sizes)
    mesh = Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)
    step = splitjax.parallelize(problem.step, mesh=mesh, rules=cell.rules)
    return _run(step, step.place(problem.state, example=(problem.batches[0],)), problem)


def _run(step: Any, state: Any, problem: Problem) -> Run:
    losses = []
    for batch in problem.batches:
        state, metrics = step(state, batch)
        losses.append(np.asarray(metrics["loss"]))
    return Run({**{f"loss {number}": loss for number, loss in enumerate(losses, 1)}, **_leaves(state)})


def _leaves(state: Any) -> dict[str, np.ndarray]:
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        is_key = hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        found[jax.tree_util.keystr(path, simple=True, separator="/")] = np.asarray(
            jax.random.key_data(leaf) if is_key else leaf
        )
    return found
