"""Finds the reductions of activations that leave a value for each example: a loss's maximum and sum over classes, the
class it looks up, the class that is likeliest.

A flat step and its dim classes come in, `Reduction`s come out. They exist because a reduction over a dim that devices
have parts of is a collective: each device reduces its part, and the devices' results are brought together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep, Op


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Describes an operation of the forward computation that reduces dims of activations, or looks one place of a dim
    up, and leaves a value for each example.

    - `primitive`: its name. `site`: of the operation.
    - `labels`: the local labels of the leading atoms of the dims that it reduces.
    - `shape`: of the result. `operand_dtype`, `dtype`: of what it reads, and of its result.
    - `trips`: how often it runs per step. `repeated`: how often rematerialisation computes it again.
    """

    primitive: str
    site: tuple[int, ...]
    labels: frozenset[int]
    shape: tuple[int, ...]
    operand_dtype: str
    dtype: str
    trips: int
    repeated: int


def find_reductions(
    flat: FlatStep, classes: Classes, examples: frozenset[int], weights: frozenset[int], repeated: Sequence[int]
) -> Iterator[Reduction]:
    """Yields the reductions of the forward computation of `flat` that keep examples apart, in program order.

    **Arguments:** `classes`: the dim classes. `examples`: the atoms of the example dim. `weights`: the positions of
    operations that a parameter is used by, which look its rows up. `repeated`: by operation, how often
    rematerialisation computes it again."""
    for number, op in enumerate(flat.ops):
        reduced_dims = _REDUCED.get(op.primitive)
        if reduced_dims is None or op.phase == BACKWARD or number in weights or len(op.outputs) != 1:
            continue
        operand, (result,) = op.inputs[0], op.outputs
        kept = classes.dims(result, len(flat.shapes[result]))
        if not any(atoms and atoms[0] in examples for atoms in kept):
            continue
        dims = classes.dims(operand, len(flat.shapes[operand]))
        labels = frozenset(classes.local(atoms[0]) for dim in reduced_dims(op) if (atoms := dims[dim]))
        if labels:
            yield Reduction(
                op.primitive, op.site, labels, flat.shapes[result], flat.dtypes[operand], flat.dtypes[result],
                op.trips, repeated[number],
            )  # fmt: skip


def _axes(op: Op) -> tuple[int, ...]:
    return tuple(op.params["axes"])


def looked_up(op: Op) -> tuple[int, ...]:
    """Returns the dims of the operand of a lookup of which one place is taken for each result."""
    numbers: Any = op.params["dimension_numbers"]
    return tuple(dim for dim in numbers.start_index_map if dim in numbers.collapsed_slice_dims)


_REDUCED: Mapping[str, Callable[[Op], tuple[int, ...]]] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"), _axes
    ),
    "gather": looked_up,
}
