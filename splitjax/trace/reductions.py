"""Finds what is made of activations across devices: reductions that leave a value for each example (a loss's maximum
and sum over classes, the class it looks up, the class that is likeliest), rows that are picked from all examples or put
among them (tokens that are sorted by expert), and what is concatenated with other values.

A flat step and its dim classes come in; `Reduction`s, `Pick`s and `Joined`s come out. They exist because a reduction
over a dim that devices have parts of is a collective: each device reduces its part, and the devices' results are
brought together. So is a pick, whose rows may lie on any device; and where values are concatenated along the dim, the
parts of the joined dim lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep, Op
from splitjax.trace.graph import Joined, Pick, Reduction


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


def find_picks(
    flat: FlatStep, classes: Classes, examples: frozenset[int], weights: frozenset[int], repeated: Sequence[int]
) -> Iterator[Pick]:
    """Yields where the forward computation of `flat` picks examples of floating-point values by number, or puts rows at
    the places of numbers, in program order. The arguments are those of `find_reductions`."""
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
                repeated[number],
            )  # fmt: skip


def find_joined(
    flat: FlatStep, classes: Classes, examples: frozenset[int], weights: frozenset[int]
) -> Iterator[Joined]:
    """Yields where the forward computation of gradient boundaries reads values that it concatenates with others along
    another dim than that of the examples, in program order; and reads values that are stacked with such a value, which
    has its columns together. The arguments are those of `find_reductions`.

    A constraint can be put on what an operation reads only where lowering rebuilds that operation. It rebuilds none
    inside a custom derivative rule, nor one that stands for no equation of the program. A value that is read by such an
    operation, too, cannot be constrained alike wherever it is read, and is left out with all of its readers."""
    makers: dict[int, int] = {}
    along: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}  # by value and label of a dim, where that comes from

    def behind(value: int, label: int) -> tuple[tuple[int, ...], ...]:
        if not makers:
            makers.update((made, number) for number, op in enumerate(flat.ops) for made in op.outputs)
        return _uses_behind(value, label, flat, classes, weights, makers)

    joining = [
        op
        for op in flat.ops
        if op.primitive in ("concatenate", "stack") and op.inside and op.phase != BACKWARD and len(op.inputs) > 1
    ]
    for op in joining:
        for value in op.inputs if op.primitive == "concatenate" else ():
            dims = classes.dims(value, len(flat.shapes[value]))
            atoms = dims[op.params["dimension"]]
            if atoms and atoms[0] not in examples and any(dim and dim[0] in examples for dim in dims):
                label = classes.local(atoms[0])
                along[value, label] = behind(value, label)
    for op in joining:
        labels = {value: _labels(value, flat, classes) for value in op.inputs}
        for label in {label for (_, label), sites in along.items() if sites}.intersection(*labels.values()):
            together = {site for (_, its), sites in along.items() if its == label for site in sites}
            found = {(value, label): behind(value, label) for value in op.inputs}
            if any(together.intersection(sites) for sites in found.values()):
                along |= {key: sites for key, sites in found.items() if sites}
    labels_of: dict[int, list[int]] = {}
    for value, label in along:
        labels_of.setdefault(value, []).append(label)
    readers = [
        (op, operand, value)
        for op in flat.ops
        if op.inside and op.phase != BACKWARD
        for operand, value in enumerate(op.inputs)
        if value in labels_of
    ]
    hidden = {value for op, _, value in readers if not op.editable or op.eqn is None}
    for op, operand, value in readers:
        for label in labels_of[value] if value not in hidden else ():
            dims = classes.dims(value, len(flat.shapes[value]))
            is_joined = tuple(bool(dim) and classes.local(dim[0]) == label for dim in dims)
            yield Joined(op.site, operand, label, is_joined, along[value, label])


def _labels(value: int, flat: FlatStep, classes: Classes) -> set[int]:
    """Returns the local labels of the dims of a value."""
    return {classes.local(atom) for dim in classes.dims(value, len(flat.shapes[value])) for atom in dim}


def _uses_behind(
    value: int, label: int, flat: FlatStep, classes: Classes, weights: frozenset[int], makers: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the sites of the uses of parameters that the columns of a value come from, in program order: the nearest
    before it on every way back through values with these columns. `label`: theirs. `makers`: by value, the position of
    the operation that makes it."""
    found: set[int] = set()
    seen, left = {value}, [value]
    while left:
        number = makers.get(left.pop())
        if number is None:
            continue
        if number in weights:
            found.add(number)
            continue
        for before in flat.ops[number].inputs:
            if before not in seen and label in _labels(before, flat, classes):
                seen.add(before)
                left.append(before)
    return tuple(flat.ops[number].site for number in sorted(found))


def _axes(op: Op) -> tuple[int, ...]:
    return tuple(op.params["axes"])


def _looked_up(op: Op) -> tuple[int, ...]:
    """Returns the dims of the operand of a lookup of which one place is taken for each result."""
    numbers: Any = op.params["dimension_numbers"]
    return tuple(dim for dim in numbers.start_index_map if dim in numbers.collapsed_slice_dims)


def _indexed(op: Op) -> tuple[int, ...] | None:
    """Returns the dims of the whole value along which an operation picks or puts rows; None where it does neither."""
    if op.primitive not in ("gather", "scatter", "scatter-add"):
        return None
    numbers: Any = op.params["dimension_numbers"]
    if op.primitive == "gather":
        return tuple(dim for dim in numbers.start_index_map if dim in numbers.collapsed_slice_dims)
    return tuple(dim for dim in numbers.scatter_dims_to_operand_dims if dim in numbers.inserted_window_dims)


_REDUCED: Mapping[str, Callable[[Op], tuple[int, ...]]] = {
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"), _axes
    ),
    "gather": _looked_up,
}
