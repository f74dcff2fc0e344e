"""Finds attention: the projections around a softmax between two products of activations.

A flat step and the positions of weights in it go in, the operations that belong to an attention come out; layers
that hold them get the kind "attention", which rule sets shard by heads (Vaswani et al. 2017, section 3.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitjax.primitives.dims_fused import FUSED_ATTENTION
from splitjax.trace.flatten import BACKWARD, FlatStep
from splitjax.trace.flow import ValueFacts
from splitjax.trace.links import Linked

Tag = tuple[str, int]  # what made a value, and the index of the operation that did
Tags = frozenset[Tag]
_NONE: Tags = frozenset()


def mark_attention(
    flat: FlatStep, linked: Linked, flow: ValueFacts, uses: Mapping[int, tuple[int, int]]
) -> frozenset[int]:
    """Finds the operations that feed the scores or the values of an attention, or read its result first.

    **Arguments:**

    - `flat`: the flat step.
    - `linked`: its links; says which operations mix dims and which join operands.
    - `flow`: says which values carry examples.
    - `uses`: index of an operation with a weight -> operand positions of weight and data.

    **Returns** indices of operations among `uses`.

    Values are tagged with what made them since the last mixing: `("use", op)`, `("score", op)` for a product of
    activations, `("softmax", op)` for its exponential, `("result", op)` for a product with such probabilities.
    """
    tags: list[Tags] = [_NONE] * len(flat.shapes)
    feeds: dict[int, Tags] = {}
    attention: set[int] = set()
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
            out = frozenset({("result" if probabilities else "score", index)})
        elif op.primitive in FUSED_ATTENTION:
            attention.update(tag[1] for v in op.inputs[:3] for tag in tags[v] if tag[0] == "use")
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
    return frozenset(attention)


def _joined(inputs: Sequence[int], incoming: Tags, tags: Sequence[Tags], flow: ValueFacts) -> Tags:
    """Gives the tags of a join: what is added to the residual stream is no attention result any more, so that the tag
    of a result stays only if all activations have it."""
    activations = [v for v in inputs if flow.carrying[v]]
    if len(activations) < 2:
        return incoming
    return frozenset(tag for tag in incoming if tag[0] != "result" or all(tag in tags[v] for v in activations))
