"""Describes a state as data, path, shape and dtype of every leaf, and says how two states differ.

A pytree goes in, a tuple of `StateLeaf`s comes out, which is kept beside the arrays of a checkpoint. So a state that is
not the one that was saved is refused, by the path of the first leaf that differs, before any array is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.codec import Form, without_nones
from splitjax.errors import CheckpointError

# Leaves that are kept as JSON values; everything else is an array.
PYTHON_TYPES = (bool, int, float, str)


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """Describes a leaf of a state.

    **Arguments:**

    - `path`: such as `params/Dense_0/kernel`; different for every leaf of a state.
    - `shape`, `dtype`: as JAX names them; `key<fry>` for a typed PRNG key, `str` for a Python string.
    - `key_impl`: how a typed PRNG key draws, such as `threefry2x32`; None for other leaves, and for keys that are only
      shapes.
    - `value`: a Python number or string; None for arrays.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    key_impl: str | None = None
    value: bool | int | float | str | None = None

    @property
    def is_stored_as_array(self) -> bool:
        """Returns whether its values are in array files: Python values are in the description, arrays without elements
        have none."""
        return self.value is None and 0 not in self.shape

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


# How a leaf stands in JSON: without the fields that only few leaves have.
LEAF_FORM: Form[StateLeaf] = without_nones("key_impl", "value")


def is_key(leaf: Any) -> bool:
    """Returns whether a `leaf` (an array or its shape) holds typed PRNG keys."""
    dtype = getattr(leaf, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def describe(state: Any) -> tuple[StateLeaf, ...]:
    """Returns the leaves of a `state`, a pytree of arrays, shapes and Python values, in the order of `jax.tree.leaves`.

    Raises `CheckpointError` for a leaf that cannot be kept: an object, a function, an array of strings.
    """
    paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    names = _unique_names([path for path, _ in paths_and_leaves])
    return tuple(_describe_leaf(name, leaf) for name, (_, leaf) in zip(names, paths_and_leaves))


def reject_consumed(leaves: Sequence[StateLeaf], state: Any) -> None:
    """Raises `CheckpointError` for an array of the `state`, whose leaves are `leaves`, that is not there any more."""
    for leaf, value in zip(leaves, jax.tree.leaves(state)):
        if isinstance(value, jax.Array) and value.is_deleted():
            raise CheckpointError(
                "an array of the state is gone: a later step consumed (donated) it",
                place=leaf.path,
                remedy="save the state that the last call of the step returned",
            )


@dataclasses.dataclass(frozen=True)
class LeafDifference:
    """Names a place where a saved state is not the wanted one.

    - `path`: of the leaf.
    - `saved`, `wanted`: the leaf in each of the two states; None where it has no such leaf.
    """

    path: str
    saved: StateLeaf | None
    wanted: StateLeaf | None

    def __str__(self) -> str:
        if self.saved is None:
            return f"{self.path}: wanted {self.wanted}, not in the checkpoint"
        if self.wanted is None:
            return f"{self.path}: saved {self.saved}, not in the wanted state"
        return f"{self.path}: saved {self.saved}, wanted {self.wanted}"


def compare(saved: Sequence[StateLeaf], wanted: Sequence[StateLeaf]) -> tuple[LeafDifference, ...]:
    """Returns all differences between the leaves `saved` and `wanted` in path, shape and dtype: first those at wanted
    leaves, in their order, then the leaves that only were saved."""
    by_path = {leaf.path: leaf for leaf in saved}
    wanted_paths = {leaf.path for leaf in wanted}
    differences = []
    for leaf in wanted:
        saved_leaf = by_path.get(leaf.path)
        if saved_leaf is None or (saved_leaf.shape, saved_leaf.dtype) != (leaf.shape, leaf.dtype):
            differences.append(LeafDifference(leaf.path, saved_leaf, leaf))
    differences += [LeafDifference(leaf.path, leaf, None) for leaf in saved if leaf.path not in wanted_paths]
    return tuple(differences)


def may_be_padding(differences: Sequence[LeafDifference]) -> bool:
    """Returns whether states may differ in nothing but the padding of dims (`uneven="pad"`), which takes less than what
    is padded."""
    return bool(differences) and all(
        each.saved is not None
        and each.wanted is not None
        and each.saved.dtype == each.wanted.dtype
        and len(each.saved.shape) == len(each.wanted.shape)
        and all(max(sizes) < 2 * min(sizes) for sizes in zip(each.saved.shape, each.wanted.shape) if len({*sizes}) > 1)
        for each in differences
    )


def _describe_leaf(path: str, leaf: Any) -> StateLeaf:
    if isinstance(leaf, PYTHON_TYPES) and not isinstance(leaf, np.generic):  # numpy.float64 is a Python float as well
        # A Python number is described as the array that it becomes in a step, so that it is restored into one.
        dtype = "str" if isinstance(leaf, str) else jax.dtypes.canonicalize_dtype(type(leaf)).name
        return StateLeaf(path, (), dtype, value=leaf)
    if is_key(leaf):
        impl = str(jax.random.key_impl(leaf)) if isinstance(leaf, jax.Array) else None
        return StateLeaf(path, tuple(leaf.shape), str(leaf.dtype), key_impl=impl)
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or not hasattr(leaf, "shape") or not _is_storable(np.dtype(dtype)):
        raise CheckpointError(
            "a checkpoint holds arrays, PRNG keys, numbers and strings; this leaf is none of them",
            value=leaf if dtype is None else dtype,
            place=path,
            remedy="keep it out of the state, or save it in `extra` as JSON values",
        )
    return StateLeaf(path, tuple(leaf.shape), np.dtype(dtype).name)


def _is_storable(dtype: np.dtype) -> bool:
    """Tells whether TensorStore, which writes the arrays, knows a dtype."""
    import tensorstore

    try:
        tensorstore.dtype(dtype.name)
    except (TypeError, ValueError):
        return False
    return dtype.kind not in "OSUMm" and dtype.fields is None


def _unique_names(paths: Sequence[Any]) -> list[str]:
    """Readable names (`params/kernel`), or exact ones (`['params']['kernel']`) where the readable ones are not unique
    or one would be a folder of another."""
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    ordered = sorted(name + "/" for name in names)
    if any(later.startswith(earlier) for earlier, later in zip(ordered, ordered[1:])):
        names = [jax.tree_util.keystr(path) for path in paths]
    return [name or "state" for name in names]
