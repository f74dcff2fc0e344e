"""What the benchmark of real time to accuracy makes of what it counted and timed, and at which depths jobs train; no
processes are started."""

from __future__ import annotations

import dataclasses
import math

import pytest

from benchmarks.jigsaw import real_accuracy
from benchmarks.jigsaw.jobs import MODELS
from benchmarks.jigsaw.real_accuracy import COUNTED_UNDER, DISCIPLINES, POLICY, WAY, Count, Round, Target, Timed
from splitjax.schedule import Cluster, Depth, Job, JobProfile, ThreadEngine, execute
from tests.schedule.toys import Toy

IMAGES, TEXT = Target("accuracy", 0.9, 8), Target("loss", 3.0, 8)
THERE = Count(6, True, 2.5)
SECONDS = {"gangs": (10.0, 8.0), "packed alone": (8.0, 6.0), "temporal": (7.0, 7.0), "JigSaw": (6.0, 4.5)}


def a_round(seconds=None, spatial: Count = THERE, held_out: float = 2.5) -> Round:
    """A round of one job that reads text."""
    counts = {"full": Count(4, True, 2.5), "spatial": spatial, "temporal": Count(8, True, 2.5)}
    timed = {
        name: Timed(makespan, completion, {"job": held_out if name == "JigSaw" else 2.5})
        for name, (makespan, completion) in {**SECONDS, **(seconds or {})}.items()
    }
    return Round({way: {"job": count} for way, count in counts.items()}, timed)


def section(*rounds: Round):
    return real_accuracy.report(rounds, {"job": TEXT})


def first_sentence(*rounds: Round) -> str:
    return section(*rounds).lines[0]


def test_iterations_are_counted_until_each_job_is_where_it_shall_be():
    asked = []

    def train_to(numbers):
        asked.append(dict(numbers))
        return {
            name: {"accuracy": number / 6, "loss": 5.0 - (number if name == "text" else 0.1)}
            for name, number in numbers.items()
        }

    found = real_accuracy.count_iterations(train_to, {"images": IMAGES, "text": TEXT, "never": TEXT})
    assert found == {
        "images": Count(6, True, 1.0),
        "text": Count(2, True, 3.0),
        "never": Count(8, False, pytest.approx(4.9)),
    }
    assert asked == [{"images": 2, "text": 2, "never": 2}, {"images": 4, "never": 4}, {"images": 6, "never": 6}] + [
        {"never": 8}
    ], "what is there is trained no further"


def test_numbers_that_are_none_reach_nothing():
    assert not IMAGES.is_reached({"accuracy": math.nan}) and not TEXT.is_reached({"loss": math.nan})


class Recorded:
    """Stands for the processes: a job's loss falls by one in an iteration."""

    def __init__(self):
        self.runs, self.done = [], {}

    def rewind(self, jobs, seed, *, is_temporal=False):
        self.runs.append((seed, is_temporal))

    def go_on(self, policy, jobs):
        self.runs.append(policy)
        self.done |= {job.name: job.num_iterations for job in jobs}

    def held_out(self, jobs):
        return {job.name: {"loss": 10.0 - self.done[job.name]} for job in jobs}


def test_a_way_is_counted_from_the_beginning_with_its_own_depths():
    for way, policy in COUNTED_UNDER.items():
        processes = Recorded()
        found = real_accuracy.count_of_way(processes, way, 3, {"job": dataclasses.replace(TEXT, value=6.0)})
        assert found == {"job": Count(4, True, 6.0)}
        assert processes.runs == [(3, way == "temporal"), policy, policy]


def test_disciplines_train_at_the_depths_at_which_their_iterations_were_counted():
    profile = JobProfile("toy", 0.001, (Depth(1.0, 0.002), Depth(0.5, 0.001)))

    def depths(policy):
        programs = {name: Toy(seconds=0.001) for name in MODELS}
        execute([Job(name, 0.0, 2, 4, profile) for name in MODELS], programs, Cluster(1, 2), policy, ThreadEngine())
        return {name: {(number, given) for _, _, number, given in toy.log} for name, toy in programs.items()}

    counted = {way: depths(policy) for way, policy in COUNTED_UNDER.items()}
    assert {name: depths(policy) == counted[WAY[name]] for name, policy in POLICY.items()} == dict.fromkeys(
        DISCIPLINES, True
    )
    halves = {way: sum(given.count(0.5) for _, given in found["mlp"]) for way, found in counted.items()}
    assert halves == {"full": 0, "spatial": 4, "temporal": 4}, "partial ways skip as much, in four iterations"


def test_the_page_says_first_whether_skipped_work_costs_more_than_it_saves():
    faster = first_sentence(a_round())
    assert faster.startswith("**Skipping backward work saves more") and "JigSaw is 0.750 times" in faster
    assert "makespan 0.750 times (0.750 to 0.750)" in faster and faster.endswith("full backpropagation: job 1.50.")
    assert "Under temporal-spb, which packs nothing, they are 1.167 times (1.167 to 1.167) and 0.875 times" in faster
    slower = first_sentence(a_round({"JigSaw": (9.0, 6.6)}))
    assert slower.startswith("**Skipping backward work costs more iterations than it saves: ")
    assert "1.100 times" in slower and "1.125 times" in slower
    late = first_sentence(a_round({"JigSaw": (7.0, 6.6)}))
    assert "more iterations than it saves for the mean job, and saves more than it costs for the last job:" in late
    late = first_sentence(a_round({"JigSaw": (9.0, 5.0)}))
    assert "more iterations than it saves for the last job, and saves more than it costs for the mean job:" in late


def test_rounds_are_compared_with_themselves():
    """The median, and the spread, are of ratios within rounds: a slow machine in one round changes nothing."""
    slow = {name: (10 * makespan, 10 * completion) for name, (makespan, completion) in SECONDS.items()}
    rounds = [a_round(), a_round(slow), a_round({"JigSaw": (12.0, 9.0)})]
    assert real_accuracy.ratios(rounds, "JigSaw", "packed alone", lambda run: run.makespan) == (0.75, 0.75, 1.5)
    lines = section(*rounds).lines
    assert "| JigSaw | 12.0 | 0.600 | 0.600 | 1.200 | 9.0 | 0.562 | 0.562 | 1.125 | 6 |" in lines
    assert "| gangs | 10.0 | 1.000 | 1.000 | 1.000 | 8.0 | 1.000 | 1.000 | 1.000 | 4 |" in lines
    assert "| job | 3.000 nats | 8 | spatial | 6 | 6 | 6 | 6 | 1.50 |" in lines


def test_goals_hold_runs_to_the_accuracy_and_to_the_computation_that_was_counted():
    assert [goal.ok for goal in section(a_round()).goals] == [True] * 4
    reached, apart, *_ = section(a_round(), a_round(held_out=3.5)).goals
    assert not reached.ok and reached.value == 7 / 8 and not apart.ok and apart.value == 1.0
    *_, completion, makespan = section(a_round({"JigSaw": (7.0, 6.6)})).goals
    assert not completion.ok and makespan.ok


def test_a_job_that_does_not_get_there_is_told():
    found = section(a_round(spatial=Count(8, False, 3.5), held_out=3.5))
    assert "| job | 3.000 nats | 8 | spatial | none | none | none |" in found.lines and not found.goals[0].ok
    assert found.lines[0].endswith("full backpropagation: job none.")
    assert "| job | 3.000 nats | 2.500 nats | 2.500 nats | 2.500 nats | 3.500 nats |" in found.lines
