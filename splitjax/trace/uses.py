"""Which operation uses which parameter as its weight, with flops, and what is special about it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from splitjax.trace.attention import mark_attention
from splitjax.trace.flatten import BACKWARD, FORWARD, Flat, Op
from splitjax.trace.flow import Flow
from splitjax.trace.links import Linked
from splitjax.trace.recurrence import mark_recurrent

# A value made of more parameters than this is a statistic of the whole model (a global norm), not a weight.
_MAX_SOURCES = 64


@dataclasses.dataclass(frozen=True)
class RawUse:
    """One mixing operation between a weight (made of state alone) and what depends on the batch."""

    op: int
    weight: int  # operand position
    data: int | None  # None for a lookup of constant ids
    leaves: tuple[int, ...]  # leaf indices of the parameters that make the weight, largest first
    names: tuple[str | None, ...]  # per dim of the weight operand
    flops: int
    backward: bool
    recurrent: bool = False
    attention: bool = False


def find_uses(flat: Flat, linked: Linked, flow: Flow, sources: Sequence[frozenset[int]]) -> list[RawUse]:
    """All uses in program order."""
    raw: list[RawUse] = []
    for index, op in enumerate(flat.ops):
        names_of = _WEIGHTS.get(op.primitive)
        if names_of is None or len(op.inputs) < 2:
            continue
        found = _operands(op, flow, sources, flat)
        if found is None:
            continue
        weight, data = found
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


def weight_sources(flat: Flat, flow: Flow) -> list[frozenset[int]]:
    """Per value that is made of state alone: the parameters (leaf indices) it is made of."""
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


def _operands(op: Op, flow: Flow, sources: Sequence[frozenset[int]], flat: Flat) -> tuple[int, int | None] | None:
    """The positions of weight and data, where an operation is a use: its data carry examples, or depend on the batch
    and its result does something to examples (the inputs of an expert, which belong to no example any more) or to a
    loss."""
    for weight in (0,) if op.primitive == "gather" else (0, 1):
        if not sources[op.inputs[weight]]:
            continue
        other = op.inputs[1 - weight]
        if flow.carrying[other]:
            return weight, 1 - weight
        if not flow.has_effect(op.outputs[0]) and flow.has_examples and not op.inside and op.phase != FORWARD:
            continue
        if flow.data[other] and not flow.is_weight(other):
            return weight, 1 - weight
        if (
            op.primitive == "gather"
            and flow.has_effect(op.outputs[0])
            and not sources[other]
            and len(flat.shapes[other]) > 1
        ):
            return weight, None
    return None


def _dot_names(op: Op, weight: int, flat: Flat) -> tuple[str | None, ...]:
    contract, batch = (side[weight] for side in op.params["dimension_numbers"])
    rank = len(flat.shapes[op.inputs[weight]])
    return tuple("in" if d in contract else "expert" if d in batch else "out" for d in range(rank))


def _conv_names(op: Op, weight: int, flat: Flat) -> tuple[str | None, ...]:
    if weight != 1:
        return (None,) * len(flat.shapes[op.inputs[weight]])
    out, in_, *spatial = op.params["dimension_numbers"].rhs_spec
    names = {0: (), 1: ("width",), 2: ("height", "width"), 3: ("depth", "height", "width")}.get(len(spatial), ())
    space = dict(zip(spatial, names, strict=False))
    return tuple(
        "out" if d == out else "in" if d == in_ else space.get(d) for d in range(len(flat.shapes[op.inputs[1]]))
    )


def _gather_names(op: Op, weight: int, flat: Flat) -> tuple[str | None, ...]:
    shape, sizes = flat.shapes[op.inputs[0]], op.params["slice_sizes"]
    looked_up = {d for d in op.params["dimension_numbers"].start_index_map if sizes[d] != shape[d]}
    return tuple("vocab" if d in looked_up else "features" for d in range(len(shape)))


def _ragged_names(op: Op, weight: int, flat: Flat) -> tuple[str | None, ...]:
    numbers = op.params["ragged_dot_dimension_numbers"]
    contract, batch = (side[weight] for side in numbers.dot_dimension_numbers)
    groups = {*batch, *(numbers.rhs_group_dimensions if weight == 1 else ())}
    rank = len(flat.shapes[op.inputs[weight]])
    return tuple("expert" if d in groups else "in" if d in contract else "out" for d in range(rank))


def _scaled_names(op: Op, weight: int, flat: Flat) -> tuple[str | None, ...]:
    return (None, "out", "in")


_WEIGHTS = {
    "dot_general": _dot_names,
    "conv_general_dilated": _conv_names,
    "gather": _gather_names,
    "ragged_dot_general": _ragged_names,
    "scaled_matmul_wrapper": _scaled_names,
    "scaled_matmul": _scaled_names,
}


def product_flops(op: Op, flat: Flat) -> int:
    """Multiply-adds counted as two, of all repetitions of one operation."""
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
