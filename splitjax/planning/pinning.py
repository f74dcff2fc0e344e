"""Synchronises tables as is known beforehand: from a pinned plan, or from the run that is resumed.

A traced step, its plan and what is known come in; the tables, the plan with them and the decision come out. Nothing is
observed then, and what does not fit the step is an error (a pinned plan) or a warning (a run that is resumed).
"""

from __future__ import annotations

import dataclasses
import glob
import logging
from collections.abc import Sequence

from splitjax import _compat
from splitjax.errors import PlanError, SyncError
from splitjax.plan import Plan, SyncPlan
from splitjax.planning.draft import Draft
from splitjax.planning.observing import TableDecision, note_without_tables
from splitjax.planning.table_plan import sync_plans
from splitjax.planning.tables.finding import TableFinder, find_sparse
from splitjax.planning.tables.sync_request import AUTO, SyncRequest
from splitjax.sync.costs.dense import DenseCosts
from splitjax.sync.costs.exchange import OWNED, exchange_of
from splitjax.sync.costs.schemes import ByRows
from splitjax.trace.graph import Graph

logger: logging.Logger = logging.getLogger("splitjax")


def pins_tables(plan: Plan | None) -> bool:
    """Returns whether a pinned `plan` says how every table is synchronised; False for None."""
    return plan is not None and bool(plan.syncs) and all(sync.is_decided for sync in plan.syncs)


@dataclasses.dataclass(frozen=True)
class _Known:
    """Holds what is known beforehand of a step's tables.

    **Attributes:** `where`: where it is known from, in words. `syncs`: the entries of its plan, `decision`: what they
    decide. `decides`: whether the schemes in it hold whatever is asked for.
    """

    where: str
    syncs: Sequence[SyncPlan]
    decision: TableDecision
    decides: bool


def synchronise(draft: Draft) -> Draft:
    """Returns the draft with its tables, and with what was decided about them: nothing while steps are to be observed.

    A pinned plan decides, if it has schemes and capacities, unless steps were observed since; then what the run that is
    resumed knew, if it fits and is what is asked for.

    Raises `PlanError` for a pinned plan whose tables are not those of the step, naming the first difference, and what
    `planning.tables.finding.find_sparse` raises."""
    known, request = draft.known, draft.request.sync
    pinned = None if known.observes else draft.request.pinned
    if not draft.takes_gradient or not (pins_tables(pinned) or not request.is_dense):
        return draft
    graph, jaxpr, plan, decision = draft.graph, draft.traced.jaxpr, draft.decided, known.decision
    carried = () if known.observes else known.carried
    if decision is None and pinned is not None and pins_tables(pinned):
        request = _request_of(pinned.syncs)
        decision = _decision_of(pinned.syncs)
        problem = _first_difference(graph, jaxpr, plan, request, _Known("plan", pinned.syncs, decision, decides=True))
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
        of_run = _Known("run that is resumed", carried, _decision_of(carried), decides=False)
        problem = _first_difference(graph, jaxpr, plan, request, of_run)
        if problem:
            logger.warning(
                "splitjax: tables are observed anew, for what the resumed run knew of them does not fit: %s", problem
            )
        else:
            decision = of_run.decision
    chosen = None if decision is None else decision.chosen
    finder = TableFinder(graph, jaxpr, plan.mesh, plan.batch_axes, request, chosen)
    tables = finder.sparse_step(finder.find(plan.leaves))
    note = note_without_tables(tables)
    return dataclasses.replace(draft, tables=tables, finder=finder.settled(tables.tables), decision=decision).noting(
        *([note] if note else ())
    )


def _request_of(syncs: Sequence[SyncPlan]) -> SyncRequest:
    """Returns the request that the tables of a plan answer."""
    # Of a table with owners the layout decides that it has them; "auto" stands for whatever the plan has.
    return SyncRequest(
        tuple(
            (glob.escape(sync.param), ByRows(DenseCosts() if sync.scheme == DenseCosts.name else AUTO, sync.lazy))
            for sync in syncs
        )
    )


def _decision_of(syncs: Sequence[SyncPlan]) -> TableDecision:
    """Returns the decision that a plan records. Raises `PlanError` for schemes, options and sizes that do not exist."""
    chosen = {}
    for number, sync in enumerate(syncs):
        try:
            chosen[sync.param] = exchange_of(sync.scheme, sync.options, sync.capacities, sync.rows)
        except SyncError as error:
            raise PlanError(
                error.message, value=error.value, place=f"syncs[{number}].{error.place}", remedy=error.remedy
            ) from error
    return TableDecision(chosen, {sync.param: sync.why for sync in syncs}, is_whole=True)


def _first_difference(graph: Graph, jaxpr: _compat.ClosedJaxpr, plan: Plan, request: SyncRequest, known: _Known) -> str:
    """Describes the first difference between the tables of a step and what is known of them; empty where they agree."""
    where = known.where
    sync_of, tables = {sync.param: sync for sync in known.syncs}, {table.param for table in graph.tables}
    for param in sync_of:
        if param not in tables:
            return f"the {where} has a table {param!r}, of which the step looks up no rows"
    for param in tables:
        if param not in sync_of:
            return f"the step looks rows up in {param!r}, which is no table of the {where}"
    step = find_sparse(graph, jaxpr, plan, request, None)
    by_rows = {table.param: table for table in step.tables}
    for here in sync_plans(step, plan.batch_axes, {}, None):
        param, there, table = here.param, sync_of[here.param], by_rows.get(here.param)
        if there.rows != here.rows:
            return f"{param!r} has {there.rows} rows in the {where} and {here.rows} in the step"
        if there.scheme == DenseCosts.name and (table is None or known.decides):
            continue
        if table is None:
            return f"{param!r} is synchronised by {there.scheme} in the {where} and stays dense in the step: {here.why}"
        if (there.scheme == OWNED) != table.exchange.pulls and there.scheme != DenseCosts.name:
            not_there, not_here = ("", "not ") if there.scheme == OWNED else ("not ", "")
            return f"{param!r} is {not_there}owned by rows in the {where} and {not_here}in the step"
        if there.scheme != DenseCosts.name and there.axis != here.axis:
            return (
                f"{param!r} is synchronised over {there.axis or 'nothing'} in the {where} and over"
                f" {here.axis or 'nothing'} in the step"
            )
        if there.scheme != DenseCosts.name and there.lazy != here.lazy:
            return (
                f"the update of {param!r} is {'' if there.lazy else 'not '}lazy in the {where} and"
                f" {'' if here.lazy else 'not '}in the step"
            )
        # A scheme that is asked for by name is the one that is wanted; of a table with owners only how values are sent.
        exchange = known.decision.chosen[param]
        is_asked = not known.decides and (table.exchange.pulls or request.of(param).scheme != AUTO)
        if is_asked and (exchange.name, exchange.options) != (here.scheme, dict(here.options)):
            asked = f"{here.scheme} {dict(here.options)} is asked for"
            return f"{param!r} is synchronised by {there.scheme} {dict(there.options)} in the {where}, and {asked}"
    return ""
