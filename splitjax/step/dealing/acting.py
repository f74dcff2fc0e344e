"""Says what operations do with values whose columns are dealt out to devices (`values`).

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

from splitjax import _compat
from splitjax.primitives.elementwise import ELEMENTWISE
from splitjax.step.dealing.values import Dealt, FusedProduct, as_array, copy_p, deal_p, lies, settled

# What makes the arrays that are dealt out: `Acting.made` remembers it.
NOTED: frozenset[str] = frozenset({"broadcast_in_dim", "concatenate", "convert_element_type", "reshape"})


class Acting:
    """Says what operations do with dealt values: the same for values with and without numbers.

    **Attributes:** `made`: by variable, the equation that made it, if it is of `NOTED`, and its operands.
    """

    def __init__(self) -> None:
        self.made: dict[Any, tuple[Any, list[Any]]] = {}
        # By array and how it was dealt out: the array, which keeps its place in memory, and what came of it.
        self._known: dict[tuple[Any, ...], tuple[Any, tuple[jax.Array, Sequence[jax.Array]]]] = {}

    def product(self, eqn: Any, values: Sequence[Any], target: FusedProduct) -> list[Any]:
        """Returns the result of the product of a target, with its weight dealt out."""
        (contracted, batch), side, dim = eqn.params["dimension_numbers"], target.weight, target.dim
        free = [
            [d for d in range(eqn.invars[k].aval.ndim) if d not in contracted[k] and d not in batch[k]] for k in (0, 1)
        ]
        before = len(batch[0]) + (len(free[0]) if side == 1 else 0)
        shape, at = eqn.outvars[0].aval.shape, before + free[side].index(dim)
        value, others = None, ()
        if any(operand is not None for operand in values):
            weight, copies = self._dealt(eqn.invars[side], values[side], dim, target, target.num)
            moved = lambda dims, k: tuple(d + (k == side and d > dim) for d in dims)
            numbers = tuple(tuple(moved(kind[k], k) for k in (0, 1)) for kind in (contracted, batch))
            data = as_array(values[1 - side])
            beside = lambda weight: [weight if k == side else data for k in (0, 1)]
            value = _compat.bind_equation(_compat.with_params(eqn, dimension_numbers=numbers), beside(weight))[0]
            others = tuple(_compat.bind_equation(eqn, beside(each))[0] for each in copies)
        sites = (target.site,)
        copied = target.copied if others else ()
        return [Dealt(value, shape, at, 0, target.sizes, target.stored, products=sites, copied=copied, others=others)]

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
            return [settled(value.cut(start, stop)) for start, stop in pairs]
        if name == "slice":
            return _sliced(eqn, value)
        if name == "pad":
            return _padded(eqn, value)
        return None

    def _elementwise(self, eqn: Any, values: Sequence[Any]) -> list[Any] | None:
        (first, *others) = [value for value in values if isinstance(value, Dealt)]
        if any(lies(other) != lies(first) for other in others):
            return None
        sites = dict.fromkeys(site for value in (first, *others) for site in value.products)
        first = dataclasses.replace(first, products=tuple(sites))
        operands, copies = [], []
        for variable, value in zip(eqn.invars, values, strict=True):
            met = (value.value, value.others) if isinstance(value, Dealt) else self._beside(first, variable, value)
            if met is None:
                return None
            operands.append(met[0])
            copies.append(met[1])
        if not first.is_known:
            return [first] * len(eqn.outvars)
        parts = [_compat.bind_equation(eqn, each) for each in zip(*copies, strict=True)]
        results = _compat.bind_equation(eqn, operands) if first.value is not None else [None] * len(eqn.outvars)
        return [first.with_value(result, [part[k] for part in parts]) for k, result in enumerate(results)]

    def _beside(self, dealt: Dealt, variable: Any, value: Any) -> tuple[Any, Sequence[Any]] | None:
        """Returns what meets a dealt value in place of an array, and what meets each of its copied parts: a number, an
        array that is the same along its columns, or one number for each column, which is dealt out too. None for an
        array that cannot meet it."""
        shape, at, nothing = tuple(variable.aval.shape), dealt.dim, (None, ())
        if not shape:
            return value, [value] * len(dealt.others)
        if dealt.split or dealt.order or dealt.is_part or len(shape) != len(dealt.shape):
            return None
        if shape[at] == 1:
            return nothing if value is None else (lax.expand_dims(value, (at,)), [value] * len(dealt.others))
        if math.prod(shape[: at + 1]) == shape[at] == dealt.columns:
            return nothing if value is None else self._dealt(variable, value, at, dealt, dealt.num)
        made = self.made.get(variable)
        if made is None or made[0].primitive.name != "broadcast_in_dim":
            return None
        eqn, sources = made
        where, small = tuple(eqn.params["broadcast_dimensions"]), tuple(eqn.invars[0].aval.shape)
        if (
            at not in where
            or math.prod(small[: where.index(at) + 1]) != dealt.columns
            or small[where.index(at)] != dealt.columns
        ):
            return None
        if value is None:
            return nothing
        source, copies = self._dealt(eqn.invars[0], sources[0], where.index(at), dealt, dealt.num)
        wide = (*shape[:at], *source.shape[where.index(at) :][:2], *shape[at + 1 :])
        dims = [d for k in where for d in ((k, k + 1) if k == at else (k + (k > at),))]
        along = lambda copy: lax.broadcast_in_dim(
            copy, (*shape[:at], copy.shape[where.index(at)], *shape[at + 1 :]), where
        )
        return lax.broadcast_in_dim(source, wide, dims), [along(copy) for copy in copies]

    def _dealt(
        self, variable: Any, value: Any, dim: int, parts: Dealt | FusedProduct, num: int
    ) -> tuple[jax.Array, Sequence[jax.Array]]:
        """Returns an array with its columns dealt out, in `parts` as those of this are, and an array for each part that
        is copied. Where the program laid several arrays side by side to make it (the gates of a recurrent cell), each
        is dealt out by itself: a weight alone lies as its devices read it, and nothing is sent for it."""
        sizes, stored = parts.sizes, parts.stored
        arrays = self._side_by_side(variable, dim) if sizes == stored else None
        lying = _in_arrays(parts, [each for each in arrays or () if each.shape[dim]], dim)
        if lying is None:  # what is cut apart behind the product lies across two arrays, or none were laid so
            key = id(value), dim, sizes, stored, parts.copied, num
            if key not in self._known:  # several products may read one weight
                self._known[key] = (
                    value,
                    (
                        _with_copies(value, dim, parts, num)
                        if parts.copied
                        else (deal_p.bind(value, dim=dim, sizes=sizes, stored=stored, num=num)[0], ())
                    ),
                )
            return self._known[key][1]
        pieces, copies = [], []
        for array, is_copied, inside in lying:
            if is_copied:
                copies += _cut(array, dim, inside)
            elif len(inside) == 1:
                columns = num, array.shape[dim] // num
                pieces.append(array.reshape(*array.shape[:dim], *columns, *array.shape[dim + 1 :]))
            else:
                pieces += deal_p.bind(array, dim=dim, sizes=inside, stored=inside, num=num)
        return lax.concatenate(pieces, dim + 1), copies

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


def _in_arrays(
    parts: Dealt | FusedProduct, arrays: Sequence[Any], dim: int
) -> list[tuple[Any, bool, tuple[int, ...]]] | None:
    """Returns the arrays that lie side by side along `dim`, each with whether the parts that it holds are copied, and
    with their sizes; None where there are none, a part lies across two, or one holds parts of both kinds."""
    found, number = [], 0
    copied = parts.copied or (False,) * len(parts.sizes)
    for array in arrays:
        first, held = number, 0
        while number < len(parts.sizes) and held < array.shape[dim]:
            held += parts.sizes[number]
            number += 1
        if held != array.shape[dim] or len(set(copied[first:number])) > 1:
            return None
        found.append((array, copied[first], tuple(parts.sizes[first:number])))
    return found or None


def _with_copies(
    value: jax.Array, dim: int, parts: Dealt | FusedProduct, num: int
) -> tuple[jax.Array, Sequence[jax.Array]]:
    """Returns an array with its columns dealt out, but for those of parts that are copied, and an array for each of
    these. What is copied lies side by side, and is dealt out first: its columns are evenly on all devices then, and
    each has to send as much."""
    runs = [
        (is_copied, tuple(size for size, _ in run))
        for is_copied, run in itertools.groupby(zip(parts.sizes, parts.copied, strict=True), lambda part: part[1])
    ]
    sizes = tuple(size for is_copied, run in runs for size in ((sum(run),) if is_copied else run))
    every = deal_p.bind(value, dim=dim, sizes=sizes, stored=sizes, num=num)[0]
    at, dealt, copies = 0, [], []
    for is_copied, run in runs:
        width = sum(run) // num
        share = lax.slice_in_dim(every, at, at + width, axis=dim + 1)
        at += width
        if is_copied:
            copies += copy_p.bind(share, dim=dim, sizes=run)
        else:
            dealt.append(share)
    return dealt[0] if len(dealt) == 1 else lax.concatenate(dealt, dim + 1), copies


def _cut(array: jax.Array, dim: int, sizes: Sequence[int]) -> list[jax.Array]:
    """Returns the parts of these `sizes` that lie side by side along `dim`."""
    ends = map(int, np.cumsum((0, *sizes)))
    return [lax.slice_in_dim(array, start, stop, axis=dim) for start, stop in itertools.pairwise(ends)]


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
    if not value.is_known:
        return [None]  # whose columns are counted otherwise: its parts are noted here
    if (
        value.copied
        or set(value.sizes) != {found.size}
        or set(value.stored) != {found.stored}
        or len(value.sizes) != found.count
    ):
        return None
    return [settled(value.with_padding(found.split))]


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
    return [settled(value.cut(start[cut[0]], stop[cut[0]]))]
