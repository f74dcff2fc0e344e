"""Four training jobs of two workers each on two devices of one processor core, run for real through Ray: gang FIFO,
Muri, JigSaw, and what each part of JigSaw gives.

Every worker is a process pinned to its device's core; they are started once, and every run trains from the beginning.
The jobs of a device take turns by its token. All policies run in turns, round by round: each round's jobs come in
another order and see other batches. Before the first run and after every one, each job is profiled alone: a run is
simulated from the two profiles around it, for a machine that others share changes its speed within minutes. What a
switch between jobs costs is measured before the first round and after every one, and all these measurements are taken
together. Policies place by what was known when they ran.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.jigsaw.jobs import MODELS, SMALL_MODELS
from benchmarks.jigsaw.processes import Run
from benchmarks.jigsaw.real_runs import ALL, ALONE, FULL, GANG, JIGSAW, MURI, POLICIES, Taken, simulated, take
from splitjax.schedule import JobProfile

ROUNDS = 5
MOST_ERROR = 0.05


def makespan(run: Run) -> float:
    return run.makespan


def _busy(run: Run) -> float:
    return run.busy


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """Makespan, busy share and final losses under each policy."""
    return report(take(SMALL_MODELS, 1) if quick else take(MODELS, ROUNDS))


@dataclasses.dataclass(frozen=True)
class Figures:
    """Medians over rounds of what was run; `predicted`: by round and policy the simulated makespan in seconds."""

    taken: Taken
    predicted: Sequence[Mapping[str, float]]

    def median(self, what: Callable[[Run], float], title: str) -> float:
        return statistics.median(what(one[title]) for one in self.taken.rounds)

    def ratios(self, title: str, base: str = GANG, what: Callable[[Run], float] = makespan) -> list[float]:
        """By round, what a policy has over what `base` has."""
        return [what(one[title]) / what(one[base]) for one in self.taken.rounds]

    def errors(self, title: str) -> list[float]:
        """By round, the simulated makespan over the measured one, less 1."""
        return [
            expected[title] / one[title].makespan - 1
            for expected, one in zip(self.predicted, self.taken.rounds, strict=True)
        ]

    def apart(self, titles: Sequence[str], base: str) -> float:
        """The most by which a final loss under `titles` differs from the one under `base`, in any round."""
        return max(
            abs(one[title].losses[name] - one[base].losses[name])
            for one in self.taken.rounds
            for title in titles
            for name in self.taken.models
        )


def report(taken: Taken) -> Any:
    """The section, of what was run."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Section

    rounds, models = taken.rounds, taken.models
    figures = Figures(
        taken, [{title: simulated(taken.jobs(seed, title), title) for title in POLICIES} for seed in range(len(rounds))]
    )
    lines = [
        (
            "Four jobs of two workers each (VGG-11 and a perceptron on digits, a transformer and an LSTM on text,"
            f" Adam), all there from the beginning; two devices of one core; Ray. Medians of {len(rounds)} rounds; in"
            " each, all policies run in turn, jobs in another order and on other batches. Processes are started and"
            " programs compiled before. *Busy*: share of the time in which a device's token is with a job."
            " *Computing*: share of the cores' time that the jobs' processes used. *Simulated*: the simulator's, from"
            " profiles that were measured right before the run and right after it, at full depth for policies with"
            " full backpropagation and under partial backpropagation for the others, each with nobody beside it, and"
            " with what a switch between jobs was measured to cost, before the first round and after each; no run of a"
            " policy is used for them. The load average was"
            f" {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores when it ended."
        ),
        "",
        *table(COLUMNS, (_policy_row(figures, title) for title in POLICIES)),
        "",
        "Measured profiles, all measurements together, ms:",
        "",
        *table(
            ("job", "depths", "forward", "backward", "exposed", "a switch", "iterations"),
            (
                _profile_row(name, what, profile, models[name].num_iterations)
                for what, profiles in (("full", taken.known.full), ("partial", taken.known.partial))
                for name, profile in profiles.items()
            ),
        ),
        "",
        "Loss of the last iteration, first round:",
        "",
        *table(
            ("job", *POLICIES),
            ((name, *(f"{rounds[0][title].losses[name]:.6g}" for title in POLICIES)) for name in models),
        ),
        "",
        (
            f"`{FULL}` is JigSaw at full depth, `{ALONE}` has whole devices: what each of JigSaw's parts gives. Partial"
            " backpropagation does less backward work, which changes the numbers; the packing does not: a job's depths"
            " and batches depend on the number of its iteration alone."
        ),
    ]
    return Section("Real execution", lines, _goals(figures))


COLUMNS = (
    "policy",
    "makespan, s",
    "over gang FIFO",
    "least to most",
    "simulated, s",
    "error",
    "errors, least to most",
    "busy",
    "computing",
    "of jobs, CPU s",
    "of Ray and executor, CPU ms an iteration",
)


def _policy_row(figures: Figures, title: str) -> tuple[str, ...]:
    ratios, errors = figures.ratios(title), figures.errors(title)
    per_iteration = sum(model.num_iterations for model in figures.taken.models.values())
    return (
        title,
        f"{figures.median(makespan, title):.1f}",
        f"{statistics.median(ratios):.3f}",
        f"{min(ratios):.3f} to {max(ratios):.3f}",
        f"{statistics.median(one[title] for one in figures.predicted):.1f}",
        f"{statistics.median(errors):+.1%}",
        f"{min(errors):+.1%} to {max(errors):+.1%}",
        f"{figures.median(_busy, title):.1%}",
        f"{figures.median(lambda run: run.computing, title):.1%}",
        f"{figures.median(lambda run: run.jobs_seconds, title):.1f}",
        f"{1000 * figures.median(lambda run: run.other_seconds, title) / per_iteration:.1f}",
    )


def _profile_row(name: str, what: str, profile: JobProfile, num_iterations: int) -> tuple[str, ...]:
    seconds = (
        profile.forward_seconds,
        profile.depths[0].backward_seconds,
        profile.exposed_seconds,
        profile.switch_seconds,
    )
    return (name, what, *(f"{1000 * value:.1f}" for value in seconds), str(num_iterations))


def _goals(figures: Figures) -> list[Any]:
    from benchmarks.splitbrain.common import Goal

    over = lambda *arguments: statistics.median(figures.ratios(*arguments))
    same = lambda titles, base: (figures.apart(titles, base), 0.0, True, ".3g")
    return [
        Goal("real, final losses under Muri and packing alone less those under gang FIFO", *same((MURI, FULL), GANG)),
        Goal(
            "real, final losses under JigSaw less those of partial backpropagation alone", *same((JIGSAW, ALL), ALONE)
        ),
        Goal("real, makespan of JigSaw over gang FIFO", over(JIGSAW), 1.0, True),
        Goal("real, makespan of JigSaw over Muri", over(JIGSAW, MURI), 1.0, True),
        *(
            Goal(
                f"real, makespan of {title}: error of the simulated",
                abs(statistics.median(figures.errors(title))),
                MOST_ERROR,
                True,
                ".1%",
            )
            for title in POLICIES
        ),
        Goal("real, busy share of JigSaw over gang FIFO", over(JIGSAW, GANG, _busy), 1.0, False),
    ]
