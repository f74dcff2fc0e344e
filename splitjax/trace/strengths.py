"""Decides how strong each link is (`trace.graph` says what the strengths mean).

A flat step and its links go in, a strength per link comes out. The measurements behind the cuts: one union-find ties
half of a Transformer's parameter dims together through its residual stream, and both dims of square recurrent
kernels. Dropping backward passes, the skip operand of a join, what a loop carries, and the input side of a weight
that its own output comes back to leaves the groups that people shard by hand.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.primitives.operation import Trait
from splitjax.trace.classes import Strength
from splitjax.trace.flatten import BACKWARD, FlatStep, Op
from splitjax.trace.flow import ValueFacts
from splitjax.trace.links import Linked, RawLink


def strengths(flat: FlatStep, linked: Linked, flow: ValueFacts, raw: Sequence[RawLink]) -> list[Strength]:
    """Decides the strength of every link in `raw`.

    **Arguments:**

    - `flat`, `linked`, `flow`: the flat step, its links, and facts about its values.
    - `raw`: links of operations, and ties outside of them.

    Links are hard in the update (what depends on gradients or optimizer state) and for gradients of the boundary;
    soft for backward passes, residual operands, carried values and updates that mix; local otherwise.
    """
    skips, returns = cut_operands(flat, linked, flow)
    # What only reads optimizer state to make examples of it (spectral norm) is no update: its results carry examples.
    of_update = [own or of_gradient for own, of_gradient in zip(flow.update, flow.updated, strict=True)]
    of_op = [_of_operation(op, is_mixing, of_update) for op, is_mixing in zip(flat.ops, linked.mixing, strict=True)]
    of_op.append(Strength.HARD)  # of ties: their operation is number -1
    of_link = [of_op[link.op] for link in raw]
    if skips or returns:
        cut = skips.keys() | returns
        for number, link in enumerate(raw):
            if link.op in cut and of_link[number] is Strength.LOCAL:
                if link.operand in skips.get(link.op, ()) or (link.op in returns and link.contracted):
                    of_link[number] = Strength.SOFT
    return of_link


def _of_operation(op: Op, is_mixing: bool, of_update: Sequence[bool]) -> Strength:
    """Decides the strength of an operation's links, cuts aside. `of_update`: per value whether it is of the update."""
    if op.phase == BACKWARD or op.primitive in ("_gradient", "_carry_back", "add_any"):
        if op.primitive == "_gradient":
            return Strength.HARD
        if op.primitive == "_carry_back":
            return Strength.HARD if of_update[op.inputs[0]] else Strength.SOFT
        # Cotangents mirror the forward pass, and meet activations on the far side of a cut.
        return Strength.SOFT
    for v in op.outputs:
        if of_update[v]:
            # Several arrays side by side in one are a copy, not the same storage.
            return Strength.SOFT if is_mixing or Trait.ARRANGES in op.facts.traits else Strength.HARD
    return Strength.LOCAL


def cut_operands(flat: FlatStep, linked: Linked, flow: ValueFacts) -> tuple[dict[int, frozenset[int]], frozenset[int]]:
    """Finds two kinds of cuts, from one walk over ancestors in `flat`, its links `linked` and facts `flow`.

    **Returns**

    - per elementwise join, the operands that are upstream of another operand through a mixing operation (skip
      connections);
    - the products in which a weight meets what descends from it through a mixing operation (a recurrent weight in
      its second step, a table that both embeds and decodes).
    """
    bit = _shared_values(flat)
    above = [0] * len(flat.shapes)  # ancestors, any way, and the value itself
    mixed = [0] * len(flat.shapes)  # ancestors through a mixing operation
    for v, own in bit.items():
        above[v] = own
    skips: dict[int, frozenset[int]] = {}
    returns: set[int] = set()
    for index, op in enumerate(flat.ops):
        if op.primitive == "_carry_back":
            continue
        mixing = linked.mixing[index]
        if len(op.inputs) > 1 and linked.joins[index]:
            upstream = [
                k
                for k, v in enumerate(op.inputs)
                if v in bit
                and any(
                    mixed[w] & bit[v] and _is_branch(op.primitive, flat.shapes[w], flat.shapes[v]) for w in op.inputs
                )
            ]
            if upstream and len(upstream) < len(op.inputs):
                skips[index] = frozenset(upstream)
        elif len(op.inputs) > 1 and mixing:
            pairs = (op.inputs[:2], op.inputs[1::-1])
            if any(above[weight] & mixed[data] and flow.weights[weight] for weight, data in pairs):
                returns.add(index)
        every, through = 0, 0
        for v in op.inputs:
            every |= above[v]
            through |= mixed[v]
        for v in op.outputs:
            above[v] = every | bit.get(v, 0)
            mixed[v] = every if mixing else through
    return skips, frozenset(returns)


def _is_branch(primitive: str, shape: tuple[int, ...], skip: tuple[int, ...]) -> bool:
    """Tells whether a value can be the branch beside a skip connection. A scale with fewer values than what it scales
    (squeeze and excitation, spectral norm) is not."""
    return bool(shape) and (shape == skip or primitive not in ("mul", "div"))


def _shared_values(flat: FlatStep) -> dict[int, int]:
    """Gives a bit to every value that is used more than once: only such a value can stand on both ways of a join."""
    uses = [0] * len(flat.shapes)
    for op in flat.ops:
        for v in set(op.inputs):
            uses[v] += 1
    bit: dict[int, int] = {}
    for v, count in enumerate(uses):
        if count > 1 and flat.shapes[v]:
            bit[v] = 1 << len(bit)
    return bit
