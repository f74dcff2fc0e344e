"""How long jobs really take to a stated accuracy: trained by the executor, on processor cores, through Ray.

The jobs are those of `jigsaw.real`. Partial backpropagation does less in an iteration and may need more iterations. How
many each job needs is found first: the executor trains all jobs, and every few iterations what is held out is judged. A
job's depths and batches depend on the number of its iteration alone, so the number that was found is the number that
any discipline needs. Then the jobs run for so many iterations under every discipline, and are timed; what is held out
is judged again after each run, outside of its time.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.jigsaw.accuracy import DISCIPLINES, Trained, lengthening
from benchmarks.jigsaw.jobs import LEARNING_RATE, MODELS, MOST_HELD_OUT, SMALL_MODELS
from benchmarks.jigsaw.processes import GUESS, Processes, started
from benchmarks.jigsaw.profiling import PROFILE_ROUNDS, Known, profiles
from splitjax.schedule import Job, JobProfile

ROUNDS = 3
EVERY = 2  # iterations between two looks at what is held out
NUM_WORKERS = 2
GANGS, ALONE, TEMPORAL, JIGSAW = DISCIPLINES
# How each discipline trains, as where the cluster is simulated, and its policy in the order in which jobs came.
WAY = {discipline: way for discipline, (_, way) in DISCIPLINES.items()}
POLICY = {
    GANGS: "gang-fifo",
    ALONE: "interleave-fifo",
    TEMPORAL: "temporal-spb-fifo",
    JIGSAW: "jigsaw-fifo",
}
# Way -> the policy under which its iterations are counted: one job after the other, each with both devices.
COUNTED_UNDER = {"full": "gang-fifo", "spatial": "spb-fifo", "temporal": "temporal-spb-fifo"}


@dataclasses.dataclass(frozen=True)
class Target:
    """An accuracy that a job is trained to, and the iterations after which it counts as not having got there.

    - `metric`: `"accuracy"`, the share of held-out images that are classified rightly, is to be at least `value`;
      `"loss"`, the cross-entropy of a held-out character in nats, at most.
    - `most_iterations`: a multiple of `EVERY`.
    """

    metric: str
    value: float
    most_iterations: int

    def is_reached(self, metrics: Mapping[str, float]) -> bool:
        found = metrics[self.metric]
        return found >= self.value if self.metric == "accuracy" else found <= self.value

    def told(self, value: float) -> str:
        """`value`, of this target's metric, as it stands on the page."""
        return f"{100 * value:.1f} % right" if self.metric == "accuracy" else f"{value:.3f} nats"


# Stated before the jobs of this page were trained; chosen on batches in an order that these do not see. Who knows only
# how frequent each character is has 3.28 nats.
TARGETS = {
    "vgg": Target("accuracy", 0.95, 100),
    "transformer": Target("loss", 2.9, 100),
    "mlp": Target("accuracy", 0.95, 100),
    "lstm": Target("loss", 3.2, 100),
}
EASY = {
    name: Target(one.metric, {"accuracy": 0.2, "loss": 4.2}[one.metric], 8)
    for name, one in TARGETS.items()
    if name in SMALL_MODELS
}


@dataclasses.dataclass(frozen=True)
class Count:
    """How many iterations a job was trained, whether that reached its target, and what is held out after them."""

    iterations: int
    is_reached: bool
    held_out: float


@dataclasses.dataclass(frozen=True)
class Timed:
    """A timed run: seconds until all jobs were done, the mean of the seconds until each was, and by job what is held
    out after it."""

    makespan: float
    mean_completion: float
    held_out: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Round:
    """One order of batches, for every job: by way and job the iterations, by discipline the timed run."""

    counts: Mapping[str, Mapping[str, Count]]
    timed: Mapping[str, Timed]


