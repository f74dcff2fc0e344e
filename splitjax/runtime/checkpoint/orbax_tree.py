"""Gives a state the form in which orbax stores it, so that plain orbax reads the same pytree back.

A pytree and the descriptions of its leaves go in. Out comes a pytree of the same structure for
`orbax.checkpoint.PyTreeCheckpointHandler`, or a flat dict by path for the few states whose names orbax would confuse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from splitjax.runtime.checkpoint.state_match import StateLeaf


def keeps_structure(tree: Any) -> bool:
    """Returns whether orbax can store `tree` as the pytree that it is.

    Orbax names a leaf by the keys on its way, joined by dots, and a name is a folder. So two leaves whose names are
    equal (`{"a.b": ..., "a": {"b": ...}}`) would be one, and a key that is empty or holds a slash would lead elsewhere.
    Such a tree, and a leaf alone, is stored as a flat dict by path."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    keys = [[jax.tree_util.keystr((key,), simple=True) for key in path] for path in paths]
    names = {".".join(path) for path in keys}
    return len(names) == len(keys) and all(path and all(key and "/" not in key for key in path) for path in keys)


def stored_tree(leaves: Sequence[StateLeaf], tree: Any, form: Callable[[StateLeaf, Any], Any], *, as_tree: bool) -> Any:
    """Returns what is given to orbax for `tree`.

    **Arguments:**

    - `leaves`: describe the leaves of `tree`, in its order.
    - `tree`: a pytree of arrays, shapes, numbers and strings.
    - `form`: makes what orbax gets of (a leaf's description, the leaf).
    - `as_tree`: keep the structure: Python values stand in it, and None where an array has no elements, which orbax
      cannot store. Otherwise a flat dict by path holds the arrays alone.
    """
    values = jax.tree.leaves(tree)
    if not as_tree:
        return {leaf.path: form(leaf, value) for leaf, value in zip(leaves, values) if leaf.is_stored_as_array}
    stored = [None if 0 in leaf.shape else form(leaf, value) for leaf, value in zip(leaves, values)]
    return jax.tree.unflatten(jax.tree.structure(tree), stored)


def by_path(leaves: Sequence[StateLeaf], tree: Any, restored: Any, *, as_tree: bool) -> Mapping[str, Any]:
    """Returns the arrays that orbax `restored`, by the paths of `leaves`; the other arguments are those of
    `stored_tree`. A leaf that is not stored is missing."""
    if not as_tree:
        return restored
    # `restored` is compared with None by position: a leaf without elements is None there, and no leaf to JAX.
    flat = jax.tree.structure(tree).flatten_up_to(restored)
    return {leaf.path: value for leaf, value in zip(leaves, flat) if leaf.is_stored_as_array}
