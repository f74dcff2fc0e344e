"""Keeps the folder of a run's checkpoints: says which names mean what, what may be removed, and what never is.

`300` is a checkpoint. `300.saving-<token>` is being written, `300.deleting` removed; both are leftovers once their run
is dead. `300.damaged-1` and `300.superseded-1` were set aside and stay. All other names are the user's.
"""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from splitjax.errors import CheckpointError
from splitjax.runtime.checkpoint import integrity

STATE = "state"  # the state, written by orbax
CARRIED = "carried"  # arrays that the step carries between calls, if there are any; written by orbax
OWN = "own"  # a JSON file of every process that had something to say for itself, named by its number
DESCRIPTION = "checkpoint.json"  # step, leaves, extra

_STEP = re.compile(r"0|[1-9][0-9]*")
_LEFTOVER = re.compile(r"[0-9]+\.(saving-[0-9a-f]+|deleting)")


def prepare_folder(folder: Path, *, read_only: bool) -> None:
    """Makes the `folder`, except where it is `read_only`, and tries whether it can be used. Raises `CheckpointError`
    where it cannot be used."""
    place = str(folder)
    if read_only and not folder.exists():
        raise CheckpointError(
            "there is no such folder of checkpoints", place=place, remedy="name the folder that the run saved to"
        )
    try:
        if not read_only:
            folder.mkdir(parents=True, exist_ok=True)
            # nothing is tried out: a disk that is full can still be restored from
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(
            "the path of the checkpoints is a file, or lies below one", place=place, remedy="name a folder"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"the folder of the checkpoints cannot be written: {error.strerror or error}",
            place=place,
            remedy=(
                "free space or correct the permissions, name another folder, or open it with read_only=True to restore"
                " only"
            ),
        ) from error
    if not folder.is_dir():
        raise CheckpointError("the path of the checkpoints is not a folder", place=place, remedy="name a folder")


def checkpoint_folders(folder: Path) -> dict[int, Path]:
    """Returns the checkpoints in a `folder`, damaged or not, by step, ascending. Folders that only have a number for a
    name are left out."""
    by_step = {}
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return {}
    for entry in entries:
        if _STEP.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and is_ours(Path(entry.path)):
            by_step[int(entry.name)] = Path(entry.path)
    return dict(sorted(by_step.items()))


def is_ours(path: Path) -> bool:
    """Returns whether the folder `path` is a checkpoint, or what damage left of one."""
    return any((path / name).exists() for name in (integrity.MANIFEST, DESCRIPTION, STATE))


def new_saving_folder(folder: Path, step: int) -> Path:
    """Makes the folder, inside `folder`, that the checkpoint of a `step` is written to, and returns its path. No two
    attempts share a name: a writer of a failed one may linger."""
    path = folder / f"{step}.saving-{secrets.token_hex(4)}"
    (path / STATE).mkdir(parents=True)
    return path


def commit(saving: Path, step: int) -> None:
    """Gives the sealed folder `saving` the name of its `step`: from now on it is a checkpoint. Raises `OSError`."""
    os.rename(saving, saving.with_name(str(step)))
    integrity.sync_folder(saving.parent)


def set_aside(path: Path, why: str) -> Path:
    """Renames the checkpoint (or file) `path`, whose place is needed, with the reason `why` behind its name, such as
    `300.damaged-1`, and returns the new path. Nothing is deleted. Raises `OSError`."""
    for number in range(1, 10_000):
        aside = path.with_name(f"{path.name}.{why}-{number}")
        if not aside.exists():
            os.rename(path, aside)
            return aside
    raise FileExistsError(f"too many folders {path.name}.{why}-*")


def remove(path: Path) -> None:
    """Deletes the checkpoint `path`, renamed first: half of it must not be taken for all of it. Raises `OSError`."""
    doomed = path.with_name(f"{path.name}.deleting")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def discard(saving: Path) -> None:
    """Deletes the folder `saving` that a failed attempt wrote, so that it does not keep a full disk full. Some of its
    writers may end only now; what they leave after all goes with the leftovers before the next save."""
    for _ in range(20):
        shutil.rmtree(saving, ignore_errors=True)
        if not saving.exists():
            return
        time.sleep(0.05)


def remove_leftovers(folder: Path) -> None:
    """Deletes what dead attempts left in a `folder`. Only while `FolderLock` is held."""
    for entry in list(os.scandir(folder)):
        if _LEFTOVER.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)


def steps_to_keep(
    metrics: Mapping[int, Mapping[str, float]],
    *,
    keep_last: int | None,
    keep_best: int,
    best_metric: str | None,
    best_mode: str,
) -> set[int]:
    """Returns the steps that stay: the last ones, and the best by a metric. Of equally good ones the later stays; NaN
    is never good.

    **Arguments:**

    - `metrics`: those of every step.
    - `keep_last`, `keep_best`, `best_metric`, `best_mode`: as in `CheckpointOptions`.
    """
    steps = sorted(metrics)
    if keep_last is None:
        return set(steps)
    sign = 1 if best_mode == "max" else -1
    scored = [
        (sign * values[best_metric], step)
        for step, values in metrics.items()
        if best_metric is not None and not math.isnan(values.get(best_metric, math.nan))
    ]
    best = sorted(scored, reverse=True)[:keep_best]
    return set(steps[-keep_last:]) | {step for _, step in best}


class FolderLock:
    """Decides who may remove leftovers from a `folder`: the first process of the run that opened it first.

    A process of another run that opens the folder to look (or by mistake) then does not take a save in progress for a
    leftover. The lock falls with the process that holds it, however that dies. Where the file system has no locks (some
    network file systems), it counts as held. `is_held` says whether this process has it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._descriptor: int | None = None
        self.is_held: bool = False

    def acquire(self) -> bool:
        """Tries to get the lock, without waiting, and returns whether this process has it now. Raises `OSError`."""
        if self.is_held:
            return True
        try:
            import fcntl
        except ImportError:  # Windows
            self.is_held = True
            return True
        descriptor = os.open(self._folder, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        except OSError:
            os.close(descriptor)
            descriptor = None
        self._descriptor, self.is_held = descriptor, True
        return True

    def release(self) -> None:
        """Gives the lock back, if this process has it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self.is_held = None, False
