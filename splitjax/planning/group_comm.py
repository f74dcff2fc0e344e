"""Decides which group communication a step uses: `gather`, `turns` or `modulo`, asked for or chosen by memory.

A plan with `gather` comes in, a plan with the kind that is decided comes out, its memory and collectives predicted for
it.

`gather` moves the fewest messages; `modulo` as many bytes in as many turns as a group has workers, with the activations
of one turn alive at a time; `turns` twice the bytes (its broadcasts change their sender from turn to turn:
all-reduces), so that it is never chosen, only asked for. `auto` takes `modulo` where that lowers the predicted peak by
more than `WORTHWHILE`, for its smaller products run less efficiently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from splitjax.cost import LaidOutStep, predict_collectives, predict_memory
from splitjax.cost.flow import flows, linked
from splitjax.errors import BatchError, PlanError, Refusal
from splitjax.lower.turns.in_turns import InTurns
from splitjax.plan import Plan
from splitjax.primitives.walk import Site
from splitjax.trace.graph import Graph

WORTHWHILE = 0.1  # of the predicted peak

InTurnsBySite = Mapping[Site, InTurns]


def choose(
    requested: str, plan: Plan, graph: Graph, in_turns: Callable[[str], InTurnsBySite | Refusal], crosses: bool
) -> tuple[Plan, InTurnsBySite]:
    """Decides the group communication of a step. Returns its plan with it, and by site the boundaries that are prepared
    to run in turns.

    **Arguments:**

    - `requested`: the value of the option `group_comm`.
    - `plan`: the plan, with `gather`. `graph`: the traced step.
    - `in_turns`: prepares, for a kind, the gradient boundaries in which examples cross; returns a refusal where a
      boundary cannot run in turns.
    - `crosses`: whether the layout has a crossing at all.

    Raises `PlanError` for `turns` or `modulo` where the step refuses them, `BatchError` where the batch does not divide
    into turns."""
    asked = requested not in ("auto", "gather")
    if asked and not graph.num_boundaries:
        raise PlanError(
            f"group_comm={requested!r} needs a gradient boundary: the step takes its gradient with plain jax.grad,"
            " which lowering cannot run in turns",
            value=requested,
            place="parallelize, group_comm",
            remedy="use splitjax.value_and_grad for the gradient",
        )
    if requested == "gather":
        return plan, {}
    if not crosses:
        note = f"group communication: no examples cross into a split layer, so {requested} has nothing to do"
        is_told = asked and plan.mesh.num_devices > 1
        return dataclasses.replace(plan, notes=(*plan.notes, note)) if is_told else plan, {}
    kind = requested if asked else "modulo"
    candidate = with_kind(plan, graph, kind)
    if not asked and candidate.memory.peak_bytes > (1 - WORTHWHILE) * plan.memory.peak_bytes:
        return plan, {}
    ways = in_turns(kind)
    if not isinstance(ways, Refusal):
        if ways:
            return candidate, ways
        ways = Refusal("no examples cross inside a gradient boundary")
    reason = ways.message
    if asked and ways.kind is BatchError:
        raise ways.error()
    if asked:
        raise PlanError(
            f"group_comm={requested!r} cannot be had for this step: {reason}",
            value=requested,
            place="parallelize, group_comm",
            remedy='use group_comm="auto", which falls back to "gather"',
        )
    return dataclasses.replace(plan, notes=(*plan.notes, f"group communication: gather, not modulo: {reason}")), {}


def with_kind(plan: Plan, graph: Graph, kind: str) -> Plan:
    """Returns the `plan` of the traced step `graph` with the group communication `kind`, memory and collectives
    predicted anew."""
    return dataclasses.replace(
        plan,
        group_comm=kind,
        memory=predict_memory(graph, plan.leaves, plan.mesh, plan.batch_axes, plan.replicated_batch, group_comm=kind),
        collectives=predict_collectives(
            LaidOutStep(graph, plan.leaves, plan.layers, plan.mesh, plan.batch_axes, plan.replicated_batch),
            group_comm=kind,
        ),
    )


def crosses(graph: Graph, plan: Plan) -> bool:
    """Returns whether under the layout of `plan` examples of the traced step `graph` cross from replicated layers,
    whose batch is split over all axes, into split layers."""
    chain = flows(graph, plan.leaves, plan.mesh, plan.batch_axes, plan.replicated_batch)
    return any(flow.crossing and not flow.at_hand and linked(flow.producer, flow.axes, chain) is None for flow in chain)
