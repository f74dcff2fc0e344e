"""Defines the operation that deals the columns of a fused weight out to devices.

A weight that holds several others side by side (query, key and value; gate and up) is cut where these meet, while its
parts on devices are consecutive columns. `splitjax_deal` takes a value, and gives it with one more dim, which counts
devices: the share of a device holds its columns of each of the weights. So that what is cut behind a product lies on
the device that has it, as with separate weights.

The equation's parameters: `dim` (which dim is dealt out), `sizes` (of the parts, side by side), `num` (of shares; it
divides every size).
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


def deal(value: jax.Array, dim: int, sizes: Sequence[int], num: int) -> jax.Array:
    """Returns `value`, whose dim `dim` holds parts of these `sizes`, with a dim of `num` shares in its place, and
    behind it what each share has: its piece of every part, one after the other."""
    shape, at, pieces = value.shape, 0, []
    for size in sizes:
        part = lax.slice_in_dim(value, at, at + size, axis=dim)
        pieces.append(part.reshape(*shape[:dim], num, size // num, *shape[dim + 1 :]))
        at += size
    return lax.concatenate(pieces, dim + 1)


def gathered(value: jax.Array, dim: int, sizes: Sequence[int]) -> jax.Array:
    """Returns what was dealt out to be `value`: the reverse of `deal`."""
    at, parts, num = 0, [], value.shape[dim]
    for size in sizes:
        piece = lax.slice_in_dim(value, at, at + size // num, axis=dim + 1)
        parts.append(piece.reshape(*value.shape[:dim], size, *value.shape[dim + 2 :]))
        at += size // num
    return lax.concatenate(parts, dim)
