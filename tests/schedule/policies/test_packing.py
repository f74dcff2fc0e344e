"""Policies that share devices: what they place by the iteration, that steady rates are those of the iterations, and
what never happens."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from splitjax.errors import ScheduleError
from splitjax.schedule import (
    Assignment,
    Cluster,
    Group,
    Job,
    JobProfile,
    Member,
    Options,
    Policy,
    Stages,
    get,
    names,
    simulate,
)
from splitjax.schedule.model.discipline import get_discipline
from splitjax.schedule.model.iterations import Mark, advance, measure_rates, settled, start_state
from splitjax.schedule.model.jobs import resident_bytes
from splitjax.schedule.policies.muri import efficiency, interleave
from splitjax.schedule.simulation.optimal import compare_round
from tests.schedule.helpers import finishes, job

FREE = Options(restart_seconds=0.0)
FOUR = JobProfile.uniform("four", 1.2, num_depths=4)  # forward 0.4; backward 0.2 to 0.8: tasks of 1.2, 1, 0.8, 0.6
COMM = JobProfile.uniform("comm", 1.0, num_depths=4, exposed_fraction=0.2)
FAST = JobProfile.uniform("fast", 0.35, exposed_fraction=0.1)
PACKING = [name for name in names() if name.startswith(("jigsaw", "interleave"))]
OURS = [name for name in names() if not name.startswith("gang-")]


def group(jobs, num_devices, discipline="jigsaw", option=None):
    devices = tuple(range(num_devices))
    return Group(
        tuple(
            Member(number, tuple(devices[worker % num_devices] for worker in range(one.num_workers)), devices)
            for number, one in enumerate(jobs)
        ),
        discipline,
        option,
    )


def run(jobs, num_devices, count, discipline="jigsaw"):
    """The first iterations of a group, and the state after them."""
    shared = group(jobs, num_devices, discipline)
    state, found = start_state(shared, jobs), []
    for _ in range(count):
        found.append(get_discipline(discipline).next_iteration(shared, jobs, state))
        state = advance(shared, state, found[-1])
    return found, state


# Iterations


def test_longest_tasks_come_first_onto_the_device_that_frees_earliest():
    (iteration, second), _ = run([job("a", 0, 4, 9, FOUR)], 2, 2)
    spans = {task.depth: (task.device, task.start_seconds, task.end_seconds) for task in iteration.tasks}
    assert spans[0] == (0, 0.0, pytest.approx(1.2)) and spans[1] == (1, 0.0, pytest.approx(1.0))
    # device 1 frees first, so it gets the longer rest
    assert spans[2][0] == 1 and spans[2][1:] == pytest.approx((1.0, 1.8))
    assert spans[3][0] == 0 and spans[3][1:] == pytest.approx((1.2, 1.8))
    assert iteration.ready_seconds == pytest.approx(1.8)  # no hole: 3.6 s of tasks on 2 devices
    deep = [next(task for task in one.tasks if task.depth == 0) for one in (iteration, second)]
    assert deep[0].device != deep[1].device and deep[0].worker != deep[1].worker  # nobody is always deep


def test_all_reduce_is_hidden_behind_another_job():
    jobs = [job("a", 0, 2, 9, COMM), job("b", 0, 2, 9, COMM)]
    alone, both = (
        get_discipline("interleave").rates(group(some, 2, "interleave"), some, Cluster(1, 2))
        for some in (jobs[:1], jobs)
    )
    assert alone.iterations_per_second == pytest.approx([1.0])
    # 0.8 s of computing each: the devices never wait
    assert sum(both.iterations_per_second) * 0.8 == pytest.approx(1.0, rel=0.01)


def test_four_jobs_fit_three_quarters_of_their_devices_at_full_speed():
    jobs = [job(str(number), 0, 4, 9, FOUR) for number in range(4)]
    rates = get_discipline("jigsaw").rates(group(jobs, 12), jobs, Cluster(2, 6))
    assert rates.iterations_per_second == pytest.approx([1 / 1.2] * 4, rel=0.01)  # phi(4) = 3/4
    assert rates.credit == pytest.approx([0.75] * 4) and rates.device_seconds == pytest.approx([3.6] * 4)


def test_depths_are_real_cuts_rounded_up():
    coarse = JobProfile.uniform("coarse", 1.0, num_depths=2)
    (iteration,), _ = run([job("a", 0, 4, 9, coarse)], 4, 1)
    # for 1/4, 1/2, 3/4, 1
    assert sorted(coarse.depths[task.depth].fraction for task in iteration.tasks) == [0.5, 0.5, 1.0, 1.0]


def test_stages_of_other_resources_are_kept_too():
    heavy = JobProfile.uniform("heavy", 1.0, num_depths=4, exposed_fraction=0.8, stages=Stages(0.0, 0.8, 0.2, 0.0))
    jobs = [job(str(number), 0, 1, 9, heavy) for number in range(3)]
    rates = get_discipline("jigsaw").rates(group(jobs, 1), jobs, Cluster(1, 1))
    # the CPU, not the device, is what they share
    assert sum(rates.iterations_per_second) == pytest.approx(1 / 0.8, rel=0.02)


def test_muri_interleaves_complementary_stages_and_leaves_alike_ones_alone():
    first, second = (0.0, 0.5, 0.1, 0.0), (0.0, 0.1, 0.5, 0.0)
    # 0.5 with 0.5, then 0.1 alone, 0.1 alone: all go on together
    assert interleave((first, second))[0] == pytest.approx(0.7)
    assert efficiency((first, second)) > efficiency((first, first))
    profiles = [
        JobProfile.uniform(str(times), sum(times), exposed_fraction=1 - times[2] / sum(times), stages=Stages(*times))
        for times in (first, second)
    ]
    jobs = [job(str(number), 0, 2, 200, profiles[number % 2]) for number in range(4)]
    shared = finishes(simulate(jobs, Cluster(1, 2), "muri-s", FREE))
    alone = finishes(simulate(jobs, Cluster(1, 2), "gang-srsf", FREE))
    assert max(shared.values()) < 0.9 * max(alone.values())
    same = [job(str(number), 0, 2, 200) for number in range(2)]  # nothing but computing
    assert finishes(simulate(same, Cluster(1, 2), "muri-s", FREE)) == finishes(
        simulate(same, Cluster(1, 2), "gang-srsf", FREE)
    )


def test_partial_backpropagation_alone_saves_nothing_temporal_does():
    jobs = [job("a", 0, 4, 100, FOUR)]
    assert finishes(simulate(jobs, Cluster(1, 4), "spb", FREE))["a"] == pytest.approx(120)
    assert finishes(simulate(jobs, Cluster(1, 4), "temporal-spb", FREE))["a"] == pytest.approx(90)


@pytest.mark.parametrize("exact", [False, True])
def test_a_shallow_iteration_exchanges_for_as_long_as_a_full_one(exact):
    # depths of 1.2, 1, 0.8, 0.6 s
    hidden = dataclasses.replace(FOUR, stages=Stages(device_seconds=1.2, network_seconds=1.1))
    made = simulate(
        [job("a", 0, 4, 100, hidden)], Cluster(1, 4), "temporal-spb", dataclasses.replace(FREE, exact=exact)
    )
    assert finishes(made)["a"] == pytest.approx(25 * (1.2 + 3 * 1.1))


# Steady rates and exact mode

members = st.lists(st.tuples(st.integers(1, 5), st.sampled_from([FOUR, COMM, FAST])), min_size=1, max_size=4)
# on six devices: "comm" waits for 24 s, until the others have caught up, then all take turns
CHANGES = [(1, FAST), (5, COMM), (5, FAST), (5, FAST)]


@settings(max_examples=25, deadline=None)
@given(members, st.integers(1, 9), st.sampled_from(["jigsaw", "interleave"]))
@example(CHANGES, 6, "interleave")
def test_steady_rates_are_those_of_the_iterations(shapes, num_devices, discipline):
    jobs = [job(str(number), 0, workers, 9, profile) for number, (workers, profile) in enumerate(shapes)]
    shared = group(jobs, num_devices, discipline)
    steady = get_discipline(discipline).rates(shared, jobs, Cluster(1, num_devices))
    measured = measure_rates(get_discipline(discipline).next_iteration, shared, jobs)
    assert steady.iterations_per_second == pytest.approx(measured.iterations_per_second, rel=1e-6)
    assert steady.device_seconds == pytest.approx(measured.device_seconds, rel=1e-6) and steady.credit == pytest.approx(
        measured.credit, rel=1e-6
    )
    # No device computes more than all the time, and no job is faster than alone.
    assert sum(
        rate * busy for rate, busy in zip(measured.iterations_per_second, measured.device_seconds)
    ) <= num_devices * (1 + 1e-9)
    assert all(
        rate <= 1 / one.profile.iteration_seconds * (1 + 1e-9)
        for rate, one in zip(measured.iterations_per_second, jobs)
    )


def long_run(shared, jobs):
    """Iterations per second of a group's members once the slowest has done 300, until it has done 300 more."""
    jobs = [dataclasses.replace(one, num_iterations=10**6) for one in jobs]
    state, marks = start_state(shared, jobs), []
    for least in (300, 600):
        while min(state.iterations) < least:
            state = advance(shared, state, get_discipline(shared.discipline).next_iteration(shared, jobs, state))
        marks.append(state)
    before, after = marks
    return [
        (now - then) / (end - start)
        for then, now, start, end in zip(before.iterations, after.iterations, before.ready_seconds, after.ready_seconds)
    ]


