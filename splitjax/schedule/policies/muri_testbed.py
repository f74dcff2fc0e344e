"""Registers the policies of Muri as its authors ran them on their testbed, by their public code: it is not quite what
their paper describes (`muri`), and faster. The fidelity of simulations is measured on these.

At each decision all is matched anew. In the policy's order, each job that still finds devices brings up to four jobs of
its width along. These are joined in pairs, and pairs again, by matchings of the greatest use of resources, until no
more devices are asked for than there are; widest first, groups are placed. A cycle has four slots: in each, one job
computes and the one before it in turn exchanges, while input is prepared over two slots.

The testbed decided every 360 s and started all jobs anew then: `Options(interval_seconds=360, restart_all=True)`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import numpy as np

from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.discipline import GroupState, Iteration, Rates, discipline
from splitjax.schedule.model.jobs import Job, JobProfile, resident_bytes
from splitjax.schedule.model.policy import Assignment, Group, Member, View, register
from splitjax.schedule.policies.gang import nodes_for
from splitjax.schedule.policies.muri import MAX_MEMBERS, maximum_matching
from splitjax.schedule.policies.turns import Turns, next_in_turn, stage_seconds, steady_rates, with_switch

_PAPER = "Zhao et al., Multi-Resource Interleaving for Deep Learning Training (Muri, SIGCOMM'22), the public code"
_NUM_SLOTS = 4
Stages = tuple[float, float, float]  # seconds of input (storage and CPU in one), device, network
_Node = tuple[int, ...]  # positions of jobs that are joined so far


@dataclasses.dataclass(frozen=True)
class Overhead:
    """Says by how much a cycle of several jobs takes longer than their stages say; for the testbed's V100s, 72 ms a job
    were fitted (benchmark `jigsaw`, part `fidelity`). Nothing by default; then no job is faster than alone, and no
    resource serves two jobs at once, which the stages alone do not ensure.

    **Attributes:**

    - `share`: of the cycle. `job_seconds`: for each job.
    - `unexplained`: also by what each job's iteration alone takes longer than its own stages together, which nobody's
      work then hides.
    """

    share: float = 0.0
    job_seconds: float = 0.0
    unexplained: bool = False


@register("muri-s-testbed", paper=_PAPER, order="srsf")
def muri_s_testbed(view: View, *, overhead: Overhead = Overhead()) -> Assignment:
    """Muri-S as its testbed ran it; the job with the least device time left first.

    **Arguments:** `view`: what is known. `overhead`: by how much cycles take longer than their stages say.
    """
    return _decided(view, view.remaining_seconds * view.num_workers, overhead)


@register("muri-l-testbed", paper=_PAPER, order="las")
def muri_l_testbed(view: View, *, overhead: Overhead = Overhead()) -> Assignment:
    """Muri-L as its testbed ran it, which does not know times; the job that has held devices for least device time
    first.

    `view` and `overhead` are those of `muri_s_testbed`.
    """
    return _decided(view, view.attained_seconds * view.num_workers, overhead)


# Grouping


def _decided(view: View, keys: np.ndarray, overhead: Overhead) -> Assignment:
    """Matches and places all jobs anew, smallest of `keys` (f64[active]) first. Groups that are as before stay."""
    order = np.argsort(keys, kind="stable").tolist()
    profiles = [view.jobs[job].profile for job in view.active.tolist()]
    chosen = _chosen(order, view.num_workers.tolist(), view.cluster)
    needed = sum(width * len(jobs) for width, jobs in chosen.items())
    nodes: dict[int, list[_Node]] = {width: [(position,) for position in jobs] for width, jobs in chosen.items()}
    for _ in range(MAX_MEMBERS):
        nodes, needed = _joined(nodes, profiles, needed, view.cluster)
        if needed <= view.cluster.num_devices:
            break
    free = _Free(view.cluster)
    groups: list[Group] = []
    for width in sorted(nodes, reverse=True):
        for node in nodes[width]:
            devices = free.take(width)
            if devices is not None:
                members = tuple(Member(int(view.active[position]), devices) for position in sorted(node))
                groups.append(Group(members, "muri-testbed", overhead))
    running = {group: number for number, group in view.groups.items()}
    kept = {running[group] for group in groups if group in running}
    stop = tuple(number for number in view.groups if number not in kept)
    return Assignment(stop, tuple(group for group in groups if group not in running))


class _Free:
    """Holds the devices of a cluster that are not given away: first fit, on one node or whole ones."""

    def __init__(self, cluster: Cluster):
        self._free = np.ones((cluster.num_nodes, cluster.devices_per_node), bool)

    def take(self, width: int) -> tuple[int, ...] | None:
        """Gives `width` devices away; None where there are none."""
        per_node = self._free.shape[1]
        places = nodes_for(self._free.sum(axis=1), width, per_node)
        devices: list[int] = []
        for node, count in places or []:
            here = np.flatnonzero(self._free[node])[:count]
            self._free[node, here] = False
            devices += (here + node * per_node).tolist()
        return None if places is None else tuple(devices)


def _chosen(order: Sequence[int], num_workers: Sequence[int], cluster: Cluster) -> dict[int, list[int]]:
    """Gives the jobs that are to be matched, in `order`, by their width."""
    waiting: dict[int, list[int]] = {}
    for position in order:
        waiting.setdefault(num_workers[position], []).append(position)
    taken = dict.fromkeys(waiting, 0)
    free, along = _Free(cluster), set[int]()
    for position in order:
        width = num_workers[position]
        if position not in along and free.take(width) is not None:
            along.update(waiting[width][taken[width] : taken[width] + MAX_MEMBERS])
            taken[width] = min(taken[width] + MAX_MEMBERS, len(waiting[width]))
    return {width: jobs[: taken[width]] for width, jobs in waiting.items() if taken[width]}


def _joined(
    nodes: dict[int, list[_Node]], profiles: Sequence[JobProfile], needed: int, cluster: Cluster
) -> tuple[dict[int, list[_Node]], int]:
    """Does one round of matching in each width. Pairs are joined only while more devices are `needed` than there are;
    returns how many are needed then, too."""
    limit = cluster.memory_bytes

    def kind(position: int) -> tuple[Stages, tuple[int, int]]:
        profile = profiles[position]
        return _stages_of(profile), (profile.state_bytes, profile.depths[0].memory_bytes) if limit else (0, 0)

    def fits(positions: _Node) -> bool:
        return not limit or resident_bytes(profiles[position] for position in positions) <= limit

    found: dict[int, list[_Node]] = {}
    for width, here in nodes.items():
        kinds: dict[tuple[tuple[Stages, tuple[int, int]], ...], collections.deque[_Node]] = {}
        for node in here:
            kinds.setdefault(tuple(sorted(map(kind, node))), collections.deque()).append(node)
        keys = sorted(kinds)
        weights = {
            (a, b): used(tuple(sorted(stages for stages, _ in (*keys[a], *keys[b]))))
            for a, b in itertools.combinations_with_replacement(range(len(keys)), 2)
            if len(keys[a]) + len(keys[b]) <= MAX_MEMBERS and fits((*kinds[keys[a]][0], *kinds[keys[b]][0]))
        }
        found[width] = []
        for (a, b), count in maximum_matching(tuple(len(kinds[key]) for key in keys), tuple(sorted(weights.items()))):
            for _ in range(count):
                first, second = kinds[keys[a]].popleft(), kinds[keys[b]].popleft()
                if needed > cluster.num_devices:
                    needed -= width
                    found[width].append((*first, *second))
                else:
                    found[width] += [first, second]
        found[width] += [node for key in keys for node in kinds[key]]
    return found, needed


# Cycles


@dataclasses.dataclass(frozen=True)
class Cycle:
    """Is the best cycle of some jobs.

    **Attributes:** `seconds`: in which each does one iteration. `begins`: by job, how far into the cycle its input
    begins. `starts`: by job, how long after that each of its stages begins.
    """

    seconds: float
    begins: tuple[float, ...]
    starts: tuple[Stages, ...]


@functools.lru_cache(maxsize=1 << 16)
def best_cycle(stages: tuple[Stages, ...]) -> Cycle:
    """Finds the best cycle of 2 to 4 jobs with these `stages`: the order in which they follow each other by a slot or,
    of two jobs, opposite each other, two slots apart."""
    orders = itertools.permutations(range(len(stages)))
    best = min((_in_slots(stages, order) for order in orders), key=lambda each: each.seconds)
    if len(stages) == 2:
        (input_a, device_a, network_a), (input_b, device_b, network_b) = stages
        first, second = max(input_a, device_b + network_b), max(input_b, device_a + network_a)
        if first + second < best.seconds:
            starts = (0.0, first, first + device_a), (0.0, second, second + device_b)
            return Cycle(first + second, (0.0, first), starts)
    return best


def _in_slots(stages: Sequence[Stages], order: Sequence[int]) -> Cycle:
    """Gives the cycle of jobs in an `order`: the job of turn t has its input in slots t and t + 1, and is on the device
    in slot t + 2 and on the network in slot t + 3."""
    in_turn = [stages[job] for job in order]
    # Ends of the slots of two cycles; the second is what each takes once all are under way.
    ends = [0.0]
    for slot in range(2 * _NUM_SLOTS):
        network, device, inputs = (
            in_turn[turn] if turn < len(in_turn) else (0.0, 0.0, 0.0)
            for turn in ((slot + 1) % 4, (slot + 2) % 4, (slot + 3) % 4)
        )
        end = max(ends[-1] + network[2], ends[-1] + device[1])
        ends.append(max(end, ends[-2] + inputs[0]) if slot else end)
    seconds = ends[2 * _NUM_SLOTS] - ends[_NUM_SLOTS]
    at = lambda slot: ends[_NUM_SLOTS + slot % _NUM_SLOTS] - ends[_NUM_SLOTS] + slot // _NUM_SLOTS * seconds
    turn_of = {job: turn for turn, job in enumerate(order)}
    turns = [turn_of[job] for job in range(len(stages))]
    starts = tuple((0.0, at(turn + 2) - at(turn), at(turn + 3) - at(turn)) for turn in turns)
    return Cycle(seconds, tuple(at(turn) for turn in turns), starts)


def used(stages: tuple[Stages, ...]) -> float:
    """Gives the mean share of the best cycle of jobs with these `stages` in which a resource works, of four; 1 at
    most."""
    seconds = best_cycle(stages).seconds
    return sum(map(sum, stages)) / (_NUM_SLOTS * seconds) if seconds else 0.0


def _stages_of(profile: JobProfile) -> Stages:
    return _three(stage_seconds(profile))


def _three(times: Sequence[float]) -> Stages:
    """Gives storage and CPU in one, as the testbed does."""
    storage, cpu, device, network = times
    return storage + cpu, device, network


# How the jobs of a group take turns


def _turns(group: Group, jobs: Sequence[Job]) -> Turns:
    """Gives when the members of a group are on which resource."""
    overhead: Overhead = group.option or Overhead()
    times = [with_switch(stage_seconds(job.profile), job.profile.switch_seconds) for job in jobs]
    ordered = sorted(range(len(jobs)), key=lambda member: _three(times[member]))
    cycle = best_cycle(tuple(_three(times[member]) for member in ordered))
    alone = [job.profile.iteration_seconds for job in jobs]
    hidden = [max(0.0, seconds - sum(each)) for seconds, each in zip(alone, times, strict=True)]
    asked = (1 + overhead.share) * cycle.seconds + len(jobs) * overhead.job_seconds
    asked += sum(hidden) if overhead.unexplained else 0.0
    seconds = asked if overhead != Overhead() else max(asked, *alone, *map(sum, zip(*times, strict=True)))
    stretch = seconds / cycle.seconds if cycle.seconds else 1.0
    place = {member: k for k, member in enumerate(ordered)}
    begins, starts = list[float](), list[tuple[float, ...]]()
    for member in range(len(jobs)):
        first, device, network = cycle.starts[place[member]]
        begins.append(stretch * cycle.begins[place[member]])
        starts.append((stretch * first, stretch * first + times[member][0], stretch * device, stretch * network))
    return Turns(seconds, tuple(begins), tuple(starts))


def _rates(group: Group, jobs: Sequence[Job], cluster: Cluster) -> Rates:
    return steady_rates(jobs, _turns(group, jobs) if len(jobs) > 1 else None)


@discipline("muri-testbed", _rates)
def muri_testbed_iteration(group: Group, jobs: Sequence[Job], state: GroupState) -> Iteration:
    """Gives the next iteration of `group` in `state`: one cycle of four slots after the other. A job alone overlaps its
    own stages as its iteration time says. `jobs` are those of the members, in order.

    The testbed's hosts prepared the inputs of two jobs at a time, and the steady state has that where an overhead was
    fitted. Iteration by iteration a device's input serves one job at a time, so that long inputs wait for each
    other."""
    return next_in_turn(group, jobs, state, _turns(group, jobs) if len(jobs) > 1 else None)
