"""Holds what a run asks of its checkpoints, and what it gets back: options go in, a restored state comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax

from splitjax.errors import CheckpointError
from splitjax.planning.carried import Carried


@dataclasses.dataclass(frozen=True)
class CheckpointOptions:
    """Says how checkpoints are kept.

    **Arguments:**

    - `directory`: the folder, on a file system that all processes share. Made if missing. Other files in it are left
      alone.
    - `keep_last`: how many of the newest are kept, at least 1; None keeps all.
    - `keep_best`: how many of the best are kept, however old they are.
    - `best_metric`, `best_mode`: what is best: the name of a metric that `save` is given, and whether the smallest
      (`min`) or the largest (`max`) counts. Checkpoints without it, or with NaN, are kept by age only.
    - `timeout_seconds`: after this a save, and an answer of another process, has failed.
    - `on_failure`: called with the `CheckpointError` of each failed save, in the thread that noticed.
    - `read_only`: only restores; nothing in the folder changes.

    Raises `CheckpointError` for a value that cannot be used.
    """

    directory: Path | str
    keep_last: int | None = 3
    keep_best: int = 1
    best_metric: str | None = "loss"
    best_mode: Literal["min", "max"] = "min"
    timeout_seconds: float = 300.0
    on_failure: Callable[[CheckpointError], None] | None = None
    read_only: bool = False

    def __post_init__(self) -> None:
        if "://" in str(self.directory):
            raise CheckpointError(
                "checkpoints are kept in a folder of a mounted file system",
                value=str(self.directory),
                place="directory",
                remedy="mount the bucket, or use parallel_step.abstract_state(...) with orbax",
            )
        object.__setattr__(self, "directory", Path(self.directory).absolute())
        self._require(self.keep_last is None or self.keep_last >= 1, "keep_last", "at least 1, or None to keep all")
        self._require(self.keep_best >= 0, "keep_best", "0 or more")
        self._require(self.best_mode in ("min", "max"), "best_mode", '"min" or "max"')
        self._require(self.timeout_seconds > 0, "timeout_seconds", "a positive number of seconds")

    def _require(self, holds: bool, name: str, wanted: str) -> None:
        if not holds:
            raise CheckpointError(
                f"{name} is not usable", value=getattr(self, name), place=f"CheckpointOptions.{name}", remedy=wanted
            )


@dataclasses.dataclass(frozen=True)
class Restored:
    """Holds what `Checkpoints.restore` read.

    **Arguments:**

    - `step`: of the checkpoint that was restored.
    - `state`: bit for bit what was saved, in the structure and the shardings that were asked for.
    - `extra`: as given to `save`.
    - `metrics`: as given to `save`.
    - `carried`: as given to `save`, for `parallel_step.resume`; None if it was not given.
    - `skipped`: newer checkpoints that are damaged, newest first: pairs of step and what is wrong, naming the first
      file.
    - `own`: what each process gave to `save` for itself, by its number; empty if it was not given.
    """

    step: int
    state: Any
    extra: Mapping[str, Any]
    metrics: Mapping[str, float]
    skipped: tuple[tuple[int, str], ...]
    carried: Carried | None = None
    own: tuple[Any, ...] = ()

    @property
    def position(self) -> Any:
        """Returns where this process's data go on, as the training loop saved it: a JSON value, None if there is none.

        Raises `CheckpointError` where every process had a position of its own in its own part of the data, and the
        number of processes is another one now.
        """
        if not self.own or all(value == self.own[0] for value in self.own):
            return self.own[0] if self.own else self.extra.get("position")
        if len(self.own) == jax.process_count():
            return self.own[jax.process_index()]
        raise CheckpointError(
            f"every process of the run had a place of its own in the data, and there were {len(self.own)} processes",
            value=jax.process_count(),
            place="Restored.position",
            remedy=f"resume with {len(self.own)} processes; or read the rows of global batches "
            "(splitjax.data.RowsOfBatches), whose position is the same in any number of processes",
        )
