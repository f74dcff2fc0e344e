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
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from splitjax import _compat
from splitjax.errors import BatchError, MicrobatchError, SplitjaxError
from splitjax.lower import gradient
from splitjax.lower.microbatch.islands import Request
from splitjax.lower.microbatch.loop import PreparedBoundary
from splitjax.lower.microbatch.microbatch import (
    expand_microbatches,
    local_examples,
    manual_axes,
    prepare,
    traced_examples,
)
from splitjax.lower.microbatch.places import Runner
from splitjax.lower.products.exchange import EXAMPLES, SWAP
from splitjax.lower.products.groups import Copies, Where
from splitjax.lower.products.interpret import BoundaryHook, EvalForward, Layout, Site, evaluate_equation
from splitjax.lower.turns.turns import Mode, Refused, TurnedBoundary, evaluate_turns, take_turns
from splitjax.plan import Plan
from splitjax.step.arguments import Bound, abstract
from splitjax.trace.flatten import equation_at
from splitjax.trace.graph import Graph

# Finds a boundary in a trace with another number of examples: (its equation, its site, the number) -> that equation.
Twin = Callable[[Any, Site, int], Any]


def resized_trace(
    bound: Bound, trace: Callable[[list[Any]], _compat.ClosedJaxpr]
) -> Callable[[int], _compat.ClosedJaxpr]:
    """Returns a function that traces the step with another number of examples: number -> closed jaxpr.

    **Arguments:**

    - `bound`: the call of the step: its arguments, and which of them are the batch.
    - `trace(leaves)`: traces the step for other flat arguments (`ShapeDtypeStruct`s) and returns its closed jaxpr.

    The function remembers what it traced, and raises `MicrobatchError` where the step cannot be traced.
    """

    @functools.cache
    def resized(num_examples: int) -> _compat.ClosedJaxpr:
        leaves = [
            jax.ShapeDtypeStruct((num_examples, *leaf.shape[1:]), leaf.dtype, weak_type=leaf.weak_type)
            if argument.is_batch and leaf.shape
            else leaf
            for leaf, argument in zip(abstract(bound.leaves, bound.signature.avals), bound.arguments, strict=True)
        ]
        try:
            return trace(leaves)
        except SplitjaxError:
            raise
        except Exception as error:
            raise MicrobatchError(
                f"the step cannot be traced with {num_examples} examples: {error}",
                value=num_examples,
                place="microbatches",
                remedy="write the step for any batch size, or use microbatches=None",
            ) from error

    return resized


def make_twin(graph: Graph, resized: Callable[[int], _compat.ClosedJaxpr]) -> Twin:
    """Returns a function that finds a step's boundary in a trace with another number of examples.

    **Arguments:**

    - `graph`: of the step.
    - `resized`: number of examples -> closed jaxpr, as `resized_trace` makes it.

    The function raises `MicrobatchError` where the other trace has no such boundary at the same site.
    """

    def twin_of(eqn: Any, site: Site, num_examples: int) -> Any:
        twin = equation_at(resized(num_examples), site)
        if twin is None or not gradient.is_boundary(twin) or len(twin.invars) != len(eqn.invars):
            raise MicrobatchError(
                f"{eqn.params['label']}: the step is another program for {num_examples} examples than for"
                f" {graph.num_examples}",
                value=num_examples,
                place=eqn.params["label"],
                remedy="do not let the program depend on the batch size, or use microbatches=None",
            )
        return twin

    return twin_of


