"""Moves the dealing out of fused weights from the bodies of loops to before the loops.

A step's jaxpr comes in whose products have their weights dealt out where they stand (`rewriting`); the same step
comes out. A weight that every iteration of a loop reads, such as that of a recurrent layer, is dealt out once, and so
its gradient is taken back once, behind the loop's: in the body it would be in every iteration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from splitjax import _compat
from splitjax.primitives.calls import CallKind, kind_of
from splitjax.primitives.dealt import COPY, DEAL
from splitjax.primitives.walk import bodies

_SAME_ELEMENTS = ("convert_element_type", "copy", "reshape", "broadcast_in_dim")  # the last, of as many elements


def with_deals_before(body: Any, in_loop: bool = False) -> Any:
    """Returns a jaxpr in which each loop, those of its bodies too, has the weights that it deals out in every iteration
    dealt out before it: out of several loops in each other, before the outermost; out of rematerialised calls within
    loops, too. `in_loop`: whether the jaxpr stands in a loop."""
    inner, _ = _compat.open_jaxpr(body)
    found: list[Any] = []
    for eqn in inner.eqns:
        kind = kind_of(eqn)
        eqn = _with_changed_bodies(eqn, in_loop or kind is CallKind.SCAN)
        is_left = kind is CallKind.SCAN or (in_loop and kind is CallKind.REMAT)
        while is_left and (moved := _moved(eqn)) is not None:
            before, eqn = moved
            found += before
        found.append(eqn)
    is_same = len(found) == len(inner.eqns) and all(one is other for one, other in zip(found, inner.eqns, strict=True))
    return body if is_same else _compat.like_jaxpr(body, inner.replace(eqns=found))


def _with_changed_bodies(eqn: Any, in_loop: bool) -> Any:
    """Returns an equation whose bodies have their loops' weights dealt out before these loops; itself where that
    changes none. `in_loop`: whether the bodies stand in a loop."""
    pairs = ((before, with_deals_before(before, in_loop)) for before in bodies(eqn))
    changed = {id(before): after for before, after in pairs if after is not before}
    if not changed:
        return eqn
    swap = lambda value: changed.get(id(value), value)
    params = {
        name: type(value)(map(swap, value)) if type(value) in (tuple, list) else swap(value)
        for name, value in eqn.params.items()
    }
    return eqn.replace(params=params)


def _moved(call: Any) -> tuple[list[Any], Any] | None:
    """Moves one weight's dealing out of a loop or a rematerialised call: returns equations that stand before it, and
    the call without them; None where there is none to move."""
    body = call.params["jaxpr"]
    inner, _ = _compat.open_jaxpr(body)
    num_consts = _compat.scan_counts(call.params)[0] if kind_of(call) is CallKind.SCAN else len(call.invars)
    consts = dict(zip(inner.invars[:num_consts], call.invars[:num_consts], strict=True))
    makers = {v: eqn for eqn in inner.eqns for v in eqn.outvars}
    chains: dict[Any, list[list[Any]]] = {}
    for eqn in inner.eqns:
        chain = _from_const(eqn, makers, consts) if eqn.primitive.name == DEAL else None
        if chain is None or (kind_of(call) is CallKind.REMAT and _is_copied(inner, eqn.outvars[0])):
            continue
        if all(_num_reads(inner, one.outvars[0]) == 1 for one in chain[:-1]):
            chains.setdefault(chain[0].invars[0], []).append(chain)
    for const, alike in chains.items():
        # Several products may read one weight, all of them dealt out alike.
        if _num_reads(inner, const) > len(alike) or any(_does(one) != _does(alike[0]) for one in alike):
            continue
        value, before = consts[const], []
        for one in alike[0]:
            result = _compat.new_variable(one.outvars[0])
            before.append(one.replace(invars=[value], outvars=[result]))
            value = result
        inside = alike[0][-1].outvars[0]
        same = {chain[-1].outvars[0]: inside for chain in alike}
        in_place = lambda v, same=same: v if isinstance(v, _compat.Literal) else same.get(v, v)
        gone = {id(one) for chain in alike for one in chain}
        left = [
            one.replace(invars=list(map(in_place, one.invars)))
            if any(in_place(v) is not v for v in one.invars)
            else one
            for one in inner.eqns
            if id(one) not in gone
        ]
        at = next(number for number, v in enumerate(inner.invars) if v is const)
        inputs = [*inner.invars[:at], inside, *inner.invars[at + 1 :]]
        changed = _compat.changed_jaxpr(body, inner.constvars, inputs, left, list(map(in_place, inner.outvars)))
        invars = [*call.invars[:at], value, *call.invars[at + 1 :]]
        return before, call.replace(invars=invars, params={**call.params, "jaxpr": changed})
    return None


def _does(chain: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Returns what the equations of a chain do: equal for those that make the same of the same value."""
    return [(eqn.primitive.name, dict(eqn.params)) for eqn in chain]


def _from_const(deal: Any, makers: dict[Any, Any], consts: dict[Any, Any]) -> list[Any] | None:
    """Returns the equations that make a dealt weight of a constant of the loop, its casts first; None where something
    else makes it."""
    chain = [deal]
    while (v := chain[0].invars[0]) not in consts:
        maker = None if isinstance(v, _compat.Literal) else makers.get(v)
        if maker is None or maker.primitive.name not in _SAME_ELEMENTS:
            return None
        made_of: Any = maker.invars[0]
        made: Any = maker.outvars[0]
        if len(maker.invars) > 1 or math.prod(made_of.aval.shape) != math.prod(made.aval.shape):
            return None
        chain.insert(0, maker)
    return chain


def _is_copied(inner: Any, dealt: Any) -> bool:
    """Returns whether columns of a dealt value are copied to all devices. Their copies stay in a rematerialised call,
    and what is copied has to lie beside them there: XLA gathers shares that come in from outside."""
    cut = {eqn.outvars[0] for eqn in inner.eqns if any(v is dealt for v in eqn.invars)}
    return any(eqn.primitive.name == COPY and any(v in cut for v in eqn.invars) for eqn in inner.eqns)


def _num_reads(inner: Any, variable: Any) -> int:
    """Returns how often a body reads a variable, its results included."""
    return sum(v is variable for eqn in inner.eqns for v in eqn.invars) + sum(v is variable for v in inner.outvars)
