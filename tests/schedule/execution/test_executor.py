"""Real execution with workers that are threads: tokens, preemption, deaths, and what disciplines are told."""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import itertools

import numpy as np
import pytest

from splitjax.errors import ScheduleError
from splitjax.schedule import (
    Assignment,
    Cluster,
    Depth,
    ExecutionOptions,
    Group,
    Iteration,
    JobProfile,
    Member,
    Policy,
    RayEngine,
    Stages,
    Task,
    ThreadEngine,
    discipline,
    execute,
    names,
    simulate,
)
from splitjax.schedule.execution import granted
from splitjax.schedule.execution.real_groups import pinned
from splitjax.schedule.execution.tokens import Tokens
from splitjax.schedule.model.jobs import CPU, DEVICE, NETWORK, STORAGE
from tests.schedule.toys import PROFILE, Toy, job

TWO = Cluster(1, 2)


def policy(decide, name: str = "test") -> Policy:
    return Policy(name, decide, "", "", "fifo", "gang-fifo")


@discipline("test-turns")
def turns(group, jobs, state):
    """The member with the fewest iterations; worker 0 at full depth, others at the shallowest, on whichever device is
    free first."""
    member = min(
        (number for number, left in enumerate(state.remaining_iterations) if left > 0),
        key=lambda number: (state.iterations[number], number),
    )
    place = {device: index for index, device in enumerate(group.devices)}
    tasks = []
    for worker, device in enumerate(group.members[member].devices):
        depth = 0 if worker == 0 else len(jobs[member].profile.depths) - 1
        start = max(state.now_seconds, state.ready_seconds[member], state.free_seconds[place[device]][DEVICE])
        tasks.append(Task(worker, device, depth, start, jobs[member].profile.task_seconds(depth)))
    return Iteration(
        member, tuple(tasks), max(task.end_seconds for task in tasks) + jobs[member].profile.exposed_seconds
    )


@discipline("test-stages")
def stages(group, jobs, state):
    """As above, one task per resource."""
    member = min(
        (number for number, left in enumerate(state.remaining_iterations) if left > 0),
        key=lambda number: (state.iterations[number], number),
    )
    place = {device: index for index, device in enumerate(group.devices)}
    tasks, ready = [], 0.0
    for worker, device in enumerate(group.members[member].devices):
        end = max(state.now_seconds, state.ready_seconds[member])
        for resource in (STORAGE, CPU, DEVICE, NETWORK):
            start = max(end, state.free_seconds[place[device]][resource])
            tasks.append(Task(worker, device, 0, start, 0.005, resource))
            end = start + 0.005
        ready = max(ready, end)
    return Iteration(member, tuple(tasks), ready)


def together(view):
    """All jobs that are there in one group."""
    members = tuple(
        Member(int(number), tuple(range(int(workers)))) for number, workers in zip(view.active, view.num_workers)
    )
    if len(view.groups) == 1 and {member.job for group in view.groups.values() for member in group.members} == {
        member.job for member in members
    }:
        return Assignment()
    return Assignment(tuple(view.groups), (Group(members, "test-turns"),) if members else ())


def names_in_order(execution, device: int) -> list[tuple[str, int]]:
    records = sorted(
        (one for one in execution.tasks if one.device == device and one.resource == DEVICE),
        key=lambda one: one.start_seconds,
    )
    return [(one.job, one.number) for one in records]


def overlaps(execution) -> list:
    found = []
    by_place = collections.defaultdict(list)
    for one in execution.tasks:
        by_place[one.device, one.resource].append((one.start_seconds, one.end_seconds, one.job))
    for records in by_place.values():
        records.sort()
        found += [pair for pair in itertools.pairwise(records) if pair[1][0] < pair[0][1]]
    return found


@pytest.mark.parametrize("name", ["gang-fifo", "gang-srtf"])
def test_a_gang_policy_runs_jobs_as_it_does_in_simulation(name: str) -> None:
    jobs = [job("long", num_iterations=12), job("short", 1, 4, 0.05), job("other", 1, 5, 0.05)]
    programs = {one.name: Toy() for one in jobs}
    execution = execute(jobs, programs, TWO, name, ThreadEngine())
    assert not execution.failed and set(execution.restarts.values()) == {0}
    assert not overlaps(execution)
    for one in jobs:
        done = [number for _, worker, number, _ in programs[one.name].log if worker == 0]
        assert done == list(range(1, one.num_iterations + 1))
        assert execution.metrics[one.name] == {"loss": sum(done)}
        assert programs[one.name].saved[-1] == one.num_iterations
    simulated = simulate(jobs, TWO, name)
    assert [record.name for record in sorted(execution.result.records, key=lambda record: record.finish_seconds)][
        0
    ] == (
        "long" if name == "gang-fifo" else sorted(simulated.records, key=lambda record: record.finish_seconds)[0].name
    )
    worth = sum(one.device_seconds for one in jobs)
    assert execution.result.total.finished_device_seconds == pytest.approx(worth)
    assert 0 < execution.result.busy <= 1


