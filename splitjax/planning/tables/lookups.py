"""Edits a gradient boundary so that its tables give rows instead of dense gradients.

A boundary's equation and the sites of its lookups go in, `Edited` comes out, an equation for the same evaluators. A
dense gradient of a table has as many rows as the table, nearly all of them zeros. Every lookup `rows = gather(table,
ids)` of the forward becomes `gather(table, ids) + delta`, or `delta` alone where the rows were brought from elsewhere.
The boundary differentiates with respect to the deltas, which are zero or these rows, and no longer the table; the ids
are further results. So the table's gradient comes out as (ids, cotangents), one row per lookup, and nothing of the
table's size is made. Calls that a lookup stands in (jit, remat, scan) hand its delta in and its ids out.

Equations keep their places, so that sites (`primitives.walk`) mean the same in the edited forward: plans and layouts
need not know.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from splitjax import _compat
from splitjax.primitives.calls import CallKind, kind_of, scan_parts
from splitjax.primitives.walk import Site, bodies, equation_at

PRIMITIVE: str = "splitjax_lookup"  # the table of `primitives` knows it by this name


def _evaluate(table: Any, ids: Any, delta: Any, *, is_given: bool, **params: Any) -> list[Any]:
    return [delta if is_given else jax.lax.gather_p.bind(table, ids, **params) + delta]


# (table, ids, delta) -> [gather(table, ids) + delta], or [delta] where the rows are given instead; further parameters
# are the gather's.
lookup_p: _compat.Primitive = _compat.define_primitive(
    PRIMITIVE, _evaluate, lambda table, ids, delta, **params: ([delta], _compat.NO_EFFECTS)
)


@dataclasses.dataclass(frozen=True)
class EditedLookup:
    """A lookup of an edited boundary.

    - `params`: its gather's parameters.
    - `delta`: the type of its delta.
    - `num_loops`: the loops that it stands in, whose lengths are the leading dims of its ids and its delta.
    """

    params: Mapping[str, Any]
    delta: jax.ShapeDtypeStruct
    num_loops: int


@dataclasses.dataclass(frozen=True)
class Edited:
    """A boundary with edited lookups.

    - `eqn`: its equation. Its further operands, the deltas, come last, one per lookup in the order of the sites; its
      further results are the ids, behind the auxiliary ones, and the deltas' gradients, last.
    - `lookups`: in the order of the sites.
    - `kept`: the positions of the gradients that it still has, among those of the original.
    """

    eqn: Any
    lookups: tuple[EditedLookup, ...]
    kept: tuple[int, ...]


def edit_boundary(eqn: Any, sites: Sequence[Site], tables: Sequence[int], given: Collection[int] = ()) -> Edited:
    """Edits lookups of a boundary.

    **Arguments:**

    - `eqn`: the boundary's equation.
    - `sites`: of the lookups, within the boundary's forward.
    - `tables`: the operand positions of their tables, which are differentiated no longer.
    - `given`: the lookups, by their place in `sites`, whose rows are given.
    """
    forward, positions = eqn.params["forward"], eqn.params["positions"]
    edited, deltas = _edit(forward, {site: number for number, site in enumerate(sites)}, frozenset(given))
    num_operands, num_results = len(eqn.invars), len(eqn.outvars) - len(positions)
    kept = tuple(number for number, position in enumerate(positions) if position not in tables)
    variables = [_compat.variable_of(delta) for delta in deltas]
    ids = [_compat.variable_of(v.aval) for v in _compat.open_jaxpr(edited)[0].outvars[num_results:]]
    gradients = [_compat.variable_of(delta) for delta in deltas]
    new = eqn.replace(
        invars=[*eqn.invars, *variables],
        outvars=[*eqn.outvars[:num_results], *ids, *(eqn.outvars[num_results + number] for number in kept), *gradients],
        params={
            **eqn.params,
            "forward": edited,
            "positions": (*(positions[number] for number in kept), *range(num_operands, num_operands + len(deltas))),
            "names": (*eqn.params["names"], *("rows of a lookup" for _ in deltas)),
        },
    )
    gathers = [equation_at(forward, site) for site in sites]
    lookups = (
        EditedLookup(gather.params, delta, len(delta.shape) - gather.outvars[0].aval.ndim)
        for gather, delta in zip(gathers, deltas, strict=True)
    )
    return Edited(new, tuple(lookups), kept)


def _edit(jaxpr: Any, lookups: Mapping[Site, int], given: frozenset[int]) -> tuple[Any, list[jax.ShapeDtypeStruct]]:
    """Edits the lookups of a jaxpr at some sites: deltas are further operands, ids further results, by number. Returns
    also the deltas' types."""
    inner, consts = _compat.open_jaxpr(jaxpr)
    eqns, deltas, ids, constants = list(inner.eqns), {}, {}, list(zip(inner.constvars, consts, strict=True))
    inside: dict[int, dict[Site, int]] = {}
    for site, number in lookups.items():
        if len(site) == 1:
            index = site[0]
            delta = _compat.new_variable(eqns[index].outvars[0])
            ids[number] = eqns[index].invars[1]
            deltas[number] = delta
            eqns[index] = eqns[index].replace(
                primitive=lookup_p,
                invars=[*eqns[index].invars, delta],
                params={**eqns[index].params, "is_given": number in given},
            )
        else:
            inside.setdefault(site[0], {})[site[2:]] = number
    renamed: dict[Any, Any] = {}
    for index, inner_lookups in inside.items():
        eqns[index], more = _call(eqns[index], inner_lookups, given, deltas, ids, renamed)
        constants += more
    swap = lambda v: v if isinstance(v, _compat.Literal) else renamed.get(v, v)
    if renamed:
        eqns = [eqn.replace(invars=[swap(v) for v in eqn.invars]) for eqn in eqns]
    numbers = sorted(deltas)
    new = _compat.build_jaxpr(
        jaxpr,
        [*inner.invars, *(deltas[n] for n in numbers)],
        [*map(swap, inner.outvars), *(ids[n] for n in numbers)],
        eqns,
        constants,
    )
    return new, [_struct(deltas[n].aval) for n in numbers]


