"""Chooses which of a folder's checkpoints is restored, and which are removed.

A folder goes in, a step and the damage of newer checkpoints come out: a damaged checkpoint is passed over, with the
reason, and one of another state is refused before its arrays are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from splitjax.errors import CheckpointError
from splitjax.runtime.checkpoint import folder as folders
from splitjax.runtime.checkpoint import integrity
from splitjax.runtime.checkpoint.description import Description
from splitjax.runtime.checkpoint.options import CheckpointOptions
from splitjax.runtime.checkpoint.state_match import StateLeaf, compare, may_be_padding

Skipped = list[tuple[int, str]]


def complete(folder: Path, ignored: Collection[int] = ()) -> dict[int, Path]:
    """Returns the checkpoints in a `folder` of which every file is there with its size, by step, ascending, without the
    steps `ignored`."""
    return {
        step: path
        for step, path in folders.checkpoint_folders(folder).items()
        if step not in ignored and integrity.find_damage(path, digests=False) is None
    }


def newest_good(folder: Path) -> tuple[int | None, Skipped]:
    """Returns the newest step in a `folder` without damage (None: there is none), and the newer ones with what is wrong
    with them."""
    return _newest(folder, integrity.find_damage)


def choose(folder: Path, wanted: Sequence[StateLeaf], step: int | None) -> tuple[int, Skipped]:
    """Returns the newest step in a `folder` without damage, or the given `step`, if it holds the state whose leaves are
    `wanted`; and the newer ones with what is wrong.

    Raises `CheckpointError` where there is none, and for another state: compared before the arrays' files are read.
    """

    def find_damage(path: Path) -> str | None:
        return (
            integrity.find_damage(path, only=folders.DESCRIPTION)
            or _refuse(path, wanted)
            or integrity.find_damage(path)
        )

    good, skipped = _newest(folder, find_damage, step)
    if good is not None:
        return good, skipped
    if step is None and not skipped:
        raise CheckpointError("there is no checkpoint", place=str(folder), remedy="see steps() before restoring")
    if skipped:
        message = "no checkpoint is undamaged: " if step is None else "this checkpoint is damaged: "
        message += "; ".join(f"step {bad}: {damage}" for bad, damage in skipped)
    else:
        message = f"there is no checkpoint of step {step}"
    complete_steps = list(complete(folder, dict(skipped)))
    raise CheckpointError(
        message,
        place=str(folder),
        remedy=f"complete are the steps {complete_steps}"
        if complete_steps
        else "restore the files from a copy, or start anew in another folder",
    )


def remove_old(folder: Path, options: CheckpointOptions, damaged: Collection[int]) -> None:
    """Removes the checkpoints of a `folder` that need not be kept by `options`. Those of the steps `damaged` neither
    count nor go. Raises `OSError`."""
    abouts = {step: integrity.read_about(path) for step, path in complete(folder, damaged).items()}
    metrics = {step: about["metrics"] for step, about in abouts.items() if about is not None}
    kept = folders.steps_to_keep(
        metrics,
        keep_last=options.keep_last,
        keep_best=options.keep_best,
        best_metric=options.best_metric,
        best_mode=options.best_mode,
    )
    for step in sorted(set(metrics) - kept):
        folders.remove(folder / str(step))


def _newest(
    folder: Path, find_damage: Callable[[Path], str | None], step: int | None = None
) -> tuple[int | None, Skipped]:
    """Returns the newest step in a `folder`, or the given `step`, for which `find_damage` has no complaint (None: there
    is none), and the newer ones with their damage."""
    skipped: Skipped = []
    for present_step, path in reversed(folders.checkpoint_folders(folder).items()):
        if step is not None and present_step != step:
            continue
        damage = find_damage(path)
        if damage is None:
            return present_step, skipped
        skipped.append((present_step, damage))
    return None, skipped


_PADDED = (
    'if the sizes differ by padding alone (uneven="pad"): save step.logical(state), and restore like'
    " step.logical(step.abstract_state(...)); what was saved padded is restored like the abstract_state of the step"
    " that saved it, whose logical(...) other steps take"
)


def _refuse(path: Path, wanted: Sequence[StateLeaf]) -> None:
    """Raises `CheckpointError` where a checkpoint holds another state than the wanted one."""
    differences = compare(Description.read(path / folders.DESCRIPTION).leaves, wanted)
    if not differences:
        return
    count = len(differences) - 1
    further = f" ({count} further difference{'s' if count > 1 else ''})" if count else ""
    padded = f"; {_PADDED}" if may_be_padding(differences) else ""
    raise CheckpointError(
        f"the checkpoint holds another state: {differences[0]}{further}",
        place=str(path),
        remedy=f"use the model and the optimizer of the run that saved it, or another folder for a new run{padded}",
    )
