"""Damage, full disks and sudden death: nothing already saved is lost, nothing damaged is used."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from splitjax.errors import CheckpointError
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints, integrity
from splitjax.runtime.checkpoint import folder as folders
from tests.runtime.states import LIKE, assert_same, filled, no_file_beyond, state_at


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]


@pytest.fixture(autouse=True)
def writers_end():
    """A save that is given up on leaves orbax's threads behind. What they still raise is to be seen here, not in a
    later test."""
    yield
    for thread in threading.enumerate():
        if type(thread).__module__.startswith("orbax."):
            threading.Thread.join(thread, 60)  # orbax's own raises what the thread raised


@pytest.fixture
def two_good(tmp_path):
    with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
        checkpoints.save(100, state_at(100), metrics={"loss": 2.0})
        checkpoints.save(200, state_at(200), metrics={"loss": 1.0})
        yield checkpoints


def test_damage_in_any_file_is_found_and_the_older_checkpoint_restored(two_good, tmp_path):
    rng = random.Random(0)
    assert two_good.newest_good() == 200
    files = files_of(tmp_path / "200")
    kinds = {path.relative_to(tmp_path / "200").parts[:2] for path in files}
    assert {
        ("manifest.json",),
        ("checkpoint.json",),
        ("state", "_METADATA"),
        ("state", "manifest.ocdbt"),
        ("state", "ocdbt.process_0"),
    } <= kinds
    for path in files:
        data = path.read_bytes()
        name = path.relative_to(tmp_path / "200").as_posix()
        damages = [flip(data, rng), flip(data, rng), data[: rng.randrange(len(data))], data + b"\n", b"", None]
        for damage in damages:
            if damage is None:
                path.unlink()
            else:
                path.write_bytes(damage)
            restored = two_good.restore(LIKE)
            assert restored.step == 100 and [step for step, _ in restored.skipped] == [200], (name, damage)
            assert restored.skipped[0][1].startswith(f"{name}: "), restored.skipped
            path.write_bytes(data)
        assert_same(restored.state, state_at(100))
    assert two_good.steps() == (100,)
    assert two_good.newest_good() == 200 and two_good.steps() == (100, 200)  # the file is back as it was


def test_what_is_damaged_is_said_and_kept_when_its_step_comes_again(two_good, tmp_path, caplog):
    two_good.wait()
    file = max(files_of(tmp_path / "200" / "state"), key=lambda path: path.stat().st_size)
    bad = flip(file.read_bytes(), random.Random(1))
    file.write_bytes(bad)
    assert two_good.steps() == (100, 200)  # as far as known without reading
    with pytest.raises(CheckpointError, match="(?s)this checkpoint is damaged: step 200: state/.*SHA-256.*steps .100."):
        two_good.restore(LIKE, step=200)
    assert two_good.newest_good() == 100
    assert two_good.steps() == (100,)
    assert two_good.save(200, state_at(200), wait=True)
    assert "set aside as 200.damaged-1" in caplog.text
    assert (tmp_path / "200.damaged-1" / file.relative_to(tmp_path / "200")).read_bytes() == bad
    assert two_good.restore(LIKE).step == 200
    file = next((tmp_path / "200" / "state").rglob("manifest.ocdbt"))
    file.unlink()
    assert two_good.steps() == (100,)
    assert two_good.save(200, state_at(200), wait=True)
    assert sorted(os.listdir(tmp_path)) == ["100", "200", "200.damaged-1", "200.damaged-2"]


def test_a_damaged_newer_checkpoint_does_not_push_out_the_good_older_one(tmp_path):
    options = CheckpointOptions(tmp_path, keep_last=2, keep_best=0)
    with Checkpoints(options) as checkpoints:
        for step in (100, 200, 300):
            checkpoints.save(step, state_at(step))
    (tmp_path / "300" / "state" / "_METADATA").write_text("{}")
    with Checkpoints(options) as checkpoints:
        assert checkpoints.restore(LIKE).step == 200
        checkpoints.save(250, state_at(250), wait=True)
        assert checkpoints.steps() == (200, 250)
        assert (tmp_path / "300").exists()  # damaged: neither counted nor deleted
        checkpoints.save(350, state_at(350), wait=True)
        assert checkpoints.steps() == (250, 350)
        assert (tmp_path / "300").exists()


def test_no_good_checkpoint_says_what_is_wrong_with_each(two_good, tmp_path):
    two_good.wait()
    (tmp_path / "200" / "manifest.json").unlink()
    (tmp_path / "100" / "checkpoint.json").write_text("{}")
    with pytest.raises(
        CheckpointError, match=r"step 200: manifest.json: missing; step 100: checkpoint.json: 2 bytes, written were"
    ):
        two_good.restore(LIKE)
    assert two_good.newest_good() is None


def test_a_folder_that_is_not_sealed_yet_is_no_checkpoint(tmp_path):
    saving = folders.new_saving_folder(tmp_path, 3)
    (saving / "state" / "a").write_bytes(b"x" * 10)
    assert integrity.find_damage(saving) == "manifest.json: missing"
    integrity.seal(saving, {"step": 3})
    assert integrity.find_damage(saving) is None and integrity.read_about(saving) == {"step": 3}
    assert folders.checkpoint_folders(tmp_path) == {}
    folders.commit(saving, 3)
    assert folders.checkpoint_folders(tmp_path) == {3: tmp_path / "3"}


# Where the limit strikes: the arrays; only the files that are written after them.
@pytest.mark.parametrize(
    "state, extra",
    [({"w": np.random.default_rng(0).random(100_000)}, {}), ({"w": np.zeros(3)}, {"log": "x" * 100_000})],
)
def test_a_failed_save_is_reported_and_cleaned_up_and_the_next_one_tries_again(tmp_path, caplog, state, extra):
    told = []
    with Checkpoints(CheckpointOptions(tmp_path, on_failure=told.append)) as checkpoints:
        checkpoints.save(1, {"w": np.zeros(3)}, wait=True)
        with no_file_beyond(50_000):
            assert checkpoints.save(2, state, extra)  # nothing is raised in the middle of training
            assert checkpoints.steps() == (1,)
            assert os.listdir(tmp_path) == ["1"]
            assert [error.message for error in told] == [error.message for error in checkpoints.failures]
            assert "step 2 was not saved" in caplog.text and "File too large" in told[0].message
            assert "free space" in told[0].remedy and str(tmp_path) in str(told[0])
            with pytest.raises(CheckpointError, match="step 3 was not saved"):
                checkpoints.save(3, state, extra, wait=True)
            with pytest.raises(CheckpointError, match="step 3 was not saved"):
                checkpoints.wait()
        assert checkpoints.save(3, state, extra, wait=True)  # the next one tries again
        assert checkpoints.steps() == (1, 3) and len(told) == 2
        assert_same(checkpoints.restore(state).state, state)


def test_close_raises_when_the_last_save_failed_but_hides_no_other_error(tmp_path):
    with no_file_beyond(50_000), pytest.raises(CheckpointError, match="step 1 was not saved"):
        with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
            checkpoints.save(1, {"w": np.zeros(100_000)})
    with no_file_beyond(50_000), pytest.raises(ZeroDivisionError):
        with Checkpoints(CheckpointOptions(tmp_path)) as checkpoints:
            checkpoints.save(1, {"w": np.zeros(100_000)})
            raise ZeroDivisionError
    assert os.listdir(tmp_path) == []


def test_a_folder_that_went_away_fails_the_save_only(tmp_path):
    folder = tmp_path / "run"
    checkpoints = Checkpoints(CheckpointOptions(folder))
    shutil.rmtree(folder)
    assert checkpoints.save(1, {"w": filled(3)}) is False
    assert "No such file" in checkpoints.failures[0].message
    folder.mkdir()
    assert checkpoints.save(2, {"w": filled(3)}, wait=True)
    checkpoints.close()


def test_a_save_that_takes_too_long_fails_and_leaves_nothing(tmp_path):
    checkpoints = Checkpoints(CheckpointOptions(tmp_path, timeout_seconds=1e-3))
    started = time.monotonic()
    with pytest.raises(CheckpointError, match="took longer than the timeout"):
        checkpoints.save(1, {"w": np.zeros(1_000_000)}, wait=True)
    assert time.monotonic() - started < 10
    assert checkpoints.steps() == ()
    with pytest.raises(CheckpointError):
        checkpoints.close()


def test_a_file_system_that_does_not_answer_is_given_up_on(tmp_path, monkeypatch):
    answered = threading.Event()
    seal = integrity.seal
    monkeypatch.setattr(integrity, "seal", lambda *args: (answered.wait(60), seal(*args)))
    checkpoints = Checkpoints(CheckpointOptions(tmp_path, timeout_seconds=2))
    with pytest.raises(CheckpointError, match="did not answer within the timeout"):
        checkpoints.save(1, {"w": np.zeros(3)}, wait=True)
    answered.set()
    next(thread for thread in threading.enumerate() if thread.name == "checkpoint-1").join()
    assert os.listdir(tmp_path) == [] and len(checkpoints.failures) == 1  # what came too late is not used
    with pytest.raises(CheckpointError, match="did not answer within the timeout"):
        checkpoints.close()


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        state = {"w": np.random.default_rng(0).random(300_000)}  # 2.4 MB
        free_bytes = lambda: os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        with Checkpoints(CheckpointOptions(disk / "run", keep_last=1)) as checkpoints:
            checkpoints.save(1, state, wait=True)
            (disk / "ballast").write_bytes(bytes(free_bytes() - 1_000_000))
            before = free_bytes()
            checkpoints.save(2, state)
            assert checkpoints.restore(state).step == 1
            assert "No space left on device" in checkpoints.failures[0].message
            assert free_bytes() == before
            (disk / "ballast").unlink()
            checkpoints.save(3, state, wait=True)
            assert checkpoints.steps() == (3,)
    finally:
        subprocess.run(["umount", disk], check=True)


_TRAINER = """
import sys
from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints
from tests.runtime.states import LIKE, state_at
import numpy as np