def count_iterations(
    train_to: Callable[[Mapping[str, int]], Mapping[str, Mapping[str, float]]], targets: Mapping[str, Target]
) -> dict[str, Count]:
    """Counts the iterations of each job to its target, a multiple of `EVERY`.

    **Arguments:** `train_to`: trains each job that it is given to that number of iterations in all, and gives the
    metrics of what is held out. `targets`: by job."""
    found: dict[str, Count] = {}
    number = 0
    while left := [name for name in targets if name not in found]:
        number += EVERY
        metrics = train_to(dict.fromkeys(left, number))
        for name in left:
            target, is_reached = targets[name], targets[name].is_reached(metrics[name])
            if is_reached or number >= target.most_iterations:
                found[name] = Count(number, is_reached, metrics[name][target.metric])
    return {name: found[name] for name in targets}


def count_of_way(processes: Processes, way: str, seed: int, targets: Mapping[str, Target]) -> dict[str, Count]:
    """Counts iterations in the processes of the jobs, trained through the executor in the given way."""
    of = lambda numbers: [Job(name, 0.0, NUM_WORKERS, number, GUESS) for name, number in numbers.items()]

    def train_to(numbers: Mapping[str, int]) -> Mapping[str, Mapping[str, float]]:
        jobs = of(numbers)
        processes.go_on(COUNTED_UNDER[way], jobs)
        return processes.held_out(jobs)

    processes.rewind(of(dict.fromkeys(targets, 1)), seed, is_temporal=way == "temporal")
    found = count_iterations(train_to, targets)
    print(f"seed {seed}, {way}: {found}", flush=True)
    return found


def time_run(
    processes: Processes,
    discipline: str,
    seed: int,
    counts: Mapping[str, Count],
    profile: Mapping[str, JobProfile],
    targets: Mapping[str, Target],
) -> Timed:
    """Runs the jobs of `counts`, which come in this order, from their beginning under a discipline."""
    jobs = [Job(name, 0.0, NUM_WORKERS, one.iterations, profile[name]) for name, one in counts.items()]
    run = processes(POLICY[discipline], jobs, seed, is_temporal=WAY[discipline] == "temporal")
    metrics = processes.held_out(jobs)
    held_out = {name: metrics[name][targets[name].metric] for name in counts}
    print(f"seed {seed}, {discipline}: {run.makespan:.1f} s, computing {run.computing:.0%}, {held_out}", flush=True)
    return Timed(run.makespan, run.mean_completion, held_out)


