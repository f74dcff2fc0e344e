"""Every collective of a compiled step, with its layer, its reason and the planned one that it realises."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.plan import Collective, Plan
from splitjax.report.causes import cause_of
from splitjax.report.dataflow import Dataflow
from splitjax.report.evidence import FALLBACK, Evidence, Step, gather_evidence
from splitjax.report.hlo import CompiledCollective
from splitjax.report.parts import StepPart
from splitjax.report.reconcile import difference, pair
from splitjax.trace.graph import Graph

# Further away than this, a line says little about a collective.
_NEAR = 8


@dataclasses.dataclass(frozen=True)
class ReportedCollective:
    """One collective of the compiled step beside its plan.

    **Attributes:**

    - `compiled`: what XLA compiled: shape, trips, groups, names, stack.
    - `layer`: the layer that it belongs to; of the module around it where no layer is closer; empty for what belongs to
      none (the loss).
    - `phase`: `forward`, `backward` or `update`.
    - `cause`: why it is there: the plan's own reason where it was planned. Empty where nothing is known.
    - `rule`: the sharding rule that decided the layer's weight; empty without a layer.
    - `known_by`: `dataflow`, `scope`, `name` or `line`: what the layer is known by.
    - `planned`: the planned collective that it realises; None for one that the plan does not have.
    - `differs`: how it differs from the planned one, in words; empty where it does not.
    - `source`: the user's `file:line (function)` of the operation that it serves, or where XLA has none of one nearby.
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

    @property
    def op(self) -> str:
        """`all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `collective_permute`, ..."""
        return self.compiled.op

    @property
    def axis(self) -> str:
        """The mesh axes that it runs over, joined by `+`."""
        return self.compiled.axis

    @property
    def bytes(self) -> int:
        """What each device sends per step, in bytes, by the ring formulas."""
        return self.compiled.bytes

    @property
    def predicted_bytes(self) -> int:
        """What the plan says that each device sends for it per step, in bytes; 0 where it was not planned."""
        return self.planned.bytes if self.planned is not None else 0

    @property
    def is_attributed(self) -> bool:
        """Whether its layer or its cause is known."""
        return bool(self.layer or self.cause)


def attribute(
    parts: Sequence[StepPart], plan: Plan, graph: Graph
) -> tuple[tuple[ReportedCollective, ...], tuple[Collective, ...]]:
    """The collectives of a step's compiled programs in their order, and the planned ones that none of them realises."""
    known: list[tuple[Evidence, Dataflow, Step]] = []
    step = None
    for part in parts:
        for module in part.modules:
            flow = Dataflow(module)
            step = Step(plan, graph, part.argument_names, flow)
            known += [(_counted(gather_evidence(one, flow, step)), flow, step) for one in part.collectives(module)]
    if step is None:
        return (), plan.collectives
    paired, missing = pair([one for one, _, _ in known], step)
    return tuple(
        _reported(one, flow, step, planned) for (one, flow, step), planned in zip(known, paired, strict=True)
    ), missing


def _counted(one: Evidence) -> Evidence:
    """A fallback counts nothing: it hardly ever runs."""
    return (
        dataclasses.replace(one, collective=dataclasses.replace(one.collective, trips=0, bytes=0))
        if one.about == FALLBACK
        else one
    )


def _reported(one: Evidence, flow: Dataflow, step: Step, planned: Collective | None) -> ReportedCollective:
    layer = planned.layer if planned is not None else one.layer
    return ReportedCollective(
        one.collective,
        layer,
        one.phase,
        cause_of(one, flow, step) if planned is None else planned.why,
        rule=next((found.rule for found in step.plan.layers if found.name == layer), ""),
        known_by=one.known_by,
        planned=planned,
        differs="" if planned is None else difference(one, planned),
        source=one.frames[0] if one.frames else _line_nearby(one, flow),
    )


def _line_nearby(one: Evidence, flow: Dataflow) -> str:
    """The nearest line of the user's before a collective, or else after it; empty for none within a few operations."""
    for onward in (flow.sources, flow.users):
        for distance, node in flow.walk([one.node] if one.node is not None else [], onward):
            if distance > _NEAR:
                break
            if lines := flow.lines(node):
                return lines[0]
    return ""
