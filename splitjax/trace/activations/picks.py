"""Finds where examples are picked by number, or rows put among them: tokens that are sorted by expert.

A flat step and its dim classes come in, `Pick`s come out. They exist because a pick is a collective where the examples
lie on several devices: its rows may lie on any of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from splitjax.trace.activations.reductions import looked_up
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep, Op


@dataclasses.dataclass(frozen=True)
class Pick:
    """Describes an operation of the forward computation that picks rows of activations from all examples, or puts rows
    at the places of examples.

    - `primitive`: its name: `gather`, `scatter` or `scatter-add`. `site`: of the operation.
    - `shape`: of the value with all examples. `rows`: of what is picked or put. `dtype`: of both.
    - `trips`: how often it runs per step. `repeated`: how often rematerialisation computes it again.
    - `is_learned`: whether a parameter reaches what is picked from, or what is put: else nobody asks for its cotangent.
    """

    primitive: str
    site: tuple[int, ...]
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    dtype: str
    trips: int
    repeated: int
    is_learned: bool = True


def find_picks(
    flat: FlatStep,
    classes: Classes,
    examples: frozenset[int],
    weights: frozenset[int],
    repeated: Sequence[int],
    learned: frozenset[int],
) -> Iterator[Pick]:
    """Yields where the forward computation of `flat` picks examples of floating-point values by number, or puts rows at
    the places of numbers, in program order. `learned`: the values that parameters reach; the other arguments are those
    of `reductions.find_reductions`."""
    for number, op in enumerate(flat.ops):
        indexed = _indexed(op)
        if indexed is None or op.phase == BACKWARD or number in weights or len(op.outputs) != 1:
            continue
        whole, rows = (op.inputs[0], op.outputs[0]) if op.primitive == "gather" else (op.outputs[0], op.inputs[2])
        dims = classes.dims(whole, len(flat.shapes[whole]))
        leading = [dims[dim][0] for dim in indexed if dims[dim]]
        if jnp.issubdtype(np.dtype(flat.dtypes[whole]), np.inexact) and examples.intersection(leading):
            yield Pick(
                op.primitive, op.site, flat.shapes[whole], flat.shapes[rows], flat.dtypes[whole], op.trips,
                repeated[number], (whole if op.primitive == "gather" else rows) in learned,
            )  # fmt: skip


def _indexed(op: Op) -> tuple[int, ...] | None:
    """Returns the dims of the whole value along which an operation picks or puts rows; None where it does neither."""
    if op.primitive == "gather":
        return looked_up(op)
    if op.primitive not in ("scatter", "scatter-add"):
        return None
    numbers: Any = op.params["dimension_numbers"]
    return tuple(dim for dim in numbers.scatter_dims_to_operand_dims if dim in numbers.inserted_window_dims)
