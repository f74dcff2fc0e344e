"""Holds values whose columns are dealt out to devices while a step is traced again (`step.dealing`), and says what
operations do with them.

What acts on each number by itself, changes shapes, transposes or cuts acts on such a value; the rest gets arrays. The
same rules hold for values without numbers, by which the parts are found first.
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
from splitjax.primitives.dealt import DEAL, deal, gathered
from splitjax.primitives.elementwise import ELEMENTWISE
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


# What makes the arrays that are dealt out: `Acting.made` remembers it.
NOTED: frozenset[str] = frozenset({"broadcast_in_dim", "concatenate", "convert_element_type", "reshape"})

deal_p: _compat.Primitive = _compat.define_primitive(DEAL, _evaluate, _result_types)


@dataclasses.dataclass(frozen=True)
class FusedProduct:
    """Describes a product with a fused weight, whose result is cut into parts.

    - `site`: of its equation; behind a body, where that is traced again. `weight`: the operand position of the weight.
    - `dim`: the dim of the weight along which the parts lie side by side. `sizes`: of the parts. `stored`: their sizes
      with the padding, which stands behind all of them.
    - `num`: to how many devices they are dealt out; it divides every stored size.
    """

    site: Site
    weight: int
    dim: int
    sizes: tuple[int, ...]
    stored: tuple[int, ...]
    num: int


@dataclasses.dataclass(frozen=True)
class Dealt:
    """A value whose columns are dealt out, or a part of such a value.

    - `value`: the array, with a dim of shares and one of columns in place of the dim `dim`; None while parts are
      looked for.
    - `shape`: as it would be with all of its columns in one dim, which is at `dim`. `first`: the number of the first of
      its columns in the product.
    - `sizes`: of the parts that it holds. `stored`: their sizes with padding: what devices have of each.
    - `split`: the dims into which the program has reshaped its columns since; none where it has not. `order`: how it
      has transposed all dims then.
    - `is_part`: whether it was cut out. `products`: the sites of those that gave it (a sum has several).
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

    @property
    def columns(self) -> int:
        """The number of its columns."""
        return self.shape[self.dim]

    @property
    def seen(self) -> tuple[int, ...]:
        """The shape that the program sees, before it is transposed."""
        return (*self.shape[: self.dim], *(self.split or (self.columns,)), *self.shape[self.dim + 1 :])

    def with_value(self, value: Any) -> Dealt:
        """Returns the same columns with another value, of any dtype."""
        return dataclasses.replace(self, value=value)

    def is_apart(self, start: int, stop: int) -> bool:
        """Tells whether the entries that `cut` takes are whole parts; so they are while parts are looked for."""
        ends, unit = {0, *np.cumsum(self.sizes), self.columns}, math.prod(self.split[1:])
        return self.value is None or {start * unit, stop * unit} <= ends

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
        value = self.value
        if value is not None:
            num = value.shape[self.dim]
            start, stop = (self._in_stored(column) // num for column in (first, first + size))
            value = lax.slice_in_dim(value, start, stop, axis=self.dim + 1)
        sizes, stored = (tuple(each[number] for number in inside) for each in (self.sizes, self.stored))
        return Dealt(value, shape, self.dim, self.first + first, sizes, stored, split, self.order, True, self.products)

    def _in_stored(self, column: int) -> int:
        """Returns where a column lies between the parts with their padding."""
        before = [number for number, end in enumerate(np.cumsum(self.sizes)) if end <= column]
        return column + sum(self.stored[number] - self.sizes[number] for number in before)

    def array(self) -> jax.Array:
        """Returns what the program has in its place."""
        value = gathered(self.value, self.dim, self.sizes, self.stored) if self._is_moved else self.value
        value = value.reshape(self.seen)
        return lax.transpose(value, self.order) if self.order else value

    @property
    def _is_moved(self) -> bool:
        return len(self.sizes) > 1 or self.sizes != self.stored

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


def _settled(value: Dealt) -> Any:
    """Returns a value that was cut out: an array, if it is a single part."""
    return value if value.value is None or len(value.sizes) > 1 or value.sizes != value.stored else value.array()


def _lies(value: Dealt) -> tuple[Dealt, int]:
    """Returns how a value lies on devices: equal for those that can meet number by number."""
    num = 0 if value.value is None else value.value.shape[value.dim]
    return dataclasses.replace(value, value=None, products=()), num


class Acting:
    """Says what operations do with dealt values: the same for values with and without numbers.

    **Attributes:** `made`: by variable, the equation that made it, if it is of `NOTED`, and its operands.
    """

    def __init__(self) -> None:
        self.made: dict[Any, tuple[Any, list[Any]]] = {}

    def product(self, eqn: Any, values: Sequence[Any], target: FusedProduct) -> list[Any]:
        """Returns the result of the product of a target, with its weight dealt out."""
        (contracted, batch), side, dim = eqn.params["dimension_numbers"], target.weight, target.dim
        free = [
            [d for d in range(eqn.invars[k].aval.ndim) if d not in contracted[k] and d not in batch[k]] for k in (0, 1)
        ]
        before = len(batch[0]) + (len(free[0]) if side == 1 else 0)
        shape, at = eqn.outvars[0].aval.shape, before + free[side].index(dim)
        value = None
        if any(operand is not None for operand in values):
            weight = self._dealt(eqn.invars[side], values[side], dim, target, target.num)
            moved = lambda dims, k: tuple(d + (k == side and d > dim) for d in dims)
            numbers = tuple(tuple(moved(kind[k], k) for k in (0, 1)) for kind in (contracted, batch))
            operands = [weight if k == side else as_array(values[k]) for k in (0, 1)]
            value = _compat.bind_equation(_compat.with_params(eqn, dimension_numbers=numbers), operands)[0]
        return [Dealt(value, shape, at, 0, target.sizes, target.stored, products=(target.site,))]

    def act(self, eqn: Any, values: Sequence[Any]) -> list[Any] | None:
        """Returns the results of an equation with dealt operands; None for one that needs arrays."""
        name = eqn.primitive.name
        if name in ELEMENTWISE and name not in ("sharding_constraint", "reshard"):
            return self._elementwise(eqn, values)
        value = values[0]
        if not isinstance(value, Dealt):
            return None
        if name == "reshape" and not value.order and eqn.params.get("dimensions") is None:
            return _reshaped(value, tuple(eqn.params["new_sizes"]))
        if name == "transpose":
            order = value.order or tuple(range(len(value.seen)))
            return [dataclasses.replace(value, order=tuple(order[d] for d in eqn.params["permutation"]))]
        if name == "split":
            ends = np.cumsum((0, *eqn.params["sizes"]))
            pairs = [(int(start), int(stop)) for start, stop in zip(ends[:-1], ends[1:], strict=True)]
            if _axis(value, eqn.params["axis"]) != value.dim or not all(itertools.starmap(value.is_apart, pairs)):
                return None
            return [_settled(value.cut(start, stop)) for start, stop in pairs]
        if name == "slice":
            return _sliced(eqn, value)
        if name == "pad":
            return _padded(eqn, value)
        return None

    def _elementwise(self, eqn: Any, values: Sequence[Any]) -> list[Any] | None:
        (first, *others) = [value for value in values if isinstance(value, Dealt)]
        if any(_lies(other) != _lies(first) for other in others):
            return None
        sites = dict.fromkeys(site for value in (first, *others) for site in value.products)
        first = dataclasses.replace(first, products=tuple(sites))
        operands = []
        for variable, value in zip(eqn.invars, values, strict=True):
            operand = value.value if isinstance(value, Dealt) else self._beside(first, variable, value)
            if operand is _UNFIT:
                return None
            operands.append(operand)
        if first.value is None:
            return [first] * len(eqn.outvars)
        return [first.with_value(result) for result in _compat.bind_equation(eqn, operands)]

    def _beside(self, dealt: Dealt, variable: Any, value: Any) -> Any:
        """Returns what meets a dealt value in place of an array: a number, an array that is the same along its columns,
        or one number for each column, which is dealt out too."""
        shape, at = tuple(variable.aval.shape), dealt.dim
        if not shape:
            return value
        if dealt.split or dealt.order or dealt.is_part or len(shape) != len(dealt.shape):
            return _UNFIT
        if shape[at] == 1:
            return None if value is None else lax.expand_dims(value, (at,))
        num = 1 if dealt.value is None else dealt.value.shape[at]
        if math.prod(shape) == dealt.columns:
            return None if value is None else self._dealt(variable, value, at, dealt, num)
        made = self.made.get(variable)
        if made is None or made[0].primitive.name != "broadcast_in_dim":
            return _UNFIT
        eqn, sources = made
        where, small = tuple(eqn.params["broadcast_dimensions"]), tuple(eqn.invars[0].aval.shape)
        if at not in where or math.prod(small) != dealt.columns or small[where.index(at)] != dealt.columns:
            return _UNFIT
        if value is None:
            return None
        source = self._dealt(eqn.invars[0], sources[0], where.index(at), dealt, num)
        wide = (*shape[:at], num, dealt.columns // num, *shape[at + 1 :])
        dims = [d for k in where for d in ((k, k + 1) if k == at else (k + (k > at),))]
        return lax.broadcast_in_dim(source, wide, dims)

    def _dealt(self, variable: Any, value: Any, dim: int, parts: Dealt | FusedProduct, num: int) -> jax.Array:
        """Returns an array with its columns dealt out, in `parts` as those of this are. Where the program laid several
        arrays side by side to make it (the gates of a recurrent cell), each is dealt out by itself: a weight alone lies
        as its devices read it, and nothing is sent for it."""
        sizes, stored = parts.sizes, parts.stored
        pieces, left = [], list(sizes)
        for part in (self._side_by_side(variable, dim) if sizes == stored else None) or ():
            if not part.shape[dim]:
                continue
            inside: list[int] = []
            while left and sum(inside) < part.shape[dim]:
                inside.append(left.pop(0))
            if sum(inside) != part.shape[dim]:  # what is cut apart behind the product lies across two arrays
                pieces.clear()
                break
            if len(inside) == 1:
                columns = num, part.shape[dim] // num
                pieces.append(part.reshape(*part.shape[:dim], *columns, *part.shape[dim + 1 :]))
            else:
                pieces += deal_p.bind(part, dim=dim, sizes=tuple(inside), stored=tuple(inside), num=num)
        if pieces:
            return lax.concatenate(pieces, dim + 1)
        return deal_p.bind(value, dim=dim, sizes=sizes, stored=stored, num=num)[0]

    def _side_by_side(self, variable: Any, dim: int) -> list[Any] | None:
        """Returns the arrays that the program laid side by side along a dim, in the dtype and with the dims of the
        array that they make; None for an array that was not made so."""
        if isinstance(variable, _compat.Literal) or variable not in self.made:
            return None
        eqn, values = self.made[variable]
        name = eqn.primitive.name
        if name == "concatenate":
            return values if eqn.params["dimension"] == dim else None
        if name == "convert_element_type":
            parts = self._side_by_side(eqn.invars[0], dim)
            return None if parts is None else [_compat.bind_equation(eqn, [part])[0] for part in parts]
        if name == "broadcast_in_dim":
            where, shape = tuple(eqn.params["broadcast_dimensions"]), eqn.outvars[0].aval.shape
            if dim not in where or eqn.invars[0].aval.shape[where.index(dim)] != shape[dim]:
                return None
            parts = self._side_by_side(eqn.invars[0], where.index(dim))
            wide = lambda part: (*shape[:dim], part.shape[where.index(dim)], *shape[dim + 1 :])
            return None if parts is None else [lax.broadcast_in_dim(part, wide(part), where) for part in parts]
        if name == "reshape":
            before, shape = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            if shape[dim] == 1 or [size for size in before if size != 1] != [size for size in shape if size != 1]:
                return None
            inner = [at for at, size in enumerate(before) if size != 1][sum(size != 1 for size in shape[:dim])]
            parts = self._side_by_side(eqn.invars[0], inner)
            wide = lambda part: (*shape[:dim], part.shape[inner], *shape[dim + 1 :])
            return None if parts is None else [part.reshape(wide(part)) for part in parts]
        return None


_UNFIT = object()  # an operand that cannot meet a dealt value


def _axis(value: Dealt, axis: int) -> int:
    """Returns a dim of what the program sees before it is transposed."""
    return value.order[axis] if value.order else axis


@dataclasses.dataclass(frozen=True)
class PaddedParts:
    """Says how the program pads the parts of a dealt value.

    - `count`: how many parts it has. `size`: of each. `stored`: with the padding.
    - `split`: the dims of its columns then; none where they are one. `heads`: of each part, where that shows.
    """

    count: int
    size: int
    stored: int
    split: tuple[int, ...]
    heads: int | None


def padded_parts(eqn: Any, value: Dealt) -> PaddedParts | None:
    """Returns how an equation that pads a dealt `value` pads its parts; None for one that does anything else, such as
    putting other numbers than zeros there."""
    order = value.order or tuple(range(len(value.seen)))
    config = {order[axis]: tuple(each) for axis, each in enumerate(eqn.params["padding_config"])}
    (at, more), *others = [(axis, each) for axis, each in config.items() if each != (0, 0, 0)] or [(0, (0, 0, 0))]
    split = list(value.split or (value.columns,))
    inside = at - value.dim
    zeros = isinstance(eqn.invars[1], _compat.Literal) and not np.any(eqn.invars[1].val)
    behind = more[:1] + more[2:] == (0, 0) and more[1] > 0
    if others or not zeros or not behind or not value.is_part or not 0 <= inside < len(split):
        return None
    unit, size = math.prod(split[inside + 1 :]), split[inside]
    split[inside] += more[1]
    heads = split[inside] if value.split else None
    dims = tuple(split) if value.split else ()
    return PaddedParts(math.prod(split[:inside]), size * unit, split[inside] * unit, dims, heads)


def _padded(eqn: Any, value: Dealt) -> list[Any] | None:
    found = padded_parts(eqn, value)
    if found is None:
        return None
    if value.value is None:
        return [None]  # whose columns are counted otherwise: its parts are noted here
    if set(value.sizes) != {found.size} or set(value.stored) != {found.stored} or len(value.sizes) != found.count:
        return None
    return [_settled(value.with_padding(found.split))]


def _reshaped(value: Dealt, sizes: tuple[int, ...]) -> list[Any] | None:
    end = len(sizes) - (len(value.shape) - value.dim - 1)
    before, split, behind = sizes[: value.dim], sizes[value.dim : end], sizes[end:]
    alike = (before, behind) == (value.shape[: value.dim], value.shape[value.dim + 1 :])
    if not alike or math.prod(split) != value.columns:
        return None
    return [dataclasses.replace(value, split=() if len(split) == 1 else split)]


def _sliced(eqn: Any, value: Dealt) -> list[Any] | None:
    start, stop, strides = (eqn.params[key] for key in ("start_indices", "limit_indices", "strides"))
    shape = eqn.invars[0].aval.shape
    cut = [axis for axis, size in enumerate(shape) if (start[axis], stop[axis]) != (0, size)]
    if set(strides or ()) - {1} or len(cut) != 1 or _axis(value, cut[0]) != value.dim:
        return None
    if not value.is_apart(start[cut[0]], stop[cut[0]]):
        return None
    return [_settled(value.cut(start[cut[0]], stop[cut[0]]))]
