"""Finds which operation uses which parameter as its weight, with flops, and what is special about it.

A flat step and facts about its values go in, one `RawUse` per dot, convolution or lookup of a weight comes out.
Layers, names of dims and costs all start from these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from splitjax.trace.attention import mark_attention
from splitjax.trace.flatten import BACKWARD, FORWARD, FlatStep, Op
from splitjax.trace.flow import ValueFacts
from splitjax.trace.links import Linked
from splitjax.trace.recurrence import mark_recurrent

# A value made of more parameters than this is a statistic of the whole model (a global norm), not a weight.
_MAX_SOURCES = 64


@dataclasses.dataclass(frozen=True)
class RawUse:
    """Describes an operation that mixes a weight (made of state alone) with what depends on the batch.

    - `op`: the operation's index.
    - `weight`, `data`: operand positions; `data` is None for a lookup of constant ids.
    - `leaves`: leaf indices of the parameters that make the weight, largest first.
    - `names`: a name (or None) per dim of the weight operand.
    - `flops`: of all repetitions.
    - `backward`: whether it belongs to a backward pass that JAX already traced.
    - `recurrent`, `attention`: whether the weight is recurrent, or feeds or reads an attention.
    """

    op: int
    weight: int
    data: int | None
    leaves: tuple[int, ...]
    names: tuple[str | None, ...]
    flops: int
    backward: bool
    recurrent: bool = False
    attention: bool = False


def find_uses(flat: FlatStep, linked: Linked, flow: ValueFacts, sources: Sequence[frozenset[int]]) -> list[RawUse]:
    """Finds all uses of weights in program order.

    **Arguments:**

    - `flat`, `linked`, `flow`: the flat step, its links, and facts about its values.
    - `sources`: per value the parameters (leaf indices) that it is made of.
    """
    raw: list[RawUse] = []
    for index, op in enumerate(flat.ops):
        names_of = _WEIGHTS.get(op.primitive)
        if names_of is None or len(op.inputs) < 2:
            continue
        positions = _operands(op, flow, sources, flat)
        if positions is None:
            continue
        weight, data = positions
        size = {i: math.prod(flat.shapes[flat.inputs[i]]) for i in sources[op.inputs[weight]]}
        leaves = tuple(sorted(size, key=lambda i: (-size[i], i)))
        raw.append(
            RawUse(
                index, weight, data, leaves, names_of(op, weight, flat), product_flops(op, flat), op.phase == BACKWARD
            )
        )
    at = {use.op: (use.weight, use.data) for use in raw if use.data is not None}
    recurrent = mark_recurrent(flat, linked, flow, at)
    attention = mark_attention(flat, linked, flow, at)
    return [dataclasses.replace(use, recurrent=use.op in recurrent, attention=use.op in attention) for use in raw]


def weight_sources(flat: FlatStep, flow: ValueFacts) -> list[frozenset[int]]:
    """Returns, per value of `flat` that is made of state alone (by `flow`), the parameters (leaf indices) it is made
    of.

    A value made of very many parameters, such as a global norm, has none.
    """
    nothing: frozenset[int] = frozenset()
    sources = [nothing] * len(flat.shapes)
    for index, value in enumerate(flat.inputs):
        if flow.is_param[index]:
            sources[value] = frozenset((index,))
    for op in flat.ops:
        if op.primitive in ("_carry_back", "_gradient"):
            continue
        made = nothing
        for v in op.inputs:
            own = sources[v]
            if own and own is not made:
                made = made | own if made else own
        if made and len(made) <= _MAX_SOURCES:
            for v in op.outputs:
                if flow.is_weight(v):
                    sources[v] = made
    return sources


def _operands(
    op: Op, flow: ValueFacts, sources: Sequence[frozenset[int]], flat: FlatStep
) -> tuple[int, int | None] | None:
    """Finds the positions of weight and data, where an operation is a use: its data carry examples, or depend on the
    batch and its result does something to examples (the inputs of an expert, which belong to no example any more) or
    to a loss."""
    for weight in (0,) if op.primitive == "gather" else (0, 1):
        if not sources[op.inputs[weight]]:
            continue
        partner = op.inputs[1 - weight]
        if flow.carrying[partner]:
            return weight, 1 - weight
        if not flow.has_effect(op.outputs[0]) and flow.has_examples and not op.inside and op.phase != FORWARD:
            continue
        if flow.data[partner] and not flow.is_weight(partner):
            return weight, 1 - weight
        if (
            op.primitive == "gather"
            and flow.has_effect(op.outputs[0])
            and not sources[partner]
            and len(flat.shapes[partner]) > 1
        ):
            return weight, None
    return None


def _dot_names(op: Op, weight: int, flat: FlatStep) -> tuple[str | None, ...]:
    contract, batch = (side[weight] for side in op.params["dimension_numbers"])
    rank = len(flat.shapes[op.inputs[weight]])
    return tuple("in" if d in contract else "expert" if d in batch else "out" for d in range(rank))


def _conv_names(op: Op, weight: int, flat: FlatStep) -> tuple[str | None, ...]:
    if weight != 1:
        return (None,) * len(flat.shapes[op.inputs[weight]])
    out, in_, *spatial = op.params["dimension_numbers"].rhs_spec
    names = {0: (), 1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}.get(len(spatial), ())
    space = dict(zip(spatial, names, strict=False))
    return tuple(
        "out" if d == out else "in" if d == in_ else space.get(d) for d in range(len(flat.shapes[op.inputs[1]]))
    )


def _gather_names(op: Op, weight: int, flat: FlatStep) -> tuple[str | None, ...]:
    shape, sizes = flat.shapes[op.inputs[0]], op.params["slice_sizes"]
    looked_up = {d for d in op.params["dimension_numbers"].start_index_map if sizes[d] != shape[d]}
    return tuple("vocab" if d in looked_up else "features" for d in range(len(shape)))


def _ragged_names(op: Op, weight: int, flat: FlatStep) -> tuple[str | None, ...]:
    numbers = op.params["ragged_dot_dimension_numbers"]
    contract, batch = (side[weight] for side in numbers.dot_dimension_numbers)
    groups = {*batch, *(numbers.rhs_group_dimensions if weight == 1 else ())}
    rank = len(flat.shapes[op.inputs[weight]])
    return tuple("expert" if d in groups else "in" if d in contract else "out" for d in range(rank))


def _scaled_names(op: Op, weight: int, flat: FlatStep) -> tuple[str | None, ...]:
    return (None, "out", "in")


_WEIGHTS: dict[str, Callable[[Op, int, FlatStep], tuple[str | None, ...]]] = {
    "dot_general": _dot_names,
    "conv_general_dilated": _conv_names,
    "gather": _gather_names,
    "ragged_dot_general": _ragged_names,
    "scaled_matmul_wrapper": _scaled_names,
    "scaled_matmul": _scaled_names,
}


def product_flops(op: Op, flat: FlatStep) -> int:
    """Counts the flops of all repetitions of operation `op` of `flat`: a multiply-add is two. Zero for other than
    products."""
    out, left = math.prod(flat.shapes[op.outputs[0]]), flat.shapes[op.inputs[0]]
    if op.primitive in ("dot_general", "ragged_dot_general"):
        numbers = op.params.get("dimension_numbers")
        if numbers is None:
            numbers = op.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        return 2 * out * math.prod(left[d] for d in numbers[0][0]) * op.trips
    if op.primitive == "conv_general_dilated":
        rhs_out, *rest = op.params["dimension_numbers"].rhs_spec
        return 2 * out * math.prod(flat.shapes[op.inputs[1]][d] for d in rest) * op.trips
    if op.primitive.startswith("scaled_matmul"):
        return 2 * out * left[-1] * op.trips
    return 0
