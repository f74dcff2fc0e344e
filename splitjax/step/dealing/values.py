"""Holds values whose columns are dealt out to devices while a step is traced again (`rewriting`).

Some of their parts may be copied instead (`primitives.dealt`): each of these is an array of its own beside what is
dealt out, of which every device has all. What operations do with such values, `acting` says.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray

from splitjax import _compat
from splitjax.primitives.dealt import COPY, DEAL, copy, deal, gathered
from splitjax.primitives.walk import Site


def _evaluate(
    value: jax.Array, *, dim: int, sizes: tuple[int, ...], stored: tuple[int, ...], num: int
) -> list[jax.Array]:
    return [deal(value, dim, sizes, stored, num)]


def _result_types(
    value: Any, *, dim: int, sizes: tuple[int, ...], stored: tuple[int, ...], num: int
) -> tuple[list[Any], Any]:
    shape = (*value.shape[:dim], num, value.shape[dim] // num, *value.shape[dim + 1 :])
    return [ShapedArray(shape, value.dtype, weak_type=value.weak_type)], _compat.NO_EFFECTS


def _copy(value: jax.Array, *, dim: int, sizes: tuple[int, ...]) -> list[jax.Array]:
    return copy(value, dim, sizes)


def _copy_types(value: Any, *, dim: int, sizes: tuple[int, ...]) -> tuple[list[Any], Any]:
    shapes = [(*value.shape[:dim], size, *value.shape[dim + 2 :]) for size in sizes]
    return [ShapedArray(shape, value.dtype, weak_type=value.weak_type) for shape in shapes], _compat.NO_EFFECTS


deal_p: _compat.Primitive = _compat.define_primitive(DEAL, _evaluate, _result_types)
copy_p: _compat.Primitive = _compat.define_primitive(COPY, _copy, _copy_types)


@dataclasses.dataclass(frozen=True)
class FusedProduct:
    """Describes a product with a fused weight, whose result is cut into parts.

    - `site`: of its equation; behind a body, where that is traced again. `weight`: the operand position of the weight.
    - `dim`: the dim of the weight along which the parts lie side by side. `sizes`: of the parts. `stored`: their sizes
      with the padding, which stands behind all of them.
    - `num`: to how many devices they are dealt out; it divides every stored size but those of copied parts.
    - `copied`: by part, whether all devices get all of it; empty where none is copied. Parts that are copied and lie
      side by side have together a multiple of `num` columns, and no padding.
    """

    site: Site
    weight: int
    dim: int
    sizes: tuple[int, ...]
    stored: tuple[int, ...]
    num: int
    copied: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class Dealt:
    """A value whose columns are dealt out, or a part of such a value.

    - `value`: the array, with a dim of shares and one of columns in place of the dim `dim`; None while parts are
      looked for, and where all of its parts are copied.
    - `shape`: as it would be with all of its columns in one dim, which is at `dim`. `first`: the number of the first of
      its columns in the product.
    - `sizes`: of the parts that it holds. `stored`: their sizes with padding: what devices have of each.
    - `split`: the dims into which the program has reshaped its columns since; none where it has not. `order`: how it
      has transposed all dims then.
    - `is_part`: whether it was cut out. `products`: the sites of those that gave it (a sum has several).
    - `copied`: as for `FusedProduct`. `others`: an array for each part that is copied, with its columns at `dim`.
    """

    value: Any
    shape: tuple[int, ...]
    dim: int
    first: int
    sizes: tuple[int, ...]
    stored: tuple[int, ...]
    split: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    is_part: bool = False
    products: tuple[Site, ...] = ()
    copied: tuple[bool, ...] = ()
    others: tuple[Any, ...] = ()

    @property
    def is_known(self) -> bool:
        """Whether it has numbers; it has none while parts are looked for."""
        return self.value is not None or bool(self.others)

    @property
    def num(self) -> int:
        """To how many devices its columns are dealt out; 0 where that does not show."""
        return 0 if self.value is None else self.value.shape[self.dim]

    @property
    def columns(self) -> int:
        """The number of its columns."""
        return self.shape[self.dim]

    @property
    def seen(self) -> tuple[int, ...]:
        """The shape that the program sees, before it is transposed."""
        return (*self.shape[: self.dim], *(self.split or (self.columns,)), *self.shape[self.dim + 1 :])

    def with_value(self, value: Any, others: Sequence[Any]) -> Dealt:
        """Returns the same columns with another value, and other arrays of what is copied, of any dtype."""
        return dataclasses.replace(self, value=value, others=tuple(others))

    def is_apart(self, start: int, stop: int) -> bool:
        """Tells whether the entries that `cut` takes are whole parts; so they are while parts are looked for."""
        ends, unit = {0, *np.cumsum(self.sizes), self.columns}, math.prod(self.split[1:])
        return not self.is_known or {start * unit, stop * unit} <= ends

    def cut(self, start: int, stop: int) -> Dealt:
        """Returns the entries from `start` to before `stop` of the dim along which its columns lie."""
        unit = math.prod(self.split[1:])
        first, size = start * unit, (stop - start) * unit
        shape = (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])
        split = (stop - start, *self.split[1:]) if self.split else ()
        ends = np.cumsum((0, *self.sizes))
        inside = [
            number
            for number, (part, at) in enumerate(zip(self.sizes, ends, strict=False))
            if first <= at and at + part <= first + size
        ]
        sizes, stored, copied = (
            tuple(each[number] for number in inside) for each in (self.sizes, self.stored, self._copied)
        )
        value = self.value
        if value is not None:
            start, stop = (self._in_stored(column) // self.num for column in (first, first + size))
            value = lax.slice_in_dim(value, start, stop, axis=self.dim + 1) if stop > start else None
        others = tuple(self.others[sum(self._copied[:number])] for number in inside if self._copied[number])
        return dataclasses.replace(
            self,
            value=value,
            shape=shape,
            first=self.first + first,
            sizes=sizes,
            stored=stored,
            split=split,
            is_part=True,
            copied=copied if any(copied) else (),
            others=others,
        )

    @property
    def _copied(self) -> tuple[bool, ...]:
        """By part, whether it is copied."""
        return self.copied or (False,) * len(self.sizes)

    def _in_stored(self, column: int) -> int:
        """Returns where a column lies between the parts that are dealt out, with their padding."""
        before = [number for number, end in enumerate(np.cumsum(self.sizes)) if end <= column]
        dealt = (0 if self._copied[number] else self.stored[number] for number in before)
        return column - sum(self.sizes[number] for number in before) + sum(dealt)

    def array(self) -> jax.Array:
        """Returns what the program has in its place."""
        value = self._whole() if self._is_moved else self.value
        value = value.reshape(self.seen)
        return lax.transpose(value, self.order) if self.order else value

    def _whole(self) -> jax.Array:
        """Returns all parts, side by side in one dim and without their padding."""
        others, pieces, at = iter(self.others), [], 0
        for is_copied, parts in itertools.groupby(range(len(self.sizes)), self._copied.__getitem__):
            if is_copied:
                pieces += [next(others) for _ in parts]
                continue
            numbers = list(parts)
            sizes, stored = ([each[number] for number in numbers] for each in (self.sizes, self.stored))
            width = sum(stored) // self.num
            piece = self.value if self.copied == () else lax.slice_in_dim(self.value, at, at + width, axis=self.dim + 1)
            pieces.append(gathered(piece, self.dim, sizes, stored))
            at += width
        return pieces[0] if len(pieces) == 1 else lax.concatenate(pieces, self.dim)

    @property
    def _is_moved(self) -> bool:
        return len(self.sizes) > 1 or self.sizes != self.stored or bool(self.copied)

    def with_padding(self, split: tuple[int, ...]) -> Dealt:
        """Returns the same with zeros in the padding of its parts, which the program sees: as dims `split`, or as
        columns."""
        dim, value, num = self.dim, self.value, self.value.shape[self.dim]
        inside = [
            lax.lt(lax.iota("int32", large).reshape(num, -1), np.int32(size))
            for size, large in zip(self.sizes, self.stored, strict=True)
        ]
        keep = lax.broadcast_in_dim(lax.concatenate(inside, 1), value.shape, (dim, dim + 1))
        shape = (*self.shape[:dim], sum(self.stored), *self.shape[dim + 1 :])
        zeros = lax.full_like(value, 0)
        return dataclasses.replace(
            self, value=lax.select(keep, value, zeros), shape=shape, sizes=self.stored, split=split
        )


def as_array(value: Any) -> Any:
    """Returns the array that the program has in place of a dealt value; anything else as it is."""
    return value.array() if isinstance(value, Dealt) else value


def settled(value: Dealt) -> Any:
    """Returns a value that was cut out: an array, if it is a single part."""
    return value if not value.is_known or len(value.sizes) > 1 or value.sizes != value.stored else value.array()


def lies(value: Dealt) -> tuple[Dealt, int]:
    """Returns how a value lies on devices: equal for those that can meet number by number."""
    return dataclasses.replace(value, value=None, others=(), products=()), value.num
