"""Evaluates jaxprs equation by equation: one loop, and handlers that say what an equation becomes.

A jaxpr, its operands and a handler go in, its results come out. `fold` is the loop alone, over values of any kind
(numbers of values, variables, arrays). `evaluate` is the loop over arrays: every equation is under its own source line
and names, and what the handler leaves alone is bound as it is. `retraced` makes a jaxpr of such an evaluation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax

from splitjax import _compat
from splitjax.primitives.walk import Site

AnyJaxpr = _compat.ClosedJaxpr | _compat.Jaxpr  # a call holds a body of either kind
# Evaluates a body of an equation as the jaxpr around it is evaluated: (jaxpr, which of the equation's bodies it is,
# operands) -> results.
RunBody = Callable[[AnyJaxpr, int, Sequence[Any]], list[Any]]
# Evaluates an equation: (equation, operands, site, evaluator of its bodies) -> results; None: it is bound as it is, on
# the list of operands, which the handler may have changed.
Handler = Callable[[Any, list[Any], Site, RunBody], Sequence[Any] | None]


@dataclasses.dataclass(frozen=True)
class Selective:
    """A handler that is asked about some equations alone. All others are bound as they are, without a look at them.

    - `handle`: the handler.
    - `primitives`: the names of the primitives that it is asked about.
    - `sites`: the sites that it is asked about, whatever the primitive.
    - `operands`: it is asked about equations with an operand of this type, too; None: of no type.
    """

    handle: Handler
    primitives: Container[str]
    sites: Container[Site] = frozenset()
    operands: type | None = None

    def is_asked(self, name: str, site: Site, values: Sequence[Any]) -> bool:
        """Tells whether the handler is asked about an equation of the primitive `name` on `values` at `site`."""
        if name in self.primitives or site in self.sites:
            return True
        return self.operands is not None and any(isinstance(value, self.operands) for value in values)


def fold(
    jaxpr: AnyJaxpr,
    operands: Sequence[Any],
    equation: Callable[[int, Any, list[Any]], Sequence[Any]],
    literal: Callable[[Any], Any],
    constants: Sequence[Any],
) -> list[Any]:
    """Runs through the equations of `jaxpr` in order, and returns what its results become.

    **Arguments:**

    - `operands`: what its inputs become.
    - `equation(index, eqn, values) -> results`: what the results of an equation become, given its operands'.
    - `literal`: what a literal becomes.
    - `constants`: what its constvars become.
    """
    inner, _ = _compat.open_jaxpr(jaxpr)
    env: dict[Any, Any] = dict(zip(inner.constvars, constants, strict=True))
    env.update(zip(inner.invars, operands, strict=True))

    of_type = _compat.Literal
    for index, eqn in enumerate(inner.eqns):
        values = [literal(atom) if isinstance(atom, of_type) else env[atom] for atom in eqn.invars]
        env.update(zip(eqn.outvars, equation(index, eqn, values), strict=True))
    return [literal(atom) if isinstance(atom, of_type) else env[atom] for atom in inner.outvars]


def evaluate(
    jaxpr: AnyJaxpr,
    operands: Sequence[Any],
    handler: Handler | Selective,
    site: Site = (),
    sites: Sequence[Site] | None = None,
    literal: Callable[[Any], Any] = lambda atom: atom.val,
    constants: Sequence[Any] | None = None,
) -> list[Any]:
    """Evaluates `jaxpr` on arrays or tracers, and returns its flat results.

    **Arguments:**

    - `operands`: its flat operands.
    - `handler`: evaluates equations, as far as it wants to; a `Selective` is not asked about all of them.
    - `site`: where the jaxpr stands; the sites that the handler is given begin with it.
    - `sites`: of the equations behind `site`; None: they are numbered from 0.
    - `literal`: gives the value of a literal; by default the number that stands in the program.
    - `constants`: the values of its constvars; None: those that it holds.
    """
    selective = handler if isinstance(handler, Selective) else None
    handle = handler.handle if isinstance(handler, Selective) else handler

    def equation(index: int, eqn: Any, values: list[Any]) -> Sequence[Any]:
        here = (*site, index) if sites is None else (*site, *sites[index])
        if selective is not None and not selective.is_asked(eqn.primitive.name, here, values):
            return _compat.rebind(eqn, values)

        def run(body: AnyJaxpr, number: int, inner: Sequence[Any]) -> list[Any]:
            return evaluate(body, inner, handler, (*here, number), literal=literal)

        with _compat.equation_context(eqn):
            results = handle(eqn, values, here, run)
            return _compat.bind_equation(eqn, values) if results is None else results

    return fold(jaxpr, operands, equation, literal, _compat.open_jaxpr(jaxpr)[1] if constants is None else constants)


def retraced(
    body: AnyJaxpr,
    run: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    shapes: Mapping[int, tuple[int, ...]] | None = None,
) -> AnyJaxpr:
    """Returns a body that is traced again while it is evaluated otherwise, as what it is: open or closed.

    **Arguments:** `run`: evaluates it: (constants, operands) -> results, arrays all of them. `shapes`: of the operands
    that have other ones than the body's, by position."""
    inner, _ = _compat.open_jaxpr(body)
    count = len(inner.constvars)
    types = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
        for v in (*inner.constvars, *inner.invars)
    ]
    for number, shape in (shapes or {}).items():
        types[count + number] = types[count + number].update(shape=shape)
    closed, new_consts = _compat.detach_consts(
        _compat.trace(lambda *arrays: list(run(arrays[:count], arrays[count:])), *types)[0]
    )
    assert not new_consts, "what is traced again closes over nothing"
    made, _ = _compat.open_jaxpr(closed)
    return _compat.changed_jaxpr(body, made.invars[:count], made.invars[count:], made.eqns, made.outvars)