@pytest.mark.parametrize("seed", [None, *range(12)])
def test_steady_rates_are_those_of_the_long_run(seed):
    random = np.random.default_rng(seed)
    shapes, num_devices, discipline = CHANGES, 6, "interleave"
    if seed is not None:
        shapes = [
            (int(random.integers(1, 6)), (FOUR, COMM, FAST)[random.integers(3)]) for _ in range(random.integers(2, 5))
        ]
        num_devices, discipline = int(random.integers(1, 10)), ("jigsaw", "interleave")[seed % 2]
    jobs = [job(str(number), 0, workers, 9, profile) for number, (workers, profile) in enumerate(shapes)]
    shared = group(jobs, num_devices, discipline)
    steady = get_discipline(discipline).rates(shared, jobs, Cluster(1, num_devices))
    assert steady.iterations_per_second == pytest.approx(long_run(shared, jobs), rel=0.03)


def test_rates_settle_where_two_windows_agree_or_at_the_last_mark():
    def marks(*rates):
        found, now = [Mark((0,), (0.0,))], 0.0
        for rate in rates:
            now += 1 / rate
            found.append(Mark((found[-1].done[0] + 1,), (now,)))
        return found

    assert settled(marks(1.0)) is None and settled(marks(1.0, 1.1)) is None
    same = marks(2.0, 1.0, 1.01)
    assert settled(same) == (same[1], same[3])
    never = marks(1.0, 2.0, 1.0, 2.0, 1.0, 2.0)
    assert all(settled(never[:count]) is None for count in range(7)) and settled(never) == (never[5], never[6])


