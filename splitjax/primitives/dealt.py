"""Defines the operations that deal the columns of a fused weight out to devices, and copy some to all of them.

A weight that holds several others side by side (query, key and value; gate and up) is cut where these meet, while its
parts on devices are consecutive columns. `splitjax_deal` takes a value, and gives it with one more dim, which counts
devices: the share of a device holds its columns of each of the weights. So that what is cut behind a product lies on
the device that has it, as with separate weights.

The equation's parameters: `dim` (which dim is dealt out), `sizes` (of the parts, side by side), `stored` (their sizes
with padding, which stands behind all parts in the operand, and behind each in the result), `num` (of shares; it divides
every stored size).

Heads of keys and values of which there are fewer than devices are copied instead: `splitjax_copy` takes their columns
as they were dealt out, with the dim `dim` of shares and one of what is in a share, and gives the parts of these `sizes`
that lie there side by side, an array each, of which every device has all. It cuts them apart itself: XLA would cut what
is whole in parts where these are read in parts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
from jax import lax

from splitjax.primitives.dims import DimMap, Label, Params, Shapes
from splitjax.primitives.operation import Examples, Linear, Linearity
from splitjax.primitives.table import OPERATIONS, dim_rule

DEAL: str = "splitjax_deal"
COPY: str = "splitjax_copy"
for _operation in (DEAL, COPY):
    OPERATIONS.state(_operation, examples=Examples.BY_DIMS, linear=Linear(Linearity.TOGETHER))


@dim_rule(DEAL)
def dealt(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels the dealt dim of `inputs[0]` as (share, what is in a share), two dims of `outputs[0]`. A share holds other
    columns than consecutive parts do: what counts is that both are split over the same devices."""
    at, rank = params["dim"], len(inputs[0])
    sizes: dict[Label, int] = {"share": params["num"], "column": outputs[0][at + 1]}
    before, behind = [(i,) for i in range(at)], [(i,) for i in range(at + 1, rank)]
    into: list[tuple[Label, ...]] = [*before, ("share", "column"), *behind]
    return DimMap((tuple(into),), ((*before, ("share",), ("column",), *behind),), sizes=sizes)


@dim_rule(COPY)
def copied(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels the columns of each of the `outputs` by themselves: they are whole wherever the shares of `inputs[0]`
    are."""
    at, rank = params["dim"], len(outputs[0])
    before, behind = [(i,) for i in range(at)], [(i,) for i in range(at + 1, rank)]
    wholes = tuple((*before, (("copied", number),), *behind) for number in range(len(outputs)))
    return DimMap(((*before, ("share",), ("column",), *behind),), wholes)


def copy(value: jax.Array, dim: int, sizes: Sequence[int]) -> list[jax.Array]:
    """Returns the parts of these `sizes`, side by side, of which `value` has the shares: dims `dim` and the next."""
    whole = value.reshape(*value.shape[:dim], sum(sizes), *value.shape[dim + 2 :])
    ends = [sum(sizes[:number]) for number in range(len(sizes) + 1)]
    return [lax.slice_in_dim(whole, start, stop, axis=dim) for start, stop in itertools.pairwise(ends)]


def deal(value: jax.Array, dim: int, sizes: Sequence[int], stored: Sequence[int], num: int) -> jax.Array:
    """Returns `value`, whose dim `dim` holds parts of these `sizes` and then the padding that makes them as large as
    they are `stored`, with a dim of `num` shares in its place, and behind it what each share has: its piece of every
    part, one after the other."""
    shape, at, padding, pieces = value.shape, 0, sum(sizes), []
    for size, large in zip(sizes, stored, strict=True):
        part = lax.slice_in_dim(value, at, at + size, axis=dim)
        if large > size:
            behind = lax.slice_in_dim(value, padding, padding + large - size, axis=dim)
            part = lax.concatenate([part, behind], dim)
        pieces.append(part.reshape(*shape[:dim], num, large // num, *shape[dim + 1 :]))
        at, padding = at + size, padding + large - size
    return lax.concatenate(pieces, dim + 1)


def gathered(value: jax.Array, dim: int, sizes: Sequence[int], stored: Sequence[int]) -> jax.Array:
    """Returns the parts that were dealt out to be `value`, side by side, without their padding. The arguments are those
    of `deal`."""
    at, parts, num = 0, [], value.shape[dim]
    for size, large in zip(sizes, stored, strict=True):
        piece = lax.slice_in_dim(value, at, at + large // num, axis=dim + 1)
        part = piece.reshape(*value.shape[:dim], large, *value.shape[dim + 2 :])
        parts.append(lax.slice_in_dim(part, 0, size, axis=dim))
        at += large // num
    return lax.concatenate(parts, dim)
