"""Reads a checkpoint that was chosen: its folder goes in, the state, laid out as it is wanted, comes out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from splitjax.errors import CheckpointError
from splitjax.runtime.checkpoint import folder as folders
from splitjax.runtime.checkpoint import integrity
from splitjax.runtime.checkpoint.carrying import put_together, targets
from splitjax.runtime.checkpoint.description import Description, read_own
from splitjax.runtime.checkpoint.options import Restored
from splitjax.runtime.checkpoint.state_io import read_arrays
from splitjax.runtime.checkpoint.state_match import StateLeaf


def read_checkpoint(
    path: Path, step: int, like: Any, wanted: Sequence[StateLeaf], skipped: tuple[tuple[int, str], ...]
) -> Restored:
    """Reads the checkpoint of a `step` in the folder `path` into the structure of `like`, whose leaves are `wanted`.
    `skipped` goes into the result. Raises `CheckpointError` for a damaged manifest, and whatever reading raises."""
    description = Description.read(path / folders.DESCRIPTION)
    about = integrity.read_about(path)
    if about is None:
        raise CheckpointError(
            "the manifest was damaged while the checkpoint was read",
            place=str(path),
            remedy="keep other programs away from the folder, and read it again",
        )
    more = targets(description.carried, like)
    states, carries = path / folders.STATE, path / folders.CARRIED
    if description.as_tree is None:  # written before the two had folders of their own
        both, leaves = (like, more.arrays), (*wanted, *more.leaves)
        state, arrays = read_arrays(states, (*description.leaves, *more.leaves), both, leaves, as_tree=False)
    else:
        state = read_arrays(states, description.leaves, like, wanted, as_tree=description.as_tree)
        arrays = read_arrays(carries, more.leaves, more.arrays, more.leaves, as_tree=False)
    carried = put_together(description.carried, arrays)
    state, own = _shared_as(like, state), read_own(path)
    return Restored(step, state, description.extra, about["metrics"], skipped, carried, own)


def _shared_as(like: Any, state: Any) -> Any:
    """Returns the `state`, with variables of NNX objects shared as in `like`."""
    if "flax.nnx" not in sys.modules:
        return state
    from splitjax._nnx_graph import shared_as

    return shared_as(like, state)