@settings(max_examples=25, deadline=None)
@given(members, st.integers(1, 6), st.integers(1, 40))
def test_no_device_computes_two_tasks_at_once_and_nobody_starves(shapes, num_devices, count):
    jobs = [job(str(number), 0, workers, 1000, profile) for number, (workers, profile) in enumerate(shapes)]
    found, state = run(jobs, num_devices, count)
    spans: dict[int, list[tuple[float, float]]] = {}
    for iteration in found:
        assert sorted(task.worker for task in iteration.tasks) == list(range(jobs[iteration.member].num_workers))
        for task in iteration.tasks:
            spans.setdefault(task.device, []).append((task.start_seconds, task.end_seconds))
    for tasks in spans.values():
        assert all(end <= start + 1e-9 for (_, end), (start, _) in zip(sorted(tasks), sorted(tasks)[1:]))
    # the slowest of four is 3.4 times as long as the fastest: 14 iterations serve everybody
    assert count < 20 or min(state.iterations) >= 1


@pytest.mark.parametrize("name", ["jigsaw", "jigsaw-las", "jigsaw-fifo", "spb", "temporal-spb", "muri-s"])
def test_steady_and_exact_runs_agree(name):
    random = np.random.default_rng(1)
    jobs = [
        job(
            str(number),
            number * 15.0,
            int(random.choice([1, 2, 4, 8])),
            int(random.integers(150, 500)),
            (FOUR, COMM)[number % 2],
        )
        for number in range(10)
    ]
    steady, exact = (
        simulate(jobs, Cluster(2, 4), name, dataclasses.replace(FREE, exact=mode)) for mode in (False, True)
    )
    assert steady.avg_jct == pytest.approx(exact.avg_jct, rel=0.06)
    assert steady.makespan == pytest.approx(exact.makespan, rel=0.06)


