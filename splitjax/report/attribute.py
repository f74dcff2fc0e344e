"""Attributes every collective of a compiled step: to its layer, its reason and the planned collective that it realises.

A step's compiled programs and its plan go in; the collectives of a report come out, and what the plan has that XLA did
without. This module joins what the others of this room find: evidence, causes, pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.plan import Collective, Plan
from splitjax.report.blame.rematerialised import Rematerialised, rematerialised
from splitjax.report.causes import cause_of
from splitjax.report.dataflow import Dataflow
from splitjax.report.evidence import FALLBACK, Evidence, gather_evidence
from splitjax.report.hlo import CompiledCollective
from splitjax.report.known_step import Step
from splitjax.report.parts import StepPart
from splitjax.report.reconcile import difference, pair
from splitjax.trace.graph import Graph

# Further away than this, a line says little about a collective.
_NEAR = 8


@dataclasses.dataclass(frozen=True)
class ReportedCollective:
    """Describes a collective of the compiled step beside its plan.

    **Attributes:**

    - `compiled`: what XLA compiled: shape, trips, groups, names, stack.
    - `layer`: the layer that it belongs to; of the module around it where no layer is closer; empty for what belongs to
      none (the loss).
    - `phase`: `forward`, `backward` or `update`.
    - `cause`: why it is there, in words: the plan's own reason where it was planned. Empty where nothing is known.
    - `rule`: the sharding rule that decided the layer's weight; empty without a layer.
    - `known_by`: `dataflow`, `scope`, `name` or `line`: what the layer is known by.
    - `planned`: the planned collective that it realises; None where the plan has none.
    - `also`: further planned collectives that it realises: sums of gradients that XLA joined into a single one.
    - `differs`: how it differs from the planned ones, in words; empty where it does not.
    - `source`: the user's `file:line (function)` of the operation that it serves, or, where XLA has none, of an
      operation nearby.
    - `cause_beside`: of a collective that was not planned, the cause as it reads beside the name of the layer, which it
      does not say again; empty where it reads alike.
    - `rematerialised`: where it gathers a whole array of which each device keeps a part: what XLA's log calls an
      involuntary full rematerialization. None elsewhere.
    """

    compiled: CompiledCollective
    layer: str
    phase: str
    cause: str
    rule: str = ""
    known_by: str = ""
    planned: Collective | None = None
    differs: str = ""
    source: str = ""
    also: tuple[Collective, ...] = ()
    cause_beside: str = ""
    rematerialised: Rematerialised | None = None

    @property
    def realised(self) -> tuple[Collective, ...]:
        """Returns the planned collectives that it realises: none, `planned`, or `planned` and `also`."""
        return () if self.planned is None else (self.planned, *self.also)

    @property
    def op(self) -> str:
        """Returns its kind: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `collective_permute`, ..."""
        return self.compiled.op

    @property
    def axis(self) -> str:
        """Returns the mesh axes that it runs over, joined by `+`."""
        return self.compiled.axis

    @property
    def bytes(self) -> int:
        """Returns the bytes that each device sends per step, by the ring formulas."""
        return self.compiled.bytes

    @property
    def predicted_bytes(self) -> int:
        """Returns the bytes that each device sends for it per step by the plan; 0 where it was not planned."""
        return sum(planned.bytes for planned in self.realised)

    @property
    def is_attributed(self) -> bool:
        """Tells whether its layer or its cause is known."""
        return bool(self.layer or self.cause)


def attribute(
    parts: Sequence[StepPart], plan: Plan, graph: Graph
) -> tuple[tuple[ReportedCollective, ...], tuple[Collective, ...]]:
    """Attributes the collectives of a step.

    **Arguments:**

    - `parts`: the step's programs (`report.parts.read_parts`).
    - `plan`, `graph`: what they were compiled from.

    Returns the collectives of the programs in their order, and the planned ones that none of them realises.
    """
    known: list[tuple[Evidence, Dataflow, Step]] = []
    step = None
    for part in parts:
        for module in part.modules:
            flow = Dataflow(module)
            step = Step(plan, graph, part.argument_names, flow)
            known += [
                (_counted(gather_evidence(collective, flow, step)), flow, step)
                for collective in part.collectives(module)
            ]
    if step is None:
        return (), plan.collectives
    paired, missing = pair([evidence for evidence, _, _ in known], step)
    return tuple(
        _reported(evidence, flow, step, realised)
        for (evidence, flow, step), realised in zip(known, paired, strict=True)
    ), missing


def _counted(evidence: Evidence) -> Evidence:
    """Counts nothing for a fallback, which hardly ever runs; returns anything else as it is."""
    return (
        dataclasses.replace(evidence, collective=dataclasses.replace(evidence.collective, trips=0, bytes=0))
        if evidence.about == FALLBACK
        else evidence
    )


def _reported(evidence: Evidence, flow: Dataflow, step: Step, realised: Sequence[Collective]) -> ReportedCollective:
    """Puts a compiled collective beside `realised`, the planned ones that it realises."""
    layer = realised[0].layer if realised else evidence.layer
    cause, cause_beside = "; ".join(dict.fromkeys(planned.why for planned in realised)), ""
    if not realised:
        cause, cause_beside = cause_of(evidence, flow, step), cause_of(evidence, flow, step, layer)
    return ReportedCollective(
        evidence.collective,
        layer,
        evidence.phase,
        cause,
        rule=next((layer_plan.rule for layer_plan in step.plan.layers if layer_plan.name == layer), ""),
        known_by=evidence.known_by,
        planned=realised[0] if realised else None,
        differs=difference(evidence, realised) if realised else "",
        source=evidence.frames[0] if evidence.frames else _line_nearby(evidence, flow),
        also=tuple(realised[1:]),
        cause_beside=cause_beside if cause_beside != cause else "",
        rematerialised=rematerialised(evidence.node, flow, step.plan.mesh, evidence.collective.axis),
    )


def _line_nearby(evidence: Evidence, flow: Dataflow) -> str:
    """Returns the nearest of the user's lines before a collective, or else after it; empty for none within a few
    operations."""
    for onward in (flow.sources, flow.users):
        for distance, node in flow.walk([evidence.node] if evidence.node is not None else [], onward):
            if distance > _NEAR:
                break
            if lines := flow.lines(node):
                return lines[0]
    return ""
