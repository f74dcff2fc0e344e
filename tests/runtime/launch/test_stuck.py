"""Who holds up a run: pages of whereabouts, deadlines over them, stacks, and a launcher that ends what stands still."""

from __future__ import annotations

import math
import mmap
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from splitjax.errors import LaunchError
from splitjax.runtime.launch import deadlines, stacks, whereabouts
from splitjax.runtime.launch.deadlines import Deadlines, find_stuck
from splitjax.runtime.launch.whereabouts import NUM_TIMES, Board, Place, StepRecorder, StepTimes, Whereabouts
from tests.runtime.conftest import until

SECOND = 10**9


def where(place, step=5, since=0, completed=4, **more):
    return Whereabouts(1, 1, step, completed, place, since * SECOND, since * SECOND, **more)


def stuck(run, seconds=61, **options):
    timed = {rank: where if where.times.seconds else _timed(where) for rank, where in run.items()}
    return find_stuck(timed, Deadlines(**options), seconds * SECOND)


def _timed(where, *seconds):
    return Whereabouts(**{**vars(where), "times": StepTimes(seconds or (0.1,), seconds or (0.1,))})


@pytest.fixture
def clock(monkeypatch):
    """`clock[0]`: what `time.monotonic_ns` shows."""
    now = [100 * SECOND]
    monkeypatch.setattr(whereabouts.time, "monotonic_ns", lambda: now[0])
    return now


def test_a_page_says_where_its_process_is(clock):
    memory = bytearray(3 * 4096)
    recorder = StepRecorder(memory, rank=1)
    recorder.joined()
    recorder.begin()
    recorder.at(Place.DATA, 7)
    clock[0] += SECOND
    recorder.at(Place.DISPATCH)
    clock[0] += 2 * SECOND
    recorder.at(Place.HOST)
    with recorder.during(Place.COLLECTIVE, "results of step 6"):
        clock[0] += 4 * SECOND
        inside = recorder.read()
    recorder.completed(6)
    after = recorder.read(1)
    assert (inside.place, inside.step, inside.detail) == (Place.COLLECTIVE, 7, "results of step 6")
    assert inside.pid == os.getpid() and inside.since_ns == 100 * SECOND and inside.place_since_ns == 103 * SECOND
    assert (after.place, after.completed, after.detail, after.since_ns) == (Place.HOST, 6, "", 107 * SECOND)
    # Of the seven seconds one was its own: data; in the rest it may have waited for others.
    assert after.times == StepTimes((7.0,), (1.0,))
    assert recorder.read(0).pid == 0 and recorder.read(2).place is Place.OUTSIDE


def test_saves_and_compilations_begin_a_new_stretch_and_are_no_time_of_a_step(clock):
    recorder = StepRecorder()
    recorder.begin()
    recorder.at(Place.HOST, 1)
    for place in (Place.CHECKPOINT, Place.COMPILE, Place.EVALUATE):
        with recorder.during(place):
            clock[0] += 100 * SECOND
        assert recorder.read().since_ns == clock[0]
    clock[0] += SECOND
    recorder.completed(1)
    assert recorder.read().times.seconds == (1.0,)


def test_a_page_keeps_the_times_of_the_last_steps_alone(clock):
    recorder = StepRecorder()
    recorder.begin()
    for number in range(1, NUM_TIMES + 11):
        clock[0] += number * SECOND
        recorder.completed(number)
    times = recorder.read().times
    assert sorted(times.seconds) == [float(n) for n in range(11, NUM_TIMES + 11)]
    assert times.quantile(0.0) == 11 and times.quantile(1.0) == NUM_TIMES + 10


def test_the_process_that_has_come_least_far_holds_up_the_others():
    waiting = {0: where(Place.COLLECTIVE), 2: where(Place.DISPATCH, step=6)}
    for culprit in (
        where(Place.DATA),
        where(Place.HOST),
        where(Place.DISPATCH),
        where(Place.COLLECTIVE, step=4),
    ):
        assert stuck({**waiting, 1: culprit}).ranks == (1,)
    assert stuck({0: where(Place.COLLECTIVE), 1: where(Place.COLLECTIVE)}).ranks == (0, 1)  # nothing tells
    saving = {0: where(Place.CHECKPOINT, waits_for=1), 1: where(Place.CHECKPOINT)}
    assert stuck(saving, save_timeout_seconds=60).ranks == (1,)
    assert stuck({0: where(Place.COLLECTIVE), 1: where(Place.OUTSIDE, step=4, completed=3)}).ranks == (1,)  # left early
    assert stuck({0: where(Place.COLLECTIVE), 1: where(Place.OUTSIDE, completed=5)}).ranks == (0,)


def test_only_the_place_of_who_holds_up_the_others_has_a_deadline():
    others = {0: where(Place.COLLECTIVE), 1: where(Place.DISPATCH, step=6)}
    for place, option in (
        (Place.COMPILE, "compile_timeout_seconds"),
        (Place.EVALUATE, "compile_timeout_seconds"),
        (Place.CHECKPOINT, "save_timeout_seconds"),
    ):
        run = {**others, 2: where(place)}
        assert stuck(run, seconds=1000) is None  # a long compilation or a slow disk is no fault
        found = stuck(run, seconds=1000, **{option: 900})
        assert found.ranks == (2,) and found.allowed_seconds == 900 and found.waited_seconds == 1000
    assert stuck({0: where(Place.OUTSIDE)}, seconds=10**9) is None


