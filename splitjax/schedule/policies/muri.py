"""Registers the policies of Muri as its paper describes them: jobs of complementary needs share devices, each on
another resource at any moment. `muri_testbed` has those that its authors ran."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, milp

from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.discipline import GroupState, Iteration, Rates, discipline
from splitjax.schedule.model.jobs import DEVICE, RESOURCES, Job, resident_bytes
from splitjax.schedule.model.policy import Assignment, Group, Member, View, register
from splitjax.schedule.policies.gang import admit, place
from splitjax.schedule.policies.orders import Order, las, srsf
from splitjax.schedule.policies.turns import Times, Turns, next_in_turn, stage_seconds, steady_rates, with_switch

_PAPER = "Zhao et al., Multi-Resource Interleaving for Deep Learning Training (Muri, SIGCOMM'22, sections 3 and 4)"
_KINDS = len(RESOURCES)
MAX_MEMBERS = 4
GAIN = 0.02  # jobs whose cycle is not shorter by this than one after the other do not share


@register("muri", paper=_PAPER, order="srsf")
@register("muri-s", paper=_PAPER, order="srsf")
def muri_s(view: View, *, overhead: float = 0.0, max_members: int = MAX_MEMBERS) -> Assignment:
    """Interleaving of resource stages, groups by matching; the job with the least device time left first.

    **Arguments:**

    - `view`: what is known.
    - `overhead`: by how much a cycle of interleaved jobs takes longer than its stages say.
    - `max_members`: 2 or 4 jobs in a group.
    """
    return _muri(view, srsf(view), overhead, max_members)


@register("muri-l", paper=_PAPER, order="las")
def muri_l(view: View, *, overhead: float = 0.0, max_members: int = MAX_MEMBERS) -> Assignment:
    """The same where times are not known; the job that has had the least device time first.

    `view`, `overhead` and `max_members` are those of `muri_s`.
    """
    return _muri(view, las(view), overhead, max_members)


@functools.lru_cache(maxsize=1 << 16)
def interleave(times: tuple[Times, ...]) -> tuple[float, tuple[int, ...]]:
    """Finds the best interleaving of jobs with the stages `times` (section 4.1): at any moment each job is on another
    resource, and all go on to the next together.

    **Returns:** seconds of a cycle, in which each job does one iteration, and the resource on which each job begins a
    cycle.
    """
    best = (math.inf, ())
    for offsets in itertools.permutations(range(1, _KINDS), len(times) - 1):
        offsets = (0, *offsets)
        seconds = sum(_phases(times, offsets))
        if seconds < best[0] - 1e-12:
            best = (seconds, offsets)
    return best


def _phases(times: Sequence[Times], offsets: Sequence[int]) -> list[float]:
    return [max(job[(phase + offset) % _KINDS] for job, offset in zip(times, offsets)) for phase in range(_KINDS)]


def efficiency(times: tuple[Times, ...]) -> float:
    """Gives the mean share of a cycle of jobs with the stages `times` in which a resource is used (section 4.1,
    equation 4); in (0, 1]."""
    cycle, _ = interleave(times)
    return sum(map(sum, times)) / (_KINDS * cycle) if cycle else 0.0


# Grouping


def _muri(view: View, order: Order, overhead: float, max_members: int) -> Assignment:
    num_devices = view.cluster.num_devices
    num_workers = view.num_workers
    rank = np.empty(len(order.positions), np.int64)
    rank[order.positions] = np.arange(len(rank))
    candidates = order.positions[admit(num_workers[order.positions], max_members * num_devices)].tolist()
    running: dict[int, list[int]] = {}
    for position in np.flatnonzero(view.group_of >= 0).tolist():
        running.setdefault(int(view.group_of[position]), []).append(position)
    demand, level = int(num_workers[candidates].sum()), 1
    while level < max_members and demand > level * num_devices:
        level *= 2
    wanted = set(candidates)
    # Groups that are complete stay: matching all anew would move, and so restart, jobs that are alike.
    nodes = [tuple(members) for members in running.values() if 1 < len(members) == level and wanted.issuperset(members)]
    loose = sorted(wanted.difference(*nodes), key=lambda position: int(rank[position]))
    parts, size = [(position,) for position in loose], 1
    while size < level:
        parts = _matched(view, parts)
        size *= 2
    nodes += parts
    nodes.sort(key=lambda node: min(int(rank[position]) for position in node))
    chosen = [
        nodes[index]
        for index in admit(np.array([int(num_workers[node[0]]) for node in nodes], np.int64), num_devices).tolist()
    ]
    return _assignment(view, order, chosen, running, overhead)


def _matched(view: View, nodes: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Does one round of matching (section 4.2): groups of equal width, joined in pairs where sharing pays. Jobs of
    equal stages are alike, so it is a matching of few kinds with counts, solved exactly."""
    limit = view.cluster.memory_bytes
    profiles = {position: view.jobs[int(view.active[position])].profile for node in nodes for position in node}

    def kind(position: int) -> tuple[Times, float, int]:
        profile = profiles[position]
        return stage_seconds(profile), profile.iteration_seconds, resident_bytes([profile]) if limit else 0

    def fits(positions: tuple[int, ...]) -> bool:
        return not limit or resident_bytes(profiles[position] for position in positions) <= limit

    buckets: dict[int, dict[tuple, list[tuple[int, ...]]]] = {}
    for node in nodes:
        buckets.setdefault(int(view.num_workers[node[0]]), {}).setdefault(tuple(sorted(map(kind, node))), []).append(
            node
        )
    joined = []
    for kinds in buckets.values():
        keys = sorted(kinds)
        left = {key: collections.deque(kinds[key]) for key in keys}
        weights = {}
        for a, b in itertools.combinations_with_replacement(range(len(keys)), 2):
            members = (*keys[a], *keys[b])
            times = tuple(sorted(stages for stages, _, _ in members))
            if interleave(times)[0] < (1 - GAIN) * sum(alone for _, alone, _ in members) and fits(
                (*kinds[keys[a]][0], *kinds[keys[b]][0])
            ):
                weights[a, b] = efficiency(times)
        for (a, b), count in maximum_matching(tuple(len(kinds[key]) for key in keys), tuple(sorted(weights.items()))):
            joined += [(*left[keys[a]].popleft(), *left[keys[b]].popleft()) for _ in range(count)]
        joined += [node for key in keys for node in left[key]]
    return joined


