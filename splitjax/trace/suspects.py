"""Finds the operations of a step that XLA's partitioner may compute wrongly (`splitjax.partitioner`).

What lowering needs to evaluate them otherwise: the atoms of the dims that must not be split while XLA partitions them
and, for a convolution, the atoms behind each of its four kinds of dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitjax.partitioner import COVERED, Operation, defect_of
from splitjax.primitives.table import qualified_name
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep, Op
from splitjax.trace.suspect_dims import ConvolutionDims, Dim, Suspect, TouchedDims, TransformDims


def find_suspects(flat: FlatStep, classes: Classes) -> tuple[Suspect, ...]:
    """Finds the operations of `flat` that a row of the table of defects covers, in program order.

    `classes` are the dim classes, for the atoms of the dims that must not be split.
    """
    suspects: list[Suspect] = []
    for op in flat.ops:
        covered = defect_of(operation_of(op, flat)) if op.primitive in COVERED else None
        if covered is None:
            continue
        defect, touched = covered
        touched_dims = [
            TouchedDims(position, dims, classes.dims(value, len(flat.shapes[value])))
            for position, dims in touched.items()
            for value in (op.inputs[position] if position >= 0 else op.outputs[-1 - position],)
        ]
        suspects.append(
            Suspect(
                defect.name,
                qualified_name(op.primitive, op.params),
                op.site,
                op.source,
                tuple(touched_dims),
                op.editable,
                op.rule_at,
                op.phase == BACKWARD,
                _convolution_dims(op, flat, classes) if op.primitive == "conv_general_dilated" else None,
                _transform_dims(op, flat) if op.primitive == "fft" else None,
            )
        )
    return tuple(suspects)


def operation_of(op: Op, flat: FlatStep) -> Operation:
    """Describes operation `op` of `flat` in the terms of the table of defects."""
    literals = {position: flat.literals[value] for position, value in enumerate(op.inputs) if value in flat.literals}
    return Operation(
        op.primitive,
        op.params,
        tuple(flat.shapes[v] for v in op.inputs),
        tuple(flat.shapes[v] for v in op.outputs),
        literals,
        tuple(flat.dtypes[v] for v in op.inputs),
    )


def _convolution_dims(op: Op, flat: FlatStep, classes: Classes) -> ConvolutionDims:
    """Finds the atoms of a convolution's kinds of dims. The features of the result are (group, feature), those of the
    data (group, contracted) with feature groups; with batch groups its examples are (group, example)."""
    data, weight, result = (classes.dims(value, len(flat.shapes[value])) for value in (*op.inputs[:2], op.outputs[0]))
    numbers, params = op.params["dimension_numbers"], op.params
    num_groups = params["feature_group_count"] * params["batch_group_count"]
    groups, features = split_leading(weight[numbers.rhs_spec[0]], num_groups, classes.atoms.sizes)
    if not groups:  # the weight's atoms need not be cut at its groups; the result's or the data's may be
        groups = next(
            (
                leading
                for dim in (result[numbers.out_spec[1]], data[numbers.lhs_spec[1]], data[numbers.lhs_spec[0]])
                if (leading := split_leading(dim, num_groups, classes.atoms.sizes)[0])
            ),
            (),
        )
    batch = data[numbers.lhs_spec[0]]
    if params["batch_group_count"] > 1:
        _, batch = split_leading(batch, num_groups, classes.atoms.sizes)
    return ConvolutionDims(groups, batch, weight[numbers.rhs_spec[1]], features)


def _transform_dims(op: Op, flat: FlatStep) -> TransformDims:
    """Finds the sizes of a Fourier transform, and whether real numbers stand behind its complex ones."""
    (operand,), (result,) = op.inputs, op.outputs
    operand_dtype, result_dtype = flat.dtypes[operand], flat.dtypes[result]
    maker = next((earlier for earlier in flat.ops if operand in earlier.outputs), None)
    if maker is not None and maker.primitive == "convert_element_type":
        operand_dtype = _narrower(operand_dtype, flat.dtypes[maker.inputs[0]])
    readers = [later for later in flat.ops if result in later.inputs]
    if readers and all(reader.primitive == "real" for reader in readers) and result not in flat.outputs:
        result_dtype = flat.dtypes[readers[0].outputs[0]]
    return TransformDims(
        len(op.params["fft_lengths"]),
        flat.shapes[operand],
        flat.shapes[result],
        operand_dtype,
        result_dtype,
        op.trips,
    )


def _narrower(of_transform: str, before: str) -> str:
    """Returns the dtype of the real numbers behind complex ones that are converted from the dtype `before`."""
    if not of_transform.startswith("complex") or not before.startswith("float"):
        return of_transform
    return {"complex64": "float32", "complex128": "float64"}[of_transform]


def split_leading(dim: Dim, size: int, sizes: Sequence[int] | Mapping[int, int]) -> tuple[Dim, Dim]:
    """Splits a dim into the leading atoms that make up a size, and the rest.

    `dim` is the atoms, `size` the product wanted, `sizes` the size per atom. No leading atoms where none make it up.
    """
    product = 1
    for position, atom in enumerate(dim):
        if product == size:
            return dim[:position], dim[position:]
        product *= sizes[atom]
    return (dim, ()) if product == size and size > 1 else ((), dim)
