"""Connects the gradient boundaries of a step with their evaluation: in microbatches (`microbatch.py`), in turns
(`turns.py`), or whole.

A step's graph, plan and layout come in; a hook comes out that the interpreter (`products/interpret.py`) calls for every
gradient boundary. It exists so that the ways to run a boundary do not know of each other, nor the interpreter of them.

For either loop the step is traced a second time with as many examples as one microbatch of one worker has; the boundary
at the same site of that trace is the local forward, and operand dims whose sizes differ between the traces are the
example dims.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

from jax.sharding import Mesh

from splitjax import _compat
from splitjax.errors import BatchError, MicrobatchError
from splitjax.lower.boundary import Twin, boundary_forward, expand, is_boundary
from splitjax.lower.microbatch.islands import Request
from splitjax.lower.microbatch.loop import PreparedBoundary
from splitjax.lower.microbatch.microbatch import (
    Accumulation,
    expand_microbatches,
    local_examples,
    manual_axes,
    prepare,
    traced_examples,
)
from splitjax.lower.microbatch.places import Runner
from splitjax.lower.products.exchange import EXAMPLES, SWAP
from splitjax.lower.products.groups import Copies, MeshContext
from splitjax.lower.products.interpret import BoundaryHook, EvalForward, evaluate_equation
from splitjax.lower.products.layout import StepLayout
from splitjax.lower.turns.turns import Mode, Refused, TurnedBoundary, evaluate_turns, take_turns
from splitjax.plan import Plan
from splitjax.primitives.walk import Site, equation_at
from splitjax.trace.graph import Graph


def make_twin(graph: Graph, resized: Callable[[int], _compat.ClosedJaxpr]) -> Twin:
    """Returns a function that finds a step's boundary in a trace with another number of examples.

    **Arguments:**

    - `graph`: of the step.
    - `resized`: number of examples -> closed jaxpr, as `step.traced.Traced.resized`.

    The function raises `MicrobatchError` where the other trace has no such boundary at the same site.
    """

    def twin_of(eqn: Any, site: Site, num_examples: int) -> Any:
        twin = equation_at(resized(num_examples), site)
        if twin is None or not is_boundary(twin) or len(twin.invars) != len(eqn.invars):
            raise MicrobatchError(
                f"{eqn.params['label']}: the step is another program for {num_examples} examples than for"
                f" {graph.num_examples}",
                value=num_examples,
                place=eqn.params["label"],
                remedy="do not let the program depend on the batch size, or use microbatches=None",
            )
        return twin

    return twin_of


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredStep:
    """Holds what is known of the step around a boundary: what every way to run a boundary asks.

    - `graph`, `plan`: of the step. `mesh`: the mesh that the plan is for.
    - `layout`: the plan's constraints and exchanges by site.
    - `twin_of`: finds a boundary in a trace with another number of examples, as `make_twin` makes it.
    """

    graph: Graph
    mesh: Mesh
    plan: Plan
    layout: StepLayout
    twin_of: Twin


@dataclasses.dataclass(frozen=True, eq=False)
class BoundaryCall:
    """Holds a boundary that is to be evaluated, as a `BoundaryHook` is given it.

    - `eqn`: its equation. `operands`: the values of its operands. `site`: where it stands in the step.
    - `forward(jaxpr, operands)`: evaluates its forward where it runs whole.
    """

    eqn: Any
    operands: Sequence[Any]
    site: Site
    forward: EvalForward


def boundary_hook(step: LoweredStep, pulled_at: Callable[[Site], Collection[str]] | None = None) -> BoundaryHook:
    """Returns the evaluator of gradient boundaries, which runs each whole, in microbatches, or in turns.

    **Arguments:**

    - `step`: the step around the boundaries.
    - `pulled_at`: maps the site of a boundary to the paths of the tables that it is given rows of; None where there are
      none.
    """

    graph, plan, mesh = step.graph, step.plan, step.mesh

    def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: EvalForward) -> list[Any]:
        call = BoundaryCall(eqn, operands, site, forward)
        if plan.group_comm != "gather":
            turned = turned_boundary(step, eqn, site)
            if turned is not None:
                return evaluate_turns(turned, operands, step.layout)
        manual = whole_axes(plan, mesh, () if pulled_at is None else pulled_at(site))
        number = eqn.params["microbatches"]
        if (
            number in (None, 1)
            and graph.num_examples is not None
            and plan.mesh.size(manual) > 1
            and _has_recurrence(graph, site)
        ):
            try:
                return accumulated_boundary(step, call, 1, manual)
            except MicrobatchError:  # its loss is no sum over examples, say: XLA sums in every iteration
                pass
        if number in (None, 1) or graph.num_examples is None:
            return expand(eqn.params, operands, forward)
        return accumulated_boundary(step, call, number, manual)

    return hook


def accumulated_boundary(
    step: LoweredStep, call: BoundaryCall, number: int, manual: tuple[str, ...], runner: Runner | None = None
) -> list[Any]:
    """Evaluates a boundary in microbatches, and returns its results in the order of `boundary.expand`.

    **Arguments:**

    - `step`, `call`: the step, and the boundary in it.
    - `number`: of microbatches.
    - `manual`: the mesh axes that the loop handles itself.
    - `runner`: how the loops of the places along these axes run; None where they all run alike.

    Raises `MicrobatchError` where the loss is no sum over examples, or the batch does not divide.
    """
    size = local_examples(_num_examples(step.graph), number, step.plan.batch_axes, step.mesh, manual)
    loop = _accumulation(step, call.eqn, call.site, step.twin_of(call.eqn, call.site, size), number, manual)
    return expand_microbatches(call.eqn.params, call.operands, loop, eval_forward=call.forward, runner=runner)


def uneven_jobs(
    step: LoweredStep, eqn: Any, site: Site, shares: Collection[int], manual: tuple[str, ...]
) -> dict[int, PreparedBoundary]:
    """Prepares a boundary for workers that have different numbers of examples.

    **Arguments:**

    - `step`: the step around the boundary. `eqn`, `site`: the boundary's equation, and where it stands.
    - `shares`: the numbers of examples that workers have.
    - `manual`: the mesh axes that the loop handles itself.

    Returns the prepared loop by number of examples; a number is left out where no loop is needed. Raises
    `MicrobatchError` where the loss is no sum over examples.
    """
    jobs: dict[int, PreparedBoundary] = {}
    for share in sorted(set(shares)):
        twin = step.twin_of(eqn, site, traced_examples(share))
        job = prepare(eqn.params, _accumulation(step, eqn, site, twin, 1, manual, share))
        if job is not None:
            jobs[share] = job
    return jobs


def _accumulation(
    step: LoweredStep, eqn: Any, site: Site, twin: Any, number: int, manual: tuple[str, ...], share: int | None = None
) -> Accumulation:
    """Returns how the boundary `eqn` at `site` is evaluated in `number` microbatches. `twin`: its equation traced with
    the examples of one. `share`: the examples of the place, where places have different numbers of them."""
    copies: Copies = {}
    return Accumulation(
        [example_dim(a.aval.shape, b.aval.shape) for a, b in zip(eqn.invars, twin.invars, strict=True)],
        boundary_forward(twin)[0],
        number,
        step.plan.batch_axes,
        step.mesh,
        manual_axes=manual,
        bind=lambda inner, values, inside: evaluate_equation(
            step.layout.without(manual), inner, values, (*site, 0, *inside), copies
        ),
        islands=_islands(step, eqn, site, number, manual, share),
        share=share,
    )


def _has_recurrence(graph: Graph, site: Site) -> bool:
    """Returns whether a boundary differentiates weights that a recurrence uses each time round its loop. Their
    gradients are added up over the loop, and XLA adds them up over workers each time round, too. In a loop of one
    microbatch they are exchanged once."""
    recurrent = {layer.name for layer in graph.layers if layer.kind == "recurrent"}
    return any(use.trips > 1 and use.layer in recurrent and use.site[: len(site)] == site for use in graph.uses)


def _num_examples(graph: Graph) -> int:
    """Returns the step's number of examples, which it has wherever a boundary runs in a loop."""
    assert graph.num_examples is not None, "a step without examples was evaluated in microbatches"
    return graph.num_examples