# Whole runs

traces = st.lists(
    st.tuples(
        st.floats(0, 2000),
        st.sampled_from([1, 1, 2, 3, 4, 8]),
        st.integers(1, 2000),
        st.integers(0, 1),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=24,
)


def watched(policy: Policy, cluster: Cluster, jobs):
    """The policy, with its groups' memory checked; the simulator itself refuses devices in two groups."""

    def decide(view):
        decision = policy.decide(view)
        for one in decision.start:
            for device in one.devices:
                here = [
                    jobs[member.job].profile for member in one.members if device in (*member.devices, *member.resident)
                ]
                assert resident_bytes(here) <= cluster.memory_bytes
        return decision

    return dataclasses.replace(policy, decide=decide)


@settings(max_examples=40, deadline=None)
@given(traces, st.sampled_from(OURS))
# Jobs that gain nothing by packing, more of them than there are devices.
@example([(0.0, 3, 1000, 0, 0), (0.0, 4, 1000, 0, 0), (0.0, 2, 500, 0, 0)], "interleave-fifo")
@example([(0.0, 8, 2000, 0, 0), (0.0, 4, 1000, 1, 4), (0.0, 2, 500, 0, 4)], "interleave")
def test_every_job_ends_within_memory_and_below_the_bound(rows, name):
    cluster = Cluster(2, 4, memory_bytes=100)
    profiles = [
        JobProfile.uniform(
            f"{kind} {size}", 1.0 + kind / 2, num_depths=8, exposed_fraction=0.15 * kind, memory_bytes=20 * size
        )
        for kind in (0, 1)
        for size in range(5)
    ]
    jobs = [
        Job(str(number), arrival, workers, iterations, profiles[kind * 5 + size])
        for number, (arrival, workers, iterations, kind, size) in enumerate(rows)
    ]
    result = simulate(jobs, cluster, watched(get(name), cluster, jobs), Options(restart_seconds=5.0))
    assert all(record.finish_seconds > record.arrival_seconds for record in result.records)
    for part in (result.total, result.busy_part):
        assert not part.seconds or part.rate <= part.bound * (1 + 1e-9)
        assert part.busy_device_seconds <= part.device_seconds * (1 + 1e-9)
    assert result.total.finished_device_seconds == pytest.approx(sum(one.device_seconds for one in jobs), rel=1e-6)


seconds = st.floats(0.01, 2.0)


@st.composite
def profile(draw, with_stages):
    """Times of no common measure, as measured ones are."""
    stages = (
        Stages(*draw(st.tuples(*[st.one_of(st.just(0.0), seconds)] * 2, seconds, st.one_of(st.just(0.0), seconds))))
        if with_stages
        else None
    )
    if not stages:
        return JobProfile.uniform(
            "some",
            draw(seconds),
            num_depths=draw(st.integers(1, 6)),
            exposed_fraction=draw(st.sampled_from([0.0, 0.1, 0.4, 0.9])),
        )
    # stages overlap, or not, or there is waiting besides
    whole = draw(st.floats(max(stages.seconds), 1.5 * sum(stages.seconds)))
    return JobProfile.uniform(
        "some",
        whole,
        num_depths=draw(st.integers(1, 6)),
        exposed_fraction=1 - stages.device_seconds / whole,
        stages=stages,
    )


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from(OURS))
def test_no_policy_gets_more_from_devices_than_there_is(data, with_stages, exact, name):
    # Without restarts nothing hides rates that are too high.
    shapes = data.draw(
        st.lists(
            st.tuples(st.integers(1, 5), st.integers(1, 20 if exact else 2000), profile(with_stages)),
            min_size=1,
            max_size=6,
        )
    )
    jobs = [job(str(number), 0, *shape) for number, shape in enumerate(shapes)]
    result = simulate(jobs, Cluster(1, data.draw(st.integers(5, 8))), name, dataclasses.replace(FREE, exact=exact))
    for one, record in zip(jobs, result.records):  # and no job is faster than alone
        assert name.startswith(
            "temporal"
        ) or record.finish_seconds >= one.num_iterations * one.profile.iteration_seconds * (1 - 1e-9)
    for part in (result.total, result.busy_part):
        assert not part.seconds or (
            part.rate <= part.bound * (1 + 1e-9) and part.busy_device_seconds <= part.device_seconds * (1 + 1e-9)
        )