def test_the_deadline_of_a_step_is_ten_medians_and_at_least_a_minute():
    limit = lambda *seconds: Deadlines().allowed_seconds(_timed(where(Place.DATA), *seconds))
    assert limit(0.5) == 60 and limit(7.0) == 70 and limit(300.0, 7.0, 7.0, 9.0) == 90
    assert limit(300.0, 7.0) == 3000  # of two steps the first may have been the longer by chance
    assert Deadlines().allowed_seconds(where(Place.DATA)) == 3600  # no step is known yet
    assert Deadlines(5).allowed_seconds(where(Place.DATA)) == 5
    assert stuck({0: where(Place.DATA)}, seconds=10**9, step_timeout_seconds=math.inf) is None
    with pytest.raises(LaunchError, match="save_timeout_seconds must be above 0"):
        Deadlines(save_timeout_seconds=0)


def test_time_in_which_the_launcher_stood_still_does_not_count():
    run = {0: _timed(where(Place.DATA))}
    assert find_stuck(run, Deadlines(), 90 * SECOND, not_before_ns=40 * SECOND) is None
    assert find_stuck(run, Deadlines(), 101 * SECOND, not_before_ns=40 * SECOND).waited_seconds == 61


def test_stragglers_are_named_with_everybodys_times():
    page = lambda own: Whereabouts(
        **{**vars(where(Place.DATA)), "times": StepTimes((0.1,) * 99 + (0.5,), (own,) * 100)}
    )
    text = deadlines.step_times_text({0: page(0.01), 1: page(0.06)})
    assert "worker 1 p50 100 ms p99 500 ms (own part 60 ms)" in text and text.endswith("worker 1 holds up the others")
    assert deadlines.slowest({0: page(0.01), 1: page(0.06)}) == 1
    assert "holds up" not in deadlines.step_times_text({0: page(0.05), 1: page(0.06)})
    assert "holds up" not in deadlines.step_times_text({0: page(0.0001), 1: page(0.001)})  # of a step of 100 ms
    assert deadlines.step_times_text({0: where(Place.DATA)}) == ""


def test_the_loops_thread_comes_first_and_stacks_are_cut():
    frames = "\n".join(f'  File "x.py", line {n} in f{n}' for n in range(40))
    text = "\n\n".join(f"Thread 0x{ident:016x} (most recent call first):\n{frames}" for ident in range(1, 9))
    lines = stacks.python_lines(text, thread_ident=3)
    assert lines[0].startswith("Thread 0x0000000000000003") and "  ... 28 more frames" in lines
    assert lines[-1] == "... and 3 more threads"
    assert stacks.python_lines(text)[0].startswith("Thread 0x0000000000000008")  # the main thread's is the last
    assert stacks.python_lines("no stacks") == ["no stacks"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_of_a_process_that_does_not_answer_the_kernel_tells(monkeypatch):
    monkeypatch.setattr(stacks, "_ANSWER_SECONDS", 0.1)
    file = whereabouts.shared_file("test")
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        process.send_signal(signal.SIGSTOP)
        until(lambda: stacks.is_stopped(process.pid))
        lines = stacks.take(process.pid, file)
        assert lines[0] == "Python does not answer; what the kernel says:" and "State: T (stopped)" in lines
    finally:
        process.kill()
        process.wait()
    assert stacks.take(process.pid, file) == [f"process {process.pid} is gone"]
    os.close(file)


def test_a_board_is_read_by_who_made_it():
    board = Board(2)
    memory = mmap.mmap(board.file, 2 * 4096)
    StepRecorder(memory, rank=1).at(Place.DATA, 3)
    assert board.read(1).step == 3 and board.read(0).pid == 0
    board.close()


LOOP = """
import os, signal, time
import splitjax
from splitjax.runtime.launch.whereabouts import Place, StepRecorder
rank, recorder = int(os.environ["SPLITJAX_PROCESS_ID"]), StepRecorder.open()
recorder.begin()
def gets_stuck_here():
    time.sleep(1000)
for number in range(1, 400):
    recorder.at(Place.DATA, number)
    if rank == 1 and number == 5: BAD
    recorder.at(Place.COLLECTIVE)
    time.sleep(0.005)
    if number > 5: WAIT
    recorder.completed(number)
    if number == 2: print("under way", flush=True)
recorder.at(Place.OUTSIDE)
"""


def test_who_gets_stuck_is_named_with_its_stack_and_ended(launched):
    script = LOOP.replace("BAD", "gets_stuck_here()").replace("WAIT", "time.sleep(1000)")
    run = launched(script, num_processes=2, step_timeout_seconds=1.5, grace_seconds=0.3, heartbeat_seconds=1)
    outcome = run.wait()
    (attempt,) = outcome.attempts
    assert outcome.status == 137 and attempt.failed.rank == 1 and attempt.failed.silent_seconds is None
    assert re.match(
        r"no step completed for \d+ s \(its deadline: 1\.5 s\): waiting for data in step 5", attempt.failed.stuck
    )
    said = run.err.getvalue()
    assert "worker 0: waiting for a collective in step 6" in said and "worker 1: waiting for data in step 5" in said
    assert "in gets_stuck_here" in said and "last collective completed: that of step 4" in said
    assert "step times: worker 0 p50" in said and "what worker 0 is doing" not in said


def test_who_is_stopped_for_less_than_the_deadline_is_left_alone(launched):
    script = LOOP.replace("BAD", "print('stops', flush=True); os.kill(os.getpid(), signal.SIGSTOP)").replace(
        "WAIT", "pass"
    )
    run = launched(script, num_processes=2, step_timeout_seconds=30)
    run.until("stops")
    pid = run.run.workers[1].pid
    until(lambda: stacks.is_stopped(pid))
    time.sleep(1.0)
    os.kill(pid, signal.SIGCONT)
    assert run.wait().status == 0 and len(run.run.wait().attempts) == 1
