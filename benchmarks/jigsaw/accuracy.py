"""How long jobs take to a stated accuracy: iterations measured by training, the cluster's time simulated.

Partial backpropagation takes less of the devices in an iteration, and may need more iterations. A network is trained on
real images until it is right about a stated share of the test images, with full backpropagation, with workers of
different depths (what JigSaw runs) and with all workers of one depth that changes from step to step (`temporal-spb`).
The iterations over those of full backpropagation lengthen the jobs of a trace, whose cluster is then simulated under
each discipline: gangs and packing alone run full backpropagation, and are not lengthened.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import multiprocessing
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.jigsaw import common
from benchmarks.partial.quality import BATCH, NUM_WORKERS, RATES, Task, Trainer, start, tasks
from splitjax.schedule import SimulationResult, simulate

SEEDS, TUNING_SEEDS = (1, 2, 3, 4, 5), (101, 102)
EVERY = 5  # steps between two looks at the test images
# Stated before any training: share of test images, and the steps after which a training counts as not having got there.
WANTED = {"digits": (0.95, 800), "CIFAR-10 sample": (0.37, 960)}
OPTIMIZERS = ("sgd", "adam")
TRACES, LOADS = ("ee9e8c", "4+ GPUs", "muri 3"), (1.0, 1.5)
EXPOSED, SWITCH_SECONDS = 0.15, 0.02
# Discipline on the page -> (policy, what it trains with).
DISCIPLINES = {
    "gangs": ("gang-srtf", "full"),
    "packed alone": ("interleave", "full"),
    "temporal": ("temporal-spb", "temporal"),
    "JigSaw": ("jigsaw", "spatial"),
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """A way to train a task: its learning rate, and the iterations of each seed to the accuracy; those that did not get
    there have infinitely many."""

    rate: float
    iterations: tuple[float, ...]

    @property
    def typical(self) -> float:
        """The median of the seeds."""
        return statistics.median(self.iterations)


def ways() -> dict[str, Any]:
    """Way -> `backprop`."""
    from splitjax import PartialBackprop

    return {"full": None, "spatial": PartialBackprop(), "temporal": PartialBackprop(assignment="temporal")}


def iterations_to(trainer: Trainer, rate: float, seed: int, wanted: float, most_steps: int) -> float:
    """Trains from the seed's parameters until the share `wanted` of the test images is classified rightly. Returns the
    number of steps, a multiple of `EVERY`; infinity where `most_steps` are not enough."""
    trainer.step.resume(None)  # the assignment of depths from its beginning
    state = trainer.state(start(trainer.task, seed), rate)
    for number, batch in zip(range(1, most_steps + 1), trainer.batches(seed)):
        state, loss = trainer.step(state, batch)
        if number % EVERY == 0:
            if not math.isfinite(float(loss)):
                return math.inf
            if float(trainer.evaluate(state["params"], *trainer.task.test)[1]) >= wanted:
                return float(number)
    return math.inf


def train(task: Task, optimizer: str, quick: bool) -> dict[str, Trained]:
    """Trains a task in every way, each with the learning rate that needs fewest iterations on other seeds."""
    wanted, most_steps = WANTED[task.name]
    wanted, most_steps = (0.3, 30) if quick else (wanted, most_steps)
    found = {}
    for way, backprop in ways().items():
        trainer = Trainer(task, optimizer, backprop, BATCH)

        # What does not get there counts as the most steps, and once more, so that a rate that gets there is better.
        def typical(rate: float, trainer: Trainer = trainer) -> float:
            seeds = TUNING_SEEDS[:1] if quick else TUNING_SEEDS
            took = [iterations_to(trainer, rate, seed, wanted, most_steps) for seed in seeds]
            return statistics.fmean(min(one, 2.0 * most_steps) for one in took)

        rate = min(RATES[optimizer], key=typical)
        seeds = SEEDS[:1] if quick else SEEDS
        found[way] = Trained(rate, tuple(iterations_to(trainer, rate, seed, wanted, most_steps) for seed in seeds))
        print(task.name, optimizer, way, found[way], flush=True)
    return found


def lengthening(trained: Mapping[str, Trained], way: str) -> float:
    """Returns the iterations of a way over those of full backpropagation, in the median of pairs of a seed."""
    pairs = zip(trained[way].iterations, trained["full"].iterations, strict=True)
    return statistics.median(one / full if math.isfinite(full) else math.nan for one, full in pairs)


def cluster(
    trace: str, load: float, longer: Mapping[str, float], data_dir: pathlib.Path, quick: bool
) -> dict[str, tuple[float, float]]:
    """Simulates a trace under every discipline, jobs lengthened as their way to train asks for (`longer`). Returns
    discipline -> makespan and mean completion time, over those of gangs."""
    jobs = common.draw(common.sizes(trace, data_dir, exposed=EXPOSED), trace, load, 0, quick)
    results: dict[str, SimulationResult] = {}
    for discipline, (policy, way) in DISCIPLINES.items():
        profiles = {job.profile: dataclasses.replace(job.profile, switch_seconds=SWITCH_SECONDS) for job in jobs}
        lengthened = [
            dataclasses.replace(
                job, profile=profiles[job.profile], num_iterations=max(1, round(job.num_iterations * longer[way]))
            )
            for job in jobs
        ]
        results[discipline] = simulate(lengthened, common.CLUSTER, policy)
    base = results["gangs"]
    found = {name: (one.makespan / base.makespan, one.avg_jct / base.avg_jct) for name, one in results.items()}
    print(trace, load, dict(longer), found, flush=True)
    return found


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section of the page."""
    from benchmarks._common import table, virtual_devices
    from benchmarks.splitbrain.common import Goal, Section

    virtual_devices(NUM_WORKERS)
    trained = {
        (task.name, optimizer): (task, train(task, optimizer, quick))
        for task in tasks(quick, data_dir)
        if task.name in WANTED
        for optimizer in (OPTIMIZERS[-1:] if quick else OPTIMIZERS)
    }
    longer: dict[str, dict[str, float]] = {"as many": dict.fromkeys(ways(), 1.0)}
    longer |= {
        ", ".join(key): {way: lengthening(of, way) for way in of}
        for key, (_, of) in trained.items()
        if all(math.isfinite(lengthening(of, way)) for way in of)
    }
    asked = [
        (trace, load, name)
        for trace in TRACES[: 1 if quick else None]
        for load in LOADS[1 if quick else 0 :]
        for name in longer
    ]
    with concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        outcomes = pool.map(
            cluster,
            *zip(*((trace, load, longer[name]) for trace, load, name in asked), strict=True),
            [data_dir] * len(asked),
            [quick] * len(asked),
        )
        found = dict(zip(asked, outcomes, strict=True))
    return Section(
        "Time to accuracy: iterations measured, the cluster simulated",
        [
            *_verdict(found),
            "",
            *_told(quick),
            "",
            *table(
                ["task", "optimizer", "accuracy", "way", "rate", "iterations, median", "of each seed", "over full"],
                _training_rows(trained, quick),
            ),
            "",
            "Over those of gangs, at which a discipline is faster below 1:",
            "",
            *table(
                ["trace", "load", "iterations lengthened as by", "discipline", "makespan", "mean completion"],
                [
                    [trace, f"{load}", name, discipline, f"{makespan:.3f}", f"{completion:.3f}"]
                    for (trace, load, name), of in found.items()
                    for discipline, (makespan, completion) in of.items()
                    if discipline != "gangs"
                ],
            ),
        ],
        [
            Goal(
                f"simulated, {trace}, load {load}, lengthened as by {name}: mean completion of JigSaw over that of"
                " packing alone",
                of["JigSaw"][1] / of["packed alone"][1],
                1.0,
                True,
            )
            for (trace, load, name), of in found.items()
            if name != "as many"
        ],
    )


