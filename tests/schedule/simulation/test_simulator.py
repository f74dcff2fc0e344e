"""The simulator: what it counts, at steady rates and iteration by iteration, and what it refuses."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from splitjax.errors import ScheduleError
from splitjax.schedule import (
    Assignment,
    Cluster,
    Depth,
    Group,
    Iteration,
    JobProfile,
    Member,
    Options,
    Policy,
    Stages,
    Task,
    compare,
    discipline,
    gang,
    generate,
    names,
    simulate,
)
from splitjax.schedule.model.discipline import get_discipline
from splitjax.schedule.model.iterations import advance, start_state
from splitjax.schedule.model.jobs import DEVICE, RESOURCES
from splitjax.schedule.model.result import Span
from splitjax.schedule.policies.gang import runs_after
from splitjax.schedule.simulation.plot import draw_gantt, gantt, gantt_colours, time_unit, write_plot
from tests.schedule.helpers import finishes, job

TWO = Cluster(1, 2)
FREE = Options(restart_seconds=0.0)


def named(decide, name="test"):
    return Policy(name, decide, "", "", "fifo", "gang-fifo")


@discipline("test-in-turns")
def in_turns(group, jobs, state):
    """The member that has had the least device time computes next, at its shallowest depth every other time."""
    member = min(
        (index for index in range(len(jobs)) if state.remaining_iterations[index] > 0),
        key=lambda index: (state.attained_device_seconds[index], index),
    )
    place = {device: index for index, device in enumerate(group.devices)}
    depth = len(jobs[member].profile.depths) - 1 if state.iterations[member] % 2 else 0
    tasks, ready = [], state.ready_seconds[member]
    start = max(
        [
            state.now_seconds,
            ready,
            *(state.free_seconds[place[device]][DEVICE] for device in group.members[member].devices),
        ]
    )
    for worker, device in enumerate(group.members[member].devices):
        tasks.append(Task(worker, device, depth, start, jobs[member].profile.task_seconds(depth)))
    return Iteration(member, tuple(tasks), tasks[0].end_seconds + jobs[member].profile.exposed_seconds)


def all_together(view):
    """All jobs on all devices, as one group that is formed anew whenever the jobs change."""
    if not len(view.active):
        return Assignment()
    devices = tuple(range(view.cluster.num_devices))
    wanted = Group(
        tuple(Member(number, devices[: view.jobs[number].num_workers]) for number in view.active.tolist()),
        "test-in-turns",
    )
    current = {group: number for number, group in view.groups.items()}
    return Assignment() if wanted in current else Assignment(tuple(current.values()), (wanted,))


def test_figures_of_a_case_worked_out_by_hand():
    profile = JobProfile.uniform("p", 1.0, num_depths=2, exposed_fraction=0.1)
    result = simulate(
        [job("a", 0, 2, 10, profile), job("b", 5, 2, 5, profile), job("c", 100, 1, 5, profile)],
        TWO,
        "gang-fifo",
        Options(restart_seconds=2.0),
    )
    assert finishes(result) == {"a": 12, "b": 19, "c": 107}
    a, b, c = result.records
    assert (a.start_seconds, b.start_seconds, c.start_seconds) == pytest.approx((2, 14, 102))
    assert (b.completion_seconds, b.running_seconds, b.queueing_seconds, b.device_seconds) == pytest.approx(
        (14, 7, 7, 14)
    )
    assert (
        result.avg_jct == pytest.approx((12 + 14 + 7) / 3)
        and result.makespan == pytest.approx(107)
        and result.queueing == pytest.approx(7 / 3)
    )
    # 2 x 10 + 2 x 5 + 5 device-seconds of iterations, of which 0.9 compute, in 2 x 107.
    assert result.busy == pytest.approx(0.9 * 35 / 214)
    assert result.busy_part.seconds == pytest.approx(19) and result.busy_part.rate == pytest.approx(30 / 38)
    assert result.total.held_device_seconds == pytest.approx(24 + 14 + 7)
    floor = profile.partial_seconds(2)
    assert result.busy_part.bound == pytest.approx(1 / floor)
    # b: cluster asked for twice over from 5 to 12, then once: 14 s x 1.5 on average.
    assert b.fair_seconds == pytest.approx(7 * 2 + 7) and b.unfairness == pytest.approx(14 / (5 * 1.5))


@pytest.mark.parametrize(
    ("stages", "narrow"),
    [
        (Stages(0.1, 0.2, 0.5, 0.2), "device"),
        (Stages(0.1, 0.2, 0.2, 0.5), "network"),
        (Stages(0.1, 0.5, 0.2, 0.2), "cpu"),
        (Stages(0.5, 0.1, 0.2, 0.2), "storage"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_bound_is_that_of_the_narrow_resource(stages, narrow):
    """An iteration takes half of its second on one resource: packed perfectly, two jobs run in the time of one,
    whichever resource that is."""
    half = stages.device_seconds / 2
    profile = JobProfile("p", half, (Depth(1.0, half),), exposed_seconds=1 - 2 * half, stages=stages)
    assert profile.iteration_seconds == pytest.approx(1.0)
    result = simulate([job("a", 0, 1, 10, profile), job("b", 0, 1, 10, profile)], Cluster(1, 1), "gang-fifo", FREE)
    assert stages.seconds[RESOURCES.index(narrow)] == 0.5
    assert result.busy_part.bound == pytest.approx(2.0)
    assert result.busy_part.floor_device_seconds[RESOURCES.index(narrow)] == pytest.approx(0.5 * 20)


def test_intervals_delay_decisions_and_restart_all_costs_everyone():
    jobs = [job("a", 0, 1, 20), job("b", 3, 1, 20)]
    late = simulate(jobs, TWO, "gang-fifo", Options(restart_seconds=1.0, interval_seconds=10.0))
    assert finishes(late) == {"a": 21, "b": 31}
    anew = simulate(jobs, TWO, "gang-fifo", Options(restart_seconds=1.0, interval_seconds=10.0, restart_all=True))
    # a is started anew at 10 s; its end at 22 s restarts b at 30 s, which has 1 s left
    assert finishes(anew) == {"a": 22, "b": 32}
    assert [record.num_starts for record in anew.records] == [2, 2]


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("gang-")])
def test_work_is_conserved_and_below_its_bound(name):
    random, cluster = np.random.default_rng(3), Cluster(2, 4)
    kinds = [
        JobProfile.uniform(str(index), float(random.uniform(0.2, 2)), num_depths=8, exposed_fraction=0.15 * index)
        for index in range(3)
    ]
    jobs = [
        job(
            str(number),
            float(random.uniform(0, 300)),
            int(random.integers(1, 9)),
            int(random.integers(5, 90)),
            kinds[number % 3],
        )
        for number in range(60)
    ]
    result = simulate(jobs, cluster, name, Options(restart_seconds=3.0))
    worth = sum(one.device_seconds for one in jobs)
    assert result.total.finished_device_seconds == pytest.approx(worth) == result.total.credited_device_seconds
    assert result.total.busy_device_seconds == pytest.approx(
        sum(one.num_workers * one.num_iterations * one.profile.task_seconds(0) for one in jobs)
    )
    assert result.total.held_device_seconds == pytest.approx(sum(record.device_seconds for record in result.records))
    assert result.total.held_device_seconds <= result.total.device_seconds and result.total.seconds == pytest.approx(
        result.makespan
    )
    for record, one in zip(result.records, jobs):
        assert record.running_seconds == pytest.approx(
            one.exclusive_seconds + 3.0 * record.num_starts, abs=3.0 * record.num_starts + 1e-6
        )
        assert record.completion_seconds >= one.exclusive_seconds + 3.0 - 1e-6
    assert 0 < result.iteration_efficiency() <= result.bound() and result.busy <= 1
    assert result == simulate(jobs, cluster, name, Options(restart_seconds=3.0))


@pytest.mark.parametrize(("policy", "restart"), [(named(all_together), 0.0), ("gang-srtf", 1.0), ("gang-las", 1.0)])
def test_steady_rates_agree_with_running_every_iteration(policy, restart):
    random = np.random.default_rng(1)
    kinds = [
        JobProfile.uniform(str(index), 0.02 * (index + 1), num_depths=4, exposed_fraction=0.1) for index in range(3)
    ]
    jobs = [
        job(str(number), 4.0 * number, 1 + number % 2, int(random.integers(200, 700)), kinds[number % 3])
        for number in range(6)
    ]
    fast = simulate(jobs, TWO, policy, Options(restart_seconds=restart))
    exact = simulate(jobs, TWO, policy, Options(restart_seconds=restart, exact=True))
    assert fast.completion_seconds == pytest.approx(exact.completion_seconds, rel=0.02)
    assert fast.busy == pytest.approx(exact.busy, rel=0.01) and fast.total.rate == pytest.approx(
        exact.total.rate, rel=0.01
    )
    assert fast.total.credited_rate == pytest.approx(exact.total.credited_rate, rel=0.01)
    # Iterations that a preemption cuts off are done again, and count only then.
    assert exact.total.finished_device_seconds == pytest.approx(sum(one.device_seconds for one in jobs))
    assert exact.iteration_efficiency() <= exact.bound() * (1 + 1e-9)


def test_measured_rates_of_a_discipline():
    profile = JobProfile.uniform("p", 1.0, num_depths=2)
    jobs = [job("a", 0, 2, 9, profile), job("b", 0, 2, 9, profile)]
    group = Group((Member(0, (0, 1)), Member(1, (0, 1))), "test-in-turns")
    rates = get_discipline("test-in-turns").rates(group, jobs, TWO)
    mean = (1 + 2 / 3) / 2  # full and half depth in turns
    assert rates.iterations_per_second == pytest.approx((0.5 / mean,) * 2, rel=0.02)
    assert rates.device_seconds == pytest.approx((2 * mean,) * 2) and rates.credit == pytest.approx((mean,) * 2)


def test_members_that_stay_where_they_are_pay_no_restart():
    result = simulate(
        [job("a", 0, 2, 30), job("b", 10, 2, 30), job("c", 11, 2, 4)],
        TWO,
        named(all_together),
        Options(restart_seconds=5.0),
    )
    assert [record.num_starts for record in result.records] == [1, 1, 1]
    assert 0 < result.total.credited_rate < result.total.rate


def test_a_run_that_is_over_does_not_wake():
    def waking(view):
        return dataclasses.replace(gang(view, view.arrival_seconds), wake_seconds=view.now_seconds + 1)

    result = simulate([job("a", 0, 1, 3), job("b", 1000, 1, 3)], TWO, named(waking), FREE)
    assert result.makespan == 1003 and result.num_decisions < 20


def refused(decide, match, *, cluster=TWO, jobs=None):
    with pytest.raises(ScheduleError, match=match):
        simulate(jobs or [job("a", 0, 1, 3), job("b", 0, 1, 3), job("late", 50, 1, 3)], cluster, named(decide), FREE)


def test_decisions_that_cannot_be_carried_out():
    def start(*groups, stop=()):
        return lambda view: Assignment(stop, groups)

    refused(start(), "leaves jobs waiting")
    refused(start(Group((Member(0, (0,)),)), Group((Member(1, (0,)),))), "devices that are not free")
    refused(start(Group((Member(0, (7,)),))), "devices that are not free")
    refused(start(Group((Member(0, (0, 1)),))), "another number of devices")
    refused(start(Group((Member(2, (0,)),))), "has not arrived")
    refused(start(stop=(9,)), "that does not run")
    refused(start(Group((Member(0, (0,)),), "no-such")), "no discipline of this name")
    heavy = JobProfile.uniform("heavy", 1.0, memory_bytes=60)
    full = [job("a", 0, 1, 3, heavy), job("b", 0, 1, 3, heavy)]
    shared = Group((Member(0, (0,)), Member(1, (0,))), "test-in-turns")
    refused(start(shared), "need 90 of its 80 bytes", cluster=Cluster(1, 2, 80), jobs=full)
    assert (
        simulate(
            full,
            Cluster(1, 2, 90),
            named(lambda view: start(shared)(view) if len(view.active) == 2 else Assignment()),
            FREE,
        ).makespan
        > 3
    )


def test_jobs_that_no_policy_can_run():
    with pytest.raises(ScheduleError, match="wants 3 devices, the cluster has 2"):
        simulate([job("a", 0, 3, 1)], TWO, "gang-fifo")
    with pytest.raises(ScheduleError, match="needs 60 bytes of a device's 50"):
        simulate([job("a", 0, 1, 1, JobProfile.uniform("heavy", 1.0, memory_bytes=60))], Cluster(1, 2, 50), "gang-fifo")
    with pytest.raises(ScheduleError, match="there is no job"):
        simulate([], TWO, "gang-fifo")
    with pytest.raises(ScheduleError, match="times are finite"):
        Options(restart_seconds=math.inf)


def test_many_jobs_are_quick():
    # A queue of thousands: Python work on each of them at every event would take minutes.
    sizes = [job(str(number), 0, 1 + number % 8, 50 + number % 97) for number in range(1500)]
    jobs = generate(sizes, Cluster(4, 8), load=3.0, seed=0)
    result = simulate(jobs, Cluster(4, 8), "gang-srtf")
    assert result.busy_part.rate > 0.5 and len(result.records) == 1500


def test_comparison_adds_the_gang_policy_of_the_same_order():
    jobs = [job(str(number), number, 1 + number % 2, 30) for number in range(8)]
    started = []
    found = compare(
        jobs, TWO, ["gang-srtf", "gang-las"], Options(restart_seconds=1.0, spans=True), on_start=started.append
    )
    assert started == ["gang-srtf", "gang-las"]
    figures = found.to_json()
    assert (
        list(figures) == started
        and figures["gang-las"]["baseline"] == "gang-las"
        and figures["gang-las"]["iteration_efficiency"] == 1.0
    )
    assert {"avg_jct", "p99_jct", "makespan", "busy", "iteration_efficiency", "cost_efficiency", "bound"} <= set(
        figures["gang-srtf"]
    )
    assert all(name in str(found) for name in started)
    with pytest.raises(ScheduleError, match="no policy of this name"):
        compare(jobs, TWO, ["gang-srtf", "nope"])


def test_an_idle_cluster_has_no_efficiency():
    figures = simulate([job("a", 0, 1, 3)], TWO, "gang-fifo").figures()
    assert figures["iteration_efficiency"] is None and figures["bound"] is None and figures["busy_part_seconds"] == 0


def test_gantt_chart(tmp_path):
    pytest.importorskip("matplotlib")
    jobs = [job("a", 0, 1, 10), job("b", 0, 2, 10)]
    result = simulate(jobs, TWO, "gang-fifo", Options(restart_seconds=0.0, spans=True))
    picture = gantt(result, 20)
    assert (
        picture.shape == (2, 20)
        and set(picture[0, :10]) == {2}
        and set(picture[1, :10]) == {0}
        and set(picture[:, 10:].ravel()) == {9}
    )
    write_plot(tmp_path / "p.png", [result])
    assert (tmp_path / "p.png").stat().st_size > 5000
    with pytest.raises(ScheduleError, match="cannot be written"):
        write_plot(tmp_path / "p.nonsense", [result])


def test_greys_of_a_gantt_chart_stay_lighter_than_black_and_darken_with_every_job():
    spans = tuple(Span(tuple(range(count)), (0,), float(count), count + 1.0) for count in range(1, 13))
    result = dataclasses.replace(simulate([job("a", 0, 1, 1)], TWO, "gang-fifo"), spans=spans)
    picture = gantt_colours(result, 13)
    assert picture.min() >= 0 and picture.max() <= 1 and (picture[1] == 1).all()
    greys = picture[0, 2:]
    # six on: eight jobs
    assert (greys == greys[:, :1]).all() and (np.diff(greys[:, 0]) < 0).all() and greys[6, 0] > 0.3


def test_a_job_left_alone_in_a_wide_group_is_drawn_on_as_many_devices_as_it_has_workers():
    cluster = Cluster(4, 4)
    jobs = [job(str(number), 0, 2, 40 + 160 * (number == 0)) for number in range(16)]
    for exact in (False, True):
        result = simulate(jobs, cluster, "jigsaw", Options(restart_seconds=0.0, spans=True, exact=exact))
        alone = [span for span in result.spans if span.jobs == (0,)]
        assert alone and all(len(span.devices) <= 2 for span in alone)
    # Nor does the discipline move it about: its iterations are on these devices.
    group = Group((Member(0, (3, 4), (5, 6, 7)),), "jigsaw")
    state = start_state(group, jobs[:1])
    for _ in range(5):
        iteration = get_discipline("jigsaw").next_iteration(group, jobs[:1], state)
        state = advance(group, state, iteration)
        assert {task.device for task in iteration.tasks} == {3, 4} == set(group.computing_devices)


@pytest.mark.parametrize(
    ("seconds", "unit"), [(36, "seconds"), (119, "seconds"), (120, "minutes"), (7000, "minutes"), (7200, "hours")]
)
def test_an_axis_has_the_unit_that_suits_its_span(seconds, unit):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    assert time_unit(seconds)[1] == unit
    axes = Figure().subplots()
    result = simulate([job("a", 0, 1, 10)], TWO, "gang-fifo", Options(spans=True))
    draw_gantt(axes, result, end_seconds=seconds)
    assert axes.get_xlabel() == unit and 2 <= axes.get_xlim()[1] < 120


def test_what_runs_after_a_decision():
    seen = []

    def spy(view):
        decision = gang(view, view.remaining_seconds)
        seen.append((view.active.tolist(), runs_after(view, decision).tolist()))
        return decision

    simulate([job("a", 0, 2, 10), job("b", 2, 2, 3)], TWO, named(spy), FREE)
    assert seen[:3] == [([0], [True]), ([0, 1], [False, True]), ([0], [True])]
