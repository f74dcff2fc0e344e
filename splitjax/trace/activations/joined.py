"""Finds activations that are concatenated with other values, those that are stacked with such, those that are put in
order along their columns, and those that rows of a table are compared with.

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

# The parameter that says along which dim, of operations that put values in order.
_SORTED_ALONG = {"top_k": "axis", "sort": "dimension"}


@dataclasses.dataclass(frozen=True)
class Joined:
    """Describes an operand of the forward computation that is concatenated with other values, there or elsewhere, or
    multiplied with rows of a table.

    - `site`, `operand`: of the operation that reads it, and its position there.
    - `label`: the local label of the leading atom of the dim along which it is concatenated, or meets rows.
    - `is_joined`: whether each of its dims has that label.
    - `uses`: the sites of the uses of parameters that its columns of that label come from, in program order.
    - `tables`: the sites of the lookups whose rows it meets; none where it is concatenated.
    - `is_ordered`: whether it is only put in order along that dim: the largest of its columns are looked for.
    - `into`: the local label of the leading atom of the dim that it becomes a part of; None where it is stacked, or
      meets rows.
    - `example_dim`: its first dim that holds examples; None for none.
    """

    site: tuple[int, ...]
    operand: int
    label: int
    is_joined: tuple[bool, ...]
    uses: tuple[tuple[int, ...], ...] = ()
    tables: tuple[tuple[int, ...], ...] = ()
    into: int | None = None
    is_ordered: bool = False
    example_dim: int | None = None


def find_joined(
    flat: FlatStep, classes: Classes, examples: frozenset[int], weights: frozenset[int], learned: frozenset[int]
) -> Iterator[Joined]:
    """Yields where the forward computation of gradient boundaries reads values that it concatenates with others along
    another dim than that of the examples, or sorts along one, in program order; reads values that are stacked with such
    a value, which has its columns together; and values whose columns meet rows of a table (`compared`). `learned`: the
    values that parameters reach. The other arguments are those of `reductions.find_reductions`.

    A constraint can be put on what an operation reads only where lowering rebuilds that operation. It rebuilds none
    inside a custom derivative rule, nor one that stands for no equation of the program. A value that is read by such an
    operation, too, cannot be constrained alike wherever it is read, and is left out with all of its readers."""
    along, into, ordered = _joined_columns(flat, classes, examples, weights)
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
            key = value, label
            of_examples = next((at for at, dim in enumerate(dims) if dim and dim[0] in examples), None)
            is_ordered = key in ordered
            yield Joined(op.site, operand, label, is_joined, uses, tables, into.get(key), is_ordered, of_examples)


def _joined_columns(
    flat: FlatStep, classes: Classes, examples: frozenset[int], weights: frozenset[int]
) -> tuple[dict[Column, tuple[Site, ...]], dict[Column, int], frozenset[Column]]:
    """Returns by (value, label of its columns) the sites of the uses of parameters that the columns come from, for what
    is concatenated along them, what is stacked with it, and what is put in order along them; for the first, the label
    of the joined dim; and which are the last. The arguments are those of `find_joined`."""
    along: dict[Column, tuple[Site, ...]] = {}
    into: dict[Column, int] = {}
    forward = [op for op in flat.ops if op.inside and op.phase != BACKWARD]
    joining = [op for op in forward if op.primitive in ("concatenate", "stack") and len(op.inputs) > 1]
    sorting = [op for op in forward if op.primitive in _SORTED_ALONG]
    if not joining and not sorting:
        return along, into, frozenset()
    makers = {made: number for number, op in enumerate(flat.ops) for made in op.outputs}
    behind = lambda value, label: uses_behind(value, label, flat, classes, weights, makers)

    def columns_along(value: int, dimension: int) -> int | None:
        dims = classes.dims(value, len(flat.shapes[value]))
        atoms = dims[dimension]
        has_columns = atoms and atoms[0] not in examples and any(dim and dim[0] in examples for dim in dims)
        return classes.local(atoms[0]) if has_columns else None

    for op in joining:
        for value in op.inputs if op.primitive == "concatenate" else ():
            label = columns_along(value, op.params["dimension"])
            if label is not None:
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
    ordered = {
        (value, label)
        for op in sorting
        for value in op.inputs
        if flat.shapes[value] and (label := columns_along(value, op.params[_SORTED_ALONG[op.primitive]])) is not None
    } - along.keys()
    along |= {(value, label): behind(value, label) for value, label in ordered}
    return along, into, frozenset(ordered)
