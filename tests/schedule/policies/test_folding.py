"""What a switch between jobs costs, and how jobs are folded so that none is needed."""

from __future__ import annotations

import dataclasses
import math

import pytest

from splitjax.errors import ScheduleError
from splitjax.schedule import Cluster, Group, Job, JobProfile, Member, Options, Stages, get, simulate
from splitjax.schedule.model.discipline import get_discipline
from splitjax.schedule.model.iterations import advance, charge_switches, measure_rates, start_state
from splitjax.schedule.model.tasks import Iteration, Task
from splitjax.schedule.policies.folding import folded_sizes, folded_speed

FREE = Options(restart_seconds=0.0)
PROFILE = JobProfile.uniform("even", 1.2, num_depths=8)
COSTLY = dataclasses.replace(PROFILE, switch_seconds=0.24)


def shared(jobs, num_devices, discipline="jigsaw"):
    devices = tuple(range(num_devices))
    members = (Member(number, tuple(worker % num_devices for worker in range(job.num_workers)), devices)
               for number, job in enumerate(jobs))  # fmt: skip
    return Group(tuple(members), discipline)


def jobs_of(profile, count, num_workers, num_iterations=1000, name="job"):
    return [Job(f"{name} {number}", 0.0, num_workers, num_iterations, profile) for number in range(count)]


def test_the_first_task_after_another_jobs_takes_longer_and_what_follows_begins_later():
    jobs = jobs_of(COSTLY, 2, 3)
    group = shared(jobs, 2)
    first = Iteration(0, (Task(0, 0, 0, 0.0, 1.0), Task(1, 1, 0, 0.0, 1.0)), 1.5)
    state = start_state(group, jobs)
    assert charge_switches(group, jobs, state, first) == first, "nobody was there before"
    state = advance(group, state, first)
    assert state.holders == (0, 0)
    second = Iteration(1, (Task(0, 0, 0, 1.0, 1.0), Task(1, 0, 0, 2.0, 0.5)), 2.75)
    charged = charge_switches(group, jobs, state, second)
    assert charged.tasks == (Task(0, 0, 0, 1.0, 1.24), Task(1, 0, 0, 2.24, 0.5))
    assert charged.ready_seconds == pytest.approx(2.99)
    state = advance(group, state, charged)
    assert state.holders == (1, 0)
    again = Iteration(1, (Task(0, 0, 0, 3.0, 1.0),), 4.0)
    assert charge_switches(group, jobs, state, again) == again, "its own device"


def test_a_switch_takes_time_or_none():
    for seconds in (-0.1, math.nan, math.inf):
        with pytest.raises(ScheduleError):
            dataclasses.replace(PROFILE, switch_seconds=seconds)
    assert JobProfile.from_json(COSTLY.to_json()) == COSTLY
    old = {name: value for name, value in PROFILE.to_json().items() if name != "switch_seconds"}
    assert JobProfile.from_json(old) == PROFILE


@pytest.mark.parametrize("discipline", ["jigsaw", "interleave"])
@pytest.mark.parametrize(("counts", "num_devices"), [((4, 4), 4), ((8, 4, 2), 8), ((3, 3, 3), 5)])
def test_steady_rates_know_what_switches_cost(discipline, counts, num_devices):
    jobs = [Job(f"job {index}", 0.0, count, 1000, COSTLY) for index, count in enumerate(counts)]
    group, rule = shared(jobs, num_devices, discipline), get_discipline(discipline)
    steady = rule.rates(group, jobs, Cluster(1, num_devices))
    measured = measure_rates(rule.next_iteration, group, jobs)
    assert steady.iterations_per_second == pytest.approx(measured.iterations_per_second, rel=0.05)
    assert steady.device_seconds == pytest.approx(measured.device_seconds, rel=0.05)
    free = [dataclasses.replace(job, profile=PROFILE) for job in jobs]
    without = rule.rates(group, free, Cluster(1, num_devices))
    assert sum(without.iterations_per_second) > 1.05 * sum(steady.iterations_per_second)


def test_exact_runs_and_steady_ones_agree_on_switches():
    jobs = [*jobs_of(COSTLY, 2, 4, 40, "a"), *jobs_of(COSTLY, 1, 2, 60, "b")]
    policy = dataclasses.replace(get("interleave"), decide=get("interleave").decide)
    cluster = Cluster(1, 6)
    makespans = [
        simulate(jobs, cluster, policy, Options(restart_seconds=0.0, exact=exact)).makespan for exact in (0, 1)
    ]
    assert makespans[0] == pytest.approx(makespans[1], rel=0.05)


