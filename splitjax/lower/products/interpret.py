"""Evaluates the traced step equation by equation, with the plan's constraints and exchanges at their sites.

The step's jaxpr and a `StepLayout` (what the plan decides, by site) come in. What comes out is an ordinary traceable
function over the step's flat arguments, which `parallelize` compiles with `jax.jit` and the plan's shardings. Equations
without constraints are bound as they are; a call is rebuilt (scan as scan, remat as remat) only where a constraint lies
inside it, so that derivative rules, policies and source lines survive.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from splitjax import _compat
from splitjax.lower.products.experts import arrive, depart
from splitjax.lower.products.groups import Copies, evaluate_product, fits, scope
from splitjax.lower.products.local_convolution import evaluate_local
from splitjax.lower.products.local_deal import evaluate_copy, evaluate_deal
from splitjax.lower.products.local_kernel import evaluate_grid, evaluate_kernel
from splitjax.lower.products.local_loop import evaluate_loop
from splitjax.lower.products.local_transform import evaluate_transform
from splitjax.lower.products.local_turns import evaluate_turns
from splitjax.lower.products.rebuilding import REBUILD
from splitjax.lower.products.rewrites import rewritten
from splitjax.lower.products.row_values import Rows
from splitjax.lower.products.saved_inputs import evaluate_saved
from splitjax.lower.products.scattering import evaluate_scatter, evaluate_summed
from splitjax.mesh import MeshShape
from splitjax.planning.sites.layout import SiteDecisions, SiteLayout, StepLayout, named_sharding
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.planning.sites.remedies import whole_inside
from splitjax.planning.sites.spreads import Summed
from splitjax.planning.ways import EvalForward
from splitjax.primitives import interpreter
from splitjax.primitives.calls import BOUNDARY, CALLS, CallKind, call_body, names
from splitjax.primitives.dealt import COPY, DEAL
from splitjax.primitives.foreign.grids import PALLAS
from splitjax.primitives.foreign.wrapped import KERNEL
from splitjax.primitives.interpreter import AnyJaxpr, RunBody, Selective
from splitjax.primitives.walk import Site, holds_boundary
from splitjax.step.boundary import expand
from splitjax.step.custom_rules import custom_call, jvp_of, vjp_of

# What is looked at wherever it stands: calls that are rebuilt where something lies inside of them, and boundaries.
_REBUILT = {name: kind for kind in REBUILD for name in names(kind)}
_LOOKED_AT = frozenset({*_REBUILT, BOUNDARY})
# Where there are rows of tables, these besides: what has such an operand, and what makes rows of something else.
_AMONG_ROWS = CALLS | {"broadcast_in_dim"}
# Evaluates a gradient boundary, in microbatches or turns if need be: (equation, operands, site, evaluator of its
# forward) -> results.
BoundaryHook = Callable[[Any, Sequence[Any], Site, EvalForward], list[Any]]
# Evaluates an equation outside of boundaries otherwise: (equation, operands, evaluator of a call's body) -> results, or
# None.
EquationHook = Callable[[Any, list[Any], EvalForward], list[Any] | None]


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Holds what a step's evaluation leaves to others; with None an equation is evaluated as it stands.

    - `boundary`: evaluates gradient boundaries.
    - `equation`: evaluates equations outside of them, as far as it wants to.
    """

    boundary: BoundaryHook | None = None
    equation: EquationHook | None = None


def evaluate_equation(layout: StepLayout, eqn: Any, operands: Sequence[Any], site: Site, copies: Copies) -> list[Any]:
    """Evaluates an equation of a boundary's forward with what the layout has at its site and inside of it.

    `eqn` stands at `site`, and `operands` are its values; `copies` remembers gathered activations for the equations of
    the same forward. Returns the equation's results.
    """
    if eqn.primitive.name not in _LOOKED_AT and site not in layout.sites.decided:
        return _compat.bind_equation(eqn, operands)
    with _named(layout, site):
        return _placed(layout, eqn, list(operands), site, None, copies)


def evaluate(
    layout: StepLayout, jaxpr: _compat.ClosedJaxpr, operands: Sequence[Any], hooks: Hooks | None = None
) -> list[Any]:
    """Evaluates the closed jaxpr `jaxpr` on flat `operands` with what `layout` has, and returns its flat results.

    `hooks.boundary` evaluates gradient boundaries; without it they run whole, which gives the same numbers.
    """
    return _run(layout, jaxpr, operands, (), hooks, None)