def boundary_hook(
    graph: Graph,
    mesh: Mesh,
    plan: Plan,
    layout: Layout,
    twin_of: Twin,
    pulled_at: Callable[[Site], Collection[str]] | None = None,
) -> BoundaryHook:
    """Returns the evaluator of gradient boundaries, which runs each whole, in microbatches, or in turns.

    **Arguments:**

    - `graph`, `plan`: of the step. `mesh`: the mesh that the plan is for.
    - `layout`: the plan's constraints and exchanges by site.
    - `twin_of`: finds a boundary in a trace with another number of examples, as `make_twin` makes it.
    - `pulled_at`: maps the site of a boundary to the paths of the tables that it is given rows of; None where there are
      none.
    """

    def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: EvalForward) -> list[Any]:
        if plan.group_comm != "gather":
            turned = turned_boundary(eqn, site, graph, mesh, plan, layout, twin_of)
            if turned is not None:
                return evaluate_turns(turned, operands, layout)
        manual = whole_axes(plan, mesh, () if pulled_at is None else pulled_at(site))
        number = eqn.params["microbatches"]
        if (
            number in (None, 1)
            and graph.num_examples is not None
            and plan.mesh.size(manual) > 1
            and _has_recurrence(graph, site)
        ):
            try:
                return accumulated(eqn, operands, site, forward, 1, manual)
            except MicrobatchError:  # its loss is no sum over examples, say: XLA sums in every iteration
                pass
        if number in (None, 1) or graph.num_examples is None:
            return gradient.expand(eqn.params, operands, forward)
        return accumulated(eqn, operands, site, forward, number, manual)

    def accumulated(
        eqn: Any, operands: Sequence[Any], site: Site, forward: EvalForward, number: int, manual: tuple[str, ...]
    ) -> list[Any]:
        return accumulated_boundary(eqn, operands, site, forward, number, graph, mesh, plan, layout, twin_of, manual)

    return hook


def accumulated_boundary(
    eqn: Any,
    operands: Sequence[Any],
    site: Site,
    forward: EvalForward,
    number: int,
    graph: Graph,
    mesh: Mesh,
    plan: Plan,
    layout: Layout,
    twin_of: Twin,
    manual: tuple[str, ...],
    runner: Runner | None = None,
) -> list[Any]:
    """Evaluates a boundary in microbatches, and returns its results in the order of `gradient.expand`.

    **Arguments:**

    - `eqn`, `operands`, `site`: the boundary's equation, its operands, and where it stands.
    - `forward(jaxpr, operands)`: evaluates the boundary's forward where it runs whole.
    - `number`: of microbatches.
    - `graph`, `mesh`, `plan`, `layout`, `twin_of`: as for `boundary_hook`.
    - `manual`: the mesh axes that the loop handles itself.
    - `runner`: how the loops of the places along these axes run; None where they all run alike.

    Raises `MicrobatchError` where the loss is no sum over examples, or the batch does not divide.
    """
    twin = twin_of(eqn, site, local_examples(_num_examples(graph), number, plan.batch_axes, mesh, manual))
    copies: Copies = {}
    dims = [example_dim(a.aval.shape, b.aval.shape) for a, b in zip(eqn.invars, twin.invars, strict=True)]
    return expand_microbatches(
        eqn.params,
        operands,
        dims,
        gradient.boundary_forward(twin)[0],
        number,
        plan.batch_axes,
        mesh,
        manual_axes=manual,
        bind=lambda inner, values, inside: evaluate_equation(
            layout.without(manual), inner, values, (*site, 0, *inside), copies
        ),
        eval_forward=forward,
        islands=_islands(_Step(graph, mesh, plan, layout, twin_of), eqn, site, number, manual),
        runner=runner,
    )


def uneven_jobs(
    eqn: Any,
    site: Site,
    shares: Collection[int],
    graph: Graph,
    mesh: Mesh,
    plan: Plan,
    layout: Layout,
    twin_of: Twin,
    manual: tuple[str, ...],
) -> dict[int, PreparedBoundary]:
    """Prepares a boundary for workers that have different numbers of examples.

    **Arguments:**

    - `eqn`, `site`: the boundary's equation, and where it stands.
    - `shares`: the numbers of examples that workers have.
    - `graph`, `mesh`, `plan`, `layout`, `twin_of`: as for `boundary_hook`.
    - `manual`: the mesh axes that the loop handles itself.

    Returns the prepared loop by number of examples; a number is left out where no loop is needed. Raises
    `MicrobatchError` where the loss is no sum over examples.
    """
    jobs: dict[int, PreparedBoundary] = {}
    for share in sorted(set(shares)):
        twin = twin_of(eqn, site, traced_examples(share))
        dims = [example_dim(a.aval.shape, b.aval.shape) for a, b in zip(eqn.invars, twin.invars, strict=True)]
        copies: Copies = {}
        bind = lambda inner, values, inside, copies=copies: evaluate_equation(
            layout.without(manual), inner, values, (*site, 0, *inside), copies
        )
        job = prepare(
            eqn.params,
            dims,
            gradient.boundary_forward(twin)[0],
            1,
            plan.batch_axes,
            mesh,
            manual_axes=manual,
            bind=bind,
            share=share,
            islands=_islands(_Step(graph, mesh, plan, layout, twin_of), eqn, site, 1, manual, share),
        )
        if job is not None:
            jobs[share] = job
    return jobs


