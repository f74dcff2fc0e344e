"""The quick part of the fault suite (all of it: `python -m benchmarks faults`), and that its checks see what they are
there to see."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from benchmarks.faults import damage, disk, interrupts, kills, page, stuck
from benchmarks.faults.checks import Fault, arrays, compare, differences, lost, own_problems
from benchmarks.faults.run import TRAINING, Launched, Recipe, last_step

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at the processes of a run in /proc")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    recipe = Recipe(
        folder / "undisturbed",
        folder / "compiled",
        num_steps=100,
        checkpoint_every=20,
        training=(*TRAINING, "--data", "digits", "--evaluate-every", "60"),
    )
    train_alone(recipe)
    return recipe


def train_alone(recipe):
    """Runs it in one process with two virtual devices: the same mesh, so the same numbers, and quicker to start.
    Returns its output."""
    recipe.folder.mkdir(exist_ok=True)
    done = subprocess.run(
        recipe.command(), env=recipe.environment(), cwd=recipe.folder, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done
    return done.stdout


@pytest.fixture
def copy(undisturbed, tmp_path):
    """A finished run to do something to."""
    shutil.copytree(undisturbed.folder, tmp_path / "copy")
    return dataclasses.replace(undisturbed, folder=tmp_path / "copy")


def test_workers_killed_in_steps_and_in_a_save(undisturbed, tmp_path):
    recipe = dataclasses.replace(undisturbed, folder=tmp_path / "killed")
    found = kills.kill_workers(recipe, undisturbed, ("save", "step"), random.Random(1))
    assert len(found) == 2
    for fault in found:
        assert not fault.problems, fault
        assert fault.again_seconds is not None and fault.lost_steps is not None


def test_a_full_disk_is_reported_and_left_behind(undisturbed, tmp_path):
    try:
        with disk.small_disk(tmp_path / "disk") as mounted:
            recipe = dataclasses.replace(undisturbed, folder=tmp_path / "run", num_processes=1)
            recipe = disk.on_disk(recipe, mounted, metrics_too=True)
            fault = disk.fill_for_a_while(recipe, undisturbed, "step", random.Random(2), fails=1)
    except (PermissionError, FileNotFoundError) as error:
        pytest.skip(str(error))
    assert not fault.problems, fault
    assert "no worker stopped" in fault.note


def test_a_run_goes_on_from_the_newest_undamaged_checkpoint(undisturbed, copy):
    shutil.rmtree(copy.checkpoints / "100")
    rng = random.Random(3)
    files = [
        damage.kinds(copy.checkpoints / step)[kind] for step, kind in (("80", "state/d/*"), ("60", "manifest.json"))
    ]
    bad = [damage.flip(files[0].read_bytes(), rng), damage.truncate(files[1].read_bytes(), rng)]
    for file, data in zip(files, bad, strict=True):
        file.write_bytes(data)
    damage.damage_logs(copy)
    out = train_alone(copy)
    assert (
        "resumed from the checkpoint of step 40" in out and "step 80 is damaged" in out and "step 60 is damaged" in out
    )
    assert compare(copy, undisturbed) == [] and lost(copy, (20, 40, 60, 80, 100)) == []
    for step, file, data in zip(("80", "60"), files, bad, strict=True):
        kept = copy.checkpoints / f"{step}.damaged-1" / file.relative_to(copy.checkpoints / step)
        assert kept.read_bytes() == data


def test_a_run_that_is_not_the_undisturbed_one_is_found_out(undisturbed, copy):
    assert compare(copy, undisturbed) == []
    lines = copy.metrics.read_text().splitlines(keepends=True)
    for changed, said in (
        (lines[:50] + lines[51:], "not one for each"),
        (lines[:50] + lines[49:], "not one for each"),
        ([*lines[:50], _nudged(lines[50]), *lines[51:]], "differ from step 51"),
        ([*lines[:99], lines[99][:9]], "cannot be read"),
    ):
        copy.metrics.write_text("".join(changed))
        [problem] = compare(copy, undisturbed)
        assert said in problem
    copy.metrics.write_text("".join(lines))
    for path, flipped in (("checkpoint.json", b"train"), ("state/manifest.ocdbt", b"x")):
        file = copy.checkpoints / "100" / path
        whole = file.read_bytes()
        file.write_bytes(whole + flipped)
        assert compare(copy, undisturbed) == [
            f"the last checkpoint: {path}: {len(whole) + len(flipped)} bytes, written were {len(whole)}"
        ]
        assert lost(copy, (80, 100)) != [] and lost(copy, (80,)) == []
        file.write_bytes(whole)
    shutil.rmtree(copy.checkpoints / "20")
    assert lost(copy, (20, 40)) == ["the checkpoint of step 20 was complete and is lost: missing"]


def test_arrays_are_compared_bit_for_bit(undisturbed):
    ours, theirs = (arrays(undisturbed.checkpoints / "100") for _ in range(2))
    assert {path.split("/")[0] for path in ours} >= {"params"} and differences(ours, theirs) == []
    path = next(path for path in ours if path.startswith("params") and path.endswith("bias"))
    theirs[path] = np.nextafter(theirs[path], np.float32(1))
    assert differences(ours, theirs) == [f"1 of {len(ours)} arrays differ, the first {path}"]
    assert differences({"w": np.zeros(2)}, {"w": -np.zeros(2)}) != []  # equal as numbers
    assert "other arrays" in differences({}, theirs)[0]


def test_rows_that_an_attempt_keeps_are_not_its_steps(copy):
    for step in ("60", "80", "100"):
        shutil.rmtree(copy.checkpoints / step)
    lines = copy.metrics.read_text().splitlines(keepends=True)
    with Launched(copy, launcher=[sys.executable, "-uc", "print(input()); input()"]) as run:
        kept = copy.metrics.with_name("kept")
        kept.write_text("".join(lines[:40]))
        kept.replace(copy.metrics)
        assert not run.has_stepped()  # nor has it said where it goes on from
        run.tell("resumed from the checkpoint of step 40")
        run.until("its word", lambda: run.resumed_step() == 40, 30)
        assert not run.has_stepped()
        copy.metrics.write_text("".join(lines[:41]))
        assert run.has_stepped()
        run.new_attempt()
        copy.metrics.unlink()
        kept.write_text("".join(lines[:61]))
        kept.replace(copy.metrics)
        assert run.has_stepped()  # without a word, but past all that was there


def test_what_a_fault_may_cost():
    fault = Fault(
        "kill", "save", interval=25, last_step=57, saving_step=50, resumed_step=25, end_seconds=6.9, limit_seconds=7
    )
    assert fault.lost_steps == 32 and fault.steps_of_save == 7 and own_problems(fault) == []
    assert "32 steps lost" in own_problems(dataclasses.replace(fault, saving_step=None))[0]
    assert "33 steps lost" in own_problems(dataclasses.replace(fault, resumed_step=24))[0]
    assert "answered after 7.1 s" in own_problems(dataclasses.replace(fault, end_seconds=7.1))[0]


def test_the_page_counts_what_was_not_survived(tmp_path):
    good = Fault("SIGKILL to worker 1", "step", 25, 57, None, 50, 2.0, 7.0, 9.0)
    records = tmp_path / "faults.json"
    for key, fault in (("0", good), ("1", good), ("0", good), ("1", dataclasses.replace(good, problems=("lost",)))):
        page.store(records, "kills", key, fault, 0, 60.0)  # number 0 begins the part anew
    stuck_fault = dataclasses.replace(good, kind="stuck in Python", again_seconds=20.0)
    for key in ("python-0", "python-1", "python-0"):
        page.store(records, "stuck", key, stuck_fault, 0, 1.0)
    asked = Fault("Ctrl-C to splitjax plan", "any", 0, None, end_seconds=0.2, limit_seconds=60.0, count=40)
    page.store(records, "interrupts", "plan", asked, 0, 1.0)
    parts = page.read(records)
    assert [len(part.faults) for part in parts.values()] == [2, 2, 1] and parts["kills"].seconds == 120
    text = "\n".join(page.lines(parts, tmp_path))
    assert "**3 of 4 faults of 2 kinds survived" in text and "At most 7 steps were lost" in text
    assert "| NO | lost |" in text and "40 of 40 Ctrl-C at random moments of 1 commands" in text
    assert "| stuck in Python | 2 | 2 | 2.0, 2.0 | 20.0, 20.0 |" in text


SAID = """[launch] worker 1 failed after 31.2 s: killed by the launcher: no step completed for 10 s (its deadline: 10 s)
[launch] worker 0: in the step itself in step 20 for 10.2 s; last collective completed: that of step 18
[launch] worker 1: waiting for data in step 20 for 10.2 s; last collective completed: that of step 18
[launch] what worker 1 is doing:
[launch]     Thread 0x00007f6c921f3b80 (most recent call first):
[launch]       File "worker.py", line 16 in stuck_in_loader"""


def test_what_is_not_said_of_a_stuck_worker_is_found_out():
    assert stuck.unclear(SAID, "loader", 1) == []
    lines = SAID.splitlines()
    for number, missed in ((0, "failed"), (1, "who waits"), (2, "not said to be"), (3, "stacks"), (5, "in its stacks")):
        text = "\n".join(line for index, line in enumerate(lines) if index != number)
        assert any(missed in problem for problem in stuck.unclear(text, "loader", 1)), number
    assert any("worker 0" in problem for problem in stuck.unclear(SAID, "loader", 0))
    assert any("stuck_in_save" in problem for problem in stuck.unclear(SAID, "save", 1))


@pytest.fixture
def heeds_ctrl_c():
    """A shell's background jobs ignore Ctrl-C, and so would the commands that a test in one starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_a_command_that_is_interrupted_ends_cleanly(tmp_path):
    recipe = Recipe(tmp_path / "run", tmp_path / "compiled")
    end = interrupts._run([sys.executable, "-m", "splitjax.cli", "doctor"], tmp_path, recipe.environment(), 0.0)
    assert end.status == interrupts.INTERRUPTED and interrupts._problems(end, (0,), ("interrupted",)) == []
    crashed = dataclasses.replace(end, status=-11, text="Fatal Python error: Segmentation fault")
    assert len(interrupts._problems(crashed, (0,), ("interrupted",))) >= 2
    assert interrupts._problems(dataclasses.replace(end, text=""), (0,), ("interrupted",)) != []


def test_a_command_is_interrupted_as_often_as_was_asked(tmp_path, monkeypatch):
    ends = []

    def run(arguments, folder, environment, moment):
        (folder / "out.json").write_text("{}")
        # The second start has ended before its moment, and is not counted.
        ends.append(interrupts.End(0.0, interrupts.INTERRUPTED if moment else 0, 1.0, "interrupted", len(ends) != 2))
        return ends[-1]

    monkeypatch.setattr(interrupts, "_run", run)
    recipe = Recipe(tmp_path / "run", tmp_path / "compiled")
    fault = interrupts.interrupt("plan", tmp_path / "new", recipe, interrupts.Moments(0, 2))
    assert fault.survived and len(ends) == 1 + 3


def _nudged(line):
    row = json.loads(line)
    return json.dumps({**row, "loss": row["loss"] * (1 + 2**-52)}) + "\n"


def test_the_last_whole_line_tells_the_step(tmp_path):
    assert last_step(tmp_path / "m") == 0
    (tmp_path / "m").write_text('{"step": 7}\n{"step": 8}\n{"step": 9')
    assert last_step(tmp_path / "m") == 8