def do_round(processes: Processes, known: Known, seed: int, targets: Mapping[str, Target]) -> Round:
    """Counts the iterations of every way on one order of batches, and times every discipline; jobs and disciplines come
    in an order that depends on the seed."""
    turned = lambda names: [*names][seed % len(names) :] + [*names][: seed % len(names)]
    counts = {way: count_of_way(processes, way, seed, targets) for way in COUNTED_UNDER}
    timed = {}
    for discipline in turned(DISCIPLINES):
        way = WAY[discipline]
        profile = known.full if way == "full" else known.partial
        timed[discipline] = time_run(
            processes, discipline, seed, {name: counts[way][name] for name in turned(targets)}, profile, targets
        )
    return Round(counts, timed)


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section of the page."""
    models, targets = (SMALL_MODELS, EASY) if quick else (MODELS, TARGETS)
    with started(models) as processes:
        known = profiles(processes, models, 5 if quick else 20, 1 if quick else PROFILE_ROUNDS)
        rounds = [do_round(processes, known, seed, targets) for seed in range(1 if quick else ROUNDS)]
    return report(rounds, targets)


def report(rounds: Sequence[Round], targets: Mapping[str, Target]) -> Any:
    """The section, of what was counted and timed."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    numbers = range(1, len(rounds) + 1)
    trained = trained_of(rounds, targets)
    return Section(
        "Real time to accuracy",
        [
            *verdict(rounds, trained),
            "",
            *_told(len(rounds)),
            "",
            *table(
                [
                    "discipline",
                    *(
                        f"{what}{figure}"
                        for what in ("makespan", "mean completion")
                        for figure in (", s", " over gangs", ", least", ", most")
                    ),
                    "iterations of all jobs",
                ],
                (_discipline_row(rounds, discipline) for discipline in DISCIPLINES),
            ),
            "",
            (
                "Iterations to the stated accuracy. *over full*: the median of the rounds' ratios to full"
                " backpropagation. *none*: not within the most iterations; the job was then timed for these."
            ),
            "",
            *table(
                ["job", "stated", "most", "way", *(f"round {number}" for number in numbers), "median", "over full"],
                _iteration_rows(trained, targets),
            ),
            "",
            "What was held out, judged after the timed run in which it was furthest from the stated accuracy:",
            "",
            *table(
                ["job", "stated", *DISCIPLINES],
                (
                    [name, target.told(target.value), *(target.told(_worst(rounds, one, name, target)) for one in WAY)]
                    for name, target in targets.items()
                ),
            ),
        ],
        [
            Goal(
                "real to the stated accuracy, share of the timed jobs that reached it",
                share_reached(rounds, targets),
                1.0,
                False,
            ),
            Goal(
                "real to the stated accuracy, held out after timed runs less held out when iterations were counted",
                most_apart(rounds),
                0.0,
                True,
                ".3g",
            ),
            Goal(
                "real to the stated accuracy, mean completion of JigSaw over that of packing alone",
                ratios(rounds, JIGSAW, ALONE, _completion)[1],
                1.0,
                True,
            ),
            Goal(
                "real to the stated accuracy, makespan of JigSaw over that of packing alone",
                ratios(rounds, JIGSAW, ALONE, _makespan)[1],
                1.0,
                True,
            ),
        ],
    )


def _makespan(run: Timed) -> float:
    return run.makespan


def _completion(run: Timed) -> float:
    return run.mean_completion


def trained_of(rounds: Sequence[Round], targets: Mapping[str, Target]) -> dict[str, dict[str, Trained]]:
    """Job -> way -> its iterations, a number for each round."""
    to_target = lambda one: float(one.iterations) if one.is_reached else math.inf
    return {
        name: {
            way: Trained(LEARNING_RATE, tuple(to_target(one.counts[way][name]) for one in rounds))
            for way in COUNTED_UNDER
        }
        for name in targets
    }


def ratios(
    rounds: Sequence[Round], discipline: str, base: str, what: Callable[[Timed], float]
) -> tuple[float, float, float]:
    """Least, median and most, over the rounds, of a discipline's figure over that of another in the same round."""
    found = sorted(what(one.timed[discipline]) / what(one.timed[base]) for one in rounds)
    return found[0], statistics.median(found), found[-1]


def share_reached(rounds: Sequence[Round], targets: Mapping[str, Target]) -> float:
    """The share of timed jobs whose figure, judged after the run, is that of the target or better."""
    return statistics.fmean(
        target.is_reached({target.metric: run.held_out[name]})
        for one in rounds
        for run in one.timed.values()
        for name, target in targets.items()
    )


def most_apart(rounds: Sequence[Round]) -> float:
    """The largest difference between what is held out after a timed run and after as many counted iterations: 0 where
    both are the same computation."""
    return max(
        abs(found - one.counts[WAY[discipline]][name].held_out)
        for one in rounds
        for discipline, run in one.timed.items()
        for name, found in run.held_out.items()
    )


