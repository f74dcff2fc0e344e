"""Finds activations that are concatenated with other values, those that are stacked with such, and those that rows of
a table are compared with.

A flat step and its dim classes come in, `Joined`s come out. They exist because where devices have parts of the dim
along which values are concatenated, the parts of the joined dim lie elsewhere; and where they have whole rows, parts of
columns beside these.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from splitjax.trace.activations.behind import Column, Site, labels_of, uses_behind
from splitjax.trace.activations.compared import compared_columns
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep


@dataclasses.dataclass(frozen=True)
class Joined:
    """Describes an operand of the forward computation that is concatenated with other values, there or elsewhere, or
    multiplied with rows of a table.

    - `site`, `operand`: of the operation that reads it, and its position there.
    - `label`: the local label of the leading atom of the dim along which it is concatenated, or meets rows.
    - `is_joined`: whether each of its dims has that label.
    - `uses`: the sites of the uses of parameters that its columns of that label come from, in program order.
    - `tables`: the sites of the lookups whose rows it meets; none where it is concatenated.
    - `into`: the local label of the leading atom of the dim that it becomes a part of; None where it is stacked, or
      meets rows.
    """

    site: tuple[int, ...]
    operand: int
    label: int
    is_joined: tuple[bool, ...]
    uses: tuple[tuple[int, ...], ...] = ()
    tables: tuple[tuple[int, ...], ...] = ()
    into: int | None = None


def find_joined(
    flat: FlatStep, classes: Classes, examples: frozenset[int], weights: frozenset[int], learned: frozenset[int]
) -> Iterator[Joined]:
    """Yields where the forward computation of gradient boundaries reads values that it concatenates with others along
    another dim than that of the examples, in program order; reads values that are stacked with such a value, which
    has its columns together; and values whose columns meet rows of a table (`compared`). `learned`: the values that
    parameters reach. The other arguments are those of `reductions.find_reductions`.

    A constraint can be put on what an operation reads only where lowering rebuilds that operation. It rebuilds none
    inside a custom derivative rule, nor one that stands for no equation of the program. A value that is read by such an
    operation, too, cannot be constrained alike wherever it is read, and is left out with all of its readers."""
    along, into = _joined_columns(flat, classes, examples, weights)
    compared = compared_columns(flat, classes, weights, learned)
    columns: dict[int, list[int]] = {}
    for value, label in dict.fromkeys((*along, *compared)):
        columns.setdefault(value, []).append(label)
    readers = [
        (op, operand, value)
        for op in flat.ops
        if op.inside and op.phase != BACKWARD
        for operand, value in enumerate(op.inputs)
        if value in columns
    ]
    hidden = {value for op, _, value in readers if not op.editable or op.eqn is None}
    for op, operand, value in readers:
        for label in columns[value] if value not in hidden else ():
            dims = classes.dims(value, len(flat.shapes[value]))
            is_joined = tuple(bool(dim) and classes.local(dim[0]) == label for dim in dims)
            uses, tables = (along[value, label], ()) if (value, label) in along else compared[value, label]
            yield Joined(op.site, operand, label, is_joined, uses, tables, into.get((value, label)))


def _joined_columns(
    flat: FlatStep, classes: Classes, examples: frozenset[int], weights: frozenset[int]
) -> tuple[dict[Column, tuple[Site, ...]], dict[Column, int]]:
    """Returns by (value, label of its columns) the sites of the uses of parameters that the columns come from, for what
    is concatenated along them and what is stacked with it; and, for the former, the label of the joined dim. The
    arguments are those of `find_joined`."""
    along: dict[Column, tuple[Site, ...]] = {}
    into: dict[Column, int] = {}
    joining = [
        op
        for op in flat.ops
        if op.primitive in ("concatenate", "stack") and op.inside and op.phase != BACKWARD and len(op.inputs) > 1
    ]
    if not joining:
        return along, into
    makers = {made: number for number, op in enumerate(flat.ops) for made in op.outputs}
    behind = lambda value, label: uses_behind(value, label, flat, classes, weights, makers)
    for op in joining:
        for value in op.inputs if op.primitive == "concatenate" else ():
            dims = classes.dims(value, len(flat.shapes[value]))
            atoms = dims[op.params["dimension"]]
            if atoms and atoms[0] not in examples and any(dim and dim[0] in examples for dim in dims):
                label = classes.local(atoms[0])
                along[value, label] = behind(value, label)
                whole = classes.dims(op.outputs[0], len(flat.shapes[op.outputs[0]]))[op.params["dimension"]]
                if whole:
                    into[value, label] = classes.local(whole[0])
    for op in joining:
        labels = {value: labels_of(value, flat, classes) for value in op.inputs}
        for label in {label for (_, label), sites in along.items() if sites}.intersection(*labels.values()):
            together = {site for (_, its), sites in along.items() if its == label for site in sites}
            found = {(value, label): behind(value, label) for value in op.inputs}
            if any(together.intersection(sites) for sites in found.values()):
                along |= {key: sites for key, sites in found.items() if sites}
    return along, into
