"""What the loop records about itself: places, completed steps, and compilations wherever they come."""

from __future__ import annotations

import dataclasses
import time

import jax
import jax.numpy as jnp

import splitjax
from splitjax.compile.step_programs import MET_EVENT, WAIT_EVENT
from splitjax.runtime.launch import deadlines, whereabouts
from splitjax.runtime.launch.whereabouts import Place, StepRecorder
from splitjax.runtime.training import tracking
from splitjax.runtime.training.ledger import Ledger, steady_clock
from splitjax.runtime.training.loop import LoopOptions, train
from splitjax.runtime.training.tracking import Tracker


class Seen(StepRecorder):
    """Keeps every place that it is told."""

    def __init__(self):
        self.places = []
        super().__init__()

    def at(self, place, step=None, detail=""):
        super().at(place, step, detail)
        self.places.append((place, detail))


def tracked(monkeypatch, step, state, batches, num_steps, **options):
    recorder = Seen()
    monkeypatch.setattr(tracking.StepRecorder, "open", classmethod(lambda cls: recorder))
    train(step, state, iter(batches), LoopOptions(num_steps, 4), **options)
    return recorder


def test_the_loop_says_where_it_is(monkeypatch):
    step = jax.jit(lambda state, batch: (state + batch, {"loss": state}))
    seen = tracked(monkeypatch, step, jnp.float32(0), [jnp.float32(1)] * 3, 3)
    one_step = [place for place, _ in seen.places[8:15]]
    assert seen.places[0][0] is Place.HOST and seen.places[-1][0] is Place.OUTSIDE
    assert [Place.DATA, Place.COMPILE] == [place for place, _ in seen.places if place is not Place.HOST][:2]
    assert Place.DATA in one_step and Place.DISPATCH in one_step
    assert (Place.COLLECTIVE, "results of step 2") in seen.places
    assert seen.read().completed == 3 and len(seen.read().times.seconds) == 3


def test_a_program_compiled_in_a_later_step_has_the_deadline_of_compilations(monkeypatch):
    step = jax.jit(lambda state, batch: (state + batch.sum(), {"loss": state}))
    batches = [jnp.ones(3), jnp.ones(3), jnp.ones(5), jnp.ones(5)]  # the third has another shape
    seen = tracked(monkeypatch, step, jnp.float32(0), batches, 4)
    places = [place for place, _ in seen.places]
    assert places.count(Place.COMPILE) == 3  # the first step, before and after its results, and the third
    again = len(places) - 1 - places[::-1].index(Place.COMPILE)
    assert places[again - 1] is Place.DISPATCH and places[again + 1] is Place.DISPATCH


def test_a_plan_made_in_a_later_step_has_it_until_the_step_is_given_to_the_devices(monkeypatch):
    @splitjax.parallelize(mesh={"data": 1}, rules="data_parallel")
    def step(state, batch):
        loss, grad = splitjax.value_and_grad(lambda state: ((batch["x"] @ state) ** 2).mean())(state)
        return state - 0.01 * grad, {"loss": loss}

    batches = [{"x": jnp.ones((rows, 3))} for rows in (4, 4, 8, 8)]
    state = step.place(jnp.ones(3), example=batches[:1])
    seen = tracked(monkeypatch, step, state, batches, 4)
    places = [place for place, _ in seen.places]
    assert places.count(Place.COMPILE) == 3
    again = len(places) - 1 - places[::-1].index(Place.COMPILE)
    assert places[again - 1] is Place.DISPATCH and places[again + 1] is Place.HOST


def test_compilations_of_other_threads_are_not_the_loops():
    recorder = Seen()
    with Tracker(Ledger(None), recorder) as tracker:
        recorder.at(Place.DATA, 1)
        tracker._ident += 1
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
        assert recorder.place is Place.DATA
    jax.jit(lambda x: x * 5 + 1)(jnp.ones(7))
    assert recorder.place is Place.OUTSIDE


def test_the_metrics_have_step_times_now_and_then(monkeypatch):
    now, memory = [0], bytearray(2 * 4096)
    monkeypatch.setattr(whereabouts.time, "monotonic_ns", lambda: now[0])
    for rank, own in ((0, Place.DISPATCH), (1, Place.DATA)):
        recorder = StepRecorder(memory, rank)
        recorder.begin()
        recorder.at(own, 1)
        now[0] += 10**9
        recorder.completed(1)
    tracker = Tracker(Ledger(None), StepRecorder(memory, 0))
    assert tracker.times_row() == {}
    monkeypatch.setattr(tracking, "TIMES_EVERY_SECONDS", 0.0)
    row = tracker.times_row()
    assert set(row) == {"step_seconds_p50", "step_seconds_p99", "slowest_rank", "slowest_own_seconds"}
    assert row["slowest_rank"] == 1
    alone = Tracker(Ledger(None), StepRecorder())
    assert alone.last_times() == {}
    alone.recorder.completed(1)
    assert set(alone.last_times()) == {"step_seconds_p50", "step_seconds_p99"}


def test_the_ledgers_clock_does_not_follow_the_machines(monkeypatch):
    clock = steady_clock()
    before = clock()
    monkeypatch.setattr("time.time", lambda: 0.0)  # set back by decades
    assert clock() - before < 60


def test_who_waits_for_compilations_is_not_to_blame():
    """A process that has compiled is further than one that has not, and has its deadline."""
    recorder, other = Seen(), StepRecorder()
    with Tracker(Ledger(None), recorder) as tracker, tracker.during("compile", 1):
        other.begin()
        other.at(Place.COMPILE, 1)
        jax.monitoring.record_event(WAIT_EVENT)
        assert recorder.places[-1][0] is Place.DISPATCH and recorder.places[-1][1].startswith("waits until all")
        run = {rank: dataclasses.replace(page.read(), pid=1) for rank, page in enumerate((recorder, other))}
        given = deadlines.Deadlines(step_timeout_seconds=10.0, compile_timeout_seconds=60.0)
        now = time.monotonic_ns()
        assert deadlines.find_stuck(run, given, now + 30 * 10**9) is None
        stuck = deadlines.find_stuck(run, given, now + 61 * 10**9)
        assert stuck is not None and stuck.ranks == (1,) and stuck.allowed_seconds == 60.0
        jax.monitoring.record_event(MET_EVENT)
        assert recorder.place is Place.COMPILE