def evaluate_part(
    layout: StepLayout,
    jaxpr: AnyJaxpr,
    operands: Sequence[Any],
    prefix: Site,
    sites: Sequence[Site] | None,
    copies: Copies,
) -> list[Any]:
    """Evaluates a part of a boundary's forward, and returns its flat results.

    **Arguments:**

    - `layout`: as for the whole step.
    - `jaxpr`: holds the part's equations; `operands`: its flat operands.
    - `prefix`: the site of the boundary's body, from which `sites` count.
    - `sites`: of the equations of `jaxpr` in the whole forward, in order; None where `jaxpr` is all of it.
    - `copies`: remembers gathered activations for the parts of the same forward.
    """
    return _run(layout, jaxpr, operands, prefix, None, copies, sites)


def _run(
    layout: StepLayout,
    jaxpr: AnyJaxpr,
    operands: Sequence[Any],
    prefix: Site,
    hooks: Hooks | None,
    copies: Copies | None,
    sites: Sequence[Site] | None = None,
) -> list[Any]:
    """Evaluates a jaxpr whose equations stand behind `prefix`, or at `sites` behind it. `copies`: None outside of
    boundaries."""

    def handle(eqn: Any, values: list[Any], site: Site, run: RunBody) -> list[Any]:
        with _named(layout, site):
            return _hooked(layout, eqn, values, site, hooks, copies)

    if copies is None and hooks is not None and hooks.equation is not None:
        selective = Selective(handle, _AMONG_ROWS, layout.sites.decided, Rows)
    else:
        selective = Selective(handle, _LOOKED_AT, layout.sites.decided)
    return interpreter.evaluate(jaxpr, operands, selective, prefix, sites)


def _named(layout: StepLayout, site: Site) -> contextlib.AbstractContextManager[object]:
    """Returns a context manager under which a product carries the name of its layer into the compiled step, wherever it
    is evaluated: reports and profiles know it again by that. The user's lines do not tell, as JAX traces some functions
    once in a process and keeps the lines of the first call."""
    layer = layout.sites.names.get(site)
    return contextlib.nullcontext() if layer is None else jax.named_scope(scope("layer", layer))


def _hooked(
    layout: StepLayout, eqn: Any, values: list[Any], site: Site, hooks: Hooks | None, copies: Copies | None
) -> list[Any]:
    """Evaluates an equation, by the hook for equations where that wants it."""
    if copies is None and hooks is not None and hooks.equation is not None:
        results = hooks.equation(
            eqn, values, lambda body, operands: _run(layout, body, operands, (*site, 0), hooks, None)
        )
        if results is not None:
            return results
    return _placed(layout, eqn, values, site, hooks, copies)


def _placed(
    layout: StepLayout, eqn: Any, values: list[Any], site: Site, hooks: Hooks | None, copies: Copies | None
) -> list[Any]:
    """Evaluates an equation. Inside a boundary (`copies` given) tokens travel to their experts, and what these make
    travels back."""
    if copies is not None:
        travel = layout.sites.travels.get(site)
        if travel is not None:
            values[travel.data] = arrive(travel, values[travel.data], layout.where, copies)
            results = _product(layout, eqn, values, site, hooks, copies)
            return [depart(travel, results[0], layout.where)]
    return _product(layout, eqn, values, site, hooks, copies)


def _product(
    layout: StepLayout, eqn: Any, values: list[Any], site: Site, hooks: Hooks | None, copies: Copies | None
) -> list[Any]:
    """Evaluates an equation whose operands lie where it wants them. Inside a boundary (`copies` given) products with
    split weights are evaluated as exchanges."""
    if copies is not None:
        exchange, summed = layout.sites.exchanges.get(site), layout.sites.sums.get(site)
        if exchange is not None and fits(exchange, eqn):
            return evaluate_product(exchange, eqn, values, layout.where, copies)
        # where a surrounding shard_map handles axes, gradients are summed once, after it
        if summed is not None and not layout.manual:
            if isinstance(summed, Summed):
                values = _pin(layout, site, values, results=False)
                return _pin(layout, site, evaluate_summed(summed, eqn, values, layout.where), results=True)
            if summed.fits(eqn):
                convolution = layout.sites.convolutions.get(site)
                return evaluate_scatter(summed, eqn, values, layout.where, layout.rematerialised, convolution)
    values = _pin(layout, site, values, results=False)
    results = rewritten(eqn, values) if site in layout.sites.rewritten else None
    if site in layout.sites.guarded:
        results = _guarded(layout, eqn, values)
    if results is None and site in layout.sites.convolutions and eqn.primitive.name == "conv_general_dilated":
        results = evaluate_local(layout.sites.convolutions[site], eqn, values, layout.where)
    if results is None and site in layout.sites.transforms and eqn.primitive.name == "fft":
        results = evaluate_transform(layout.sites.transforms[site], eqn, values, layout.where)
    if results is None and site in layout.sites.kernels and eqn.primitive.name in (KERNEL, PALLAS):
        run = evaluate_kernel if eqn.primitive.name == KERNEL else evaluate_grid
        results = run(layout.sites.kernels[site], eqn, values, layout.where.here())
    if results is None and site in layout.sites.deals and eqn.primitive.name == DEAL:
        results = evaluate_deal(layout.sites.deals[site], eqn, values, layout.where.here())
    if results is None and site in layout.sites.deals and eqn.primitive.name == COPY:
        results = evaluate_copy(layout.sites.deals[site], eqn, values, layout.where.here())
    if results is None and site in layout.sites.turns and eqn.primitive.name == "reshape":
        results = evaluate_turns(layout.sites.turns[site], eqn, values, layout.where.here())
    if results is None:
        results = _equation(layout, eqn, values, site, hooks, copies)
    return _pin(layout, site, results, results=True)