with Checkpoints(CheckpointOptions(sys.argv[1])) as checkpoints:
    print("start", flush=True)
    step = 0
    if checkpoints.steps():
        restored = checkpoints.restore(LIKE)
        step = restored.step
        assert not restored.skipped, restored.skipped
        np.testing.assert_array_equal(restored.state["w"], state_at(step)["w"])
        assert restored.extra == {"position": step}
    print("from", step, flush=True)
    while True:
        step += 1
        checkpoints.save(step, state_at(step), {"position": step}, {"loss": 1 / step})
        assert not checkpoints.failures, checkpoints.failures
        print("saved", step, flush=True)
"""


def _kill_at_random_moments(folder, count, seed):
    """Kills a process that resumes and saves without a pause; each leaves what the next one finds."""
    rng = random.Random(seed)
    reached = 0
    for number in range(count):
        said: list[str] = []
        before = _listing(folder)
        try:
            reached = _kill_once(folder, rng, reached, said, may_only_start=number < count - 1)
        except BaseException as error:  # it may be the only one in thousands: it has to explain itself
            threads = [thread.name for thread in threading.enumerate()]
            error.add_note(
                "\n".join(
                    [
                        f"attempt {number}, step {reached} reached before; threads of this process: {threads}",
                        *said,
                        f"folder before: {before}",
                        f"folder after: {_listing(folder)}",
                    ]
                )
            )
            raise
    assert reached > 0
    Checkpoints(CheckpointOptions(folder)).close()
    assert all(map(str.isdigit, os.listdir(folder))), _listing(folder)


def _listing(folder):
    """Names, and of checkpoints what is wrong with them."""
    return {
        name: (integrity.find_damage(folder / name) or "whole") if name.isdigit() else ""
        for name in sorted(os.listdir(folder))
    }


def _kill_once(folder, rng, reached, said, *, may_only_start):
    """Returns the last step whose save is known to have begun. `said`: gets what the process said and how it ended."""
    environment = os.environ | {
        "XLA_FLAGS": "",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _TRAINER, folder], env=environment, **pipes) as trainer:

        def line():
            text = trainer.stdout.readline()
            said.append(f"printed: {text!r}")
            assert text, "the process ended before it was killed"
            return text

        try:
            assert line() == "start\n"
            if not may_only_start or rng.random() < 0.7:  # while saving; otherwise while restoring
                assert int(line().removeprefix("from ")) >= reached - 1, "a checkpoint that was complete is gone"
                for _ in range(rng.randrange(1, 8)):
                    reached = max(reached, int(line().removeprefix("saved ")))
            time.sleep(rng.random() * 0.1)
        finally:
            trainer.send_signal(signal.SIGKILL)
            # not communicate(): it leaves out what readline() read ahead
            output, errors = trainer.stdout.read(), trainer.stderr.read()
            trainer.wait()
            said += [f"printed before it died: {output!r}", f"exit status {trainer.returncode}, stderr:\n{errors}"]
    assert trainer.returncode == -signal.SIGKILL
    # A save begins when the one before it is complete. The last line may be cut off: the process died over it.
    whole = output[: output.rfind("\n") + 1].splitlines()
    reached = max([reached, *(int(text.removeprefix("saved ")) for text in whole if text.startswith("saved"))])
    with Checkpoints(CheckpointOptions(folder, read_only=True)) as checkpoints:
        for step in checkpoints.steps():
            restored = checkpoints.restore(LIKE, step=step)
            assert_same(restored.state, state_at(step))
        # whole or not at all
        assert sorted(map(int, filter(str.isdigit, os.listdir(folder)))) == list(checkpoints.steps())
        assert (checkpoints.newest_good() or 0) >= reached - 1
    return reached


@pytest.mark.one_version
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_process_killed_at_any_moment_leaves_whole_checkpoints(tmp_path):
    _kill_at_random_moments(tmp_path, 4, seed=0)


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
def test_a_process_killed_at_many_moments_leaves_whole_checkpoints(tmp_path):
    _kill_at_random_moments(tmp_path, 25, seed=1)
