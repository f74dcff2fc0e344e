"""Finds which values of an analysed loss have to be computed, and in which form.

A `BodyAnalysis` comes in with the results that are wanted; `mark` walks backwards from these, and a `Marked` comes out,
which the evaluators follow: what nobody needs is not computed, and what can be computed once is not put into the loop.
A value has two forms: `WHOLE`, for the whole batch, and `PART`, for one microbatch. Live values of the loop, and known
values that hold examples, are used as parts; everything else that is known is used as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from splitjax import _compat
from splitjax.lower.microbatch.classify import PART, WHOLE, BodyAnalysis, NodeAnalysis, used_form
from splitjax.lower.microbatch.pairing import Node, Ref
from splitjax.primitives.example_relation import EXAMPLES, PARTIAL, Batch, Info

Need = tuple[int, str]  # (value, form)


@dataclasses.dataclass(frozen=True, eq=False)
class Marked:
    """Holds what a body has to compute.

    - `analysis`: the body with the relations of its values. `needed`: the values that it computes, by form.
    - `inputs`: (position, form) of its inputs that are needed, sorted.
    - `nested`: per node that is rebuilt, its bodies.
    - `pruned`: per node of which only known results are needed, the equation cut down to them (a closed jaxpr), which
      operands that reads, and which results it computes.
    - `effects`: the nodes that are run for their side effect.
    - `loop`: at the top, what the loop reads or returns.
    - `returned`: at the top, the values that the loop returns; in a nested body, the positions of the results that are
      wanted.
    """

    analysis: BodyAnalysis
    needed: frozenset[Need]
    inputs: tuple[tuple[int, str], ...]
    nested: dict[int, tuple[Marked, ...]]
    pruned: dict[int, tuple[Any, list[bool], list[bool]]]
    effects: frozenset[int]
    loop: frozenset[Need]
    returned: tuple[int, ...]


def mark(analysis: BodyAnalysis, wants: Iterable[Need], batch: Batch, top: bool = False) -> Marked:
    """Marks the body of `analysis` for the (value, form) pairs in `wants`.

    `batch`: the numbers of examples. `top`: the body is the forward jaxpr itself, whose whole live values are
    computed after the loop."""
    marker = _Marker(analysis, batch, top, set(wants), set(), {}, {}, set(), {})
    if top:
        marker.loop.update(need for need in marker.need if need[1] == PART)
    for index in reversed(range(len(analysis.body.nodes))):
        marker.node(index)
    positions = {v: i for i, v in enumerate(analysis.body.inputs)}
    if top:
        for v in analysis.body.inputs:
            marker.bring_back(v)
    inputs = sorted((positions[v], form) for v, form in marker.need if v in positions)
    return Marked(
        analysis,
        frozenset(marker.need),
        tuple(inputs),
        marker.nested,
        marker.pruned,
        frozenset(marker.effects),
        frozenset(marker.loop),
        tuple(marker.returned),
    )


@dataclasses.dataclass(frozen=True)
class _Marker:
    """Collects the needs of one body; lives for one call of `mark`, whose arguments it has.

    `need`: what is needed so far. The other fields become those of `Marked`, `returned` in the order of finding."""

    analysis: BodyAnalysis
    batch: Batch
    top: bool
    need: set[Need]
    loop: set[Need]
    nested: dict[int, tuple[Marked, ...]]
    pruned: dict[int, Any]
    effects: set[int]
    returned: dict[int, None]

    def want(self, ref: Ref, form: str, in_loop: bool = False) -> None:
        """Notes that a value is needed in a form, and whether the loop (at the top) needs it; constants are at hand."""
        if isinstance(ref, int):
            self.need.add((ref, form))
            if in_loop:
                self.loop.add((ref, form))

    def bring_back(self, v: int) -> None:
        """Lets the loop return `v` if it is a live value of it that is wanted afterwards, for the whole batch."""
        info = self.analysis.infos[v]
        if self.top and info.live and info.kind in (PARTIAL, EXAMPLES) and (v, WHOLE) in self.need:
            if v in self.analysis.body.inputs:
                return  # an operand: it is at hand
            self.returned[v] = None
            self.want(v, PART, True)

    def node(self, index: int) -> None:
        """Notes what the node at `index` needs for what is needed of it."""
        node, analysed = self.analysis.body.nodes[index], self.analysis.by_node[index]
        infos = [self.analysis.infos[v] for v in node.outputs]
        if self.top and not analysed.nested and getattr(node.whole, "effects", None):
            self.effects.add(index)
            for ref in node.inputs:
                self.want(ref, WHOLE)
        parts = []
        for v, info in zip(node.outputs, infos, strict=True):
            self.bring_back(v)
            if (v, PART) in self.need:
                if not info.live and not info.local:
                    self.want(v, WHOLE)
                else:
                    parts.append(v)
        self.whole(index, node, analysed, infos)
        if not parts:
            return
        if analysed.rebuilt:
            self.rebuilt(index, node, analysed, parts)
            return
        for ref, form in zip(node.inputs, analysed.forms, strict=True):
            self.want(ref, form, self.top)

    def whole(self, index: int, node: Node, analysed: NodeAnalysis, infos: list[Info]) -> None:
        """Notes what a node needs for its results that are needed for the whole batch; `infos` are their relations."""
        later = [
            v
            for v, info in zip(node.outputs, infos, strict=True)
            if (v, WHOLE) in self.need and info.live and info.kind not in (PARTIAL, EXAMPLES)
        ]
        known = [(v, WHOLE) in self.need and not info.live for v, info in zip(node.outputs, infos, strict=True)]
        some_live = any(info.live for info in analysed.operands)
        if later or (any(known) and not some_live):
            for ref in node.inputs:
                self.want(ref, WHOLE)
        if any(known) and some_live:
            closed, used = _compat.prune(node.whole, known)
            self.pruned[index] = (closed, used, known)
            for ref, is_used in zip(node.inputs, used, strict=True):
                if is_used:
                    self.want(ref, WHOLE)

    # Nodes whose bodies are evaluated anew.

    def rebuilt(self, index: int, node: Node, analysed: NodeAnalysis, parts: list[int]) -> None:
        """Marks the bodies of a node whose results `parts` are needed for a microbatch, and notes what these need."""
        wanted = [position for position, v in enumerate(node.outputs) if v in parts]
        if node.name == "scan":
            marked = self.scan(node, analysed, wanted)
            operands, forms = node.inputs, analysed.forms
        elif node.name == "cond":
            marked = tuple(
                self.body(branch, [(branch.body.outputs[k], PART) for k in wanted]) for branch in analysed.nested
            )
            self.want(node.inputs[0], analysed.forms[0], self.top)
            operands, forms = node.inputs[1:], analysed.forms[1:]
        else:
            body = analysed.nested[0]
            marked = (self.body(body, [(body.body.outputs[k], PART) for k in wanted]),)
            operands, forms = node.inputs, analysed.forms
        marked = tuple(dataclasses.replace(inner, returned=tuple(wanted)) for inner in marked)
        self.nested[index] = marked
        for inner in marked:
            for position, form in inner.inputs:
                self.want(operands[position], WHOLE if form == WHOLE else forms[position], self.top)

    def body(self, analysis: BodyAnalysis, wants: list[tuple[Ref, str]]) -> Marked:
        """Marks a nested body for results in the form in which its surroundings use them."""
        needs = [
            (ref, WHOLE if form == WHOLE else used_form(analysis.info(ref, self.batch)))
            for ref, form in wants
            if isinstance(ref, int)
        ]
        return mark(analysis, needs, self.batch)

    def scan(self, node: Node, analysed: NodeAnalysis, wanted: list[int]) -> tuple[Marked, ...]:
        """Marks the body of a loop: a carried value that the body needs in some form has to be carried in that form."""
        (analysis,) = analysed.nested
        num_consts, num_carry = _compat.scan_counts(node.whole.params)
        carried: set[tuple[int, str]] = {(k, used_form(analysed.targets[k])) for k in wanted if k < num_carry}
        while True:
            wants = [(analysis.body.outputs[k], PART) for k in wanted if k >= num_carry]
            wants += [(analysis.body.outputs[k], form) for k, form in carried]
            marked = self.body(analysis, wants)
            more = {(p - num_consts, form) for p, form in marked.inputs if num_consts <= p < num_consts + num_carry}
            if more <= carried:
                return (marked,)
            carried |= more
