"""The static half of a step's arguments: what is not an array, hashed and compared, so that equal calls share a
program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from splitjax.errors import TraceError


def is_array(value: Any) -> bool:
    """Returns whether the leaf `value` is traced: a JAX or NumPy array, or a description of one. Python numbers are
    static, as in Equinox."""
    return isinstance(value, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct))


class Fixed:
    """A static value that can always be hashed: equal by value where the value has a hash, else only to itself."""

    __slots__ = ("value", "_hash")

    def __init__(self, value: Any) -> None:
        self.value = value
        try:
            self._hash = hash(value)
        except TypeError:
            self._hash = None

    @property
    def has_hash(self) -> bool:
        """Tells whether the value itself has a hash."""
        return self._hash is not None

    def __hash__(self) -> int:
        return id(self.value) if self._hash is None else self._hash

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, Fixed):
            return NotImplemented
        if self.value is other.value:
            return True
        if self._hash is None or self._hash != other._hash or type(self.value) is not type(other.value):
            return False
        return bool(self.value == other.value)

    def __repr__(self) -> str:
        return getattr(self.value, "__name__", None) or repr(self.value)


class ArrayMark:
    """Stands for an array among static leaves."""

    def __repr__(self) -> str:
        return "an array"


ARRAY = ArrayMark()


@dataclasses.dataclass(frozen=True)
class Half:
    """The static half of a pytree: its structure, and its leaves with `ARRAY` in place of arrays."""

    tree: Any
    leaves: tuple[Any, ...]

    def combine(self, arrays: Any) -> Any:
        """Returns the pytree with these `arrays`, given in any structure, in order."""
        remaining = iter(jax.tree.leaves(arrays))
        return jax.tree.unflatten(self.tree, [next(remaining) if leaf is ARRAY else leaf.value for leaf in self.leaves])


def partition(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[Any, Half]:
    """Splits the pytree `tree` into itself with None for everything that is not an array, and the static half.
    `is_leaf`: as of `jax.tree.flatten`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
    arrays = [is_array(leaf) for leaf in leaves]
    dynamic = jax.tree.unflatten(structure, [leaf if here else None for here, leaf in zip(arrays, leaves, strict=True)])
    return dynamic, Half(
        structure, tuple(ARRAY if here else Fixed(leaf) for here, leaf in zip(arrays, leaves, strict=True))
    )


def _frozen(value: Any) -> Any:
    """A list, dict or set as it is now: a later call may find it changed in place, and is another program then."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_frozen, value))
    if isinstance(value, dict):
        return (type(value), *((key, _frozen(inner)) for key, inner in value.items()))
    if isinstance(value, set):
        return (set, frozenset(value))
    hash(value)
    return value


class Static:
    """The one static argument of the plain step. Two calls share a program exactly if `key` is equal."""

    def __init__(self, key: Any, name: str, describe: Callable[[], dict[str, Any]]) -> None:
        self.key = key
        self._describe = describe
        self._fields: tuple[tuple[str, Any], ...] = ()  # where the key has no hash: what it holds
        try:
            self._hash = hash(key)
        except TypeError as error:
            fields = describe()
            bare = {
                path: value.value for path, value in fields.items() if isinstance(value, Fixed) and not value.has_hash
            }
            try:
                self._fields = tuple(
                    (path, _frozen(bare[path]) if path in bare else value) for path, value in fields.items()
                )
                self._hash = hash(self._fields)
            except TypeError:
                raise TraceError(
                    f"a static field of an argument has no hash ({error})",
                    value=list(bare) or None,
                    place=f"call of {name}",
                    remedy=(
                        "make the field an array (in an NNX module, held in an nnx.Variable), or a hashable value such"
                        " as a tuple"
                    ),
                ) from error

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, Static)
            and self._hash == other._hash
            and self._fields == other._fields
            and self.key == other.key
        )

    def splitjax_difference(self, old: Static) -> str:
        """Returns the first static value that differs from that of another call, `old`, in words."""
        before, after = old._describe(), self._describe()
        for path in [*after, *(path for path in before if path not in after)]:
            if path not in before or path not in after or before[path] != after[path]:
                old_text, new_text = (repr(tree[path]) if path in tree else "absent" for tree in (before, after))
                return f"{path}: {old_text} -> {new_text}"
        return "a static part of the arguments changed"
