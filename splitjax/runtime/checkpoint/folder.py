"""The folder of a run's checkpoints: which names mean what, what may be removed, and what never is.

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

STATE = "state"  # the arrays, written by orbax
DESCRIPTION = "checkpoint.json"  # step, leaves, extra

_STEP = re.compile(r"0|[1-9][0-9]*")
_LEFTOVER = re.compile(r"[0-9]+\.(saving-[0-9a-f]+|deleting)")


def prepare_folder(folder: Path, *, read_only: bool) -> None:
    """Makes the folder where it is to be written to. Raises `CheckpointError` where it cannot be used."""
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
    """The checkpoints in a folder, damaged or not, by step, ascending. Folders that only have a number for a name are
    left out."""
    found = {}
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:
        return {}
    for entry in entries:
        if _STEP.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False) and is_ours(Path(entry.path)):
            found[int(entry.name)] = Path(entry.path)
    return dict(sorted(found.items()))


def is_ours(path: Path) -> bool:
    """Whether a folder is a checkpoint, or what damage left of one."""
    return any((path / name).exists() for name in (integrity.MANIFEST, DESCRIPTION, STATE))


def new_saving_folder(folder: Path, step: int) -> Path:
    """Makes the folder that a checkpoint is written to. No two attempts share a name: a writer of a failed one may
    linger."""
    path = folder / f"{step}.saving-{secrets.token_hex(4)}"
    (path / STATE).mkdir(parents=True)
    return path


def commit(saving: Path, step: int) -> None:
    """Gives a sealed folder its name: from now on it is a checkpoint."""
    os.rename(saving, saving.with_name(str(step)))
    integrity.sync_folder(saving.parent)


def set_aside(path: Path, why: str) -> Path:
    """Renames a checkpoint whose step is to be saved again: `300.damaged-1`. Nothing is deleted."""
    for number in range(1, 10_000):
        aside = path.with_name(f"{path.name}.{why}-{number}")
        if not aside.exists():
            os.rename(path, aside)
            return aside
    raise FileExistsError(f"too many folders {path.name}.{why}-*")


def remove(path: Path) -> None:
    """Deletes a checkpoint. Renamed first: half of it must not be taken for all of it."""
    doomed = path.with_name(f"{path.name}.deleting")
    if doomed.exists():
        shutil.rmtree(doomed)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def discard(saving: Path) -> None:
    """Deletes what a failed attempt wrote, so that it does not keep a full disk full. Some of its writers may end only
    now; what they leave after all goes with the leftovers before the next save."""
    for _ in range(20):
        shutil.rmtree(saving, ignore_errors=True)
        if not saving.exists():
            return
        time.sleep(0.05)


def remove_leftovers(folder: Path) -> None:
    """Deletes what dead attempts left. Only while `FolderLock` is held."""
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
    """Which steps stay: the last ones, and the best by a metric. Of equally good ones the later; NaN is never good.

    **Arguments:**

    - `metrics`: those of every step.
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
    """Who may remove leftovers: the first process of the run that opened the folder first. Another one that opens it to
    look (or by mistake) then does not take a save in progress for a leftover. Falls with the process that holds it,
    however that dies. Where the file system has no locks (some network ones), it counts as held."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._descriptor: int | None = None
        self.is_held = False

    def acquire(self) -> bool:
        """Tries to get it, without waiting."""
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
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self.is_held = None, False
