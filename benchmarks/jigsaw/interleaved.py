"""How the testbed interleaved jobs (Muri, SIGCOMM'22, its public code), for `jigsaw.fidelity`: which jobs it put
together, and how long their cycle is.

At each decision every job that runs is stopped, and all is matched anew. In the policy's order, each job that still
finds devices brings up to four jobs of its width along. These are joined in pairs, and pairs again, by matchings of the
greatest use of resources, until no more devices are asked for than there are or four rounds are over; widest first,
they are placed. A cycle has four slots; in each, one job computes and the one before it in turn exchanges, while input
is prepared over two slots. How much longer a cycle really takes is fitted to what was measured under Muri-S alone.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from splitjax.schedule import Assignment, Cluster, Group, Job, Member, SimulationResult, View
from splitjax.schedule.model.discipline import Rates, discipline
from splitjax.schedule.model.jobs import JobProfile
from splitjax.schedule.policies.gang import nodes_for
from splitjax.schedule.policies.muri import maximum_matching, muri_iteration

NUM_SLOTS = MAX_MEMBERS = 4
Stages = tuple[float, float, float]  # seconds of input, device, network


def stages_of(profile: JobProfile) -> Stages:
    """Storage and CPU in one, as the testbed's trace gives them."""
    storage, cpu, device, network = profile.stages.seconds
    return storage + cpu, device, network


@functools.lru_cache(maxsize=1 << 16)
def cycle_seconds(stages: tuple[Stages, ...]) -> float:
    """Seconds in which each of 2 to 4 jobs does one iteration, in the best order. Order of `stages` is of no matter:
    give them sorted."""
    best = min(map(_ordered_seconds, itertools.permutations(stages)))
    if len(stages) == 2:  # opposite each other, two slots apart
        (input_a, *rest_a), (input_b, *rest_b) = stages
        best = min(best, max(input_a, sum(rest_b)) + max(input_b, sum(rest_a)))
    return best


def _ordered_seconds(jobs: Sequence[Stages]) -> float:
    # Ends of the slots of two cycles; the second is what each takes once all are under way.
    ends = [0.0]
    for slot in range(2 * NUM_SLOTS):
        network, device, inputs = (
            jobs[turn] if turn < len(jobs) else (0.0, 0.0, 0.0)
            for turn in ((slot + 1) % 4, (slot + 2) % 4, (slot + 3) % 4)
        )
        end = max(ends[-1] + network[2], ends[-1] + device[1])
        ends.append(max(end, ends[-2] + inputs[0]) if slot else end)
    return ends[2 * NUM_SLOTS] - ends[NUM_SLOTS]


def used(stages: tuple[Stages, ...]) -> float:
    """Mean share of a cycle in which a resource works, of four."""
    return sum(map(sum, stages)) / (NUM_SLOTS * cycle_seconds(stages))


@dataclasses.dataclass(frozen=True)
class Overhead:
    """By how much a cycle of several jobs takes longer than its stages say: by a share of it, by a time for each job,
    and, if `unexplained`, by what each job's iteration alone takes longer than its own stages together, which nobody's
    work then hides."""

    share: float = 0.0
    job_seconds: float = 0.0
    unexplained: bool = False


# What a fitted constant may mean: (in words, its unit, the largest that is looked at, constant -> Overhead).
FORMS: dict[str, tuple[str, float, Callable[[float], Overhead]]] = {
    "a time for each job of a cycle": ("{:.3f} s", 0.15, lambda value: Overhead(job_seconds=value)),
    "a share of the cycle": ("{:.1%}", 0.5, lambda value: Overhead(share=value)),
    "a share, beside what stages leave unexplained": (
        "{:.1%}",
        0.5,
        lambda value: Overhead(share=value, unexplained=True),
    ),
}
_HALVINGS = 8


@dataclasses.dataclass(frozen=True)
class Fit:
    """A form's constant at which device time is as measured, and how far the device time of each model then is from
    what was measured: root mean square of the relative errors' logarithms."""

    form: str
    constant: float
    off: float

    @property
    def overhead(self) -> Overhead:
        """What it says of cycles."""
        return FORMS[self.form][2](self.constant)

    def __str__(self) -> str:
        return FORMS[self.form][0].format(self.constant)


