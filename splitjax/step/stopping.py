"""Changes the sharding constraints that a user wrote at one line of a step: a stop before them, or none at all.

A step's jaxpr and a `LineChange` come in, the same step comes out, in which arrays take another way from one layout to
another. It computes the same numbers. What such a change is worth shows when the step is compiled
(`compile.remedies`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from splitjax import _compat

_CONSTRAINT = "sharding_constraint"


@dataclasses.dataclass(frozen=True)
class LineChange:
    """Says what becomes of the sharding constraints at a line.

    **Attributes:**

    - `source`: the line, as `file:line (function)`, as `constraints_near` gives it.
    - `shape`: of the arrays that are meant, or of a device's part of them.
    - `stop`: the layout that such an array has first, an entry for each of its dims; None to take the constraints away.
    """

    source: str
    shape: tuple[int, ...]
    stop: PartitionSpec | None = None


def constraints_near(
    closed: _compat.ClosedJaxpr, source: str, shape: Sequence[int], parts: Sequence[Sequence[int]] = ()
) -> tuple[str, ...]:
    """Returns the lines of the sharding constraints that a user wrote at a line of a step, or, where there are none, of
    those whose array is made or read there: XLA names a move after the operation before or behind it. Where it is a
    move from one constraint to the next, that is the line of the second, whichever of them XLA names (0.10 and 0.11
    name the second, 0.12 the first).

    **Arguments:** `closed`: the step. `source`: the line, as `file:line (function)`. `shape`: as in `LineChange`.
    `parts`: the shapes of a device's part before and after the move, where they are known."""
    found = dict.fromkeys(_found(closed, _line(source), tuple(shape), frozenset(map(tuple, parts))))
    here = [at for at, is_here in found if is_here]
    return tuple(dict.fromkeys(here or [at for at, _ in found]))


def with_line_change(closed: _compat.ClosedJaxpr, change: LineChange) -> _compat.ClosedJaxpr:
    """Returns the step `closed` with a `change`, in the bodies of its loops and calls, too; `closed` itself where no
    constraint is met."""
    return _Changing(change).jaxpr(closed)


def _line(source: str) -> str:
    """Returns `file:line` of a source: functions have their full names in a jaxpr, and short ones in XLA's modules."""
    return source.partition(" (")[0]


