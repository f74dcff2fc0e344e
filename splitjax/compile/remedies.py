"""Compiles what may remove the involuntary full rematerialisations of a step, and compares it.

A signature of a step comes in. For each array that its program gathers whole to keep a part of, changes are proposed: a
stop on the way from one layout to the other, or no constraint, at the line where the user wrote one, and every other
layout of the layer (`planning.explaining`). Each is planned, lowered and compiled as the step itself is; what the
compiled programs gather, send and store comes out. No derived figure decides.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from splitjax.choosing import Prices
from splitjax.compile.building import build_entry
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.reporting import step_report
from splitjax.errors import SplitjaxError, UnavailableError
from splitjax.mesh import MeshShape, platform_of
from splitjax.plan import spec_text
from splitjax.planning.explaining import machine_prices
from splitjax.planning.layouts import typed_specs
from splitjax.report.attribute import ReportedCollective
from splitjax.report.blame.remedies import Change, CompiledCost, Remedies
from splitjax.report.rows import short_source
from splitjax.report.value import Report
from splitjax.rules.ruleset import parse_rules
from splitjax.step.options import OptionError
from splitjax.step.stopping import LineChange, constraints_near
from splitjax.step.traced import Traced, trace_step, with_changed_line


@dataclasses.dataclass(frozen=True)
class _Proposal:
    """Is a change before it is compiled. `name`, `code`: as in `Change`. `what`: a change of a line, or a rule as
    TOML."""

    name: str
    code: str
    what: LineChange | str


def step_remedies(
    recipe: Recipe, mesh: Mesh | AbstractMesh, entry: CompiledEntry, device: Any, on: str | None, most: int
) -> Remedies:
    """Returns what removes the involuntary full rematerialisations of a step.

    **Arguments:** `recipe`: the step. `mesh`: its devices. `entry`: the signature of it. `device`: one of those to
    compile it for. `on`: a target by whose figures changes are compared; None for the recipe's own. `most`: how many
    changes are compiled for each array.

    Raises `UnavailableError` for an evaluation, `OptionError` for a `most` below one, and `TargetError` for what is no
    target of this mesh."""
    place = f"{recipe.name}.remedies"
    if not recipe.returns_state:
        raise UnavailableError(
            "an evaluation has the layout of its training step, and none of its own to change",
            value=recipe.name,
            place=place,
            remedy="ask the training step",
        )
    if isinstance(most, bool) or not isinstance(most, int) or most < 1:
        raise OptionError(
            "as many changes are compiled for each array", value=most, place=f"{place}(most=)", remedy="at least one"
        )
    target = str(recipe.target) if on is None and recipe.target is not None else on
    shape = entry.plan.mesh
    prices, machine = machine_prices(target, platform_of(mesh), shape, place)
    report = step_report(recipe, entry, entry.abstract_args, device)
    gathered, planned = report.rematerialised, _cost(report, shape, prices)
    changes = []
    if gathered:
        traced = _traced_again(recipe, mesh, entry)
        for proposal in _proposals(entry, traced, gathered, most):
            try:
                changed = _changed(recipe, mesh, traced, proposal)
                found = step_report(recipe, changed, changed.abstract_args, device)
            except SplitjaxError as error:
                changes.append(Change(proposal.name, proposal.code, refused=f"{error.message} ({error.remedy})"))
                continue
            removed = _removed(gathered, found.rematerialised)
            changes.append(Change(proposal.name, proposal.code, removed, _cost(found, shape, prices)))
    changes.sort(key=lambda each: (math.inf, 0) if each.cost is None else (each.cost.seconds, each.cost.sent_bytes))
    return Remedies(recipe.name, shape, machine, gathered, planned, tuple(changes))


def _traced_again(recipe: Recipe, mesh: Mesh | AbstractMesh, entry: CompiledEntry) -> Traced:
    """Returns the trace of a step before anything was decided about its leaves; under Explicit axes with them where
    they are."""
    traced = trace_step(recipe, entry.call, mesh=mesh)
    if traced.is_settled:
        return traced
    specs = typed_specs(entry.graph, entry.plan.leaves, entry.plan.mesh)
    return trace_step(recipe, entry.call, traced.matched, mesh, specs)


def _proposals(
    entry: CompiledEntry, traced: Traced, gathered: Sequence[ReportedCollective], most: int
) -> Iterator[_Proposal]:
    """Yields what is tried, each once, at most `most` for each array: first what changes a line, then layouts in the
    order in which they are predicted to be fast."""
    seen: set[LineChange | str] = set()
    for each in gathered:
        for proposal in itertools.islice(itertools.chain(_of_line(traced, each), _of_layer(entry, each.layer)), most):
            if proposal.what not in seen:
                seen.add(proposal.what)
                yield proposal


def _of_line(traced: Traced, collective: ReportedCollective) -> Iterator[_Proposal]:
    """Yields changes of the sharding constraints at the line of a collective, or of its array near it."""
    found = collective.rematerialised
    assert found is not None, "it gathers an array of which a part is kept"
    parts = found.held, found.kept
    for source in constraints_near(traced.jaxpr, collective.source, found.whole, parts) if collective.source else ():
        line = short_source(source)
        if found.stop:
            where = spec_text(found.stop)
            what = LineChange(source, found.whole, PartitionSpec(*found.stop))
            code = f"x = jax.lax.with_sharding_constraint(x, {where})  # before that of {line}"
            yield _Proposal(f"stop at {where} before the constraint at {line}", code, what)
        yield _Proposal(f"no sharding constraint at {line}", "", LineChange(source, found.whole))


def _of_layer(entry: CompiledEntry, layer: str) -> Iterator[_Proposal]:
    """Yields the other layouts of a layer."""
    if layer and layer in {each.name for each in entry.plan.layers}:
        for way in entry.plan.explain(layer).alternatives:
            if way.rule and way.cost is not None:
                yield _Proposal(f"{layer}: {way.name}", way.rule, way.rule)


def _changed(recipe: Recipe, mesh: Mesh | AbstractMesh, traced: Traced, proposal: _Proposal) -> CompiledEntry:
    """Builds a step with a change. Raises `UnavailableError` for another layout of a pinned plan, and what planning and
    lowering raise."""
    if isinstance(proposal.what, LineChange):
        return build_entry(recipe, mesh, with_changed_line(traced, proposal.what))
    if recipe.pinned is not None:
        raise UnavailableError(
            "the plan of the step is pinned",
            value=proposal.name,
            place=f"{recipe.name}.remedies",
            remedy="take plan= out, or change the plan",
        )
    (rule,) = parse_rules(proposal.what, "remedy").rules
    rules = dataclasses.replace(recipe.rules, rules=(rule, *recipe.rules.rules))
    return build_entry(dataclasses.replace(recipe, rules=rules), mesh, traced)


def _removed(before: Sequence[ReportedCollective], after: Sequence[ReportedCollective]) -> tuple[int, ...]:
    """Returns which of the arrays that were gathered `before` are not any more."""
    left = collections.Counter((each.source, each.phase) for each in after)
    return tuple(number for number, each in enumerate(before) if not left[each.source, each.phase])


def _cost(report: Report, mesh: MeshShape, prices: Prices) -> CompiledCost:
    """Returns what a compiled step takes of a device."""
    compute, memory = report.compute, report.memory.compiled
    flops = compute.predicted.flops if compute.compiled is None else compute.compiled
    stored = report.memory.predicted.peak_bytes if memory is None else memory.total_bytes
    seconds = flops / prices.flops_per_second + 2 * stored / prices.memory_bytes_per_second
    for (op, axis), total in report.by_op.items():
        # Over a part of an axis, or in another order: taken to go over all of them.
        known = axis if set(axis.split("+")) <= set(mesh.names) else "+".join(mesh.names)
        waiting, rate = prices.ring(op, known, mesh)
        seconds += total.compiled_count * waiting + total.compiled_bytes / rate
    rematerialised = len(report.rematerialised)
    return CompiledCost(seconds, report.total.compiled_bytes, None if memory is None else stored, rematerialised)