def _islands(
    step: LoweredStep, eqn: Any, site: Site, number: int, manual: tuple[str, ...], share: int | None = None
) -> Request | None:
    """Returns what a loop is told of replicated layers whose examples are over the axes that split other layers; None
    where there are none. `share`: the examples of the place, where places have different numbers of them."""
    mesh, plan, layout = step.mesh, step.plan, step.layout
    prefix = (*site, 0)
    group = tuple(axis for axis in plan.mesh.present(plan.batch_axes) if axis not in manual)
    here = [(use.site[len(prefix) :], use.axes) for use in layout.uses if use.site[: len(prefix)] == prefix]
    crosses = any(exchange.site[: len(prefix)] == prefix for exchange in layout.exchanges.values())
    if not group or not crosses or all(axes for _, axes in here):
        return None
    even = lambda: local_examples(_num_examples(step.graph), number, plan.batch_axes, mesh, (*manual, *group))
    twin = step.twin_of(eqn, site, traced_examples(share // plan.mesh.size(group)) if share else even())
    # Nothing is shared inside an island.
    bare = StepLayout(
        layout.mesh,
        {},
        frozenset(),
        manual=(*manual, *group),
        names=layout.names,
        convolutions=layout.convolutions,
        transforms=layout.transforms,
        rewritten=layout.rewritten,
        guarded=layout.guarded,
    )
    return Request(
        group,
        boundary_forward(twin)[0],
        tuple(at for at, axes in here if axes),
        tuple(at for at, axes in here if not axes),
        lambda inner, values, inside: evaluate_equation(bare, inner, values, (*prefix, *inside), {}),
        MeshContext(mesh, manual),
    )


def whole_axes(plan: Plan, mesh: Mesh, apart: Collection[str] = ()) -> tuple[str, ...]:
    """Returns the batch axes over which every parameter is whole: over them a loop can exchange gradients once.

    `plan` is the step's, for `mesh`; `apart` are the paths of parameters that a loop does not read.
    """
    return manual_axes(
        plan.batch_axes, mesh, [leaf.spec for leaf in plan.leaves if leaf.role == "param" and leaf.path not in apart]
    )


def check_turns(kind: str, step: LoweredStep, jaxpr: _compat.ClosedJaxpr) -> bool:
    """Returns whether any boundary of the step would run in turns under a kind of group communication.

    **Arguments:**

    - `kind`: the `group_comm` that is asked for, whatever the plan has.
    - `step`: the step.
    - `jaxpr`: of the step, in which the boundaries are found.

    Raises `Refused` where a boundary cannot run so, `BatchError` for a batch that does not divide into turns.
    """
    asked = dataclasses.replace(step, plan=dataclasses.replace(step.plan, group_comm=kind))
    sites = {site[:depth] for site in step.layout.exchanges for depth in range(1, len(site))}
    is_turned = False
    for site in sorted(sites):
        eqn = equation_at(jaxpr, site)
        if eqn is not None and is_boundary(eqn):
            turned = turned_boundary(asked, eqn, site)
            if turned is not None:
                turned.check()
                is_turned = True
    return is_turned


def turned_boundary(step: LoweredStep, eqn: Any, site: Site) -> TurnedBoundary | None:
    """Returns a boundary as it runs in turns; None where nothing crosses in it.

    **Arguments:**

    - `step`: the step around the boundary. `eqn`, `site`: the boundary's equation, and where it stands.

    Raises `Refused` where the boundary cannot run in turns, `BatchError` for a batch that does not divide into them.
    """
    graph, mesh, plan, layout = step.graph, step.mesh, step.plan, step.layout
    prefix = (*site, 0)
    groups = {
        exchange.axes
        for exchange in layout.exchanges.values()
        if exchange.site[: len(prefix)] == prefix and exchange.enter in (EXAMPLES, SWAP)
    }
    if not groups or graph.num_examples is None:
        return None
    mode = Mode(plan.group_comm, plan.batch_axes, whole_axes(plan, mesh), mesh, graph.num_examples)
    group = min(groups)
    num_turns, slice_axes = plan.mesh.size(group), mode.slice_axes(group)
    unit = num_turns * plan.mesh.size(slice_axes)
    if graph.num_examples % unit:
        below, above = graph.num_examples // unit * unit, -(-graph.num_examples // unit) * unit
        raise BatchError(
            f"{graph.num_examples} examples do not divide into {num_turns} turns on {plan.mesh.size(slice_axes)}"
            " workers",
            value=graph.num_examples,
            place=f"group_comm={plan.group_comm!r}",
            remedy=f'use {f"{below} or {above}" if below else above} examples, or group_comm="gather"',
        )
    try:
        size = local_examples(graph.num_examples, num_turns, slice_axes, mesh, mode.manual)
        twin = step.twin_of(eqn, site, size)
    except MicrobatchError as error:
        raise Refused(error.message) from error
    return take_turns(eqn, twin, site, layout, mode)


def example_dim(whole: Sequence[int], part: Sequence[int]) -> int | None:
    """Returns the dim whose size differs between two traces of an array, of shapes `whole` and `part`; None where the
    shapes are the same."""
    differ = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    return differ[0] if differ else None