def test_shortest_job_first_preempts_by_a_checkpoint_and_goes_on_from_it() -> None:
    jobs = [job("long", num_iterations=60), job("short", 2, 4, 0.1)]
    programs = {one.name: Toy() for one in jobs}
    execution = execute(jobs, programs, TWO, "gang-srtf", ThreadEngine())
    long, short = execution.result.records
    assert short.finish_seconds < long.finish_seconds and long.num_starts == 2 and short.num_starts == 1
    first = programs["long"].saved[0]
    assert 0 < first < 60 and programs["long"].saved[-1] == 60
    # none twice, none left out
    assert [number for _, worker, number, _ in programs["long"].log if worker == 0] == list(range(1, 61))
    assert execution.metrics["long"] == {"loss": 60 * 61 / 2}
    assert execution.restarts == {"long": 0, "short": 0}


def test_tasks_of_different_depths_fill_each_others_holes_in_one_order_on_all_devices() -> None:
    jobs = [job("a"), job("b"), job("c", 1)]
    programs = {one.name: Toy(overlap=False) for one in jobs}
    execution = execute(jobs, programs, TWO, policy(together), ThreadEngine())
    assert not overlaps(execution) and not execution.failed
    order = [names_in_order(execution, device) for device in (0, 1)]
    shared = set(order[0]) & set(order[1])
    assert len(shared) == 12
    assert [one for one in order[0] if one in shared] == [one for one in order[1] if one in shared]
    assert {(number % 2, depths) for _, _, number, depths in programs["a"].log} == {(1, (0.5, 1.0)), (0, (1.0, 0.5))}
    work = execution.result.total
    assert (
        work.credited_device_seconds
        < work.finished_device_seconds
        == pytest.approx(sum(one.device_seconds for one in jobs))
    )


@pytest.mark.parametrize("name", names())
def test_every_policy_runs_for_real(name: str) -> None:
    staged = dataclasses.replace(PROFILE, name="staged", stages=Stages(0.002, 0.002, 0.01, 0.002))
    jobs = [job("a", 2, 4, profile=staged), job("b", 1, 4, 0.02), job("c", 2, 4, 0.02, profile=staged)]
    programs = {one.name: Toy(seconds=0.002) for one in jobs}
    execution = execute(jobs, programs, TWO, name, ThreadEngine())
    assert not execution.failed and not overlaps(execution)
    assert execution.metrics == {one.name: {"loss": 10.0} for one in jobs}


class OpposedTokens(Tokens):
    """As if every device chose by itself: odd devices take the newest first of what has not begun there."""

    def grant(self, grant) -> None:
        for claim in grant.all_claims():
            queue = self._queues.setdefault(claim.place, collections.deque())
            begun = sum(one.started is not None for one in queue)
            queue.insert(begun if claim.task.device % 2 else len(queue), claim)