def _call(
    eqn: Any,
    lookups: Mapping[Site, int],
    given: frozenset[int],
    deltas: dict[int, Any],
    ids: dict[int, Any],
    renamed: dict[Any, Any],
) -> tuple[Any, list]:
    """Edits a call around lookups, and adds its deltas and ids to the caller's; `renamed` gets results that JAX hands
    straight through. Returns also the constants (variable, value) that the caller gets with it."""
    numbers = sorted(lookups.values())
    body, types = _edit(bodies(eqn)[0], lookups, given)
    function, types = _REBUILD[kind_of(eqn)](eqn, body, types)
    variables = [v for v in eqn.invars if not isinstance(v, _compat.Literal)]

    def run(values: Sequence[Any], added: Sequence[Any]) -> list[Any]:
        fresh = iter(values)
        return function([v.val if isinstance(v, _compat.Literal) else next(fresh) for v in eqn.invars], added)

    traced, _ = _compat.trace(run, [_struct(v.aval) for v in variables], types)
    outer, values = _compat.open_jaxpr(traced)
    (made,) = outer.eqns
    new = [_compat.variable_of(delta) for delta in types]
    operand = dict(zip(outer.invars, [*variables, *new], strict=True))
    operand |= {v: v for v in outer.constvars}
    results: dict[Any, Any] = {}
    inner_ids = [_compat.new_variable(v) for v in outer.outvars[len(eqn.outvars) :]]
    for ours, theirs in zip([*eqn.outvars, *inner_ids], outer.outvars, strict=True):
        if theirs in operand or theirs in results:
            renamed[ours] = operand.get(theirs, results.get(theirs))
        else:
            results[theirs] = ours
    deltas.update(zip(numbers, new, strict=True))
    ids.update({number: renamed.get(v, v) for number, v in zip(numbers, inner_ids, strict=True)})
    swap = lambda v: v if isinstance(v, _compat.Literal) else operand[v]
    outvars = [results.get(v, v) for v in made.outvars]
    return made.replace(invars=[swap(v) for v in made.invars], outvars=outvars, source_info=eqn.source_info), list(
        zip(outer.constvars, values, strict=True)
    )


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


