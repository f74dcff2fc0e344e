"""Checks a plan in a run of tests: against a lock, and against what it may need at most. Plans go in, lines to print
come out."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

from splitjax.display.figures import bytes_text
from splitjax.errors import PlanError
from splitjax.plan import Plan
from splitjax.planning.plan_lock import PlanLock

_NAMED = 3  # of the arrays and collectives that take most


@dataclasses.dataclass(frozen=True)
class Checked:
    """Holds what a check found: `lines` to print, and whether the plan `passed`."""

    lines: tuple[str, ...]
    passed: bool


def against_lock(plan: Plan, path: pathlib.Path, update: bool) -> Checked:
    """Compares a `plan` with the lock in the file `path`, and writes it where it is to be `update`d. Raises `PlanError`
    for a file that is not there, that is no lock, or that cannot be written."""
    now = PlanLock.of(plan)
    if not path.exists():
        if not update:
            raise PlanError(
                "there is no lock to compare the plan with",
                value=str(path),
                place="--lock",
                remedy="write it once with --update-lock too, and keep the file with the code",
            )
        now.save(path)
        return Checked((f"lock: {path}, written: later plans are compared with it",), True)
    before = PlanLock.load(path)
    decisions, figures = before.changed_decisions(now), before.changed_figures(now)
    versions = "" if before.made_with == now.made_with else f" (made with {before.made_with}, now {now.made_with})"
    lines = [f"lock: {path}{versions}"]
    lines += [f"  changed: {change}" for change in decisions] or ["  every decision is the same"]
    lines += [f"  moved: {change}" for change in figures]
    if update:
        now.save(path)
        return Checked((*lines, "the lock was written anew"), True)
    if decisions:
        lines.append("remedy: if this is meant, run it again with --update-lock, and commit the file")
    return Checked(tuple(lines), not decisions)


def against_budgets(plan: Plan, most_memory: int | None, most_sent: int | None) -> Checked:
    """Compares what a device needs under `plan` with what it may need: `most_memory` bytes, which the upper bound of
    its memory has to keep, and `most_sent` bytes sent a step. None: anything."""
    lines: list[str] = []
    passed = True
    if most_memory is not None:
        memory = plan.memory
        needed = memory.peak_bytes if memory.bound_bytes is None else memory.bound_bytes
        passed &= needed <= most_memory
        how = "the sum of all its arrays" if memory.bound_bytes is None else "the upper bound of its peak"
        lines.append(f"memory of a device: {_verdict(needed, most_memory)}; this is {how}")
        if needed > most_memory:
            lines += _largest_arrays(plan)
    if most_sent is not None:
        sent = sum(collective.bytes for collective in plan.collectives)
        passed &= sent <= most_sent
        lines.append(f"sent by a device in a step: {_verdict(sent, most_sent)}")
        if sent > most_sent:
            lines += _largest_collectives(plan)
    return Checked(tuple(lines), passed)


def _verdict(needed: int, most: int) -> str:
    if needed <= most:
        return f"{bytes_text(needed)} of {bytes_text(most)}"
    return f"{bytes_text(needed)}, {bytes_text(needed - most)} more than the {bytes_text(most)} that it may be"


def _largest_arrays(plan: Plan) -> Iterator[str]:
    state = sum(leaf.bytes_per_device for leaf in plan.leaves if leaf.is_state)
    yield f"  state: {bytes_text(state)}"
    for array in plan.memory.at_peak[:_NAMED]:
        of_layer = f" in {array.layer}" if array.layer else ""
        yield f"  at the peak: {bytes_text(array.num_bytes)}, {array.made_by} {list(array.shape)}{of_layer}"


def _largest_collectives(plan: Plan) -> Iterator[str]:
    sums: dict[str, int] = {}
    for collective in plan.collectives:
        name = f"{collective.op} over {collective.axis} for {collective.layer}: {collective.why}"
        sums[name] = sums.get(name, 0) + collective.bytes
    for name in sorted(sums, key=lambda name: -sums[name])[:_NAMED]:
        yield f"  {bytes_text(sums[name])}, {name}"
