"""Finds columns of products that are multiplied with rows of a table that are looked up: a sampled softmax.

A flat step and its dim classes come in; out comes which columns are, and with the rows of which lookups. They exist
because a table that is split by rows gives whole rows: beside parts of columns, devices would have parts of the rows'
cotangents, which the table's gradient wants whole.
"""

from __future__ import annotations

from splitjax.trace.activations.behind import Column, Site, labels_of, uses_behind
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep

_COMPARES = ("mul", "dot_general")


def compared_columns(
    flat: FlatStep, classes: Classes, weights: frozenset[int], learned: frozenset[int]
) -> dict[Column, tuple[tuple[Site, ...], tuple[Site, ...]]]:
    """Returns by (value, label of its columns) the sites of the uses of parameters that the columns come from, and of
    the lookups whose rows meet them, for products between activations in gradient boundaries. `weights`: the positions
    of operations that use a parameter. `learned`: the values that parameters
    reach."""
    looked_up: dict[int, dict[int, frozenset[Site]]] = {}  # by value that is made of rows, lookups by label
    found: dict[Column, tuple[tuple[Site, ...], tuple[Site, ...]]] = {}
    makers = {made: number for number, op in enumerate(flat.ops) for made in op.outputs}
    for number, op in enumerate(flat.ops):
        if op.phase == BACKWARD or not op.inside or learned.isdisjoint(op.inputs):
            continue
        rows = [value for value in op.inputs if value in looked_up]
        if number in weights:
            if op.primitive == "gather":
                (out,), offsets = op.outputs, op.params["dimension_numbers"].offset_dims
                dims = classes.dims(out, len(flat.shapes[out]))
                looked_up[out] = {classes.local(dims[d][0]): frozenset((op.site,)) for d in offsets if dims[d]}
        elif rows and all(value in looked_up for value in op.inputs if value in learned):
            merged: dict[int, frozenset[Site]] = {}
            for value in rows:
                for label, sites in looked_up[value].items():
                    merged[label] = merged.get(label, frozenset()) | sites
            looked_up.update(dict.fromkeys(op.outputs, merged))
        elif len(rows) == 1 and op.primitive in _COMPARES:
            (other,) = (value for value in op.inputs if value not in looked_up)
            for label in labels_of(other, flat, classes) & looked_up[rows[0]].keys():
                if sites := uses_behind(other, label, flat, classes, weights, makers):
                    tables = (*found.get((other, label), ((), ()))[1], *looked_up[rows[0]][label])
                    found[other, label] = sites, tuple(sorted(set(tables)))
    return found
