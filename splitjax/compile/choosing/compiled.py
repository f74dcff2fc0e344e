"""Compiles the best few layouts that could be chosen, with the compiler of the machine that they are for, before one is
taken.

Candidates that fit by the upper bound of their memory come in, the fastest by prediction first; the one that holds what
it promised comes out. Nothing is compiled that could not be taken: where the compiled program of the best one fits and
sends no more than planned, it is the only one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from splitjax.choosing import Candidate, CompiledFigures
from splitjax.compile.choosing.places import Decided
from splitjax.compile.target_check import check_on_target
from splitjax.cost.time import Machine
from splitjax.cost.time.work import Task
from splitjax.machines.targets import Target
from splitjax.report.target.value import TargetCheck


def best_compiled(
    fitting: Sequence[Candidate], most: int, budget_bytes: float, compiled: Callable[[Candidate], Candidate | None]
) -> tuple[Candidate | None, list[Candidate]]:
    """Compiles candidates until one of them cannot be beaten.

    **Arguments:** `fitting`: those that fit by the upper bound of their memory. `most`: so many are compiled at most,
    those that do not fit beside. `budget_bytes`: of a device; infinity without one. `compiled`: compiles a candidate,
    and returns it with its `compiled` figures; None where its compiler refuses it for another reason than its memory.

    **Returns** the candidate to take, and all that were compiled. It is None where none fits as compiled."""
    best: Candidate | None = None
    tried: list[Candidate] = []
    for candidate in sorted(fitting, key=lambda each: each.best_known_seconds):
        if best is not None and (len(tried) >= most or best.best_known_seconds <= candidate.best_known_seconds):
            break
        found = compiled(candidate)
        if found is None:
            continue
        tried.append(found)
        if found.fits(budget_bytes) and (best is None or found.best_known_seconds < best.best_known_seconds):
            best = found
    return best, tried


def compiled_for(target: Target, decided: Decided, candidate: Candidate) -> Candidate:
    """Returns a `candidate` with what the compiler of a `target` makes of it. `decided`: the step that it is.

    Raises `CompilerError` where that compiler is not installed, or does not compile the step for another reason than
    its memory."""
    recipe, budget = decided.recipe, decided.choice.budget_bytes
    check = check_on_target(recipe, decided.entry, target, None if math.isinf(budget) else int(budget))
    sent = None if check.report is None else check.report.total.compiled_bytes
    figures = CompiledFigures(
        check.needed_bytes,
        check.fits,
        sent,
        sum(each.bytes for each in check.planned),
        _more_seconds(check, target),
        check.run.seconds,
    )
    return dataclasses.replace(candidate, compiled=figures)


def _more_seconds(check: TargetCheck, target: Target) -> float:
    """Returns what a step takes longer for what it sends beyond its plan: each kind of collective over each mesh axis
    as one message. 0 where nothing is published of the machine."""
    if check.report is None or not target.kind.peak_flops:
        return 0.0
    machine = Machine.published(target, dict(check.mesh.axes))
    return sum(
        _seconds(machine, op, axis, total.compiled_bytes) - _seconds(machine, op, axis, total.predicted_bytes)
        for (op, axis), total in check.report.by_op.items()
    )


def _seconds(machine: Machine, op: str, axis: str, sent_bytes: float) -> float:
    """Returns what one message takes. `op`, `axis`: as reports have them; groups of devices that lie along no mesh axis
    may go over all of them."""
    if not sent_bytes:
        return 0.0
    named = set(axis.split("+"))
    axes = tuple(name for name in machine.sizes if name in named) or tuple(machine.sizes)
    op = "permute" if op == "collective_permute" else op
    return machine.seconds(Task("compiled", op=op, axes=axes, sent_bytes=sent_bytes))
