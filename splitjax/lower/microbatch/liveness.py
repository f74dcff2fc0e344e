"""Which values of an analysed loss have to be computed, and in which form: `mark` walks backwards from what is wanted.

A value has two forms: `WHOLE`, for the whole batch, and `PART`, for one microbatch. Live values of the loop, and known
values that hold examples, are used as parts; everything else that is known is used as a whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from splitjax import _compat
from splitjax.lower.microbatch.classify import DERIVATIVE_RULES, Analysis, Found
from splitjax.lower.microbatch.example_relation import EXAMPLES, PARTIAL, Batch, Info
from splitjax.lower.microbatch.pairing import Node, Ref

WHOLE, PART = "whole", "part"
Need = tuple[int, str]


def used_form(info: Info) -> str:
    """The form in which a microbatch uses a value."""
    return PART if info.live or info.kind == EXAMPLES else WHOLE


@dataclasses.dataclass(frozen=True, eq=False)
class Marked:
    """What a body has to compute. `inputs`: (position, form) of its inputs that are needed, sorted. `nested`: per node
    that is rebuilt, its bodies. `pruned`: per node of which only known results are needed, the equation cut down to
    them. `effects`: operations run for their side effect. `loop`: at the top, what the loop reads or returns.
    `returned`: at the top, the values that the loop returns; in a nested body, the positions of the results that are
    wanted."""

    analysis: Analysis
    needed: frozenset[Need]
    inputs: tuple[tuple[int, str], ...]
    nested: dict[int, tuple[Marked, ...]]
    pruned: dict[int, tuple[Any, list[bool], list[bool]]]
    effects: frozenset[int]
    loop: frozenset[Need]
    returned: tuple[int, ...]


def is_rebuilt(node: Node, found: Found) -> bool:
    """Whether the node is run by evaluating its bodies, rather than as the part trace's equation."""
    if not found.nested or node.name in DERIVATIVE_RULES:
        return False
    return node.name != "scan" or bool(found.targets) or node.whole.params["length"] == node.part.params["length"]


def mark(analysis: Analysis, wants: Iterable[Need], batch: Batch, top: bool = False) -> Marked:
    """Marks a body for the wanted (value, form) pairs. `top`: the forward jaxpr itself, outside of which whole live
    values are computed after the loop."""
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
    """Collects needs; lives for one call of `mark`."""

    analysis: Analysis
    batch: Batch
    top: bool
    need: set[Need]
    loop: set[Need]
    nested: dict[int, tuple[Marked, ...]]
    pruned: dict[int, Any]
    effects: set[int]
    returned: dict[int, None]

    def want(self, ref: Ref, form: str, in_loop: bool = False) -> None:
        if isinstance(ref, int):
            self.need.add((ref, form))
            if in_loop:
                self.loop.add((ref, form))

    def info(self, ref: Ref) -> Info:
        return self.analysis.info(ref, self.batch)

    def bring_back(self, v: int) -> None:
        """A live value of the loop that is wanted afterwards, for the whole batch, is returned by the loop."""
        info = self.analysis.infos[v]
        if self.top and info.live and info.kind in (PARTIAL, EXAMPLES) and (v, WHOLE) in self.need:
            if v in self.analysis.body.inputs:
                return  # an operand: it is at hand
            self.returned[v] = None
            self.want(v, PART, True)

    def node(self, index: int) -> None:
        node, found = self.analysis.body.nodes[index], self.analysis.found[index]
        infos = [self.analysis.infos[v] for v in node.outputs]
        if self.top and not found.nested and getattr(node.whole, "effects", None):
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
        self.whole(index, node, infos)
        if not parts:
            return
        if is_rebuilt(node, found):
            self.rebuilt(index, node, found, parts)
            return
        for ref in node.inputs:
            self.want(ref, used_form(self.info(ref)), self.top)

    def whole(self, index: int, node: Node, infos: list[Info]) -> None:
        later = [
            v
            for v, info in zip(node.outputs, infos, strict=True)
            if (v, WHOLE) in self.need and info.live and info.kind not in (PARTIAL, EXAMPLES)
        ]
        known = [(v, WHOLE) in self.need and not info.live for v, info in zip(node.outputs, infos, strict=True)]
        some_live = any(self.info(ref).live for ref in node.inputs)
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

    def rebuilt(self, index: int, node: Node, found: Found, parts: list[int]) -> None:
        wanted = [position for position, v in enumerate(node.outputs) if v in parts]
        if node.name == "scan":
            marked = self.scan(node, found, wanted)
            operands = list(node.inputs)
        elif node.name == "cond":
            marked = tuple(self.body(one, [(one.body.outputs[k], PART) for k in wanted]) for one in found.nested)
            self.want(node.inputs[0], used_form(self.info(node.inputs[0])), self.top)
            operands = list(node.inputs[1:])
        else:
            marked = (self.body(found.nested[0], [(found.nested[0].body.outputs[k], PART) for k in wanted]),)
            operands = list(node.inputs)
        marked = tuple(dataclasses.replace(one, returned=tuple(wanted)) for one in marked)
        self.nested[index] = marked
        for one in marked:
            for position, form in one.inputs:
                self.want(
                    operands[position], WHOLE if form == WHOLE else used_form(self.info(operands[position])), self.top
                )

    def body(self, analysis: Analysis, wants: list[tuple[Ref, str]]) -> Marked:
        """Marks a body for results in the form in which its surroundings use them."""
        needs = [
            (ref, WHOLE if form == WHOLE else used_form(analysis.info(ref, self.batch)))
            for ref, form in wants
            if isinstance(ref, int)
        ]
        return mark(analysis, needs, self.batch)

    def scan(self, node: Node, found: Found, wanted: list[int]) -> tuple[Marked, ...]:
        """A carried value that the body needs in some form has to be carried in that form."""
        (analysis,) = found.nested
        num_consts, num_carry = _compat.scan_counts(node.whole.params)
        carried: set[tuple[int, str]] = {(k, used_form(found.targets[k])) for k in wanted if k < num_carry}
        while True:
            wants = [(analysis.body.outputs[k], PART) for k in wanted if k >= num_carry]
            wants += [(analysis.body.outputs[k], form) for k, form in carried]
            marked = self.body(analysis, wants)
            more = {(p - num_consts, form) for p, form in marked.inputs if num_consts <= p < num_consts + num_carry}
            if more <= carried:
                return (marked,)
            carried |= more
