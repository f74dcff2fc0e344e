"""A disk that fills up while a run goes on, on a small file system in memory (Linux, root)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

from benchmarks.faults.checks import Fault, compare, lost, with_problems
from benchmarks.faults.kills import GRACE_SECONDS, START_SECONDS
from benchmarks.faults.run import Launched, Overdue, Recipe

DISK_BYTES = 16 << 20
NOT_SAVED = "was not saved"
# A save that cannot write fails at once: it is reported before the next one is due, and long before `timeout_seconds`
# of 300.
REPORTED_WITHIN_SECONDS = 30.0


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, num_bytes: int = DISK_BYTES) -> Iterator[pathlib.Path]:
    """A file system of its own at a folder. Raises `PermissionError` where it cannot be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode:
        raise PermissionError(f"a disk to fill needs root: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Filler:
    """Takes every free byte of a disk, also those that others give back, until `free`. A context manager: frees at its
    end."""

    def __init__(self, folder: pathlib.Path):
        self._path = folder / "filler"
        self._is_full = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._fill, daemon=True)

    def fill(self) -> None:
        """Returns once the disk is full."""
        self._thread.start()
        self._is_full.wait()

    def free(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> Filler:
        return self

    def __exit__(self, *error: object) -> None:
        self.free()

    def _fill(self) -> None:
        with open(self._path, "ab", buffering=0) as file:
            while not self._over.is_set():
                try:
                    file.write(bytes(1 << 16))
                except OSError:  # smaller pieces fit into what is left
                    with contextlib.suppress(OSError):
                        while not self._over.is_set():
                            file.write(bytes(4096))
                    self._is_full.set()
                    time.sleep(0.005)


def on_disk(recipe: Recipe, disk: pathlib.Path, *, metrics_too: bool) -> Recipe:
    """The same run with its checkpoints, or everything, on a disk."""
    names = {"metrics_name": str(disk / "m.jsonl")} if metrics_too else {}
    return dataclasses.replace(recipe, checkpoints_name=str(disk / "ck"), **names)


def fill_for_a_while(recipe: Recipe, reference: Recipe, moment: str, rng: random.Random, *, fails: int = 2) -> Fault:
    """The disk fills up at a moment (`step` or `save`), has room again after so many failed saves, and the run goes
    on."""
    kind, problems = "disk full for a while", []
    fault = Fault(kind, moment, recipe.checkpoint_every)
    disk = recipe.checkpoints.parent
    with Launched(recipe) as run, Filler(disk) as filler:
        try:
            wanted = rng.randrange(recipe.checkpoint_every, 2 * recipe.checkpoint_every)
            run.until(f"step {wanted}", lambda: run.last_step() >= wanted, START_SECONDS)
            if moment == "save":
                run.until("a save", lambda: run.saving() is not None, START_SECONDS)
            sight = run.sight()
            filler.fill()
            before = run.complete()
            reported = run.until("a report", lambda: run.said(NOT_SAVED), 3 * REPORTED_WITHIN_SECONDS)
            run.until(f"{fails} reports", lambda: run.text.count(NOT_SAVED) >= fails, 3 * REPORTED_WITHIN_SECONDS)
            if not set(before) <= set(run.complete()):
                problems.append(f"of the checkpoints {before} there are {run.complete()} while the disk is full")
            filler.free()
            freed, newest = time.monotonic(), max(run.complete(), default=0)
            saved = run.until("a save", lambda: max(run.complete(), default=0) > newest, START_SECONDS)
            status = run.end(START_SECONDS)
            count = run.text.count(NOT_SAVED)
            fault = dataclasses.replace(
                fault,
                moment=sight.phase,
                last_step=sight.last_step,
                saving_step=sight.saving,
                end_seconds=reported - sight.at,
                limit_seconds=REPORTED_WITHIN_SECONDS,
                note=(
                    f"no worker stopped; {count} saves failed and were reported, the next one was complete"
                    f" {saved - freed:.1f} s after there was room"
                ),
            )
            problems += (
                [f"exit status {status}: {run.text[-800:]}"]
                if status
                else compare(recipe, reference) + lost(recipe, before)
            )
        except Overdue as error:
            problems.append(str(error))
    return with_problems(fault, problems)


def full_to_the_end(recipe: Recipe, reference: Recipe, *, killed: bool = False) -> Fault:
    """The disk stays full: the run says so and fails. With room again, the same command goes on from what was saved
    before.

    **Arguments:**

    - `killed`: a worker is killed meanwhile, and the restart meets the full disk.
    """
    kind = "disk full, and a worker killed" if killed else "disk full to the end"
    problems: list[str] = []
    fault = Fault(kind, "step", recipe.checkpoint_every)
    disk = recipe.checkpoints.parent
    with Filler(disk) as filler:
        try:
            with Launched(recipe, restarts=int(killed), options=["--grace-seconds", str(GRACE_SECONDS)]) as run:
                wanted = 2 * recipe.checkpoint_every + recipe.checkpoint_every // 2
                run.until(f"step {wanted}", lambda: run.last_step() >= wanted, START_SECONDS)
                sight = run.sight()
                filler.fill()
                if killed:
                    run.until("a report", lambda: run.said(NOT_SAVED), 3 * REPORTED_WITHIN_SECONDS)
                    sight = run.sight()
                    os.kill(run.workers()[1], signal.SIGKILL)
                status = run.end(START_SECONDS)
                before = run.complete()
                said = "No space left" in run.text
            if status == 0 or not said:
                problems.append(
                    f"exit status {status}, and the full disk was {'' if said else 'not '}named: {run.text[-800:]}"
                )
            if not before or not set(sight.complete) <= set(before):
                problems.append(f"of the checkpoints {sight.complete} there are {before}")
            problems += lost(recipe, before)
            reached = run.last_step()
            filler.free()
            freed = time.monotonic()
            with Launched(recipe) as run:
                again = run.until("a step", run.has_stepped, START_SECONDS)
                resumed = run.resumed_step()
                second = run.end(START_SECONDS)
            problems += (
                [f"with room again: exit status {second}: {run.text[-800:]}"] if second else compare(recipe, reference)
            )
            problems += lost(recipe, before)
            if resumed != max(before, default=None):
                problems.append(f"resumed from {resumed}, though {before} were there")
            fault = dataclasses.replace(
                fault,
                moment=sight.phase,
                resumed_step=resumed,
                again_seconds=again - freed,
                note=(
                    f"exit status {status} at step {reached}, naming the disk; with room again the same command went on"
                    f" from step {resumed}"
                ),
            )
        except Overdue as error:
            problems.append(str(error))
    return with_problems(fault, problems)
