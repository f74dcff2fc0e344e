"""Finds attention: the projections around a softmax between two products of activations.

A flat step and the positions of weights in it go in, the operations that belong to an attention come out; layers
that hold them get the kind "attention", which rule sets shard by heads (Vaswani et al. 2017, section 3.2); the dims
inside of a head are told apart, since nobody wants a head cut through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from splitjax.primitives.dims_fused import FUSED_ATTENTION
from splitjax.trace.classes import DimRef
from splitjax.trace.flatten import BACKWARD, FlatStep, Op
from splitjax.trace.flow import ValueFacts
from splitjax.trace.links import Linked

Tag = tuple[str, int]  # what made a value, and the index of the operation that did
Tags = frozenset[Tag]
_NONE: Tags = frozenset()


class Attention(NamedTuple):
    """Holds what belongs to the attentions of a step.

    - `uses`: indices of the operations with a weight that feed or read them.
    - `head_dims`: the dims (value, position) that lie inside a head: those over which scores are summed, and those of
      the values that are summed up.
    """

    uses: frozenset[int]
    head_dims: tuple[DimRef, ...]


def mark_attention(flat: FlatStep, linked: Linked, flow: ValueFacts, uses: Mapping[int, tuple[int, int]]) -> Attention:
    """Finds the operations that feed the scores or the values of an attention, or read its result first.

    **Arguments:**

    - `flat`: the flat step.
    - `linked`: its links; says which operations mix dims and which join operands.
    - `flow`: says which values carry examples.
    - `uses`: index of an operation with a weight -> operand positions of weight and data.

    **Returns** the operations among `uses`, and the dims inside of heads.

    Values are tagged with what made them since the last mixing: `("use", op)`, `("score", op)` for a product of
    activations, `("softmax", op)` for its exponential, `("result", op)` for a product with such probabilities.
    """
    tags: list[Tags] = [_NONE] * len(flat.shapes)
    feeds: dict[int, Tags] = {}
    attention: set[int] = set()
    scores: set[int] = set()
    inside: list[DimRef] = []
    for index, op in enumerate(flat.ops):
        if op.phase == BACKWARD or not op.outputs:
            continue
        incoming = _NONE
        for v in op.inputs:
            incoming = incoming | tags[v] if incoming else tags[v]
        if index in uses:
            if any(tag[0] == "result" for tag in tags[op.inputs[uses[index][1]]]):
                attention.add(index)
            out = frozenset({("use", index)})
        elif op.primitive == "dot_general" and all(flow.carrying[v] for v in op.inputs[:2]):
            probabilities = [tag[1] for tag in incoming if tag[0] == "softmax"]
            mine = frozenset(tag for tag in incoming if tag[0] == "use")
            feeds[index] = mine
            for j in probabilities:
                attention.update(tag[1] for tag in feeds[j] | mine)
            # (examples, heads, positions, positions): with fewer dims there is a single head, which rules may cut.
            several = [j for j in probabilities if len(flat.shapes[flat.ops[j].outputs[0]]) > 3]
            scores.update(several)
            inside += _value_dims(op, flat, tags) if several else []
            out = frozenset({("result" if probabilities else "score", index)})
        elif op.primitive in FUSED_ATTENTION:
            attention.update(tag[1] for v in op.inputs[:3] for tag in tags[v] if tag[0] == "use")
            inside += [(v, len(flat.shapes[v]) - 1) for v in op.inputs[:3]]
            out = frozenset({("result", index)})
        elif linked.mixing[index] or not incoming:
            out = _NONE
        elif op.primitive in ("exp", "exp2"):
            out = frozenset(("softmax", tag[1]) if tag[0] == "score" else tag for tag in incoming)
        elif linked.joins[index]:
            out = _joined(op.inputs, incoming, tags, flow)
        else:
            out = incoming
        for v in op.outputs:
            tags[v] = out
    for index in scores:
        op = flat.ops[index]
        contracted = op.params["dimension_numbers"][0]
        inside += [(op.inputs[k], dim) for k in (0, 1) for dim in contracted[k]]
    return Attention(frozenset(attention), tuple(inside))


def _value_dims(op: Op, flat: FlatStep, tags: Sequence[Tags]) -> list[DimRef]:
    """Returns the dims that `op`, the product of an attention's probabilities with its values, keeps of the values."""
    contracted, batch = op.params["dimension_numbers"]
    return [
        (v, dim)
        for k, v in enumerate(op.inputs)
        if not any(tag[0] == "softmax" for tag in tags[v])
        for dim in range(len(flat.shapes[v]))
        if dim not in contracted[k] and dim not in batch[k]
    ]


def _joined(inputs: Sequence[int], incoming: Tags, tags: Sequence[Tags], flow: ValueFacts) -> Tags:
    """Gives the tags of a join: what is added to the residual stream is no attention result any more, so that the tag
    of a result stays only if all activations have it."""
    activations = [v for v in inputs if flow.carrying[v]]
    if len(activations) < 2:
        return incoming
    return frozenset(tag for tag in incoming if tag[0] != "result" or all(tag in tags[v] for v in activations))
