"""Says what operations do with a weight: how the dims of a parameter that they read are called, and what they cost.

An operation with such a fact is what makes layers: products and convolutions of activations with a parameter, and
lookups of its rows. For what users teach the fact follows from the labels of its dims.
"""

from __future__ import annotations

import math
from typing import Any

from splitjax.primitives.dims import DimRule, Label, Params, Shapes
from splitjax.primitives.operation import DimNames, Weights
from splitjax.primitives.table import OPERATIONS


def weights_of(rule: DimRule, by_labels: bool) -> Weights:
    """Returns what a product, whose dims run as `rule` says, does with a weight. `by_labels`: as in `Weights`.

    A dim that the result lacks is what goes in, one that only weight and result have is what comes out, and one that
    all have numbers experts. A product multiplies and adds once for every combination of its labels."""

    def names(params: Params, inputs: Shapes, outputs: Shapes, weight: int) -> DimNames:
        dim_map = rule(inputs, outputs, params)
        results = _labels(dim_map.outputs)
        others = _labels([labels for k, labels in enumerate(dim_map.inputs) if k != weight])

        def name(label: Label) -> str | None:
            if label not in results:
                return "in" if label in others else None
            return "expert" if label in others else "out"

        return tuple(name(dim[0]) if len(dim) == 1 else None for dim in dim_map.inputs[weight])

    def flops(params: Params, inputs: Shapes, outputs: Shapes) -> int:
        dim_map = rule(inputs, outputs, params)
        sizes = dict(dim_map.sizes)
        for shape, labels in zip((*inputs, *outputs), (*dim_map.inputs, *dim_map.outputs), strict=True):
            sizes.update({dim[0]: size for dim, size in zip(labels, shape, strict=True) if len(dim) == 1})
        return 2 * math.prod(sizes.values())

    return Weights(names, flops, by_labels, follows=rule)


def _labels(tensors: Any) -> set[Label]:
    return {label for labels in tensors for dim in labels for label in dim}


def _dot_names(params: Params, inputs: Shapes, outputs: Shapes, weight: int) -> DimNames:
    contract, batch = (side[weight] for side in params["dimension_numbers"])
    rank = len(inputs[weight])
    return tuple("in" if d in contract else "expert" if d in batch else "out" for d in range(rank))


def _dot_flops(params: Params, inputs: Shapes, outputs: Shapes) -> int:
    numbers = params.get("dimension_numbers")
    if numbers is None:
        numbers = params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    return 2 * math.prod(outputs[0]) * math.prod(inputs[0][d] for d in numbers[0][0])


def _conv_names(params: Params, inputs: Shapes, outputs: Shapes, weight: int) -> DimNames:
    if weight != 1:
        return (None,) * len(inputs[weight])
    out, in_, *spatial = params["dimension_numbers"].rhs_spec
    names = {0: (), 1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}.get(len(spatial), ())
    space = dict(zip(spatial, names, strict=False))
    return tuple("out" if d == out else "in" if d == in_ else space.get(d) for d in range(len(inputs[1])))


def _conv_flops(params: Params, inputs: Shapes, outputs: Shapes) -> int:
    _, *rest = params["dimension_numbers"].rhs_spec
    return 2 * math.prod(outputs[0]) * math.prod(inputs[1][d] for d in rest)


def _gather_names(params: Params, inputs: Shapes, outputs: Shapes, weight: int) -> DimNames:
    shape, sizes = inputs[0], params["slice_sizes"]
    looked_up = {d for d in params["dimension_numbers"].start_index_map if sizes[d] != shape[d]}
    return tuple("vocab" if d in looked_up else "features" for d in range(len(shape)))


def _ragged_names(params: Params, inputs: Shapes, outputs: Shapes, weight: int) -> DimNames:
    numbers = params["ragged_dot_dimension_numbers"]
    contract, batch = (side[weight] for side in numbers.dot_dimension_numbers)
    groups = {*batch, *(numbers.rhs_group_dimensions if weight == 1 else ())}
    return tuple("expert" if d in groups else "in" if d in contract else "out" for d in range(len(inputs[weight])))


OPERATIONS.state("dot_general", weights=Weights(_dot_names, _dot_flops, by_labels=True))
OPERATIONS.state("ragged_dot_general", weights=Weights(_ragged_names, _dot_flops))
OPERATIONS.state("conv_general_dilated", weights=Weights(_conv_names, _conv_flops))
OPERATIONS.state("gather", weights=Weights(_gather_names, lambda params, inputs, outputs: 0))
OPERATIONS.state(
    "scaled_matmul scaled_matmul_wrapper",
    weights=Weights(
        lambda params, inputs, outputs, weight: (None, "out", "in"),
        lambda params, inputs, outputs: 2 * math.prod(outputs[0]) * inputs[0][-1],
    ),
)
