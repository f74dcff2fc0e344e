"""Decides which group communication a step uses: `gather`, `turns` or `modulo`, asked for or chosen by memory.

A draft whose leaves are laid out comes in and goes out with the kind that is decided, and with the boundaries that are
prepared for it.

`gather` moves the fewest messages; `modulo` as many bytes in as many turns as a group has workers, with the activations
of one turn alive at a time; `turns` twice the bytes (its broadcasts change their sender from turn to turn:
all-reduces), so that it is never chosen, only asked for. `auto` takes `modulo` where that lowers the predicted peak by
more than `WORTHWHILE`, for its smaller products run less efficiently.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from splitjax.cost.flow import has_group
from splitjax.errors import BatchError, PlanError, Refusal
from splitjax.plan import Memory
from splitjax.planning.draft import Draft
from splitjax.planning.predict import memory_of
from splitjax.planning.sites.meeting import pin_met_in_turns
from splitjax.planning.ways import Ways

WORTHWHILE = 0.1  # of the predicted peak


def cross(draft: Draft) -> Draft:
    """Returns the draft with its group communication: what is asked for, what the pinned plan has, or what is chosen.
    Raises what `choose` raises."""
    if not draft.takes_gradient:
        return draft
    pinned = draft.request.pinned
    requested = draft.request.group_comm if pinned is None else pinned.group_comm
    return choose(
        requested,
        draft,
        lambda kind: draft.chooser.in_turns(kind, _communicating_by(kind, draft).decided_step, draft.traced.jaxpr),
        memory_of,
    )


def _communicating_by(kind: str, draft: Draft) -> Draft:
    """Returns a draft with a `kind` of group communication; its boundaries are not prepared yet."""
    sites = draft.sites
    if kind == "modulo" and sites is not None:
        sites = sites.with_first(pin_met_in_turns(draft.graph, draft.flows, draft.layout.batch_axes))
    return dataclasses.replace(draft, group_comm=kind, sites=sites)


def choose(
    requested: str,
    draft: Draft,
    in_turns: Callable[[str], Ways | Refusal],
    summed: Callable[[Draft], Memory],
) -> Draft:
    """Decides the group communication of a step. Returns its draft with it, and with the boundaries that are prepared
    to run in turns.

    **Arguments:**

    - `requested`: the value of the option `group_comm`.
    - `draft`: the step, with `gather`.
    - `in_turns`: prepares, for a kind, the gradient boundaries in which examples cross; returns a refusal where a
      boundary cannot run in turns.
    - `summed`: adds up a device's memory under a draft, in milliseconds. Where turns are worth it by the sum, the
      draft's simulator has to confirm it, which takes as long as tracing the step twice.

    Raises `PlanError` for `turns` or `modulo` where the step refuses them, `BatchError` where the batch does not divide
    into turns."""
    asked = requested not in ("auto", "gather")
    if asked and not draft.graph.num_boundaries:
        raise PlanError(
            f"group_comm={requested!r} needs a gradient boundary: the step takes its gradient with plain jax.grad,"
            " which lowering cannot run in turns",
            value=requested,
            place="parallelize, group_comm",
            remedy="use splitjax.value_and_grad for the gradient",
        )
    if requested == "gather":
        return draft
    if not crosses(draft):
        note = f"group communication: no examples cross into a split layer, so {requested} has nothing to do"
        return draft.noting(note) if asked and draft.shape.num_devices > 1 else draft
    kind = requested if asked else "modulo"
    candidate = _communicating_by(kind, draft)
    if not asked and not lower_enough(summed(draft), summed(candidate)):
        return draft
    ways = in_turns(kind)
    if not isinstance(ways, Refusal) and ways:
        candidate = dataclasses.replace(candidate, in_turns=ways)
        return candidate if asked or is_confirmed(draft, candidate) else draft
    if not isinstance(ways, Refusal):
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
    return draft.noting(f"group communication: gather, not modulo: {reason}")


def lower_enough(gather: Memory, turns: Memory) -> bool:
    """Returns whether the peak with turns is lower than that with gathered examples by as much as makes turns
    worthwhile. `gather`, `turns`: the memory with each."""
    return turns.peak_bytes <= (1 - WORTHWHILE) * gather.peak_bytes


def is_confirmed(gather: Draft, turns: Draft) -> bool:
    """Returns whether lifetimes confirm that turns are worthwhile, as the quick sum says; where one of the two drafts
    cannot be simulated, the sum stands. `gather`, `turns`: the drafts."""
    simulate = gather.simulator
    if simulate is None:
        return True
    before, after = simulate(gather), simulate(turns)
    return before.bound_bytes is None or after.bound_bytes is None or lower_enough(before, after)


def crosses(draft: Draft) -> bool:
    """Returns whether under the layout of `draft` examples cross from replicated layers, whose batch is split over all
    axes, into split layers."""
    chain = draft.flows
    return any(flow.crossing and not flow.at_hand and not has_group(flow, flow.axes, chain) for flow in chain)
