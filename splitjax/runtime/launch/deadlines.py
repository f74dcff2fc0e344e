"""Decides whether a run stands still, and who holds it up, from where its processes are.

Progress is completed steps. What is judged is the process that has come least far: the others wait for it, and are not
to blame. Pure functions over `Whereabouts`; the launcher asks them, and a process that no launcher watches asks them of
itself.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from splitjax.errors import LaunchError
from splitjax.runtime.launch.whereabouts import Place, Whereabouts

STEP_MEDIANS, LEAST_STEP_SECONDS = 10, 60.0
DEFAULT_COMPILE_SECONDS = 3600.0
DEFAULT_SAVE_SECONDS = 1200.0
# A process is named as a straggler if its own part of a step takes so many times that of the others, and so large a
# share of the step.
_STRAGGLES_BY, _STRAGGLES_SHARE = 2.0, 0.2
_NANO = 1e9


@dataclasses.dataclass(frozen=True)
class Deadlines:
    """Says how long a process may go without completing a step.

    **Arguments:**

    - `step_timeout_seconds`: for a step; ten times the median of its last steps, and at least 60 s, if not given.
    - `compile_timeout_seconds`: for a first step, any compilation, and an evaluation, which compiles too.
    - `save_timeout_seconds`: for what a save holds up.

    `math.inf` for no deadline. Raises `LaunchError` for one that is not above 0.
    """

    step_timeout_seconds: float | None = None
    compile_timeout_seconds: float = DEFAULT_COMPILE_SECONDS
    save_timeout_seconds: float = DEFAULT_SAVE_SECONDS

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise LaunchError(
                    f"{field.name} must be above 0",
                    value=value,
                    place=field.name,
                    remedy="give a number of seconds, or inf for no deadline",
                )

    def allowed_seconds(self, where: Whereabouts) -> float:
        """Returns how long a process that is at `where` may stay without progress."""
        if where.place is Place.OUTSIDE:
            return math.inf
        if where.place in (Place.COMPILE, Place.EVALUATE):
            return self.compile_timeout_seconds
        if where.place is Place.CHECKPOINT:
            return self.save_timeout_seconds
        if self.step_timeout_seconds is not None:
            return self.step_timeout_seconds
        if where.times.median_seconds is None:
            return self.compile_timeout_seconds  # nobody knows yet how long a step takes
        return max(LEAST_STEP_SECONDS, STEP_MEDIANS * where.times.median_seconds)


@dataclasses.dataclass(frozen=True)
class Stuck:
    """Holds who holds up a run.

    **Attributes:** `ranks`: the processes that have come least far, several where nothing tells them apart.
    `waited_seconds`: how long they have completed nothing. `allowed_seconds`: the deadline that is over.
    """

    ranks: tuple[int, ...]
    waited_seconds: float
    allowed_seconds: float


def find_stuck(
    run: Mapping[int, Whereabouts], deadlines: Deadlines, now_ns: int, not_before_ns: int = 0
) -> Stuck | None:
    """Returns who holds up a run beyond the deadline; None where nobody does.

    **Arguments:**

    - `run`: where the processes are, by rank.
    - `deadlines`: how long each may be without progress.
    - `now_ns`: by `time.monotonic_ns`.
    - `not_before_ns`: nothing counts that was before: until then whoever asks had not run itself.
    """
    ranks = last_ranks(run)
    if not ranks:
        return None
    step = run[ranks[0]].step
    outside = tuple(
        sorted(rank for rank, where in run.items() if where.place is Place.OUTSIDE and where.completed < step)
    )
    where = max((run[rank] for rank in ranks), key=lambda one: one.since_ns)
    allowed = max(deadlines.allowed_seconds(run[rank]) for rank in ranks)
    waited = (now_ns - max(where.since_ns, not_before_ns)) / _NANO
    # They wait for whoever is not in its loop yet, or left it too early.
    return Stuck(outside or ranks, waited, allowed) if waited > allowed else None


def last_ranks(run: Mapping[int, Whereabouts]) -> tuple[int, ...]:
    """Returns the ranks of those that have come least far in their training loops, without those among them that are
    known to wait for another of them. `run`: where the processes are, by rank."""
    inside = {rank: where for rank, where in run.items() if where.place is not Place.OUTSIDE}
    if not inside:
        return ()
    least = min((where.step, where.place) for where in inside.values())
    last = {rank: where for rank, where in inside.items() if (where.step, where.place) == least}
    waits = {rank for rank, where in last.items() if where.waits_for in last and where.waits_for != rank}
    return tuple(sorted(set(last) - waits or last))


def describe(rank: int, where: Whereabouts, now_ns: int) -> str:
    """Returns a line that says where worker `rank` is; `where`, `now_ns`: as in `find_stuck`."""
    if where.place is Place.OUTSIDE:
        return f"worker {rank}: {where.place.words}"
    text = f"worker {rank}: {where.place.words} in step {where.step}"
    text += f" ({where.detail})" if where.detail else ""
    text += f" for {(now_ns - where.place_since_ns) / _NANO:.1f} s; last collective completed: that of step"
    text += f" {where.completed}" if where.completed else " none"
    return text + (f"; waits for worker {where.waits_for}" if where.waits_for is not None else "")


def step_times_text(run: Mapping[int, Whereabouts]) -> str:
    """Returns a line about the step times of the processes of a `run`, by rank; empty where no steps were timed."""
    timed = {rank: where.times for rank, where in run.items() if where.times.seconds}
    if not timed:
        return ""
    parts = [
        f"worker {rank} p50 {_milliseconds(times.quantile(0.5))} p99 {_milliseconds(times.quantile(0.99))}"
        f" (own part {_milliseconds(times.own_quantile(0.5))})"
        for rank, times in sorted(timed.items())
    ]
    slow = straggler(run)
    return f"step times: {', '.join(parts)}" + ("" if slow is None else f"; worker {slow} holds up the others")


def slowest(run: Mapping[int, Whereabouts]) -> int | None:
    """Returns the rank of the process whose own part of a step takes longest in the median, of a `run` by rank; None
    where no steps were timed."""
    timed = {rank: where.times.own_quantile(0.5) for rank, where in run.items() if where.times.seconds}
    return max(timed, key=lambda rank: timed[rank]) if timed else None


def straggler(run: Mapping[int, Whereabouts]) -> int | None:
    """Returns the rank of the process that the others of a `run` clearly wait for: its own part of a step is at least
    twice that of any other, and a fifth of the step; None where there is none."""
    rank = slowest(run)
    others = [where.times.own_quantile(0.5) for number, where in run.items() if number != rank and where.times.seconds]
    if rank is None or not others:
        return None
    own, whole = run[rank].times.own_quantile(0.5), run[rank].times.quantile(0.5)
    return rank if own >= _STRAGGLES_BY * max(others) and own >= _STRAGGLES_SHARE * whole else None


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