@functools.lru_cache(maxsize=4096)
def maximum_matching(
    counts: tuple[int, ...], weights: tuple[tuple[tuple[int, int], float], ...]
) -> tuple[tuple[tuple[int, int], int], ...]:
    """Finds a maximum-weight matching where node kinds have `counts` nodes and pairs of kinds the given `weights`: how
    many pairs of which kinds, as an integer program."""
    if not weights:
        return ()
    uses = np.zeros((len(counts), len(weights)))
    for index, ((a, b), _) in enumerate(weights):
        uses[a, index] += 1
        uses[b, index] += 1
    gains = -np.array([weight for _, weight in weights])
    solved = milp(
        gains,
        constraints=(uses, -np.inf, np.array(counts)),
        integrality=np.ones(len(weights)),
        bounds=Bounds(0, np.inf),
    )
    return tuple((pair, round(count)) for (pair, _), count in zip(weights, solved.x) if round(count))


def _assignment(
    view: View, order: Order, chosen: list[tuple[int, ...]], running: dict[int, list[int]], overhead: float
) -> Assignment:
    """Makes the change from what runs; a group takes over the devices of one whose members it has."""
    number_of = {frozenset(members): number for number, members in running.items()}
    kept = {number_of[frozenset(node)] for node in chosen if frozenset(node) in number_of}
    stop = tuple(number for number in running if number not in kept)
    free = view.free.copy()
    for number in stop:
        free[list(view.groups[number].devices)] = True
    beginning = [node for node in chosen if number_of.get(frozenset(node)) not in kept]
    devices: dict[tuple[int, ...], tuple[int, ...]] = {}
    for node in beginning:
        held = next(
            (
                view.groups[int(view.group_of[position])].members[0].devices
                for position in node
                if view.group_of[position] >= 0
            ),
            None,
        )
        if held is not None and free[list(held)].all():
            devices[node] = held
            free[list(held)] = False
    start = []
    for node in sorted(beginning, key=lambda node: -int(view.num_workers[node[0]])):
        if node not in devices:
            devices[node] = place(free, int(view.num_workers[node[0]]), view.cluster)
            free[list(devices[node])] = False
        start.append(
            Group(tuple(Member(int(view.active[position]), devices[node]) for position in node), "muri", overhead)
        )
    share = np.zeros(len(view.active))
    for node in chosen:
        seconds = [stage_seconds(view.jobs[int(view.active[position])].profile)[DEVICE] for position in node]
        for position, part in zip(node, seconds):
            share[position] = int(view.num_workers[position]) * (part / sum(seconds) if sum(seconds) else 1 / len(node))
    wake_seconds, memory = order.after(share)
    return Assignment(stop, tuple(start), wake_seconds, {"order": memory})


# How the jobs of a group take turns


def _turns(group: Group, jobs: Sequence[Job]) -> Turns:
    """Gives when the members of a group are on which resource."""
    times = tuple(with_switch(stage_seconds(job.profile), job.profile.switch_seconds) for job in jobs)
    ordered = sorted(range(len(jobs)), key=lambda member: times[member])
    _, offsets = interleave(tuple(times[member] for member in ordered))
    offset = dict(zip(ordered, offsets))
    mine = tuple(offset[member] for member in range(len(jobs)))
    phases = _phases(times, mine)
    # Stages need not explain all that an iteration takes, and nobody is faster than alone.
    longest = max(job.profile.iteration_seconds for job in jobs)
    stretch = max(1 + (group.option or 0.0) * (len(jobs) > 1), longest / sum(phases))
    phases = [stretch * seconds for seconds in phases]
    # The phase of the first cycle in which a member is on the first resource.
    first = [(_KINDS - offset) % _KINDS for offset in mine]
    stages = tuple(
        tuple(sum(phases[(at + index) % _KINDS] for index in range(kind)) for kind in range(_KINDS)) for at in first
    )
    return Turns(sum(phases), tuple(sum(phases[:at]) for at in first), stages)


def _rates(group: Group, jobs: Sequence[Job], cluster: Cluster) -> Rates:
    return steady_rates(jobs, _turns(group, jobs) if len(jobs) > 1 else None)


@discipline("muri", _rates)
def muri_iteration(group: Group, jobs: Sequence[Job], state: GroupState) -> Iteration:
    """Gives the next iteration of `group` in `state`: one cycle after the other; the stages of an iteration are a phase
    apart. A job alone overlaps its own stages as its iteration time says. `jobs` are those of the members, in order."""
    return next_in_turn(group, jobs, state, _turns(group, jobs) if len(jobs) > 1 else None)
