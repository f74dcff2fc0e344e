"""Finds tables that a step only looks rows up in, so that their gradients have as many rows as there were lookups.

A parameter is such a table if, inside one gradient boundary, it (or a conversion of it to another dtype) is read by
row lookups alone: gathers that pick whole rows by one number each, which is what `jnp.take`, indexing and Flax's
`Embed` trace to, through jit, remat, vmap and scan. A lookup inside a custom derivative rule or a condition cannot
be given another derivative; a use of another kind (tied logits, weight decay in the loss) makes the gradient dense.
Both leave the table dense, with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from splitjax.trace.flatten import FlatStep, Op
from splitjax.trace.row_update import WholeTableUpdate, row_update
from splitjax.trace.tables import Lookup, LookupTable, RowUpdate

_CONVERSIONS = ("convert_element_type", "copy")  # what they give is the table, perhaps in another dtype


def find_tables(flat: FlatStep, state_results: Mapping[int, int], paths: Sequence[str]) -> tuple[LookupTable, ...]:
    """Finds all parameters with row lookups inside a gradient boundary, in the order of the step's arguments.

    **Arguments:**

    - `flat`: the flat step.
    - `state_results`: flat argument of every state leaf -> flat result that is its new value.
    - `paths`: of the flat arguments.
    """
    gradients: dict[int, list[Op]] = {}
    for op in flat.ops:
        if op.primitive == "_gradient":
            gradients.setdefault(op.inputs[0], []).append(op)
    readers = _readers(flat, gradients.keys())
    tables: list[LookupTable] = []
    for leaf, value in enumerate(flat.inputs):
        if leaf in state_results and value in gradients and len(flat.shapes[value]) >= 1:
            table = _table(flat, leaf, gradients[value], readers, state_results, paths)
            if table is not None:
                tables.append(table)
    return tuple(tables)


def _readers(flat: FlatStep, values: Iterable[int]) -> Mapping[int, list[Op]]:
    """Maps each of `values`, and what it is converted to, to the operations of differentiated computations that read
    it."""
    readers: dict[int, list[Op]] = {value: [] for value in values}
    for op in flat.ops:
        if op.inside and not readers.keys().isdisjoint(op.inputs):
            for value in dict.fromkeys(op.inputs):
                if value in readers:
                    readers[value].append(op)
            if op.primitive in _CONVERSIONS:
                readers[op.outputs[0]] = []
    return readers


def _table(
    flat: FlatStep,
    leaf: int,
    gradients: Sequence[Op],
    readers: Mapping[int, list[Op]],
    state_results: Mapping[int, int],
    paths: Sequence[str],
) -> LookupTable | None:
    """Describes a parameter as a table; None where nothing looks rows up in it."""
    value = flat.inputs[leaf]
    uses = list(_uses(flat, value, readers))
    lookups = [_lookup(flat, op, read) for op, read in uses if _is_row_lookup(flat, op, read)]
    if not lookups:
        return None
    gradient, num_rows = gradients[0], flat.shapes[value][0]
    made = LookupTable(paths[leaf], gradient.site, num_rows, tuple(lookups), None)
    reason = _dense_reason(flat, uses, gradients)
    if reason is None:
        update = row_update(flat, gradient.outputs[0], leaf, state_results, paths)
        if isinstance(update, RowUpdate):
            return dataclasses.replace(made, update=update)
        reason = update
    where = f" ({reason.source})" if reason.source else ""
    return dataclasses.replace(made, reason=f"{reason.reason}{where}", lazy_update=reason.lazy)


def _uses(flat: FlatStep, value: int, readers: Mapping[int, list[Op]]) -> Iterator[tuple[Op, int]]:
    """Yields every operation of differentiated computations that reads the value, or a conversion of it, with what it
    reads."""
    for op in readers.get(value, ()):
        if op.primitive in _CONVERSIONS:
            yield from _uses(flat, op.outputs[0], readers)
        else:
            yield op, value


def _is_row_lookup(flat: FlatStep, op: Op, read: int) -> bool:
    """Tells whether an operation picks whole rows of the value `read`, by one number each."""
    if op.primitive != "gather" or op.inputs[0] != read or op.inputs[1] == read:
        return False
    numbers, shape = op.params["dimension_numbers"], flat.shapes[read]
    whole_rows = tuple(op.params["slice_sizes"]) == (1, *shape[1:])
    # Where `vmap` batches `table[k]`, each row starts at (k, 0, ...), and clipping leaves no other start in dims that
    # are taken whole.
    starts = tuple(numbers.start_index_map)
    return (
        whole_rows and (starts == (0,) or (0 in starts and _mode(op) == "clip")) and not numbers.operand_batching_dims
    )


def _lookup(flat: FlatStep, op: Op, read: int) -> Lookup:
    ids = flat.shapes[op.inputs[1]][:-1]
    num_ids = op.trips
    for size in ids:
        num_ids *= size
    return Lookup(op.site, flat.dtypes[read], num_ids, op.trips, _mode(op), op.source)


def _mode(op: Op) -> str:
    return str(op.params["mode"]).rsplit(".", 1)[-1].lower()


def _dense_reason(flat: FlatStep, uses: Sequence[tuple[Op, int]], gradients: Sequence[Op]) -> WholeTableUpdate | None:
    """Tells why the table's gradient has to be dense; None where it need not."""
    if len(gradients) > 1:
        return WholeTableUpdate("it is differentiated more than once in the step", "")
    for op, read in uses:
        line = op.source
        if not _is_row_lookup(flat, op, read):
            name = op.primitive.removeprefix("_")
            what = "a loop that slices or carries it" if op.eqn is None else name
            return WholeTableUpdate(f"it is also read by {what}, which needs all of its gradient", line)
        if not op.editable:
            return WholeTableUpdate("its lookup stands inside a custom derivative rule", line)
        if op.conditional:
            return WholeTableUpdate("its lookup stands in a condition, or in a loop of unknown length", line)
    return None
