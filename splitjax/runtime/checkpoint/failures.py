"""Says why a save failed: what went wrong goes in, the error that a user sees, with what to do about it, comes out."""

from __future__ import annotations

from pathlib import Path

from splitjax.errors import CheckpointError

_DISK_FULL = ("No space left", "Disk quota exceeded", "File too large")


def failure(step: int, folder: Path, problem: str, remedy: str | None) -> CheckpointError:
    """Makes the error of a save that failed.

    **Arguments:** `step`: which was to be saved. `folder`: of the checkpoints. `problem`: what went wrong. `remedy`:
    what to do about it, where `problem` does not tell; None for nothing in particular.
    """
    if any(text in problem for text in _DISK_FULL):
        remedy = "free space, or keep fewer checkpoints (keep_last, keep_best)"
    elif "after shutdown" in problem:  # of the interpreter's thread pools
        remedy = "end with close(), or use a `with` block: the program ended while the save was in progress"
    return CheckpointError(
        f"step {step} was not saved: {shorten(problem)}",
        place=str(folder),
        remedy=(remedy or "see the cause above") + "; earlier checkpoints are intact, and the next save tries again",
    )


def shorten(text: str, length: int = 500) -> str:
    """Returns `text` as a line of about `length` characters at most; storage engines print their whole
    configuration."""
    line = " ".join(text.split(" [tensorstore_spec=")[0].split())
    return line if len(line) <= length else f"{line[: length // 2]} ... {line[-length // 2 :]}"
