"""Defines the operation that deals the columns of a fused weight out to devices.

A weight that holds several others side by side (query, key and value; gate and up) is cut where these meet, while its
parts on devices are consecutive columns. `splitjax_deal` takes a value, and gives it with one more dim, which counts
devices: the share of a device holds its columns of each of the weights. So that what is cut behind a product lies on
the device that has it, as with separate weights.

The equation's parameters: `dim` (which dim is dealt out), `sizes` (of the parts, side by side), `stored` (their sizes
with padding, which stands behind all parts in the operand, and behind each in the result), `num` (of shares; it divides
every stored size).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from splitjax.primitives.dims import DimMap, Label, Params, Shapes
from splitjax.primitives.operation import Examples, Linear, Linearity
from splitjax.primitives.table import OPERATIONS, dim_rule

DEAL: str = "splitjax_deal"
OPERATIONS.state(DEAL, examples=Examples.BY_DIMS, linear=Linear(Linearity.TOGETHER))


@dim_rule(DEAL)
def dealt(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels the dealt dim of `inputs[0]` as (share, what is in a share), two dims of `outputs[0]`. A share holds other
    columns than consecutive parts do: what counts is that both are split over the same devices."""
    at, rank = params["dim"], len(inputs[0])
    sizes: dict[Label, int] = {"share": params["num"], "column": outputs[0][at + 1]}
    before, behind = [(i,) for i in range(at)], [(i,) for i in range(at + 1, rank)]
    into: list[tuple[Label, ...]] = [*before, ("share", "column"), *behind]
    return DimMap((tuple(into),), ((*before, ("share",), ("column",), *behind),), sizes=sizes)


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
