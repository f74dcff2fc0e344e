"""Connects the gradient boundaries of a step with their evaluation: in microbatches (`microbatch.py`), in turns
(`turns.py`), or whole.

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

from splitjax.errors import BatchError, MicrobatchError, SplitjaxError
from splitjax.lower import gradient
from splitjax.lower.microbatch.islands import Request
from splitjax.lower.microbatch.loop import Job
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
from splitjax.lower.products.interpret import BoundaryHook, Layout, Site, evaluate_equation
from splitjax.lower.turns.turns import Mode, Refused, Turned, evaluate_turns, take_turns
from splitjax.plan import Plan
from splitjax.step.arguments import Bound, abstract
from splitjax.trace.flatten import equation_at
from splitjax.trace.graph import Graph

# (boundary equation, its site, number of examples) -> the same equation in another trace
Twin = Callable[[Any, Site, int], Any]


def resized_trace(bound: Bound, trace: Callable[[list[Any]], Any]) -> Callable[[int], Any]:
    """The step traced with other numbers of examples: number -> closed jaxpr.

    `trace(leaves)` traces the step for other flat arguments (`ShapeDtypeStruct`s) and returns its closed jaxpr."""

    @functools.cache
    def resized(num_examples: int) -> Any:
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


def make_twin(graph: Graph, resized: Callable[[int], Any]) -> Twin:
    """Finds a step's boundaries traced with other numbers of examples. `resized`: as `resized_trace` makes it."""

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
    """The evaluator of gradient boundaries: whole, in microbatches, or in turns. `pulled_at`: the tables whose rows a
    boundary at a site is given; None where there are none."""

    def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: Callable) -> list[Any]:
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
        eqn: Any, operands: Sequence[Any], site: Site, forward: Callable, number: int, manual: tuple[str, ...]
    ) -> list[Any]:
        return accumulated_boundary(eqn, operands, site, forward, number, graph, mesh, plan, layout, twin_of, manual)

    return hook


def accumulated_boundary(
    eqn: Any,
    operands: Sequence[Any],
    site: Site,
    forward: Callable,
    number: int,
    graph: Graph,
    mesh: Mesh,
    plan: Plan,
    layout: Layout,
    twin_of: Twin,
    manual: tuple[str, ...],
    runner: Runner | None = None,
) -> list[Any]:
    """A boundary's results from `number` microbatches, in a loop that handles the axes `manual` itself. Raises
    `MicrobatchError` where the loss is no sum over examples. `runner`: how the loops of the places along these axes
    run, if not all alike."""
    twin = twin_of(eqn, site, local_examples(graph.num_examples, number, plan.batch_axes, mesh, manual))
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
        islands=_islands(eqn, site, graph, mesh, plan, layout, twin_of, number, manual),
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
) -> dict[int, Job]:
    """A boundary prepared for workers with so many examples each, by their number. Raises `MicrobatchError`."""
    found = {}
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
            islands=_islands(eqn, site, graph, mesh, plan, layout, twin_of, 1, manual, share),
        )
        if job is not None:
            found[share] = job
    return found


def _has_recurrence(graph: Graph, site: Site) -> bool:
    """Whether a boundary differentiates weights that a recurrence uses in every iteration. Their gradients are added up
    over iterations, and XLA adds them up over workers in each of them, too. In a loop of one microbatch they are
    exchanged once."""
    recurrent = {layer.name for layer in graph.layers if layer.kind == "recurrent"}
    return any(use.trips > 1 and use.layer in recurrent and use.site[: len(site)] == site for use in graph.uses)


def _islands(
    eqn: Any,
    site: Site,
    graph: Graph,
    mesh: Mesh,
    plan: Plan,
    layout: Layout,
    twin_of: Twin,
    number: int,
    manual: tuple[str, ...],
    share: int | None = None,
) -> Request | None:
    """What a loop is told of replicated layers whose examples are over the axes that split other layers; None where
    there are none. `share`: the examples of the place, where places have different numbers of them."""
    prefix = (*site, 0)
    group = tuple(axis for axis in plan.mesh.present(plan.batch_axes) if axis not in manual)
    here = [(one.site[len(prefix) :], one.axes) for one in layout.uses if one.site[: len(prefix)] == prefix]
    crosses = any(one.site[: len(prefix)] == prefix for one in layout.exchanges.values())
    if not group or not crosses or all(axes for _, axes in here):
        return None
    even = lambda: local_examples(graph.num_examples, number, plan.batch_axes, mesh, (*manual, *group))
    twin = twin_of(eqn, site, traced_examples(share // plan.mesh.size(group)) if share else even())
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
    """The batch axes over which every parameter is whole: over them a loop can exchange gradients once. `apart`:
    parameters that a loop does not read."""
    return manual_axes(
        plan.batch_axes, mesh, [leaf.spec for leaf in plan.leaves if leaf.role == "param" and leaf.path not in apart]
    )


def check_turns(kind: str, graph: Graph, mesh: Mesh, plan: Plan, layout: Layout, jaxpr: Any, twin_of: Twin) -> bool:
    """Whether any boundary of the step would run in turns. Raises `Refused` where one cannot, `BatchError` for a batch
    that does not divide into turns."""
    sites = {site[:depth] for site in layout.exchanges for depth in range(1, len(site))}
    found = False
    for site in sorted(sites):
        eqn = equation_at(jaxpr, site)
        if eqn is not None and gradient.is_boundary(eqn):
            turned = turned_boundary(
                eqn, site, graph, mesh, dataclasses.replace(plan, group_comm=kind), layout, twin_of
            )
            if turned is not None:
                turned.check()
                found = True
    return found


def turned_boundary(
    eqn: Any, site: Site, graph: Graph, mesh: Mesh, plan: Plan, layout: Layout, twin_of: Twin
) -> Turned | None:
    """A boundary as it runs in turns; None where nothing crosses in it. Raises `Refused`, `BatchError`."""
    prefix = (*site, 0)
    groups = {
        one.axes
        for one in layout.exchanges.values()
        if one.site[: len(prefix)] == prefix and one.enter in (EXAMPLES, SWAP)
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
    """The dim whose size differs between two traces of one array."""
    differ = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    return differ[0] if differ else None