# Each gets the equation, its edited body and the types of the body's deltas. Returns
# `run(operands, deltas) -> results and ids`, whose trace is one equation, and the types of the deltas that it takes.


def _jit(eqn: Any, body: Any, types: list[Any]) -> tuple[Callable, list[Any]]:
    def call(*values):
        return _compat.eval_jaxpr(body, (), *values)

    call.__name__ = call.__qualname__ = eqn.params.get("name", "call")
    return lambda values, deltas: jax.jit(call)(*values, *deltas), types


def _remat(eqn: Any, body: Any, types: list[Any]) -> tuple[Callable, list[Any]]:
    run = jax.checkpoint(
        lambda *values: _compat.eval_jaxpr(body, (), *values),
        prevent_cse=eqn.params["prevent_cse"],
        policy=eqn.params["policy"],
    )
    return lambda values, deltas: run(*values, *deltas), types


def _scan(eqn: Any, body: Any, types: list[Any]) -> tuple[Callable, list[Any]]:
    params = eqn.params

    def run(values, deltas):
        consts, init, xs = scan_parts(eqn, values)

        def iteration(carry, slices):
            x, delta = slices
            results = _compat.eval_jaxpr(body, (), *consts, *carry, *x, *delta)
            return results[: len(init)], results[len(init) :]

        carry, stacked = jax.lax.scan(
            iteration,
            init,
            (xs, list(deltas)),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*carry, *stacked]

    return run, [
        jax.ShapeDtypeStruct((params["length"], *delta.shape), delta.dtype, weak_type=delta.weak_type)
        for delta in types
    ]


_REBUILD: dict[CallKind | None, Callable] = {CallKind.INLINE: _jit, CallKind.REMAT: _remat, CallKind.SCAN: _scan}


def rows_of(lookup: EditedLookup, ids: Any, cotangent: Any = None) -> tuple[Any, Any]:
    """Brings what a lookup gives into the form of rows.

    **Arguments:** `lookup`: the edited lookup. `ids`: i[..., components], as its gather has them. `cotangent`: its
    delta's gradient; None: it is not wanted.

    Returns the ids i[...] and the cotangents f[..., *row], or None for these.
    """
    if cotangent is None:
        return ids[..., tuple(lookup.params["dimension_numbers"].start_index_map).index(0)], None
    numbers, row_shape = lookup.params["dimension_numbers"], lookup.params["slice_sizes"][1:]
    offset = [lookup.num_loops + dim for dim in numbers.offset_dims]
    values = jnp.moveaxis(cotangent, offset, range(cotangent.ndim - len(offset), cotangent.ndim))
    return ids[..., tuple(numbers.start_index_map).index(0)], values.reshape(*ids.shape[:-1], *row_shape)


def ids_of(edited: Edited) -> tuple[Any, list[bool]] | None:
    """Gives the ids of the lookups of `edited` as a closed jaxpr over some of the boundary's operands, and tells of
    each operand whether it is among these; None where the ids depend on what the boundary differentiates."""
    num_ids, forward = len(edited.lookups), edited.eqn.params["forward"]
    inner, _ = _compat.open_jaxpr(forward)
    used = [False] * (len(inner.outvars) - num_ids) + [True] * num_ids
    closed, kept = _compat.prune_jaxpr(forward, used)
    return None if any(kept[position] for position in edited.eqn.params["positions"]) else (closed, kept)
