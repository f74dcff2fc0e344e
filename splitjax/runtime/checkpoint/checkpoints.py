"""Checkpoints of a training run: asynchronous, atomic, verified, for any number of processes.

A checkpoint is written to a folder with a temporary name, its files are digested into a manifest, and one rename makes
it a checkpoint. Only then are older ones removed. See docs/checkpoints.md for what is on disk.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from splitjax.errors import CheckpointError
from splitjax.planning.carried import Carried
from splitjax.runtime.checkpoint import folder as folders
from splitjax.runtime.checkpoint import integrity
from splitjax.runtime.checkpoint.carrying import taken_apart
from splitjax.runtime.checkpoint.choice import choose, complete, newest_good, remove_old
from splitjax.runtime.checkpoint.description import Description, check_json, checked_step, write_own
from splitjax.runtime.checkpoint.failures import failure, shorten
from splitjax.runtime.checkpoint.options import CheckpointOptions, Restored
from splitjax.runtime.checkpoint.orbax_tree import keeps_structure
from splitjax.runtime.checkpoint.reading import read_checkpoint
from splitjax.runtime.checkpoint.state_io import ArrayWriter, StoredPart, check_targets, quiet_orbax
from splitjax.runtime.checkpoint.state_match import describe, reject_consumed
from splitjax.runtime.launch.peers import Peers, of_any
from splitjax.runtime.launch.stages import RESTORED_EVENT, told_as

logger: logging.Logger = logging.getLogger("splitjax")

# Shares of the timeout after which writing, collecting the processes' reports, and sealing have failed: each leaves the
# next one time, so that all processes know the end of a save when the timeout is over.
_WRITTEN, _REPORTED, _SEALED = 0.8, 0.85, 0.95
_GRACE_SECONDS = 1.0  # beyond the timeout, for the thread that noticed it to say so


@dataclasses.dataclass(frozen=True)
class _Save:
    """Holds a save in progress: the messages of the processes go by `topic`, `started` is by `time.monotonic`."""

    step: int
    folder: Path
    topic: str
    started: float
    description: str
    metrics: Mapping[str, float]


class Checkpoints:
    """Saves and restores the checkpoints in one folder; use it as a context manager. In a run of several processes all
    of them make it, and call its methods with the same arguments in the same order.

    **Arguments:** `options`: the folder, and how checkpoints are kept in it; a path alone means the options' defaults.

    Raises `CheckpointError` for a folder that cannot be used. What runs that died left half written is removed here.
    """

    def __init__(self, options: CheckpointOptions | Path | str):
        self.options: CheckpointOptions = (
            options if isinstance(options, CheckpointOptions) else CheckpointOptions(options)
        )
        options = self.options
        self._folder = Path(options.directory)
        self._seconds = options.timeout_seconds
        self._peers = Peers("checkpoints")
        self._lock = folders.FolderLock(self._folder)
        self._pending: tuple[_Save, threading.Thread] | None = None
        self._failures: list[CheckpointError] = []
        self._last_failure: CheckpointError | None = None
        self._saved: set[int] = set()
        self._damaged: dict[int, str] = {}
        self._resumed_at: int | None = None
        self._given_up: set[str] = set()
        self._is_closed = False
        self._at_close = contextlib.ExitStack()
        self._peers.decide(self._peers.new_topic(), self._open, self._seconds)
        self._at_close.callback(self._lock.release)
        self._at_close.enter_context(quiet_orbax())

    @property
    def failures(self) -> tuple[CheckpointError, ...]:
        """Returns the error of every save that failed since this was made, oldest first."""
        return tuple(self._failures)

    def save(
        self,
        step: int,
        state: Any,
        extra: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        *,
        carried: Carried | None = None,
        own: Any = None,
        wait: bool = False,
    ) -> bool:
        """Saves a state. Returns once it is copied off the devices, so that it may be donated; the rest happens in the
        background. Waits for an earlier save that is still in progress.

        A save that fails (disk full, file system gone, another process died) raises nothing here: it is in `failures`,
        logged, and given to `on_failure`; its files are removed, earlier checkpoints stay, the next save tries again.
        `close` raises if the last save failed.

        A damaged checkpoint of the same step is renamed (`300.damaged-1`) and kept. A good one stays: nothing is saved.
        After `restore(..., step=...)` of an older checkpoint, though, those of this step and later ones belong to a run
        that was given up: the first save renames them (`300.superseded-1`).

        **Arguments:**

        - `step`: 0 or more.
        - `state`: any pytree of arrays, typed PRNG keys, numbers and strings. What is no global `jax.Array` is taken
          from process 0.
        - `extra`: JSON values: data position, schedule, identity of the run. Taken from process 0.
        - `metrics`: by which the best are kept.
        - `carried`: `parallel_step.carried()`, what the step keeps besides its states.
        - `own`: a JSON value of each process for itself, such as the place in its part of the data.
        - `wait`: return when the checkpoint is complete, and raise if it fails.

        **Returns:** whether this state is being saved; False for a step that is there already, or a save that failed at
        once.

        Raises `CheckpointError` for arguments that cannot be saved; with `wait=True` for every failure.
        """
        self._require_open()
        if self.options.read_only:
            raise CheckpointError(
                "the folder was opened to restore only",
                place=str(self._folder),
                remedy="open it without read_only=True",
            )
        begin, end = self._peers.new_topic(), self._peers.new_topic()
        step = checked_step(step)
        leaves, more = describe(state), taken_apart(carried)
        reject_consumed(leaves, state)
        check_json(own, "own")
        as_tree = keeps_structure(state)
        description = Description(step, leaves, dict(extra or {}), more.entry, as_tree).to_json()
        values = {name: float(value) for name, value in (metrics or {}).items()}
        self._join()
        try:
            name = self._peers.decide(begin, lambda: self._begin(step), self._seconds)
        except CheckpointError as error:
            failure = self._failed(step, error.message, error.remedy)
            if wait:
                raise failure from error
            return False
        if name is None:
            return False
        save = _Save(step, self._folder / name, end, time.monotonic(), description, values)
        arrays = StoredPart(save.folder / folders.STATE, leaves, state, as_tree)
        carries = StoredPart(save.folder / folders.CARRIED, more.leaves, more.arrays, as_tree=False)
        writer, problem = self._start(save, own, arrays, carries)
        thread = threading.Thread(target=self._finish, args=(save, writer, problem), name=f"checkpoint-{step}")
        self._pending = save, thread
        thread.start()
        if wait:
            self.wait()
        return True

    def steps(self) -> tuple[int, ...]:
        """Returns the steps of the checkpoints that are complete, ascending: every file is there with its size.
        Contents are not read, except that what `newest_good` and `restore` found damaged is left out."""
        self._require_open()
        self._join()
        return tuple(
            self._peers.decide(
                self._peers.new_topic(), lambda: list(complete(self._folder, self._damaged)), self._seconds
            )
        )

    @told_as(RESTORED_EVENT)
    def newest_good(self) -> int | None:
        """Returns the newest step of which every byte is as it was written; None without one. Reads checkpoints, newest
        first, until one is good. All processes get the answer of process 0."""
        self._require_open()
        self._join()
        step, skipped = self._peers.decide(self._peers.new_topic(), lambda: newest_good(self._folder), self._seconds)
        self._note_damage(step, skipped)
        return step

    @told_as(RESTORED_EVENT)
    def restore(self, like: Any, step: int | None = None) -> Restored:
        """Restores the newest good checkpoint, or that of a step.

        **Arguments:**

        - `like`: the state that is wanted, as arrays, or as `ShapeDtypeStruct`s with the shardings in which they are to
          come back (`parallel_step.abstract_state`). The mesh, its size, the rules and the number of processes need not
          be those of the save.
        - `step`: this one, and no other if it is damaged.

        Raises `CheckpointError` when there is no good checkpoint (saying what is wrong with each), and, before any
        array is read, when it holds another state: naming the first path that differs, with what was saved and what is
        wanted.
        """
        self._require_open()
        self._join()
        choice, end = self._peers.new_topic(), self._peers.new_topic()
        wanted = describe(like)
        check_targets(wanted, like)
        chosen, skipped = self._peers.decide(choice, lambda: choose(self._folder, wanted, step), self._seconds)
        path = self._folder / str(chosen)
        restored, problem, cause = None, None, None
        try:
            restored = read_checkpoint(path, chosen, like, wanted, tuple((bad, damage) for bad, damage in skipped))
        except Exception as error:  # said to the other processes before it is raised: they would wait for this one
            problem, cause = shorten(f"{type(error).__name__}: {error}"), error
        problem = self._peers.agree(end, problem, self._seconds)
        if problem is not None:
            raise CheckpointError(
                f"the checkpoint of step {chosen} is undamaged but cannot be read: {problem}",
                place=str(path),
                remedy="see that all processes can read the folder, and that the state fits into memory",
            ) from cause
        assert restored is not None, "a process that could not read has a problem, which all agree on"
        self._note_damage(chosen, skipped)
        self._resumed_at = chosen if step is not None else None
        for bad, damage in skipped:
            logger.warning("checkpoint of step %s is damaged and was skipped: %s", bad, damage)
        return restored

    def wait(self) -> None:
        """Waits for the save in progress. Raises `CheckpointError` if the last save failed."""
        self._join()
        if self._last_failure is not None:
            raise self._last_failure

    def close(self) -> None:
        """Waits for the save in progress, after which nothing can be saved. Closing again does nothing. Raises
        `CheckpointError` if the last save failed."""
        if self._is_closed:
            return
        try:
            self.wait()
        finally:
            self._is_closed = True
            self._at_close.close()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CheckpointError:
            if error is None:  # an error of the training is the one to be seen; this one is in the log
                raise

    # In process 0: what is decided for all.

    def _open(self) -> None:
        folders.prepare_folder(self._folder, read_only=self.options.read_only)
        if self.options.read_only:
            return
        if self._lock.acquire():
            folders.remove_leftovers(self._folder)
        else:
            logger.warning("%s is in use by another run; read_only=True is for looking at it", self._folder)

    def _begin(self, step: int) -> str | None:
        """Returns the name of the folder to write the `step` to; None when there is nothing to do."""
        if self._lock.acquire():
            folders.remove_leftovers(self._folder)
        for present_step, path in folders.checkpoint_folders(self._folder).items():
            is_later = self._resumed_at is not None and present_step > self._resumed_at
            is_given_up = is_later and present_step >= step
            if present_step != step and not is_given_up:
                continue
            damage = self._damaged.get(present_step)
            damage = damage or integrity.find_damage(path, digests=present_step not in self._saved)
            if damage is None and not is_given_up:
                logger.warning("step %d is saved already and undamaged: it is left as it is", step)
                return None
            if damage is None or present_step == step:
                aside = folders.set_aside(path, "superseded" if damage is None else "damaged")
                logger.warning(
                    "checkpoint of step %d set aside as %s: %s",
                    present_step,
                    aside.name,
                    damage or "an older one was restored",
                )
                self._damaged.pop(present_step, None)
        self._resumed_at = None
        if (self._folder / str(step)).exists():
            raise CheckpointError(
                f"{step} exists already and is no checkpoint",
                place=str(self._folder),
                remedy="rename it, or use another folder",
            )
        return folders.new_saving_folder(self._folder, step).name

    def _conclude(self, save: _Save, writer: ArrayWriter | None, problem: str | None) -> str | None:
        """Seals and names a checkpoint that all processes wrote. Returns why it failed, then without leaving
        anything."""
        problems = of_any([problem, *self._peers.collect(save.topic, self._deadline(save, _REPORTED))])
        try:
            if not problems:
                assert writer is not None, "a process that could not start writing has a problem"
                writer.finish()
                integrity.write_durably(save.folder / folders.DESCRIPTION, save.description)
                integrity.seal(save.folder, {"step": save.step, "metrics": save.metrics})
                if time.monotonic() < self._deadline(save, _SEALED):
                    folders.commit(save.folder, save.step)
                    return None
                problems.append("sealing took longer than the timeout")
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")
        folders.discard(save.folder)
        return "; ".join(problems)

    # In every process.

    def _start(self, save: _Save, own: Any, *parts: StoredPart) -> tuple[ArrayWriter | None, str | None]:
        if not save.folder.is_dir():
            return None, f"sees no folder {save.folder}: all processes need a file system that they share"
        try:
            if own is not None:
                write_own(save.folder, self._peers.rank, own)
            return ArrayWriter(parts), None
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    def _finish(self, save: _Save, writer: ArrayWriter | None, problem: str | None) -> None:
        """Does the rest of a save, in its own thread."""
        remedy = None
        try:
            if writer is not None:
                problem = writer.wait(self._deadline(save, _WRITTEN))
            if self._peers.is_first:
                problem = self._conclude(save, writer, problem)
                self._peers.announce(save.topic, problem)
            else:
                self._peers.report(save.topic, problem)
                problem = self._peers.hear(save.topic, self._deadline(save, 1.0))
        except CheckpointError as error:
            problem, remedy = error.message, error.remedy
        except Exception as error:  # nobody sees what a thread raises
            problem = f"{type(error).__name__}: {error}"
        if save.topic in self._given_up:
            return
        if problem is not None:
            self._failed(save.step, problem, remedy)
            return
        self._saved.add(save.step)
        self._last_failure = None
        logger.info("saved step %d in %.1f s", save.step, time.monotonic() - save.started)
        if self._peers.is_first:
            try:
                remove_old(self._folder, self.options, self._damaged)
            except OSError as error:
                logger.warning("old checkpoints in %s could not be removed: %s", self._folder, error)

    def _failed(self, step: int, problem: str, remedy: str | None) -> CheckpointError:
        """Puts the failure of the save of a `step` on record, in the log and before `on_failure`, and returns it."""
        error = failure(step, self._folder, problem, remedy)
        self._failures.append(error)
        self._last_failure = error
        logger.warning("%s", error)
        if self.options.on_failure is not None:
            try:
                self.options.on_failure(error)
            except Exception:
                logger.exception("on_failure raised")
        return error

    def _join(self) -> None:
        """Waits for the save in progress, at most for its timeout. Raises nothing: a failure is on record."""
        if self._pending is None:
            return
        save, thread = self._pending
        # A call of the file system cannot be interrupted, only given up on; should it end, its deadline prevents the
        # rename.
        thread.join(max(0.0, self._deadline(save, 1.0) - time.monotonic()) + _GRACE_SECONDS)
        self._pending = None
        if thread.is_alive() and save.step not in self._saved:  # saved: it removes old checkpoints still
            self._given_up.add(save.topic)
            self._failed(save.step, "the file system did not answer within the timeout", None)

    def _note_damage(self, good: int | None, skipped: Sequence[tuple[int, str]]) -> None:
        self._damaged.update(dict(skipped))
        if good is not None:
            self._damaged.pop(good, None)  # someone brought the files back

    def _deadline(self, save: _Save, share: float) -> float:
        return save.started + share * self._seconds

    def _require_open(self) -> None:
        if self._is_closed:
            raise CheckpointError(
                "these checkpoints are closed", place=str(self._folder), remedy="use them inside the `with` block"
            )
