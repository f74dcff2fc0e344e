"""Tells which tables of a step are looked up by the same ids, so that their rows can travel in the messages of one.

The ids of a boundary's lookups come in as a jaxpr, numbers come out: lookups with the same number have the same ids on
every worker in every step. Two are the same where they are computed alike of the same operands, which is how a factor
and a linear weight of one feature are looked up (DeepFM). Ids that are equal by chance are not known to be.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from splitjax import _compat
from splitjax.primitives.calls import CallKind, kind_of
from splitjax.primitives.walk import bodies


def numbered_ids(closed: Any) -> tuple[int, ...]:
    """Returns a number for each result of a `closed` jaxpr: results with the same number are the same value."""
    inner, _ = _compat.open_jaxpr(closed)
    numbers: dict[Hashable, int] = {}
    return tuple(_results(closed, [_number(numbers, ("operand", k)) for k in range(len(inner.invars))], numbers))


def _number(numbers: dict[Hashable, int], key: Hashable) -> int:
    return numbers.setdefault(key, len(numbers))


def _results(closed: Any, operands: Sequence[int], numbers: dict[Hashable, int]) -> list[int]:
    """Returns the numbers of the results of a `closed` jaxpr, whose operands have the numbers `operands`."""
    inner, consts = _compat.open_jaxpr(closed)
    known: dict[Any, int] = dict(zip(inner.invars, operands, strict=True))
    known |= {v: _number(numbers, ("constant", id(value))) for v, value in zip(inner.constvars, consts, strict=True)}

    def of(v: Any) -> int:
        if isinstance(v, _compat.Literal):
            return _number(numbers, ("literal", str(v.aval), repr(v.val)))
        return known[v]

    for eqn in inner.eqns:
        read = [of(v) for v in eqn.invars]
        if kind_of(eqn) in (CallKind.INLINE, CallKind.REMAT):
            made = _results(bodies(eqn)[0], read, numbers)
        else:
            key = eqn.primitive.name, tuple(read), _params(eqn)
            made = [_number(numbers, (*key, k)) for k in range(len(eqn.outvars))]
        known.update(zip(eqn.outvars, made, strict=True))
    return [of(v) for v in inner.outvars]


def _params(eqn: Any) -> Hashable:
    """Returns the parameters of an equation, equal for equations that compute alike; what holds a computation, or has
    an effect, is like no other each time that it runs."""
    params = tuple(sorted(eqn.params.items(), key=lambda item: item[0]))
    try:
        hash(params)
    except TypeError:  # arrays, which nobody compares
        return object()
    return object() if bodies(eqn) or eqn.effects else params