def _guarded(layout: StepLayout, eqn: Any, values: list[Any]) -> list[Any]:
    """Evaluates a call with a custom derivative rule, in whose body and rule what XLA's partitioner gets wrong runs
    whole."""

    def run(jaxpr: AnyJaxpr, operands: Sequence[Any]) -> list[Any]:
        constraints, rewrites = whole_inside(jaxpr, MeshShape.of(layout.mesh))
        inner = StepLayout(layout.where, SiteLayout.of(constraints, SiteDecisions(rewrites=rewrites)))
        return _run(
            inner if set(layout.manual) < set(layout.mesh.axis_names) else StepLayout(MeshContext(layout.mesh)),
            jaxpr,
            operands,
            (),
            None,
            None,
        )

    body = call_body(eqn)
    assert body is not None, "a call with a custom derivative rule that has no body was to be guarded"
    rule = jvp_of(eqn) if eqn.primitive.name == "custom_jvp_call" else vjp_of(eqn)
    return list(custom_call(eqn, lambda *operands: run(body, operands), run, rule)(*values))


def _pin(layout: StepLayout, site: Site, values: list[Any], results: bool) -> list[Any]:
    """Puts the layout's constraints on an equation's operands, or with `results` on its results; changes `values`."""
    for constraint in layout.sites.by_site.get(site, ()):
        position = -1 - constraint.operand if results else constraint.operand
        # rows of a table have a layout of their own
        if (constraint.operand < 0) == results and not isinstance(values[position], Rows):
            mesh = jax.sharding.get_abstract_mesh() if layout.where.here().manual else layout.mesh
            sharding = named_sharding(mesh, constraint.spec)
            values[position] = jax.lax.with_sharding_constraint(values[position], sharding)
    return values


def _equation(
    layout: StepLayout, eqn: Any, values: list[Any], site: Site, hooks: Hooks | None, copies: Copies | None
) -> list[Any]:
    """Evaluates an equation of which the layout says nothing: a boundary by its hook, a call anew where something lies
    inside it, and all else as it is."""
    if eqn.primitive.name == BOUNDARY:

        def forward(jaxpr: AnyJaxpr, operands: Sequence[Any]) -> list[Any]:
            return _run(layout, jaxpr, operands, (*site, 0), hooks, {})

        if hooks is not None and hooks.boundary is not None:
            return hooks.boundary(eqn, values, site, forward)
        return expand(eqn.params, values, forward)
    loop = layout.sites.loops.get(site)
    if loop is not None and not layout.where.here().manual:
        own = dataclasses.replace(layout, sites=dataclasses.replace(layout.sites, loops={})).without(loop.axes)
        alone = lambda parts: _equation(own, loop.eqn, parts, site, hooks, {})
        return evaluate_loop(loop, values, layout.where.here(), alone)
    kind = _REBUILT.get(eqn.primitive.name)
    if kind is not None and (site in layout.sites.inside or site in layout.sites.saved or holds_boundary(eqn)):
        inner = dataclasses.replace(layout, rematerialised=True) if kind is CallKind.REMAT else layout
        # What is gathered in the body of a loop or a branch is a value of that body alone.
        own = lambda: dict(copies) if copies is not None and kind is not CallKind.INLINE else copies
        run = lambda jaxpr, body, operands: _run(inner, jaxpr, operands, (*site, body), hooks, own())
        if site in layout.sites.saved:
            again = lambda operands: run(eqn.params["jaxpr"], 0, operands)
            results = evaluate_saved(layout.sites.saved[site], eqn, values, layout.where.here(), again)
            if results is not None:
                return results
        return REBUILD[kind](run, eqn, values)
    return _compat.bind_equation(eqn, values)
