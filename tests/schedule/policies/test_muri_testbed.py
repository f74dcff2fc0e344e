"""Muri as its testbed ran it: how long a cycle is, who is on which resource meanwhile, and who is put together."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from splitjax.schedule import Cluster, Group, JobProfile, Member, Options, Policy, Stages, get, simulate
from splitjax.schedule.model.discipline import get_discipline
from splitjax.schedule.model.iterations import advance, start_state
from splitjax.schedule.policies.muri_testbed import Overhead, best_cycle, muri_s_testbed, used
from tests.schedule.helpers import finishes, job

FREE = Options(restart_seconds=0.0)


def profile(name: str, inputs: float, device: float, network: float, **more: int) -> JobProfile:
    whole = inputs + device + network
    stages = Stages(0.0, inputs, device, network)
    made = JobProfile.uniform(name, whole, exposed_fraction=1 - device / whole, stages=stages)
    return dataclasses.replace(made, **more) if more else made


COMPUTING, EXCHANGING = profile("computing", 0.1, 0.5, 0.1), profile("exchanging", 0.1, 0.1, 0.5)


def test_a_cycle_is_as_long_as_its_slots():
    # Input of one job is prepared over two slots: beside 0.4 s of computing, 0.6 s of input cost nothing.
    assert best_cycle(((0.0, 0.4, 0.0), (0.6, 0.1, 0.0))).seconds == pytest.approx(0.7)
    assert best_cycle(((0.8, 0.1, 0.0),) * 4).seconds == pytest.approx(1.6)  # two inputs at a time
    assert best_cycle(((0.1, 0.4, 0.1),) * 4).seconds == pytest.approx(1.6)  # one job computes at a time
    assert used(((0.1, 0.4, 0.1),) * 4) == pytest.approx(0.6 * 4 / (4 * 1.6))


@pytest.mark.parametrize("number", [2, 3, 4])
def test_jobs_take_turns_on_the_device_and_on_the_network(number):
    jobs = [
        job(str(k), 0, 2, 9, each) for k, each in enumerate([COMPUTING, EXCHANGING, COMPUTING, EXCHANGING][:number])
    ]
    shared = Group(tuple(Member(k, (0, 1)) for k in range(number)), "muri-testbed", Overhead())
    rates = get_discipline("muri-testbed").rates(shared, jobs, Cluster(1, 2))
    state, found = start_state(shared, jobs), []
    for _ in range(8 * number):
        found.append(get_discipline("muri-testbed").next_iteration(shared, jobs, state))
        state = advance(shared, state, found[-1])
    assert [sum(one.member == k for one in found) for k in range(number)] == [8] * number
    spans: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for one in found:
        stages = sorted(one.tasks, key=lambda task: (task.worker, task.start_seconds))
        for first, second in itertools.pairwise(stages):  # a job's own stages follow each other
            assert first.worker != second.worker or first.end_seconds <= second.start_seconds + 1e-9
        for task in one.tasks:
            spans.setdefault((task.device, task.resource), []).append((task.start_seconds, task.end_seconds))
    for tasks in spans.values():
        assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(sorted(tasks)))
    # As often as the steady state says, and faster than one after the other.
    ends = [one.ready_seconds for one in found if one.member == 0]
    assert (ends[-1] - ends[0]) / 7 == pytest.approx(1 / rates.iterations_per_second[0])
    assert 1 / rates.iterations_per_second[0] < 0.8 * sum(each.profile.iteration_seconds for each in jobs)


def test_what_a_cycle_takes_longer_is_added_to_it():
    jobs = [job("a", 0, 2, 9, COMPUTING), job("b", 0, 2, 9, EXCHANGING)]
    members = tuple(Member(k, (0, 1)) for k in range(2))
    seconds = {
        overhead: 1
        / get_discipline("muri-testbed")
        .rates(Group(members, "muri-testbed", overhead), jobs, Cluster(1, 2))
        .iterations_per_second[0]
        for overhead in (Overhead(), Overhead(job_seconds=0.25), Overhead(share=0.5))
    }
    base = seconds[Overhead()]
    # Nothing but the overhead counts where one was fitted: hosts prepare two inputs at a time.
    reading = [job(str(k), 0, 2, 9, profile("reading", 0.8, 0.1, 0.0)) for k in range(4)]
    four = tuple(Member(k, (0, 1)) for k in range(4))
    cycles = [
        1 / get_discipline("muri-testbed").rates(Group(four, "muri-testbed", each), reading, Cluster(1, 2))
        .iterations_per_second[0]
        for each in (Overhead(), Overhead(job_seconds=0.1))
    ]  # fmt: skip
    assert cycles == pytest.approx([3.2, 1.6 + 0.4])
    assert seconds[Overhead(job_seconds=0.25)] == pytest.approx(base + 0.5)
    assert seconds[Overhead(share=0.5)] == pytest.approx(1.5 * base)


def test_only_as_many_share_as_more_devices_are_asked_for_than_there_are():
    jobs = [job(str(k), 0, 2, 200, (COMPUTING, EXCHANGING)[k % 2]) for k in range(4)]
    started = []

    def decide(view):
        decision = get("muri-s-testbed").decide(view)
        started.append(sorted(len(group.members) for group in decision.start))
        return decision

    watched = Policy("watched", decide, "", "", "", "")
    simulate(jobs, Cluster(1, 8), watched, FREE)
    assert started[0] == [1, 1, 1, 1]
    started.clear()
    simulate(jobs, Cluster(1, 6), watched, FREE)  # one pair is enough
    assert started[0] == [1, 1, 2]
    started.clear()
    shared = finishes(simulate(jobs, Cluster(1, 2), watched, FREE))
    assert started[0] == [4]
    assert max(shared.values()) < 0.9 * max(finishes(simulate(jobs, Cluster(1, 2), "gang-srsf", FREE)).values())


def test_groups_that_are_as_before_go_on():
    jobs = [job("a", 0, 4, 100, COMPUTING), job("b", 0, 4, 100, EXCHANGING), job("late", 10, 2, 5)]
    starts = {}
    for anew in (False, True):
        options = Options(restart_seconds=7.0, restart_all=anew)
        records = simulate(jobs, Cluster(1, 10), "muri-s-testbed", options).records
        starts[anew] = {record.name: record.num_starts for record in records}
    assert starts[False] == {"a": 1, "b": 1, "late": 1}
    assert starts[True]["a"] > 2  # when the late one comes, and when it ends


def test_jobs_that_do_not_fit_into_memory_together_do_not_share():
    large = [dataclasses.replace(one, state_bytes=60) for one in (COMPUTING, EXCHANGING)]
    large = [
        dataclasses.replace(one, depths=tuple(dataclasses.replace(each, memory_bytes=70) for each in one.depths))
        for one in large
    ]
    jobs = [job(str(k), 0, 2, 50, large[k % 2]) for k in range(2)]
    sizes = []

    def decide(view):
        decision = muri_s_testbed(view)
        sizes.extend(len(group.members) for group in decision.start)
        return decision

    watched = Policy("watched", decide, "", "", "", "")
    simulate(jobs, Cluster(1, 2, memory_bytes=100), watched, FREE)
    assert set(sizes) == {1}
    sizes.clear()
    simulate(jobs, Cluster(1, 2, memory_bytes=200), watched, FREE)
    assert 2 in sizes