def test_packing_beats_gangs_when_the_cluster_is_asked_for_more():
    random = np.random.default_rng(3)
    jobs = [
        job(str(number), 0, int(random.choice([2, 4, 8])), int(random.integers(2000, 9000)), FOUR)
        for number in range(40)
    ]
    for order, suffix in (("srtf", ""), ("las", "-las"), ("fifo", "-fifo")):
        base = simulate(jobs, Cluster(4, 4), f"gang-{order}")
        packed = simulate(jobs, Cluster(4, 4), f"jigsaw{suffix}")
        bound = packed.bound(base)
        assert 1 + 0.7 * (bound - 1) <= packed.iteration_efficiency(base) <= bound


def test_all_is_grouped_anew_only_where_that_gains():
    # 4 + 3 workers of jobs of one and two, on 6 devices: what runs alone keeps whole devices however often all is
    # grouped.
    starts = []
    jobs = [job(str(number), number * 10.0, workers, 9000, FOUR) for number, workers in enumerate((2, 2, 1, 1, 1))]

    def decide(view):
        decision = get("jigsaw").decide(view)
        starts.append(len(decision.start))
        return dataclasses.replace(decision, wake_seconds=min(decision.wake_seconds, view.now_seconds + 100))

    simulate(jobs, Cluster(1, 6), dataclasses.replace(get("jigsaw"), decide=decide))
    assert len(starts) > 50 and sum(starts) <= 12


def test_steady_rates_are_kept_by_the_number_of_devices():
    # Two tasks of a job on each of two devices, then one on each of four: the same job, discipline and node.
    job_of_four = job("a", 0, 4, 100, FOUR)

    def decide(view):
        if not len(view.active):
            return Assignment()
        devices = (0, 1, 0, 1) if view.now_seconds < 50 else (0, 1, 2, 3)
        return Assignment(
            tuple(view.groups), (Group((Member(0, devices),), "jigsaw"),), 50.0 if view.now_seconds < 50 else math.inf
        )

    result = simulate([job_of_four], Cluster(1, 4), Policy("moves", decide, "", "", "", ""), FREE)
    assert result.makespan == pytest.approx(50 + (100 - 50 / 1.8) * 1.2)


def test_jobs_of_one_device_neither_gain_nor_block():
    jobs = [job(str(number), 0, 1, 500) for number in range(12)]
    packed, gangs = (simulate(jobs, Cluster(1, 4), name, FREE) for name in ("jigsaw", "gang-srtf"))
    assert packed.makespan == pytest.approx(gangs.makespan)


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_few_devices_are_shared_too(num_devices):
    jobs = [job(str(number), 0, num_devices, 400, (FOUR, COMM)[number % 2]) for number in range(4)]
    base, packed = (simulate(jobs, Cluster(1, num_devices), name, FREE) for name in ("gang-fifo", "jigsaw-fifo"))
    assert packed.busy > 0.85 and packed.makespan < 0.87 * base.makespan


# The optimum


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0.5, 0.7, 1.0])), min_size=1, max_size=4), st.integers(1, 3)
)
def test_list_schedule_is_near_the_optimum(shapes, num_devices):
    jobs = [
        job(str(number), 0, workers, 9, JobProfile.uniform("x", seconds, num_depths=4))
        for number, (workers, seconds) in enumerate(shapes)
    ]
    found = compare_round(jobs, num_devices)
    assert found.floor_seconds <= found.optimal_seconds * (1 + 1e-6) and found.optimal_seconds <= found.list_seconds * (
        1 + 1e-6
    )
    assert found.gap <= 1 - 1 / num_devices + 1e-6  # Graham: any list schedule is within 2 - 1/devices


def test_optimum_of_a_known_case():
    two = JobProfile.uniform("two", 3.0, num_depths=2)  # tasks of 3 and 2
    found = compare_round([job("a", 0, 2, 9, two), job("b", 0, 2, 9, two)], 2)
    assert (found.optimal_seconds, found.list_seconds, found.floor_seconds) == pytest.approx((5.0, 5.0, 5.0))
    with pytest.raises(ScheduleError, match="few tasks"):
        compare_round([job("a", 0, 65, 9)], 4)