def test_jobs_that_interleave_their_stages_pay_for_each_cycle():
    stages = Stages(storage_seconds=0.3, device_seconds=0.4, network_seconds=0.3)
    profile = JobProfile.uniform("staged", 1.0, stages=stages)
    rates = []
    for switch_seconds in (0.0, 0.2):
        jobs = jobs_of(dataclasses.replace(profile, switch_seconds=switch_seconds), 2, 1)
        group = Group((Member(0, (0,)), Member(1, (0,))), "muri")
        rates.append(get_discipline("muri").rates(group, jobs, Cluster(1, 1)).iterations_per_second[0])
    assert rates[1] < rates[0]


def test_workers_in_pairs_take_the_time_of_perfect_packing():
    assert folded_speed(PROFILE, 8, 8, True) == 1.0
    assert folded_speed(PROFILE, 8, 4, True) == pytest.approx(0.5 / PROFILE.phi(8))
    assert folded_speed(PROFILE, 8, 4, False) == 0.5
    assert folded_speed(PROFILE, 8, 7, True) == 1.0, "the two shallowest share a device"
    assert folded_speed(PROFILE, 8, 6, True) == pytest.approx(12 / 13)


def test_devices_go_where_they_bring_most():
    jobs = jobs_of(PROFILE, 3, 8)
    assert folded_sizes(jobs, 12, True) == [4, 4, 4]
    assert folded_sizes(jobs, 14, True) == [6, 4, 4]
    assert folded_sizes(jobs, 17, True) == [7, 6, 4]
    assert folded_sizes(jobs, 40, True) == [7, 7, 7], "an eighth device brings nothing"
    assert folded_sizes(jobs, 10, True) == [4, 4, 2]
    assert folded_sizes(jobs_of(PROFILE, 1, 1), 1, True) == [1]


@pytest.mark.parametrize("seconds", [0.0, 0.24])
def test_jobs_share_devices_only_where_switches_are_cheap(seconds):
    jobs = jobs_of(dataclasses.replace(PROFILE, switch_seconds=seconds), 8, 8)
    cluster, groups = Cluster(4, 8), []

    def decide(view):
        decision = get("jigsaw").decide(view)
        groups.extend(decision.start)
        return decision

    result = simulate(jobs, cluster, dataclasses.replace(get("jigsaw"), decide=decide), FREE)
    gang = simulate(jobs, cluster, "gang-srtf", FREE)
    assert result.iteration_efficiency(gang) > 1.3, "whether switches cost something or not"
    sizes = {(len(group.members), len(group.devices)) for group in groups}
    assert (max(members for members, _ in sizes) > 1) == (seconds == 0)
    assert seconds == 0 or (1, 4) in sizes
    assert all(record.finish_seconds > 0 for record in result.records)


def test_what_was_folded_is_unfolded_when_there_is_room():
    jobs = [*jobs_of(COSTLY, 4, 8, 100, "short"), Job("long", 0.0, 8, 2000, COSTLY)]
    policy = get("jigsaw")
    result = simulate(jobs, Cluster(2, 8), policy, FREE)
    alone = 2000 * COSTLY.iteration_seconds
    (last,) = [record for record in result.records if record.name == "long"]
    assert last.finish_seconds < 1.2 * alone, "it is not left on half its devices"


def test_a_folded_job_takes_the_devices_that_come_free():
    """Six devices suffice for the demand of eight workers, 5.7 devices, but not for their tasks: on eight they are
    8 % faster."""
    cluster = Cluster(3, 4)
    jobs = [
        dataclasses.replace(job, num_iterations=count)
        for job, count in zip(jobs_of(COSTLY, 2, 8), (1000, 20000), strict=True)
    ]
    assert folded_speed(COSTLY, 8, 6, True) == pytest.approx(12 / 13)
    sizes = []
    policy = get("jigsaw")

    def decide(view):
        decision = policy.decide(view)
        sizes.extend((view.now_seconds, len(group.devices)) for group in decision.start)
        return decision

    result = simulate(jobs, cluster, dataclasses.replace(policy, decide=decide), FREE)
    first, last = (record.finish_seconds for record in result.records)
    assert [size for now, size in sizes if now >= first] == [8], sizes
    assert last == pytest.approx(first + (20000 - first / 1.3) * 1.2, rel=0.03)