def _verdict(found: Mapping[tuple[str, float, str], Mapping[str, tuple[float, float]]]) -> list[str]:
    """Says first whether skipping backward work pays."""
    cells = {key: of for key, of in found.items() if key[2] != "as many"}
    slower = [key for key, of in cells.items() if of["JigSaw"][1] > of["packed alone"][1]]
    behind = [key for key, of in cells.items() if of["JigSaw"][1] > of["gangs"][1]]
    temporal = [key for key, of in cells.items() if of["JigSaw"][1] > of["temporal"][1]]
    return [
        (
            f"**To the stated accuracy, jobs under JigSaw complete later than packed alone with full backpropagation in"
            f" {len(slower)} of {len(cells)} cells, later than in gangs in {len(behind)}, and later than under"
            f" temporal-spb, which needs no packing, in {len(temporal)}** (mean completion time)."
        )
    ]


def _told(quick: bool) -> list[str]:
    num = 1 if quick else len(SEEDS)
    return [
        (
            f"Measured: {NUM_WORKERS} workers, batches of {BATCH} examples, the test images looked at every {EVERY}"
            f" steps, {num} seeds; accuracies and the most steps were stated before anything was trained. Each way has"
            " the learning rate that needs fewest iterations on other seeds. *Over full*: the median of the seeds'"
            " ratios, pairs with the same start and order of examples. *none*: not within the most steps. Simulated:"
            f" {common.CLUSTER} devices, jobs, arrivals and iteration times as in the part on efficiency,"
            f" {EXPOSED:.0%} of an iteration exposed communication, {1000 * SWITCH_SECONDS:.0f} ms for every switch of"
            " a device between jobs, one draw. A job's iterations are those of the trace times *over full* of the way"
            " in which its discipline trains; *as many* lengthens none. Traces do not say what jobs train: all are"
            " lengthened alike, by what small networks need."
        )
    ]


def _training_rows(
    trained: Mapping[tuple[str, str], tuple[Task, Mapping[str, Trained]]], quick: bool
) -> list[list[str]]:
    count: Any = lambda number: f"{number:.0f}" if math.isfinite(number) else "none"
    return [
        [
            name,
            optimizer,
            f"{30 if quick else 100 * WANTED[name][0]:.0f} %",
            way,
            f"{one.rate:g}",
            count(one.typical),
            " ".join(map(count, one.iterations)),
            f"{lengthening(of, way):.2f}" if math.isfinite(lengthening(of, way)) else "none",
        ]
        for (name, optimizer), (_, of) in trained.items()
        for way, one in of.items()
    ]