def _has_recurrence(graph: Graph, site: Site) -> bool:
    """Returns whether a boundary differentiates weights that a recurrence uses each time round its loop. Their
    gradients are added up over the loop, and XLA adds them up over workers each time round, too. In a loop of one
    microbatch they are exchanged once."""
    recurrent = {layer.name for layer in graph.layers if layer.kind == "recurrent"}
    return any(use.trips > 1 and use.layer in recurrent and use.site[: len(site)] == site for use in graph.uses)


@dataclasses.dataclass(frozen=True)
class _Step:
    """Holds what is known of the step around a boundary: the arguments of `boundary_hook`."""

    graph: Graph
    mesh: Mesh
    plan: Plan
    layout: Layout
    twin_of: Twin


def _num_examples(graph: Graph) -> int:
    """Returns the step's number of examples, which it has wherever a boundary runs in a loop."""
    assert graph.num_examples is not None, "a step without examples was evaluated in microbatches"
    return graph.num_examples


def _islands(
    step: _Step, eqn: Any, site: Site, number: int, manual: tuple[str, ...], share: int | None = None
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
    bare = Layout(
        layout.mesh,
        {},
        frozenset(),
        manual=(*manual, *group),
        convolutions=layout.convolutions,
        transforms=layout.transforms,
        rewritten=layout.rewritten,
        guarded=layout.guarded,
    )
    return Request(
        group,
        gradient.boundary_forward(twin)[0],
        tuple(at for at, axes in here if axes),
        tuple(at for at, axes in here if not axes),
        lambda inner, values, inside: evaluate_equation(bare, inner, values, (*prefix, *inside), {}),
        Where(mesh, manual),
    )


def whole_axes(plan: Plan, mesh: Mesh, apart: Collection[str] = ()) -> tuple[str, ...]:
    """Returns the batch axes over which every parameter is whole: over them a loop can exchange gradients once.

    `plan` is the step's, for `mesh`; `apart` are the paths of parameters that a loop does not read.
    """
    return manual_axes(
        plan.batch_axes, mesh, [leaf.spec for leaf in plan.leaves if leaf.role == "param" and leaf.path not in apart]
    )


def check_turns(
    kind: str, graph: Graph, mesh: Mesh, plan: Plan, layout: Layout, jaxpr: _compat.ClosedJaxpr, twin_of: Twin
) -> bool:
    """Returns whether any boundary of the step would run in turns under a kind of group communication.

    **Arguments:**

    - `kind`: the `group_comm` that is asked for, whatever the plan has.
    - `graph`, `mesh`, `plan`, `layout`, `twin_of`: as for `boundary_hook`.
    - `jaxpr`: of the step, in which the boundaries are found.

    Raises `Refused` where a boundary cannot run so, `BatchError` for a batch that does not divide into turns.
    """
    sites = {site[:depth] for site in layout.exchanges for depth in range(1, len(site))}
    is_turned = False
    for site in sorted(sites):
        eqn = equation_at(jaxpr, site)
        if eqn is not None and gradient.is_boundary(eqn):
            turned = turned_boundary(
                eqn, site, graph, mesh, dataclasses.replace(plan, group_comm=kind), layout, twin_of
            )
            if turned is not None:
                turned.check()
                is_turned = True
    return is_turned


def turned_boundary(
    eqn: Any, site: Site, graph: Graph, mesh: Mesh, plan: Plan, layout: Layout, twin_of: Twin
) -> TurnedBoundary | None:
    """Returns a boundary as it runs in turns; None where nothing crosses in it.

    **Arguments:**

    - `eqn`, `site`: the boundary's equation, and where it stands.
    - `graph`, `mesh`, `plan`, `layout`, `twin_of`: as for `boundary_hook`.

    Raises `Refused` where the boundary cannot run in turns, `BatchError` for a batch that does not divide into them.
    """
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
        twin = twin_of(eqn, site, size)
    except MicrobatchError as error:
        raise Refused(error.message) from error
    return take_turns(eqn, twin, site, layout, mode)


def example_dim(whole: Sequence[int], part: Sequence[int]) -> int | None:
    """Returns the dim whose size differs between two traces of an array, of shapes `whole` and `part`; None where the
    shapes are the same."""
    differ = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    return differ[0] if differ else None
