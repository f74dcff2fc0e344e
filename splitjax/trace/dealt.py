"""Finds the fused weights of a flat step whose columns are dealt out to devices, or copied to all of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from splitjax.primitives.dealt import COPY, DEAL
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep
from splitjax.trace.flow import Argument


@dataclasses.dataclass(frozen=True)
class DealtWeight:
    """Describes a parameter, or what is computed of it alone, whose columns are dealt out to devices
    (`primitives.dealt`).

    - `site`: of the operation. `param`: path of the parameter.
    - `dims`: of what is dealt out; `shape`, `dtype`: of it. `dim`: the position of the dim that is.
    - `sizes`: of the parts that lie along it. `stored`: their sizes with padding. `num`: of the shares.
    - `trips`: how often it runs per step; `repeated`: how often it does again for a backward pass that is
      rematerialised.
    - `copied`: whether the operation copies columns to all devices that another one has dealt out: `dim` counts the
      shares then.
    """

    site: tuple[int, ...]
    param: str
    dims: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    dtype: str
    dim: int
    sizes: tuple[int, ...]
    stored: tuple[int, ...]
    num: int
    trips: int
    repeated: int = 0
    copied: bool = False

    @property
    def num_elements(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)


def find_dealt(
    flat: FlatStep, classes: Classes, sources: Sequence[frozenset[int]], arguments: Sequence[Argument]
) -> tuple[DealtWeight, ...]:
    """Returns the weights of `flat` that are dealt out, in program order, with dims of `classes`.

    `sources`: per value the parameters (numbers of `arguments`) that it is made of."""
    found = []
    for op in flat.ops:
        if op.primitive in (DEAL, COPY) and op.phase != BACKWARD and op.editable:
            value, made = op.inputs[0], sources[op.inputs[0]]
            if len(made) == 1:
                shape, params = flat.shapes[value], op.params
                dims = classes.dims(value, len(shape))
                (param,) = made
                at, sizes, copied = params["dim"], params["sizes"], op.primitive == COPY
                found.append(
                    DealtWeight(
                        op.site,
                        arguments[param].path,
                        dims,
                        shape,
                        flat.dtypes[value],
                        at,
                        sizes,
                        sizes if copied else params["stored"],
                        shape[at] if copied else params["num"],
                        op.trips,
                        len(op.remats) if op.inside and not op.phase else 0,
                        copied,
                    )
                )
    return tuple(found)


def copied_values(flat: FlatStep, sources: Sequence[frozenset[int]]) -> frozenset[int]:
    """Returns the values of `flat` that hold columns which were copied to all devices, and nothing of the batch.
    `sources`: per value the parameters that it is made of."""
    found: set[int] = set()
    for op in flat.ops:
        if op.primitive == COPY or not found.isdisjoint(op.inputs):
            found.update(v for v in op.outputs if sources[v])
    return frozenset(found)