def fit(
    form: str, jobs: Sequence[Job], running_seconds: np.ndarray, replayed: Callable[[Overhead], SimulationResult]
) -> Fit:
    """One constant by halving, from `running_seconds` (f64[jobs]), how long each job held devices."""
    width, models = np.array([job.num_workers for job in jobs]), np.array([job.tag for job in jobs])

    def ratios(constant: float) -> tuple[float, float]:
        found = np.array([record.running_seconds for record in replayed(FORMS[form][2](constant)).records]) * width
        apart = [
            np.log(found[models == model].sum() / (running_seconds * width)[models == model].sum())
            for model in sorted(set(models))
        ]
        return found.sum() / (running_seconds * width).sum(), float(np.sqrt(np.mean(np.square(apart))))

    low, high = 0.0, FORMS[form][1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if ratios(middle)[0] < 1 else (low, middle)
    return Fit(form, middle, ratios(middle)[1])


def decide(view: View, *, service: bool, overhead: Overhead = Overhead()) -> Assignment:
    """Muri-S (`service` known) or Muri-L."""
    attained = view.attained_seconds * view.num_workers
    order = np.argsort(view.remaining_seconds * view.num_workers if service else attained, kind="stable").tolist()
    stages = [stages_of(view.jobs[job].profile) for job in view.active.tolist()]
    chosen = _chosen(order, view.num_workers.tolist(), view.cluster)
    needed = sum(width * len(jobs) for width, jobs in chosen.items())
    nodes = {width: [(position,) for position in jobs] for width, jobs in chosen.items()}
    for _ in range(MAX_MEMBERS):
        nodes, needed = _round(nodes, stages, needed, view.cluster.num_devices)
        if needed <= view.cluster.num_devices:
            break
    start = []
    free = _Free(view.cluster)
    for width in sorted(nodes, reverse=True):
        for node in nodes[width]:
            devices = free.take(width)
            if devices is not None:
                start.append(
                    Group(
                        tuple(Member(int(view.active[position]), devices) for position in sorted(node)),
                        "testbed",
                        overhead,
                    )
                )
    return Assignment(tuple(view.groups), tuple(start))


class _Free:
    """Devices of a cluster that jobs take, first fit, on one node or whole ones."""

    def __init__(self, cluster: Cluster):
        self.free = np.ones((cluster.num_nodes, cluster.devices_per_node), bool)

    def take(self, width: int) -> tuple[int, ...] | None:
        """None where there are none."""
        per_node = self.free.shape[1]
        places = nodes_for(self.free.sum(axis=1), width, per_node)
        devices: list[int] = []
        for node, count in places or []:
            here = np.flatnonzero(self.free[node])[:count]
            self.free[node, here] = False
            devices += (here + node * per_node).tolist()
        return None if places is None else tuple(devices)


def _chosen(order: Sequence[int], num_workers: Sequence[int], cluster: Cluster) -> dict[int, list[int]]:
    """Width -> jobs that are to be matched, in order."""
    waiting: dict[int, list[int]] = {}
    for position in order:
        waiting.setdefault(num_workers[position], []).append(position)
    taken = dict.fromkeys(waiting, 0)
    free, along = _Free(cluster), set()
    for position in order:
        width = num_workers[position]
        if position not in along and free.take(width) is not None:
            along.update(waiting[width][taken[width] : taken[width] + MAX_MEMBERS])
            taken[width] = min(taken[width] + MAX_MEMBERS, len(waiting[width]))
    return {width: jobs[: taken[width]] for width, jobs in waiting.items() if taken[width]}


def _round(
    nodes: dict[int, list[tuple[int, ...]]], stages: Sequence[Stages], needed: int, num_devices: int
) -> tuple[dict[int, list[tuple[int, ...]]], int]:
    """One matching of each width; pairs are joined only while more devices are asked for than there are."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for width, here in nodes.items():
        kinds: dict[tuple[Stages, ...], collections.deque[tuple[int, ...]]] = {}
        for node in here:
            kinds.setdefault(tuple(sorted(stages[position] for position in node)), collections.deque()).append(node)
        keys = sorted(kinds)
        weights = {
            (a, b): used(tuple(sorted((*keys[a], *keys[b]))))
            for a, b in itertools.combinations_with_replacement(range(len(keys)), 2)
            if len(keys[a]) + len(keys[b]) <= MAX_MEMBERS
        }
        found[width] = []
        for (a, b), count in maximum_matching(tuple(len(kinds[key]) for key in keys), tuple(sorted(weights.items()))):
            for _ in range(count):
                first, second = kinds[keys[a]].popleft(), kinds[keys[b]].popleft()
                if needed > num_devices:
                    needed -= width
                    found[width].append((*first, *second))
                else:
                    found[width] += [first, second]
        found[width] += [node for key in keys for node in kinds[key]]
    return found, needed


def _cycle_seconds(jobs: Sequence[Job], overhead: Overhead) -> float:
    stages = [stages_of(job.profile) for job in jobs]
    alone = [job.profile.iteration_seconds for job in jobs]
    if len(jobs) == 1:
        return alone[0]
    beside = (
        sum(max(0.0, seconds - sum(times)) for seconds, times in zip(alone, stages)) if overhead.unexplained else 0.0
    )
    return (1 + overhead.share) * cycle_seconds(tuple(sorted(stages))) + len(jobs) * overhead.job_seconds + beside


def _rates(group: Group, jobs: Sequence[Job], cluster: Cluster) -> Rates:
    cycle = _cycle_seconds(jobs, group.option)
    return Rates(
        (1 / cycle,) * len(jobs), tuple(stages_of(job.profile)[1] * job.num_workers for job in jobs), (1.0,) * len(jobs)
    )


discipline("testbed", _rates)(muri_iteration)