def verdict(rounds: Sequence[Round], trained: Mapping[str, Mapping[str, Trained]]) -> list[str]:
    """Says first whether skipping backward work costs more iterations than it saves."""
    completion, makespan = (ratios(rounds, JIGSAW, ALONE, what) for what in (_completion, _makespan))
    beside = [ratios(rounds, TEMPORAL, ALONE, what) for what in (_completion, _makespan)]
    slower = [what for what, (_, median, _) in (("mean", completion), ("makespan", makespan)) if median > 1]
    if len(slower) == 2:
        judged = "Skipping backward work costs more iterations than it saves"
    elif not slower:
        judged = "Skipping backward work saves more time than its additional iterations cost"
    else:
        late = "the mean job" if slower == ["mean"] else "the last job"
        early = "the last job" if slower == ["mean"] else "the mean job"
        judged = (
            f"Skipping backward work costs more iterations than it saves for {late}, and saves more than it costs for"
            f" {early}"
        )
    shown = lambda found: f"{found[1]:.3f} times ({found[0]:.3f} to {found[2]:.3f})"
    needed = ", ".join(f"{name} {_times(lengthening(of, 'spatial'))}" for name, of in trained.items())
    return [
        (
            f"**{judged}: to the stated accuracies, the mean completion time of the four jobs under JigSaw is"
            f" {shown(completion)} that of packing alone with full backpropagation, and their makespan"
            f" {shown(makespan)}.** Under temporal-spb, which packs nothing, they are {shown(beside[0])} and"
            f" {shown(beside[1])}. Iterations under JigSaw over those of full backpropagation: {needed}."
        )
    ]


def _told(num_rounds: int) -> list[str]:
    return [
        (
            "Four jobs of two workers each are trained for real (VGG-11, `vgg`, and a perceptron, `mlp`, on images of"
            " digits; a transformer and an LSTM on the characters of this project's documentation), all there from the"
            f" beginning, on two devices of one core, by the executor, through Ray. Adam with a rate of"
            f" {LEARNING_RATE:g} everywhere; no way has a rate of its own. *Gangs*: full backpropagation, one job after"
            " the other. *Packed alone*: full backpropagation, iterations of two jobs take turns on the devices."
            " *Temporal*: one job after the other; both workers stop half way back in every second iteration."
            " *JigSaw*: iterations take turns on the devices; in every iteration one worker, the one and the other in"
            f" turn, stops half way back. Accuracy is that of at most {MOST_HELD_OUT} examples that are not trained on:"
            " the share of images that are classified rightly, or the cross-entropy of a character in nats. It was"
            " stated, with the most iterations, before the jobs of this page were trained, and was chosen on other"
            f" batches. Iterations to it are counted first, by looking every {EVERY}; then each job runs for its number"
            " of its way under every discipline, in turns, and nothing but training is timed. Processes are started and"
            f" programs compiled before. Medians of {num_rounds} rounds, each with other batches and another order of"
            " jobs and disciplines; ratios are of runs of the same round. The load average was"
            f" {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores when it ended."
        )
    ]


def _discipline_row(rounds: Sequence[Round], discipline: str) -> list[str]:
    cells = [discipline]
    for what in (_makespan, _completion):
        least, median, most = ratios(rounds, discipline, GANGS, what)
        seconds = statistics.median(what(one.timed[discipline]) for one in rounds)
        cells += [f"{seconds:.1f}", f"{median:.3f}", f"{least:.3f}", f"{most:.3f}"]
    of_all = [sum(one.iterations for one in found.counts[WAY[discipline]].values()) for found in rounds]
    return [*cells, f"{statistics.median(of_all):.0f}"]


def _iteration_rows(trained: Mapping[str, Mapping[str, Trained]], targets: Mapping[str, Target]) -> list[list[str]]:
    count = lambda number: f"{number:.0f}" if math.isfinite(number) else "none"
    return [
        [
            name,
            targets[name].told(targets[name].value),
            str(targets[name].most_iterations),
            way,
            *map(count, one.iterations),
            count(one.typical),
            _times(lengthening(of, way)),
        ]
        for name, of in trained.items()
        for way, one in of.items()
    ]


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if math.isfinite(ratio) else "none"


def _worst(rounds: Sequence[Round], discipline: str, name: str, target: Target) -> float:
    found = [one.timed[discipline].held_out[name] for one in rounds]
    return min(found) if target.metric == "accuracy" else max(found)
