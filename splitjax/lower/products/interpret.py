"""Evaluates the traced step equation by equation, with the plan's constraints and exchanges at their sites.

The step's jaxpr and a `Layout` (what the plan decides, by site) come in. What comes out is an ordinary traceable
function over the step's flat arguments, which `parallelize` compiles with `jax.jit` and the plan's shardings. Equations
without constraints are bound as they are; a call is rebuilt (scan as scan, remat as remat) only where a constraint lies
inside it, so that derivative rules, policies and source lines survive.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.cost.convolutions import LocalConvolution
from splitjax.cost.transforms import LocalTransform
from splitjax.lower import gradient
from splitjax.lower.products.custom_rules import custom_call, jvp_of, vjp_of
from splitjax.lower.products.exchange import Exchange, WeightUse
from splitjax.lower.products.groups import Copies, Where, evaluate_product, fits, scope
from splitjax.lower.products.local_convolution import evaluate_local
from splitjax.lower.products.local_transform import evaluate_transform
from splitjax.lower.products.remedies import whole_inside
from splitjax.lower.products.rewrites import rewritten
from splitjax.lower.products.row_values import Rows
from splitjax.lower.products.scatter import Scatter, Summed
from splitjax.lower.products.scattering import evaluate_scatter, evaluate_summed
from splitjax.mesh import MeshShape
from splitjax.plan import Constraint, Spec, SpecEntry
from splitjax.trace.flatten import call_body

Site = tuple[int, ...]
AnyJaxpr = _compat.ClosedJaxpr | _compat.Jaxpr  # a call holds a body of either kind
EvalForward = Callable[
    [AnyJaxpr, Sequence[Any]], list[Any]
]  # evaluates a jaxpr on operands, with the layout's constraints
# Evaluates a gradient boundary, in microbatches or turns if need be: (equation, operands, site, evaluator of its
# forward) -> results.
BoundaryHook = Callable[[Any, Sequence[Any], Site, EvalForward], list[Any]]
# Evaluates an equation outside of boundaries otherwise: (equation, operands, evaluator of a call's body) -> results, or
# None.
EquationHook = Callable[[Any, list[Any], EvalForward], list[Any] | None]
# Evaluates a body of a call: (jaxpr, which of the call's bodies it is, operands) -> results.
_RunBody = Callable[[AnyJaxpr, int, Sequence[Any]], list[Any]]
# Evaluates a call anew, with its bodies evaluated otherwise: (evaluator, equation, operands) -> results.
_Rebuild = Callable[[_RunBody, Any, list[Any]], list[Any]]


@dataclasses.dataclass(frozen=True)
class Hooks:
    """Holds what a step's evaluation leaves to others; with None an equation is evaluated as it stands.

    - `boundary`: evaluates gradient boundaries.
    - `equation`: evaluates equations outside of them, as far as it wants to.
    """

    boundary: BoundaryHook | None = None
    equation: EquationHook | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """Holds by site what a plan decides about a step's operations, on a mesh.

    - `mesh`: of the step.
    - `by_site`: the constraints.
    - `inside`: every site that has something (or a boundary) further in.
    - `exchanges`: of products with split weights, inside of boundaries.
    - `sums`: products, biases and scales whose gradients are summed into parts, inside of boundaries.
    - `uses`: the uses of weights inside of boundaries, in program order.
    - `manual`: the axes of a surrounding `shard_map`: shardings refer to the mesh in context.
    - `names`: the layers of products, for profiles.
    - `convolutions`: those that XLA is not asked to partition.
    - `transforms`: Fourier transforms that it is not asked to partition.
    - `rewritten`: operations that are evaluated as others of the same meaning.
    - `guarded`: calls with custom derivative rules, in which operations that XLA gets wrong run whole.
    - `rematerialised`: whether this is the inside of a function that the backward pass runs again.
    """

    mesh: Mesh
    by_site: Mapping[Site, tuple[Constraint, ...]]
    inside: frozenset[Site]
    exchanges: Mapping[Site, Exchange] = dataclasses.field(default_factory=dict)
    sums: Mapping[Site, Scatter | Summed] = dataclasses.field(default_factory=dict)
    uses: tuple[WeightUse, ...] = ()
    manual: tuple[str, ...] = ()
    names: Mapping[Site, str] = dataclasses.field(default_factory=dict)
    convolutions: Mapping[Site, LocalConvolution] = dataclasses.field(default_factory=dict)
    transforms: Mapping[Site, LocalTransform] = dataclasses.field(default_factory=dict)
    rewritten: frozenset[Site] = frozenset()
    guarded: frozenset[Site] = frozenset()
    rematerialised: bool = False

    @classmethod
    def of(
        cls,
        mesh: Mesh,
        constraints: Sequence[Constraint],
        explicit: Sequence[Exchange | Scatter | Summed] = (),
        uses: Sequence[WeightUse] = (),
        names: Mapping[Site, str] | None = None,
        convolutions: Sequence[LocalConvolution] = (),
        rewrites: Collection[Site] = (),
        guarded: Collection[Site] = (),
        transforms: Sequence[LocalTransform] = (),
    ) -> Layout:
        """Makes a layout of what was decided, in any order.

        **Arguments:**

        - `mesh`: of the step. `constraints`: the plan's.
        - `explicit`: the products whose collectives are written out.
        - `uses`: the uses of weights inside of boundaries, in program order.
        - `names`: by site, as the layout has them; None for none.
        - `convolutions`, `transforms`: those that are evaluated device by device.
        - `rewrites`: sites of operations that are evaluated as others. `guarded`: sites of calls with custom rules.
        """
        by_site: dict[Site, list[Constraint]] = collections.defaultdict(list)
        for constraint in constraints:
            by_site[constraint.site].append(constraint)
        decided = (decision.site for decision in (*explicit, *convolutions, *transforms))
        sites = {*by_site, *rewrites, *guarded, *decided}
        inside = frozenset(site[:depth] for site in sites for depth in range(1, len(site)))
        pinned = {site: tuple(here) for site, here in by_site.items()}
        exchanges = {product.site: product for product in explicit if isinstance(product, Exchange)}
        sums = {product.site: product for product in explicit if not isinstance(product, Exchange)}
        local = {convolution.site: convolution for convolution in convolutions}
        return cls(
            mesh,
            pinned,
            inside,
            exchanges,
            sums,
            tuple(uses),
            names=dict(names or {}),
            convolutions=local,
            transforms={transform.site: transform for transform in transforms},
            rewritten=frozenset(rewrites),
            guarded=frozenset(guarded),
        )

    def without(self, manual: Sequence[str]) -> Layout:
        """Returns the same layout for the inside of a `shard_map` over the axes `manual`, which do not occur in its
        constraints."""
        if not manual:
            return self
        if set(manual) >= set(self.mesh.axis_names):
            return dataclasses.replace(self, by_site={}, manual=tuple(manual))

        def keep(entry: SpecEntry) -> SpecEntry:
            if isinstance(entry, tuple):
                left = tuple(axis for axis in entry if axis not in manual)
                return left[0] if len(left) == 1 else left or None
            return None if entry in manual else entry

        stripped = {
            site: tuple(
                dataclasses.replace(constraint, spec=tuple(keep(entry) for entry in constraint.spec))
                for constraint in here
            )
            for site, here in self.by_site.items()
        }
        return dataclasses.replace(self, by_site=stripped, manual=tuple(manual))


def evaluate_equation(layout: Layout, eqn: Any, operands: Sequence[Any], site: Site, copies: Copies) -> list[Any]:
    """Evaluates an equation of a boundary's forward with what the layout has at its site and inside of it.

    `eqn` stands at `site`, and `operands` are its values; `copies` remembers gathered activations for the equations of
    the same forward. Returns the equation's results.
    """
    return _placed(layout, eqn, list(operands), site, None, copies)


def named_sharding(mesh: Mesh | AbstractMesh, spec: Spec) -> NamedSharding:
    """Returns the `NamedSharding` of a plan's `spec` on `mesh`; an entry `?` leaves a dim to XLA."""
    return NamedSharding(
        mesh, PartitionSpec(*(PartitionSpec.UNCONSTRAINED if entry == "?" else entry for entry in spec))
    )


