"""Finds the reductions of activations that leave a value for each example: a loss's maximum and sum over classes, the
class it looks up, the class that is likeliest, a product over the features of two activations.

A flat step and its dim classes come in, `Reduction`s come out. They exist because a reduction over a dim that devices
have parts of is a collective: each device reduces its part, and the devices' results are brought together. So is the
cotangent of what is made of such results and laid along the dim again, as the mean and the standard deviation of a
normalisation are: it is summed over the dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from splitjax.trace.activations.learned import values_with_cotangents
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FORWARD, FlatStep, Op


@dataclasses.dataclass(frozen=True)
class Reduction:
    """Describes an operation of the forward computation that reduces dims of activations, or looks one place of a dim
    up, and leaves a value for each example; or one that lays such a value along dims, whose cotangent the backward pass
    sums over them.

    - `primitive`: its name. `site`: of the operation. `backward`: whether it lays a value.
    - `labels`: the local labels of the leading atoms of the dims that are reduced.
    - `shape`: of the value for each example: the result, or what is laid. `operand_dtype`, `dtype`: of what it reads,
      and of its result.
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
    backward: bool = False


def find_reductions(
    flat: FlatStep,
    classes: Classes,
    examples: frozenset[int],
    weights: frozenset[int],
    repeated: Sequence[int],
    learned: frozenset[int],
) -> Iterator[Reduction]:
    """Yields the reductions of the forward computation of `flat` that keep examples apart, and those of the cotangents
    of what is laid along reduced dims again, in program order of the operations.

    **Arguments:** `classes`: the dim classes. `examples`: the atoms of the example dim. `weights`: the positions of
    operations that a parameter is used by, which look its rows up. `repeated`: by operation, how often
    rematerialisation computes it again. `learned`: the values that parameters reach."""
    with_cotangents = values_with_cotangents(flat, learned)
    dims_of = lambda value: classes.dims(value, len(flat.shapes[value]))
    keeps_examples = lambda value: any(atoms and atoms[0] in examples for atoms in dims_of(value))
    made_of: dict[int, frozenset[int]] = {}  # by value, the labels of the dims that what it is made of was reduced over
    for number, op in enumerate(flat.ops):
        if op.phase == BACKWARD or len(op.outputs) != 1:
            continue
        (result,) = op.outputs
        reduced_dims = None if number in weights else _REDUCED.get(op.primitive)
        if reduced_dims is not None and keeps_examples(result):
            operand = op.inputs[0]
            dims = dims_of(operand)
            labels = frozenset(classes.local(atoms[0]) for dim in reduced_dims(op) if (atoms := dims[dim]))
            if labels:
                yield Reduction(
                    op.primitive, op.site, labels, flat.shapes[result], flat.dtypes[operand], flat.dtypes[result],
                    op.trips, repeated[number],
                )  # fmt: skip
                if op.primitive in _DIFFERENTIATED:
                    made_of[result] = labels
                continue
        made = [value for value in op.inputs if value in made_of]
        if not made or op.primitive == "stop_gradient":
            continue
        wanted = frozenset[int]().union(*(made_of[value] for value in made))
        along = {classes.local(atoms[0]): dim for dim, atoms in enumerate(dims_of(result)) if atoms}
        meeting = wanted & along.keys()
        if not meeting:
            made_of[result] = wanted
        asked_for = with_cotangents if op.inside else learned if op.phase == FORWARD else frozenset[int]()
        for value in (each for each in made if each in asked_for and result in asked_for):
            labels = frozenset(label for label in made_of[value] & meeting if _is_laid(op, flat, value, along[label]))
            if labels:
                yield Reduction(
                    op.primitive, op.site, labels, flat.shapes[value], flat.dtypes[value], flat.dtypes[value],
                    op.trips, repeated=0, backward=True,
                )  # fmt: skip


def _is_laid(op: Op, flat: FlatStep, value: int, dim: int) -> bool:
    """Tells whether an operation lays an operand, `value`, along the dim at position `dim` of its result."""
    shape, result = flat.shapes[value], flat.shapes[op.outputs[0]]
    if op.primitive == "broadcast_in_dim":
        where = tuple(op.params["broadcast_dimensions"])
        return dim not in where or shape[where.index(dim)] != result[dim]
    return len(shape) == len(result) and shape[dim] == 1 != result[dim]


def _axes(op: Op) -> tuple[int, ...]:
    return tuple(op.params["axes"])


def looked_up(op: Op) -> tuple[int, ...]:
    """Returns the dims of the operand of a lookup of which one place is taken for each result."""
    numbers: Any = op.params["dimension_numbers"]
    return tuple(dim for dim in numbers.start_index_map if dim in numbers.collapsed_slice_dims)


def _contracted(op: Op) -> tuple[int, ...]:
    """Returns the dims of the first operand of a product that it contracts."""
    (contracted, _), _ = op.params["dimension_numbers"]
    return tuple(contracted)


# Those whose results have cotangents.
_DIFFERENTIATED = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "dot_general"})
_REDUCED: Mapping[str, Callable[[Op], tuple[int, ...]]] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"), _axes
    ),
    "gather": looked_up,
    "dot_general": _contracted,
}
