"""Finds the operations of a step that XLA's partitioner may compute wrongly (`splitjax.partitioner`).

What lowering needs to evaluate them otherwise is where their examples, groups and features are: the dims of operands and
results in atoms and, for a convolution, the atoms behind each of its four kinds of dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from splitjax.partitioner import Action, defect_of
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, Flat, Op
from splitjax.trace.graph import ConvolutionDims, Dim, Suspect
from splitjax.trace.links import qualified_name


def find_suspects(flat: Flat, classes: Classes) -> tuple[Suspect, ...]:
    """The operations that a row of the table covers, in program order."""
    found = []
    for op in flat.ops:
        defect = defect_of(op.primitive, op.params)
        if defect is not None:
            convolution = _convolution_dims(op, flat, classes) if defect.action is Action.LOCAL else None
            found.append(
                Suspect(
                    defect.name, qualified_name(op), op.site, op.source, _dims(op.inputs, flat, classes), _dims(op.outputs, flat, classes),
                    op.editable, op.phase == BACKWARD, op.trips, convolution,
                )
            )
    return tuple(found)


def _dims(values: Sequence[int], flat: Flat, classes: Classes) -> tuple[tuple[Dim, ...], ...]:
    return tuple(classes.dims(value, len(flat.shapes[value])) for value in values)


def _convolution_dims(op: Op, flat: Flat, classes: Classes) -> ConvolutionDims:
    """The atoms of a convolution's kinds of dims. The features of the result are (group, feature), those of the data (group,
    contracted) with feature groups; with batch groups its examples are (group, example)."""
    data, weight, result = (classes.dims(value, len(flat.shapes[value])) for value in (*op.inputs[:2], op.outputs[0]))
    numbers, params = op.params["dimension_numbers"], op.params
    num_groups = params["feature_group_count"] * params["batch_group_count"]
    groups, features = split_leading(weight[numbers.rhs_spec[0]], num_groups, classes.atoms.sizes)
    if not groups:  # the weight's atoms need not be cut at its groups; the result's or the data's may be
        groups = next(
            (
                leading for dim in (result[numbers.out_spec[1]], data[numbers.lhs_spec[1]], data[numbers.lhs_spec[0]])
                if (leading := split_leading(dim, num_groups, classes.atoms.sizes)[0])
            ),
            (),
        )
    batch = data[numbers.lhs_spec[0]]
    if params["batch_group_count"] > 1:
        _, batch = split_leading(batch, num_groups, classes.atoms.sizes)
    return ConvolutionDims(groups, batch, weight[numbers.rhs_spec[1]], features)


def split_leading(dim: Dim, size: int, sizes: Sequence[int] | Mapping[int, Any]) -> tuple[Dim, Dim]:
    """The leading atoms of a dim that make up a size, and the rest; no leading atoms where none do."""
    product = 1
    for position, atom in enumerate(dim):
        if product == size:
            return dim[:position], dim[position:]
        product *= sizes[atom]
    return (dim, ()) if product == size and size > 1 else ((), dim)
