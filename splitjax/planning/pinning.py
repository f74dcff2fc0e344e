"""Tables whose synchronisation is known beforehand: from a pinned plan, or from the run that is resumed. Nothing is
observed then."""

from __future__ import annotations

import glob
import logging
from collections.abc import Sequence
from typing import Any

from splitjax.errors import PlanError, SyncError
from splitjax.lower.tables.sparse import SparseStep, find_sparse
from splitjax.lower.tables.sync_request import AUTO, SyncRequest
from splitjax.plan import Plan, SyncPlan
from splitjax.planning.observing import Decision, sync_plans, with_syncs
from splitjax.sync.dense import Dense
from splitjax.sync.description import OWNED, exchange_of, name_of, options_of
from splitjax.sync.scheme import ByRows
from splitjax.trace.graph import Graph

logger = logging.getLogger("splitjax")


def pins_tables(plan: Plan | None) -> bool:
    """Whether a pinned plan says how every table is synchronised."""
    return plan is not None and bool(plan.syncs) and all(one.is_decided for one in plan.syncs)


def synchronised(
    graph: Graph,
    jaxpr: Any,
    plan: Plan,
    request: SyncRequest,
    *,
    pinned: Plan | None,
    carried: Sequence[SyncPlan],
    decision: Decision | None,
) -> tuple[SparseStep, Plan, Decision | None]:
    """The tables of a step, its plan with them, and what was decided: None while steps are to be observed.

    **Arguments:** `decision`: from observed steps. Without one the `pinned` plan decides, if it has schemes and
    capacities; then what was `carried` from the run that is resumed, if it fits and is what `request` asks for.

    Raises `PlanError` for a pinned plan whose tables are not those of the step, naming the first difference."""
    if decision is None and pins_tables(pinned):
        request = _request_of(pinned.syncs)
        decision = _decision_of(pinned.syncs)
        problem = _first_difference(graph, jaxpr, plan, request, pinned.syncs, decision, "plan", decides=True)
        if problem:
            raise PlanError(
                f"the pinned plan does not fit this step: {problem}",
                place="plan=, syncs",
                remedy=(
                    "make a new plan once the step has observed its tables, or take syncs out of it: they are then"
                    " observed as sync= says"
                ),
            )
    elif decision is None and carried:
        found = _decision_of(carried)
        problem = _first_difference(graph, jaxpr, plan, request, carried, found, "run that is resumed", decides=False)
        if problem:
            logger.warning(
                "splitjax: tables are observed anew, for what the resumed run knew of them does not fit: %s", problem
            )
        else:
            decision = found
    sparse = find_sparse(graph, jaxpr, plan, request, None if decision is None else decision.chosen)
    return sparse, with_syncs(plan, sparse, decision), decision


def _request_of(syncs: Sequence[SyncPlan]) -> SyncRequest:
    """What a plan asks for."""
    # Of a table with owners the layout decides that it has them; "auto" stands for whatever the plan has.
    return SyncRequest(
        tuple(
            (glob.escape(one.param), ByRows(Dense() if one.scheme == Dense.name else AUTO, one.lazy)) for one in syncs
        )
    )


def _decision_of(syncs: Sequence[SyncPlan]) -> Decision:
    """What a plan decides. Raises `PlanError` for schemes, options and sizes that there are not."""
    chosen = {}
    for number, one in enumerate(syncs):
        try:
            chosen[one.param] = exchange_of(one.scheme, one.options, one.capacities, one.rows)
        except SyncError as error:
            raise PlanError(
                error.message, value=error.value, place=f"syncs[{number}].{error.place}", remedy=error.remedy
            ) from error
    return Decision(chosen, {one.param: one.why for one in syncs})


def _first_difference(
    graph: Graph,
    jaxpr: Any,
    plan: Plan,
    request: SyncRequest,
    syncs: Sequence[SyncPlan],
    decision: Decision,
    where: str,
    decides: bool,
) -> str:
    """The first difference between the tables of a step and those of `where`, in words; empty where they agree.
    `decides`: whatever is asked for, the scheme is that of `where`."""
    known, tables = {one.param: one for one in syncs}, {one.param for one in graph.tables}
    for param in known:
        if param not in tables:
            return f"the {where} has a table {param!r}, of which the step looks up no rows"
    for param in tables:
        if param not in known:
            return f"the step looks rows up in {param!r}, which is no table of the {where}"
    step = find_sparse(graph, jaxpr, plan, request, None)
    by_rows = {one.param: one for one in step.tables}
    for here in sync_plans(plan, step, None):
        one, table = known[here.param], by_rows.get(here.param)
        if one.rows != here.rows:
            return f"{one.param!r} has {one.rows} rows in the {where} and {here.rows} in the step"
        if one.scheme == Dense.name and (table is None or decides):
            continue
        if table is None:
            return (
                f"{one.param!r} is synchronised by {one.scheme} in the {where} and stays dense in the step: {here.why}"
            )
        if (one.scheme == OWNED) != table.is_owned and one.scheme != Dense.name:
            there, here_too = ("", "not ") if one.scheme == OWNED else ("not ", "")
            return f"{one.param!r} is {there}owned by rows in the {where} and {here_too}in the step"
        if one.scheme != Dense.name and one.axis != here.axis:
            return (
                f"{one.param!r} is synchronised over {one.axis or 'nothing'} in the {where} and over"
                f" {here.axis or 'nothing'} in the step"
            )
        if one.scheme != Dense.name and one.lazy != here.lazy:
            return (
                f"the update of {one.param!r} is {'' if one.lazy else 'not '}lazy in the {where} and"
                f" {'' if here.lazy else 'not '}in the step"
            )
        # What is asked for by name is what is wanted; of a table with owners only how values are sent.
        exchange = decision.chosen[one.param][0]
        is_asked = not decides and (table.is_owned or request.of(one.param).scheme != AUTO)
        if is_asked and (name_of(exchange), options_of(exchange)) != (here.scheme, dict(here.options)):
            asked = f"{here.scheme} {dict(here.options)} is asked for"
            return f"{one.param!r} is synchronised by {one.scheme} {dict(one.options)} in the {where}, and {asked}"
    return ""
