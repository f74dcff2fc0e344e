"""Finds the uses of parameters whose outputs are added to what earlier ones made, element by element: the layers of a
residual stream, of gates, of several towers.

A flat step and its dim classes come in, `Stream`s come out. They exist because both operands of such an operation have
to lie alike: where one of them has its examples over all devices, as whole layers leave them, so must the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep

_ELEMENTWISE = frozenset({"add", "add_any", "sub", "mul", "div", "max", "min", "select_n"})


@dataclasses.dataclass(frozen=True)
class Stream:
    """Says that the output of a use meets what an earlier one made.

    - `site`: of the use. `label`: the soft label of the dims along which both have columns.
    - `head`: the site of the earliest use whose columns it meets.
    - `met_at`: the site of the first operation where it meets these. `met_operand`: which operand they are part of
      there; `met_dims`: the dims of that.
    """

    site: tuple[int, ...]
    label: int
    head: tuple[int, ...]
    met_at: tuple[int, ...]
    met_operand: int
    met_dims: tuple[tuple[int, ...], ...]


def find_streams(
    flat: FlatStep, classes: Classes, weights: frozenset[int], learned: frozenset[int]
) -> Iterator[Stream]:
    """Yields for each use in a gradient boundary, and each label of its columns, the earliest use before it whose
    columns they meet, in program order. `weights`: the positions of operations that use a parameter. `learned`: the
    values that parameters reach."""
    # By value, and by label of its columns, the positions of the uses that these come from.
    made_by: dict[int, Mapping[int, frozenset[int]]] = {}
    heads: dict[tuple[int, int], int] = {}
    met: dict[tuple[int, int], tuple[int, int]] = {}  # the operation, and the operand
    for number, op in enumerate(flat.ops):
        if op.phase == BACKWARD or not op.inside or learned.isdisjoint(op.inputs):
            continue
        known = [made_by[value] for value in op.inputs if value in made_by]
        if number not in weights and not known:
            continue
        merged: dict[int, frozenset[int]] = {}
        for of_value in known:
            for label, uses in of_value.items():
                merged[label] = uses if label not in merged else merged[label] | uses
        if op.primitive in _ELEMENTWISE and len(known) > 1:
            for label, together in merged.items():
                head = min(together)
                of_head = next(i for i, value in enumerate(op.inputs) if head in made_by.get(value, {}).get(label, ()))
                for use in (use for uses in known if head not in (own := uses.get(label, frozenset())) for use in own):
                    if head < heads.get((use, label), number):
                        heads[use, label], met[use, label] = head, (number, of_head)
        for value in op.outputs:
            # Not local classes: the operands of a sum may be of two of these.
            labels = {classes.soft(atom) for dim in classes.dims(value, len(flat.shapes[value])) for atom in dim}
            own = dict.fromkeys(labels, frozenset((number,))) if number in weights else merged
            made_by[value] = {label: uses for label, uses in own.items() if label in labels}
    for (use, label), head in sorted(heads.items()):
        at, operand = met[use, label]
        value = flat.ops[at].inputs[operand]
        dims = classes.dims(value, len(flat.shapes[value]))
        yield Stream(flat.ops[use].site, label, flat.ops[head].site, flat.ops[at].site, operand, dims)
