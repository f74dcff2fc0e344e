"""Finds activations that are concatenated with other values, and those that are stacked with such.

A flat step and its dim classes come in, `Joined`s come out. They exist because where devices have parts of the dim
along which values are concatenated, the parts of the joined dim lie elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep
from splitjax.trace.graph import Joined


def find_joined(
    flat: FlatStep, classes: Classes, examples: frozenset[int], weights: frozenset[int]
) -> Iterator[Joined]:
    """Yields where the forward computation of gradient boundaries reads values that it concatenates with others along
    another dim than that of the examples, in program order; and reads values that are stacked with such a value, which
    has its columns together. The arguments are those of `reductions.find_reductions`.

    A constraint can be put on what an operation reads only where lowering rebuilds that operation. It rebuilds none
    inside a custom derivative rule, nor one that stands for no equation of the program. A value that is read by such an
    operation, too, cannot be constrained alike wherever it is read, and is left out with all of its readers."""
    along = _joined_columns(flat, classes, examples, weights)
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


def _joined_columns(
    flat: FlatStep, classes: Classes, examples: frozenset[int], weights: frozenset[int]
) -> dict[tuple[int, int], tuple[tuple[int, ...], ...]]:
    """Returns by (value, label of its columns) the sites of the uses of parameters that the columns come from, for what
    is concatenated along them and what is stacked with it. The arguments are those of `find_joined`."""
    along: dict[tuple[int, int], tuple[tuple[int, ...], ...]] = {}
    joining = [
        op
        for op in flat.ops
        if op.primitive in ("concatenate", "stack") and op.inside and op.phase != BACKWARD and len(op.inputs) > 1
    ]
    if not joining:
        return along
    makers = {made: number for number, op in enumerate(flat.ops) for made in op.outputs}
    behind = lambda value, label: _uses_behind(value, label, flat, classes, weights, makers)
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
    return along


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