@pytest.mark.parametrize("tokens", [Tokens, OpposedTokens])
def test_opposed_orders_deadlock_without_the_global_order_and_not_with_it(
    tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first job leaves devices 0 and 2 before device 1. The second runs on both, gives 0 back early, and the third
    begins there; on 1 both wait, and with opposed orders the third comes first. It holds 1 and waits in its exchange
    for 2, which the second holds until it has been on 1; they give up in the end."""
    monkeypatch.setattr(granted, "Tokens", tokens)
    # each worker of the first is the deep one once
    jobs = [job("first", 3, 3), job("second", 3, 5), job("third", 3, 5)]
    programs = {one.name: Toy(overlap=(0,), patience_seconds=20.0 if tokens is Tokens else 0.5) for one in jobs}
    programs["first"].seconds, programs["first"].overlap = 0.3, True
    execution = execute(
        jobs, programs, Cluster(1, 3), policy(together), ThreadEngine(), ExecutionOptions(max_restarts=0)
    )
    if tokens is Tokens:
        assert not execution.failed
    else:
        assert set(execution.failed) & {"second", "third"} and all(
            "BrokenBarrier" in reason for reason in execution.failed.values()
        )


def test_a_job_that_dies_begins_again_from_its_checkpoint_and_the_others_do_not_notice() -> None:
    jobs = [job("a", num_iterations=30), job("b", num_iterations=12), job("c", num_iterations=12)]
    programs = {one.name: Toy(patience_seconds=60) for one in jobs}
    programs["a"].dies = {(0, 1): 20, (2, 0): 25}
    execution = execute(
        jobs, programs, TWO, policy(together), ThreadEngine(), ExecutionOptions(checkpoint_every_seconds=0.1)
    )
    assert execution.restarts == {"a": 2, "b": 0, "c": 0} and not execution.failed
    assert execution.metrics == {"a": {"loss": 465.0}, "b": {"loss": 78.0}, "c": {"loss": 78.0}}
    restored = [number for attempt, worker, number, _ in programs["a"].log if attempt == 2 and worker == 0][0]
    assert 1 < restored <= 20 and restored - 1 in programs["a"].saved  # from a checkpoint, not from the beginning
    for name in "bc":
        assert [number for _, worker, number, _ in programs[name].log if worker == 0] == list(range(1, 13))
    records = {record.name: record for record in execution.result.records}
    assert records["a"].num_starts == 3 and records["b"].num_starts == records["c"].num_starts == 1
    worth = sum(one.device_seconds for one in jobs)
    assert execution.result.total.finished_device_seconds == pytest.approx(worth)  # what was lost is not counted


def test_a_job_that_always_dies_is_given_up_and_the_others_finish() -> None:
    jobs = [job("a", num_iterations=5), job("b", num_iterations=5)]
    programs = {"a": Toy(dies={(attempt, 0): 2 for attempt in range(9)}), "b": Toy()}
    execution = execute(jobs, programs, TWO, "gang-fifo", ThreadEngine(), ExecutionOptions(max_restarts=1))
    assert "killed by the test" in execution.failed["a"] and set(execution.failed) == {"a"}
    assert execution.restarts["a"] == 2 and execution.metrics["b"] == {"loss": 15.0}


def test_a_worker_that_does_not_answer_counts_as_dead() -> None:
    programs = {"a": Toy(hangs={(0, 1): 3}, patience_seconds=60)}
    execution = execute(
        [job("a", num_iterations=4)], programs, TWO, "gang-fifo", ThreadEngine(), ExecutionOptions(stall_seconds=1.0)
    )
    assert execution.restarts == {"a": 1} and execution.metrics["a"] == {"loss": 10.0}


def test_stages_have_tokens_of_their_own_and_overlap_those_of_other_jobs() -> None:
    jobs = [job("a", num_iterations=8), job("b", num_iterations=8)]
    programs = {one.name: Toy() for one in jobs}

    def decide(view):
        if view.groups or not len(view.active):
            return Assignment()
        return Assignment((), (Group(tuple(Member(int(number), (0, 1)) for number in view.active), "test-stages"),))

    execution = execute(jobs, programs, TWO, policy(decide), ThreadEngine())
    assert not execution.failed and not overlaps(execution)
    assert sorted(programs["a"].stages) == sorted(
        (worker, number, resource) for worker in (0, 1) for number in range(1, 9) for resource in (STORAGE, CPU)
    )
    chains = collections.defaultdict(list)
    for one in execution.tasks:
        chains[one.job, one.worker, one.number].append((one.start_seconds, one.end_seconds, one.resource))
    for chain in chains.values():
        chain.sort(key=lambda one: one[2])
        assert [resource for _, _, resource in chain] == [STORAGE, CPU, DEVICE, NETWORK]
        assert all(before[1] <= after[0] for before, after in itertools.pairwise(chain))


def test_a_device_goes_to_the_job_that_is_ready_not_to_one_that_should_be() -> None:
    """The slow job's exchange takes far longer than its profile says; the other one's iterations run meanwhile."""
    jobs = [job("slow", num_iterations=2), job("quick", num_iterations=8)]
    programs = {"slow": Toy(exchange_seconds=1.0), "quick": Toy()}
    execution = execute(jobs, programs, TWO, "jigsaw-fifo", ThreadEngine())
    ends = {(one.job, one.number): one.end_seconds for one in execution.tasks if one.worker == 0}
    assert not execution.failed and ends["quick", 8] < ends["slow", 2]


def test_disciplines_are_told_the_times_that_iterations_really_took() -> None:
    seen = []

    @discipline("test-observed")
    def observed(group, jobs, state):
        seen.append(state)
        return turns(group, jobs, state)

    profile = JobProfile("wrong", 0.001, (Depth(1.0, 0.001),))  # believed; really 30 ms

    def decide(view):
        if view.groups or not len(view.active):
            return Assignment()
        return Assignment((), (Group((Member(0, (0,)),), "test-observed"),))

    execution = execute(
        [job("a", 1, 6, profile=profile)], {"a": Toy(seconds=0.03)}, Cluster(1, 1), policy(decide), ThreadEngine()
    )
    # rates are measured with endless jobs
    real = [state for state in seen if np.isfinite(state.remaining_iterations).all()]
    assert [state.iterations for state in real] == [(number,) for number in range(6)]
    assert [state.remaining_iterations for state in real] == [(6.0 - number,) for number in range(6)]
    last = real[-1]
    assert last.attained_device_seconds[0] >= 4 * 0.03 and last.now_seconds >= 4 * 0.03
    assert all(times[DEVICE] >= state.now_seconds for state in real for times in state.free_seconds)
    assert execution.result.total.busy_device_seconds >= 6 * 0.03


def test_what_cannot_be_run_is_an_error() -> None:
    one = job("a")
    with pytest.raises(ScheduleError, match="a program of its own"):
        execute([one], {}, TWO, "gang-fifo", ThreadEngine())
    with pytest.raises(ScheduleError, match="wants 3 devices"):
        execute([job("a", 3)], {"a": Toy()}, TWO, "gang-fifo", ThreadEngine())
    with pytest.raises(ScheduleError, match="leaves jobs waiting"):
        execute([one], {"a": Toy()}, TWO, policy(lambda view: Assignment()), ThreadEngine())
    with pytest.raises(ScheduleError, match="not free, or on none"):
        execute(
            [one],
            {"a": Toy()},
            TWO,
            policy(lambda view: Assignment((), (Group((Member(0, (0, 7)),)),))),
            ThreadEngine(),
        )
    big = JobProfile("big", 0.01, (Depth(1.0, 0.01, memory_bytes=60),), state_bytes=60)
    crowd = lambda view: Assignment(
        (), (Group(tuple(Member(int(number), (0, 1)) for number in view.active), "test-turns"),)
    )
    with pytest.raises(ScheduleError, match="need 120 of its 100 bytes"):
        jobs = [job("a", profile=big), job("b", profile=big)]
        execute(jobs, {"a": Toy(), "b": Toy()}, Cluster(1, 2, memory_bytes=100), policy(crowd), ThreadEngine())


def test_a_worker_stays_where_its_process_is_and_depths_rotate_with_the_iteration() -> None:
    planned = Iteration(0, (Task(0, 1, 0, 5.0, 3.0), Task(1, 1, 1, 8.0, 2.0), Task(2, 1, 2, 10.0, 1.0)), 12.0)
    free = {0: 6.0, 1: 5.0, 2: 5.0}
    found = [pinned(planned, number, (0, 1, 2), free, 5.5) for number in (1, 2, 3, 4)]
    assert [
        [next(task.depth for task in one.tasks if task.worker == worker) for worker in range(3)] for one in found
    ] == [
        [2, 1, 0],
        [1, 0, 2],
        [0, 2, 1],
        [2, 1, 0],
    ]
    assert [(task.worker, task.device, task.start_seconds, task.end_seconds) for task in found[0].tasks] == [
        (2, 2, 5.5, 8.5),
        (1, 1, 5.5, 7.5),
        (0, 0, 6.0, 7.0),
    ]
    assert found[0].ready_seconds == 9.5
    shared = pinned(planned, 1, (0, 2, 2), free, 5.0)
    assert [(task.device, task.start_seconds) for task in shared.tasks] == [(2, 5.0), (2, 8.0), (0, 6.0)]


def test_a_run_that_was_cut_off_goes_on_where_its_checkpoints_are() -> None:
    toy = Toy(saved=[4])
    execution = execute([job("a", num_iterations=6)], {"a": toy}, TWO, "gang-fifo", ThreadEngine())
    assert [number for _, worker, number, _ in toy.log if worker == 0] == [5, 6]
    assert execution.metrics["a"] == {"loss": 21.0} and PROFILE.depths[0].fraction == 1


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_its_engine_says_what_to_install() -> None:
    with pytest.raises(ScheduleError, match=r"splitjax\[ray\]"):
        RayEngine(TWO)
