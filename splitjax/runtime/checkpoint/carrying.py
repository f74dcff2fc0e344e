"""Puts into a checkpoint what a step carries between calls besides its states, and reads it back.

A `planning.carried.Carried` goes in, such as the capacities and residuals of sparse exchanges. Its arrays are written
among those of the state, the rest stands as JSON in the checkpoint's description, so that a resumed run goes on as if
it had not been interrupted.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.codec import Codec, Wording
from splitjax.errors import CheckpointError
from splitjax.plan import Spec
from splitjax.planning.carried import Carried
from splitjax.runtime.checkpoint.state_match import LEAF_FORM, StateLeaf, describe, reject_consumed

logger: logging.Logger = logging.getLogger("splitjax")

PREFIX = "splitjax_carried"  # of the names of its arrays


@dataclasses.dataclass(frozen=True)
class CarriedParts:
    """Holds what is saved of a `Carried`, or what is to be read.

    - `leaves`: describe the arrays, in the order of `arrays`.
    - `arrays`: a pytree of arrays, or of their shapes and shardings.
    - `entry`: the JSON value for the checkpoint's description; None where nothing is carried.
    """

    leaves: tuple[StateLeaf, ...] = ()
    arrays: Any = ()
    entry: Mapping[str, Any] | None = None


@dataclasses.dataclass(frozen=True)
class _ArraysEntry:
    """Holds what a description says of the arrays of a `Carried`: their leaves, and under their `names` their layouts
    over the mesh."""

    arrays: tuple[StateLeaf, ...]
    names: tuple[str, ...]
    layouts: Mapping[str, Spec]


_JSON = Codec(
    _ArraysEntry,
    CheckpointError,
    Wording("a description of what the step carried", "restore another checkpoint, or the file from a copy"),
    forms={StateLeaf: LEAF_FORM},
)
_OF_ARRAYS = tuple(field.name for field in dataclasses.fields(_ArraysEntry))


def taken_apart(carried: Carried | None) -> CarriedParts:
    """Returns the parts of `carried` to save, empty ones for None. Raises `CheckpointError` for an array that a later
    call of the step consumed."""
    if not carried:
        return CarriedParts()
    arrays = {PREFIX: carried.arrays()}
    leaves = describe(arrays)
    reject_consumed(leaves, arrays)
    about_arrays = _ArraysEntry(leaves, tuple(sorted(carried.arrays())), carried.layouts())
    return CarriedParts(leaves, arrays, {**carried.to_json(), **_JSON.values(about_arrays)})


def targets(entry: Mapping[str, Any] | None, like: Any) -> CarriedParts:
    """Returns what is to be read for the `entry` of a description: arrays that lay over a mesh come back over the mesh
    of the arrays of `like`, if it has such axes, the others to the host."""
    if entry is None:
        return CarriedParts()
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(like))
    named = (sharding for sharding in shardings if isinstance(sharding, jax.sharding.NamedSharding))
    mesh = next((sharding.mesh for sharding in named), None)
    known = _JSON.read({name: value for name, value in entry.items() if name in _OF_ARRAYS}, "carried")
    if len(known.names) != len(known.arrays):
        _JSON.fail("every array of what the step carried has a name", list(known.names), "carried.names")
    arrays = {
        name: _target(leaf, known.layouts.get(name), mesh) for name, leaf in zip(known.names, known.arrays, strict=True)
    }
    return CarriedParts(known.arrays, {PREFIX: arrays}, entry)


def put_together(entry: Mapping[str, Any] | None, arrays: Any) -> Carried | None:
    """Returns the `Carried` of a description's `entry`, the inverse of `taken_apart`, with the `arrays` that were read;
    None, and a warning, for what another version wrote."""
    if entry is None:
        return None
    try:
        return Carried.parse({name: value for name, value in entry.items() if name not in _OF_ARRAYS}, arrays[PREFIX])
    except CheckpointError as error:
        logger.warning("%s", error)
        return None


def _target(
    leaf: StateLeaf, layout: Spec | None, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None
) -> jax.ShapeDtypeStruct | np.ndarray:
    """Returns what `leaf` is read into: laid out over `mesh` by `layout`, the mesh axes of each dim, where the mesh has
    these axes and they divide the dims; an array of the host otherwise."""
    try:
        dtype = jnp.dtype(leaf.dtype)
        on_host = np.broadcast_to(np.empty((), dtype), leaf.shape)  # says what is wanted, and takes no memory for it
    except (TypeError, ValueError, OverflowError) as error:
        message = f"there is no such array: {error}"
        raise CheckpointError(message, value=str(leaf), place=leaf.path, remedy="restore another checkpoint") from error
    if mesh is None or layout is None:
        return on_host
    axes = [(entry,) if isinstance(entry, str) else entry or () for entry in layout]
    known = all(axis in mesh.shape for entry in axes for axis in entry)
    if known and all(
        size % math.prod(mesh.shape[axis] for axis in entry) == 0 for size, entry in zip(leaf.shape, axes, strict=False)
    ):
        return jax.ShapeDtypeStruct(
            leaf.shape, dtype, sharding=jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*layout))
        )
    return on_host
