"""Where the time of a start goes, which commands are Python programs, and what is kept of compiled programs."""

from __future__ import annotations

import os
import pathlib
import sys
import time

import jax
import pytest

from splitjax.compile.step_programs import BUILT_EVENT
from splitjax.runtime.launch.ahead import AHEAD, imported_bits, modules_of
from splitjax.runtime.launch.compiled import DIRECTORY, MIN_SECONDS, cache_dir, drop_unfinished, kept_programs
from splitjax.runtime.launch.programs import PythonProgram, python_program
from splitjax.runtime.launch.stages import (
    FIRST_STEP_EVENT,
    LOOP_EVENT,
    PLANNED_EVENT,
    RESTORED_EVENT,
    Stage,
    StageClock,
    StageTimes,
    is_fit,
    recovery,
    shares,
    told_as,
)
from splitjax.runtime.launch.whereabouts import Board, StepRecorder


def test_every_moment_counts_once_and_for_the_innermost_stage():
    spans = [
        (Stage.TRACE, 1.0, 4.0),
        (Stage.TRACE, 2.0, 3.0),  # a trace within a trace
        (Stage.COMPILE, 3.5, 4.0),  # a small program that planning compiles
        (Stage.RESTORE, 5.0, 7.0),
        (Stage.COMPILE, 8.0, 9.5),
    ]
    seconds = shares(spans, 0.0, 7.5, 10.0)
    assert seconds == {
        Stage.IMPORT: 0.0,
        Stage.JOIN: 0.0,
        Stage.PREPARE: 2.5,  # 0 to 1, 4 to 5, 7 to 7.5
        Stage.TRACE: 2.5,
        Stage.COMPILE: 2.0,
        Stage.RESTORE: 2.0,
        Stage.STEP: 1.0,  # 7.5 to 8, 9.5 to 10
    }
    assert sum(seconds.values()) == 10.0


def test_what_a_worker_measures_the_launcher_reads():
    assert PLANNED_EVENT == BUILT_EVENT
    board = Board(2)
    clocks = []
    for rank in range(2):
        recorder = StepRecorder(board._memory, rank)
        recorder.at(recorder.place, 51)
        clocks.append(StageClock(recorder))
    ask = lambda: recovery(
        board, 2, failed_unix_seconds=time.time() - 10, started_unix_seconds=time.time() - 8, ahead=True
    )
    for number, clock in enumerate(clocks):
        clock.joined()
        jax.monitoring.register_event_listener(clock.on_event)
        jax.monitoring.register_event_duration_secs_listener(clock.on_duration)
        try:
            with told_as(RESTORED_EVENT):
                time.sleep(0.05)
            jax.monitoring.record_event(LOOP_EVENT)
            time.sleep(0.05 * (1 - number))  # worker 0 waits for worker 1 in its first step
            assert ask() is None
            jax.monitoring.record_event(FIRST_STEP_EVENT)
        finally:
            jax.monitoring.unregister_event_listener(clock.on_event)
            jax.monitoring.unregister_event_duration_listener(clock.on_duration)
    times = StageTimes.read(board, 0)
    assert times.seconds[Stage.RESTORE] >= 0.05 and times.seconds[Stage.STEP] >= 0.05 and times.step == 51
    assert "jax" in modules_of(times.imported) and "splitjax" in modules_of(times.imported)
    found = ask()
    assert found.rank == 1 and found.step == 51 and found.ahead
    assert 9.9 < found.seconds < 11 and 1.9 < found.ending_seconds < 2.1
    assert "back at step 51" in str(found) and "restore 0.0" in str(found) and "started ahead" in str(found)
    board.close()


def test_modules_are_known_by_bits():
    assert modules_of(0b11) == AHEAD[:2]
    assert set(modules_of(imported_bits())) <= set(sys.modules)


def test_a_script_that_sets_what_libraries_read_at_import_is_not_fit():
    assert is_fit({"JAX_PLATFORMS": "cpu", "A": "1"}, {"JAX_PLATFORMS": "cpu"})
    assert not is_fit({"JAX_ENABLE_X64": "1"}, {})
    assert not is_fit({}, {"OMP_NUM_THREADS": "1"})
    assert not is_fit({}, None)


def test_which_commands_are_python_programs(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("")
    tool = tmp_path / "tool"
    tool.write_text(f"#!{sys.executable}\n")
    shell = tmp_path / "shell"
    shell.write_text("#!/bin/sh\n")
    for file in (tool, shell):
        file.chmod(0o755)
    base = {"PATH": os.pathsep.join([str(pathlib.Path(sys.executable).parent), str(tmp_path)])}
    python = sys.executable
    assert python_program([python, "-u", str(script), "-m", "x"], base) == PythonProgram(
        (python, "-u"), "file", str(script), ("-m", "x")
    )
    assert python_program([python, "-X", "dev", "-m", "pkg.mod", "a"], base) == PythonProgram(
        (python, "-X", "dev"), "module", "pkg.mod", ("a",)
    )
    assert python_program([python, "-c", "pass", "a"], base) == PythonProgram((python,), "code", "pass", ("a",))
    assert python_program(["tool", "a"], base) == PythonProgram((python,), "file", str(tool), ("a",))
    for command in (
        ["shell"],
        ["nothing-there"],
        [python],
        [python, "-I", str(script)],  # finds modules elsewhere
        [python, str(tmp_path)],  # a folder brings a path of its own
        [python, str(tmp_path / "missing.py")],
        [python, "-m"],
    ):
        assert python_program(command, base) is None, command


def test_where_programs_are_kept(tmp_path):
    own = kept_programs({}, tmp_path)
    folder = pathlib.Path(own[DIRECTORY])
    assert folder.parent == tmp_path / "compiled" and folder.name.startswith("jaxlib-") and own[MIN_SECONDS] == "0"
    named = {DIRECTORY: "/there", MIN_SECONDS: "2"}
    assert kept_programs(named, tmp_path) == named
    assert kept_programs({"SPLITJAX_CACHE": "/mine"}, None)[DIRECTORY].startswith("/mine/jaxlib-")
    assert cache_dir({"XDG_CACHE_HOME": "/x"}) == pathlib.Path("/x/splitjax/compiled")


def test_what_was_being_written_at_a_kill_is_dropped(tmp_path):
    now = time.time()
    for name, seconds in (("old-cache", 60.0), ("new-cache", 0.5), ("new", 0.5)):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (now - seconds, now - seconds))
    drop_unfinished(tmp_path, now)
    drop_unfinished(tmp_path / "missing", now)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old-cache"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_this_process_has_an_initial_environment():
    from splitjax.runtime.launch.stages import initial_environment

    found = initial_environment()
    assert found is not None and "PATH" in found
