"""Holds the names that splitjax writes into boxes of Flax Linen, beside what their users wrote.

A box comes to name the layout that its array has (`compile.boxes`), and is read as its user wrote it (`step.said`).
Flax's boxes are looked for only where Flax is loaded: whoever has none needs no Flax.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import jax

from splitjax.plan import SpecEntry

LogicalRules = tuple[tuple[str, Any], ...]
# Of a box that splitjax wrote into: its number among the leaves and boxes of an argument, and all that the user wrote.
Written = tuple[int, Any, Any]


class LayoutNames(tuple[SpecEntry, ...]):
    """Holds the names that splitjax writes into a box of Linen, so that Flax reads there how the array lies, and what
    the user wrote in their place. To Flax they are a tuple of names as any other; splitjax reads the user's alone.

    **Attributes:** `users`: fields of the box and their values as the user wrote them. `logical`: the logical axis
    rules that were in force for them; None without any.
    """

    users: tuple[tuple[str, Any], ...]
    logical: LogicalRules | None

    def __new__(
        cls, names: Iterable[SpecEntry], users: tuple[tuple[str, Any], ...], logical: LogicalRules | None
    ) -> LayoutNames:
        """Makes the `names` of a layout that stand in place of `users`."""
        made = super().__new__(cls, names)
        made.users, made.logical = users, logical
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        """Returns what a copy, or what was pickled, is made of."""
        return tuple(self), self.users, self.logical


def box_type() -> type | None:
    """Returns the type of Flax Linen's boxes that name dims; None where Flax is not loaded."""
    meta = sys.modules.get("flax.core.meta")
    return None if meta is None else meta.Partitioned


def written_names(arg: Any) -> tuple[Written, ...]:
    """Returns what the user wrote into each box of an argument, a pytree, that names a layout instead. To JAX the
    structure of such an argument is that of one in which a user wrote these names."""
    boxes = box_type()
    if boxes is None:
        return ()
    nodes = enumerate(jax.tree.leaves(arg, is_leaf=lambda node: isinstance(node, boxes)))
    named = ((number, getattr(node, "names", None)) for number, node in nodes if isinstance(node, boxes))
    return tuple(
        (number, _hashable(names.users), _hashable(names.logical))
        for number, names in named
        if isinstance(names, LayoutNames)
    )


def _hashable(value: Any) -> Any:
    """Returns a value of nested sequences with tuples in place of lists."""
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value