def _fits(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Tells whether an equation is a constraint of an array of `shape`, or of which that is a device's part."""
    if eqn.primitive.name != _CONSTRAINT or not isinstance(eqn.params["sharding"], NamedSharding):
        return False
    whole = eqn.invars[0].aval.shape
    return len(whole) == len(shape) and all(part and not size % part for size, part in zip(whole, shape, strict=True))


def _found(
    jaxpr: Any, line: str, shape: tuple[int, ...], parts: frozenset[tuple[int, ...]]
) -> Iterator[tuple[str, bool]]:
    """Yields the source of each constraint that stands at a line, whose array is made there, or is read there; and
    whether it stands there itself."""
    eqns = _compat.open_jaxpr(jaxpr)[0].eqns
    fitting = [eqn for eqn in eqns if _fits(eqn, shape)]
    if fitting:
        there = [eqn for eqn in eqns if _line(_compat.source_line(eqn)) == line]
        made = {atom for eqn in there for atom in eqn.outvars}
        read = {atom for eqn in there for atom in eqn.invars if not isinstance(atom, _compat.Literal)}
        for eqn in fitting:
            is_here = _line(_compat.source_line(eqn)) == line
            source = _compat.source_line(_next(eqn, fitting, parts) if is_here else eqn)
            if source and (is_here or eqn.invars[0] in made or eqn.outvars[0] in read):
                yield source, is_here
    for eqn in eqns:
        for value in eqn.params.values():
            for each in value if isinstance(value, (tuple, list)) else (value,):
                if _compat.is_jaxpr(each):
                    yield from _found(each, line, shape, parts)


def _next(eqn: Any, fitting: Sequence[Any], parts: frozenset[tuple[int, ...]]) -> Any:
    """Returns the constraint behind the constraint `eqn` where its array moves from one of the `parts` to the other
    between them, else `eqn`."""
    behind = (each for each in fitting if each.invars[0] is eqn.outvars[0])
    return next((each for each in behind if len(parts) == 2 and {_part(eqn), _part(each)} == parts), eqn)


def _part(eqn: Any) -> tuple[int, ...]:
    """Returns the shape of the largest part that a device has of the array of a constraint, whose dims need not
    divide."""
    sharding, shape = eqn.params["sharding"], eqn.invars[0].aval.shape
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in sharding.spec]
    counts = [math.prod(sharding.mesh.shape.get(axis, 1) for axis in entry) for entry in entries]
    counts += [1] * (len(shape) - len(counts))
    return tuple(-(-size // count) for size, count in zip(shape, counts, strict=True))


class _Changing:
    """Rewrites jaxprs, each once. `change`: what of them."""

    def __init__(self, change: LineChange) -> None:
        self._change = change
        self._done: dict[int, tuple[Any, Any]] = {}  # by identity: the jaxpr, kept alive, and what became of it

    def jaxpr(self, value: Any) -> Any:
        """Returns the jaxpr `value`, open or closed as it is, with the change; itself where it has none."""
        if id(value) not in self._done:
            inner, _ = _compat.open_jaxpr(value)
            instead: dict[Any, Any] = {}
            eqns = [new for eqn in inner.eqns for new in self._equation(eqn, instead)]
            if len(eqns) == len(inner.eqns) and all(new is old for new, old in zip(eqns, inner.eqns, strict=True)):
                changed = value
            else:
                outvars = [_read(atom, instead) for atom in inner.outvars]
                changed = _compat.like_jaxpr(value, inner.replace(eqns=eqns, outvars=outvars))
            self._done[id(value)] = value, changed
        return self._done[id(value)][1]

    def _equation(self, eqn: Any, instead: dict[Any, Any]) -> Sequence[Any]:
        """Returns the equations that `eqn` becomes. `instead`: what stands for the results of equations that are gone,
        which grows."""
        if any(not isinstance(atom, _compat.Literal) and atom in instead for atom in eqn.invars):
            eqn = eqn.replace(invars=[_read(atom, instead) for atom in eqn.invars])
        if _fits(eqn, self._change.shape) and _compat.source_line(eqn) == self._change.source:
            if self._change.stop is None:
                instead[eqn.outvars[0]] = eqn.invars[0]
                return ()
            between = _compat.new_variable(eqn.outvars[0])
            where = NamedSharding(eqn.params["sharding"].mesh, self._change.stop)
            return _stop(eqn, between, where), eqn.replace(invars=[between])
        params = {name: self._param(value) for name, value in eqn.params.items()}
        is_same = all(params[name] is value for name, value in eqn.params.items())
        return (eqn if is_same else eqn.replace(params=params),)

    def _param(self, value: Any) -> Any:
        if _compat.is_jaxpr(value):
            return self.jaxpr(value)
        if isinstance(value, (tuple, list)) and any(map(_compat.is_jaxpr, value)):
            changed = [self._param(each) for each in value]
            return value if all(new is old for new, old in zip(changed, value, strict=True)) else type(value)(changed)
        return value


def _stop(eqn: Any, result: Any, where: NamedSharding) -> Any:
    """Returns the equation that lays out the operand of the constraint `eqn` as `where` says, as `result`."""
    pin = lambda x: jax.lax.with_sharding_constraint(x, where)
    aval = eqn.invars[0].aval
    (made,) = _compat.open_jaxpr(_compat.trace(pin, jax.ShapeDtypeStruct(aval.shape, aval.dtype))[0])[0].eqns
    return eqn.replace(params=made.params, outvars=[result])


def _read(atom: Any, instead: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, _compat.Literal) else instead.get(atom, atom)
