"""Finds which operation uses which parameter as its weight, with flops, and what is special about it.

A flat step and facts about its values go in, one `RawUse` per dot, convolution or lookup of a weight comes out.
Layers, names of dims and costs all start from these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from splitjax.primitives.dims import DimMap
from splitjax.primitives.operation import Linearity
from splitjax.trace.attention import mark_attention
from splitjax.trace.classes import DimRef
from splitjax.trace.flatten import BACKWARD, FORWARD, FlatStep, Op
from splitjax.trace.flow import ValueFacts
from splitjax.trace.links import Linked
from splitjax.trace.recurrence import find_state_reads, mark_recurrent

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
    - `by_labels`, `adds_up`, `reads_state`: as in `graph.Use`.
    - `recurrent`, `attention`: whether the weight is recurrent, or feeds or reads an attention.
    """

    op: int
    weight: int
    data: int | None
    leaves: tuple[int, ...]
    names: tuple[str | None, ...]
    flops: int
    backward: bool
    by_labels: bool
    adds_up: bool
    recurrent: bool = False
    reads_state: bool = False
    attention: bool = False


def find_uses(
    flat: FlatStep, linked: Linked, flow: ValueFacts, sources: Sequence[frozenset[int]]
) -> tuple[list[RawUse], tuple[DimRef, ...]]:
    """Finds all uses of weights in program order, and the dims of values that lie inside of heads (`Attention`).

    **Arguments:**

    - `flat`, `linked`, `flow`: the flat step, its links, and facts about its values.
    - `sources`: per value the parameters (leaf indices) that it is made of.
    """
    raw: list[RawUse] = []
    for index, op in enumerate(flat.ops):
        facts = op.facts.weights
        if facts is None or len(op.inputs) < 2:
            continue
        positions = _operands(op, flow, sources, flat)
        if positions is None:
            continue
        weight, data = positions
        size = {i: math.prod(flat.shapes[flat.inputs[i]]) for i in sources[op.inputs[weight]]}
        leaves = tuple(sorted(size, key=lambda i: (-size[i], i)))
        inputs, outputs = [flat.shapes[v] for v in op.inputs], [flat.shapes[v] for v in op.outputs]
        names = facts.names(op.params, inputs, outputs, weight)
        by_labels, flops = _splits_by_labels(op, linked.maps[index]), product_flops(op, flat)
        raw.append(RawUse(index, weight, data, leaves, names, flops, op.phase == BACKWARD, by_labels, is_bilinear(op)))
    at = {use.op: (use.weight, use.data) for use in raw if use.data is not None}
    recurrent = mark_recurrent(flat, linked, flow, at)
    reads_state = find_state_reads(flat, linked, {index: at[index] for index in recurrent})
    attention = mark_attention(flat, linked, flow, at)
    marked = [
        dataclasses.replace(
            use,
            recurrent=use.op in recurrent,
            reads_state=use.op in reads_state,
            attention=use.op in attention.uses,
        )
        for use in raw
    ]
    return marked, attention.head_dims


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
                if flow.weights[v]:
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
        if not flow.effective[op.outputs[0]] and flow.has_examples and not op.inside and op.phase != FORWARD:
            continue
        if flow.data[partner] and not flow.weights[partner]:
            return weight, 1 - weight
        if (
            op.primitive == "gather"
            and flow.effective[op.outputs[0]]
            and not sources[partner]
            and len(flat.shapes[partner]) > 1
        ):
            return weight, None
    return None


def _splits_by_labels(op: Op, dim_map: DimMap | None) -> bool:
    """Tells whether each device can evaluate its parts of an operation by itself, as the labels of its dims say."""
    if op.facts.weights is None or not op.facts.weights.by_labels or dim_map is None:
        return False
    tensors = (*dim_map.inputs, *dim_map.outputs)
    return len(op.inputs) == 2 and len(op.outputs) == 1 and all(len(dim) == 1 for dims in tensors for dim in dims)


def is_bilinear(op: Op) -> bool:
    """Tells whether an operation is a product that is linear in either operand: parts of a contracted dim add up, and
    its derivatives are such products."""
    linear = op.facts.linear
    return op.facts.weights is not None and linear is not None and linear.how is Linearity.EACH


def product_flops(op: Op, flat: FlatStep) -> int:
    """Counts the flops of all repetitions of operation `op` of `flat`: a multiply-add is two. Zero for other than
    products."""
    if op.facts.weights is None:
        return 0
    inputs, outputs = [flat.shapes[v] for v in op.inputs], [flat.shapes[v] for v in op.outputs]
    return op.facts.weights.flops(op.params, inputs, outputs) * op.trips