def evaluate(
    layout: Layout, jaxpr: _compat.ClosedJaxpr, operands: Sequence[Any], hooks: Hooks | None = None
) -> list[Any]:
    """Evaluates the closed jaxpr `jaxpr` on flat `operands` with what `layout` has, and returns its flat results.

    `hooks.boundary` evaluates gradient boundaries; without it they run whole, which gives the same numbers.
    """
    return _run(layout, jaxpr, operands, (), hooks, None)


def evaluate_part(
    layout: Layout, jaxpr: AnyJaxpr, operands: Sequence[Any], prefix: Site, sites: Sequence[Site] | None, copies: Copies
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
    layout: Layout,
    jaxpr: AnyJaxpr,
    operands: Sequence[Any],
    prefix: Site,
    hooks: Hooks | None,
    copies: Copies | None,
    sites: Sequence[Site] | None = None,
) -> list[Any]:
    """Evaluates a jaxpr whose equations stand behind `prefix`, or at `sites` behind it. `copies`: None outside of
    boundaries."""
    inner, consts = _compat.open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip(inner.constvars, consts, strict=True))
    env.update(zip(inner.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else env[atom]

    for index, eqn in enumerate(inner.eqns):
        with _compat.equation_context(eqn):
            site = (*prefix, index) if sites is None else (*prefix, *sites[index])
            layer = layout.names.get(site)
            with contextlib.nullcontext() if layer is None else jax.named_scope(scope("layer", layer)):
                results = _hooked(layout, eqn, [read(a) for a in eqn.invars], site, hooks, copies)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in inner.outvars]


def _hooked(
    layout: Layout, eqn: Any, values: list[Any], site: Site, hooks: Hooks | None, copies: Copies | None
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
    layout: Layout, eqn: Any, values: list[Any], site: Site, hooks: Hooks | None, copies: Copies | None
) -> list[Any]:
    """Evaluates an equation. Inside a boundary (`copies` given) products with split weights are evaluated as
    exchanges."""
    if copies is not None:
        exchange, summed = layout.exchanges.get(site), layout.sums.get(site)
        if exchange is not None and fits(exchange, eqn):
            return evaluate_product(exchange, eqn, values, Where(layout.mesh, layout.manual), copies)
        # where a surrounding shard_map handles axes, gradients are summed once, after it
        if summed is not None and not layout.manual:
            if isinstance(summed, Summed):
                return evaluate_summed(summed, eqn, values, Where(layout.mesh))
            if summed.fits(eqn):
                return evaluate_scatter(
                    summed, eqn, values, Where(layout.mesh), layout.rematerialised, layout.convolutions.get(site)
                )
    values = _pin(layout, site, values, results=False)
    results = rewritten(eqn, values) if site in layout.rewritten else None
    if site in layout.guarded:
        results = _guarded(layout, eqn, values)
    if results is None and site in layout.convolutions and eqn.primitive.name == "conv_general_dilated":
        results = evaluate_local(layout.convolutions[site], eqn, values, Where(layout.mesh, layout.manual))
    if results is None and site in layout.transforms and eqn.primitive.name == "fft":
        results = evaluate_transform(layout.transforms[site], eqn, values, Where(layout.mesh, layout.manual))
    if results is None:
        results = _equation(layout, eqn, values, site, hooks, copies)
    return _pin(layout, site, results, results=True)


def _guarded(layout: Layout, eqn: Any, values: list[Any]) -> list[Any]:
    """Evaluates a call with a custom derivative rule, in whose body and rule what XLA's partitioner gets wrong runs
    whole."""

    def run(jaxpr: AnyJaxpr, operands: Sequence[Any]) -> list[Any]:
        constraints, rewrites = whole_inside(jaxpr, MeshShape.of(layout.mesh))
        inner = dataclasses.replace(Layout.of(layout.mesh, constraints, rewrites=rewrites), manual=layout.manual)
        return _run(
            inner if set(layout.manual) < set(layout.mesh.axis_names) else Layout(layout.mesh, {}, frozenset()),
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


def _pin(layout: Layout, site: Site, values: list[Any], results: bool) -> list[Any]:
    """Puts the layout's constraints on an equation's operands, or with `results` on its results; changes `values`."""
    for constraint in layout.by_site.get(site, ()):
        position = -1 - constraint.operand if results else constraint.operand
        # rows of a table have a layout of their own
        if (constraint.operand < 0) == results and not isinstance(values[position], Rows):
            mesh = jax.sharding.get_abstract_mesh() if layout.manual else layout.mesh
            sharding = named_sharding(mesh, constraint.spec)
            values[position] = jax.lax.with_sharding_constraint(values[position], sharding)
    return values


def _equation(
    layout: Layout, eqn: Any, values: list[Any], site: Site, hooks: Hooks | None, copies: Copies | None
) -> list[Any]:
    """Evaluates an equation of which the layout says nothing: a boundary by its hook, a call anew where something lies
    inside it, and all else as it is."""
    if gradient.is_boundary(eqn):

        def forward(jaxpr: AnyJaxpr, operands: Sequence[Any]) -> list[Any]:
            return _run(layout, jaxpr, operands, (*site, 0), hooks, {})

        if hooks is not None and hooks.boundary is not None:
            return hooks.boundary(eqn, values, site, forward)
        return gradient.expand(eqn.params, values, forward)
    rebuild = _REBUILD.get(eqn.primitive.name)
    if rebuild is not None and (site in layout.inside or holds_boundary(eqn)):
        inner = dataclasses.replace(layout, rematerialised=True) if rebuild is _remat else layout
        return rebuild(
            lambda jaxpr, body, operands: _run(inner, jaxpr, operands, (*site, body), hooks, copies), eqn, values
        )
    return _compat.bind_equation(eqn, values)


def holds_boundary(eqn: Any) -> bool:
    """Returns whether a gradient boundary lies inside the call `eqn` (a step that scans over updates, say)."""
    for value in eqn.params.values():
        for body in value if isinstance(value, (tuple, list)) else (value,):
            if _compat.is_jaxpr(body):
                inner, _ = _compat.open_jaxpr(body)
                if any(gradient.is_boundary(e) or holds_boundary(e) for e in inner.eqns):
                    return True
    return False


def _call(parameter: str) -> _Rebuild:
    """Rebuilds a call that only wraps a body, by evaluating the body in its place."""

    def rebuild(run: _RunBody, eqn: Any, values: list[Any]) -> list[Any]:
        return run(eqn.params[parameter], 0, values)

    return rebuild


def _remat(run: _RunBody, eqn: Any, values: list[Any]) -> list[Any]:
    body = eqn.params["jaxpr"]
    fun = jax.checkpoint(
        lambda *operands: run(body, 0, operands), prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
    )
    return list(fun(*values))


def _scan(run: _RunBody, eqn: Any, values: list[Any]) -> list[Any]:
    num_consts, num_carry = _compat.scan_counts(eqn.params)
    consts, init, xs = (
        values[:num_consts],
        values[num_consts : num_consts + num_carry],
        values[num_consts + num_carry :],
    )

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = run(eqn.params["jaxpr"], 0, [*consts, *carry, *x])
        return results[:num_carry], results[num_carry:]

    carry, ys = jax.lax.scan(
        body,
        list(init),
        list(xs),
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


def _while(run: _RunBody, eqn: Any, values: list[Any]) -> list[Any]:
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    cond_consts, body_consts = values[:num_cond], values[num_cond : num_cond + num_body]
    goes_on = lambda carry: run(eqn.params["cond_jaxpr"], 0, [*cond_consts, *carry])[0]
    body = lambda carry: run(eqn.params["body_jaxpr"], 1, [*body_consts, *carry])
    num_batched = len(_compat.open_jaxpr(eqn.params["cond_jaxpr"])[0].outvars[0].aval.shape)

    # what `vmap` makes of a loop that each example leaves by itself: who has left stays as it is
    def batched(carry: list[Any]) -> list[Any]:
        stays = goes_on(carry)
        keep = lambda old: jax.lax.broadcast_in_dim(stays, old.shape, tuple(range(num_batched)))
        return [jax.lax.select(keep(old), new, old) for old, new in zip(carry, body(carry), strict=True)]

    if num_batched:
        return list(
            jax.lax.while_loop(lambda carry: goes_on(carry).any(), batched, list(values[num_cond + num_body :]))
        )
    return list(jax.lax.while_loop(goes_on, body, list(values[num_cond + num_body :])))


def _cond(run: _RunBody, eqn: Any, values: list[Any]) -> list[Any]:
    def branch(k: int) -> Callable[..., list[Any]]:
        return lambda *operands: run(eqn.params["branches"][k], k, operands)

    return list(jax.lax.switch(values[0], [branch(k) for k in range(len(eqn.params["branches"]))], *values[1:]))


_REBUILD: Mapping[str, _Rebuild] = {
    "jit": _call("jaxpr"),
    "pjit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "core_call": _call("call_jaxpr"),
    "remat": _remat,
    "remat2": _remat,
    "checkpoint": _remat,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
