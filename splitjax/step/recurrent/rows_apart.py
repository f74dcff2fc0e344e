"""Takes products of values laid side by side apart: `concatenate([x, h]) @ w` becomes `x @ w_x + h @ w_h`.

A step's jaxpr comes in, and the sites of such products; the same step comes out, in which each value meets its own rows
of the weight. It exists for recurrent cells: where devices have parts of the state `h`, and the inputs `x` whole, what
lies side by side of both is neither, while apart they are what the products of a cell with two weights read.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from splitjax import _compat
from splitjax.primitives import interpreter
from splitjax.primitives.calls import CallKind, call_body, inline_body, kind_of
from splitjax.primitives.interpreter import RunBody, Selective
from splitjax.primitives.walk import Site, bodies, equation_at, with_changed_body
from splitjax.step.per_microbatch import is_per_microbatch

_CAST = "convert_element_type"
_NOTED = frozenset({"concatenate", _CAST})


def find_side_by_side(jaxpr: Any, products: Mapping[Site, int]) -> tuple[Site, ...]:
    """Returns the sites of those `products` of a step whose data are several values that are laid side by side along
    the dim which is contracted, in order. `products`: by site, the position of the data."""
    leading = {site[:depth] for site in products for depth in range(1, len(site))}
    found: list[Site] = []

    def fold(body: Any, values: Sequence[Any], prefix: Site) -> list[Any]:
        inner, _ = _compat.open_jaxpr(body)
        visit = lambda index, eqn, operands: equation((*prefix, index), eqn, operands)
        return interpreter.fold(inner, values, visit, lambda atom: None, [None] * len(inner.constvars))

    def equation(site: Site, eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
        """Returns for each result the dim along which it was laid side by side; None for other values."""
        nothing = [None] * len(eqn.outvars)
        if site in products and values[products[site]] == _contracted(eqn, products[site]):
            found.append(site)
        if eqn.primitive.name == "concatenate":
            return [eqn.params["dimension"]] if len(eqn.invars) > 1 else nothing
        if eqn.primitive.name == _CAST:
            return values
        if kind_of(eqn) is CallKind.INLINE and not is_per_microbatch(eqn):
            return fold(call_body(eqn), values, (*site, 0))
        for number, body in enumerate(bodies(eqn)):
            if (*site, number) in leading:
                fold(body, [None] * len(_compat.open_jaxpr(body)[0].invars), (*site, number))
        return nothing

    fold(jaxpr, [None] * len(_compat.open_jaxpr(jaxpr)[0].invars), ())
    return tuple(sorted(found))


def with_rows_apart(jaxpr: Any, products: Mapping[Site, int]) -> Any:
    """Returns a step with the `products` taken apart: by site, the position of the data. What has no such product at
    its site, as another trace of the step may have not, is left alone."""
    fit = find_side_by_side(jaxpr, {s: at for s, at in products.items() if _is_product(equation_at(jaxpr, s))})
    by_body: dict[Site, dict[Site, int]] = {}
    for site in fit:
        at = _body_around(jaxpr, site)
        by_body.setdefault(site[:at], {})[site[at:]] = products[site]
    for prefix, inside in sorted(by_body.items(), key=lambda item: -len(item[0])):
        jaxpr = with_changed_body(jaxpr, prefix, functools.partial(_retraced, inside))
    return jaxpr


def _is_product(eqn: Any) -> bool:
    """Tells whether an equation is a product of two arrays."""
    return eqn is not None and eqn.primitive.name == "dot_general"


def _contracted(eqn: Any, operand: int) -> int:
    """Returns the one dim that a product contracts of an operand; -1 where there are several, or none."""
    contracted, _ = eqn.params["dimension_numbers"]
    return contracted[operand][0] if len(contracted[operand]) == 1 else -1


def _body_around(jaxpr: Any, site: Site) -> int:
    """Returns how much of a site leads to the innermost body that is no inlined call's."""
    found, body = 0, jaxpr
    for start in range(0, len(site) - 2, 2):
        eqn = _compat.open_jaxpr(body)[0].eqns[site[start]]
        body = bodies(eqn)[site[start + 1]]
        found = found if kind_of(eqn) is CallKind.INLINE else start + 2
    return found


def _retraced(products: Mapping[Site, int], body: Any) -> Any:
    """Returns a body with its products taken apart, as what it is: open or closed."""
    inner, _ = _compat.open_jaxpr(body)
    around = {site[:depth] for site in products for depth in range(1, len(site), 2)}
    handler = Selective(_Apart(products).handle, _NOTED, {*products, *around})
    made = interpreter.retraced(
        body, lambda constants, operands: interpreter.evaluate(inner, operands, handler, constants=list(constants))
    )
    new, _ = _compat.open_jaxpr(made)
    return _compat.like_jaxpr(made, new.replace(eqns=_needed(new)))


def _needed(inner: Any) -> list[Any]:
    """Returns the equations of a body without what lays values side by side that nobody reads so any more."""
    read = {v for v in inner.outvars if not isinstance(v, _compat.Literal)}
    left: list[Any] = []
    for eqn in reversed(inner.eqns):
        if eqn.primitive.name not in _NOTED or not read.isdisjoint(eqn.outvars):
            read.update(v for v in eqn.invars if not isinstance(v, _compat.Literal))
            left.insert(0, eqn)
    return left


class _Apart:
    """Evaluates products apart. `products`: by site, the position of the data."""

    def __init__(self, products: Mapping[Site, int]) -> None:
        self._products = products
        self._pieces: dict[int, tuple[Any, list[Any]]] = {}  # by array, what was laid side by side to make it

    def handle(self, eqn: Any, values: list[Any], site: Site, run: RunBody) -> list[Any] | None:
        """Is the handler of the evaluation."""
        if eqn.primitive.name in _NOTED:
            return self._noted(eqn, values)
        if site in self._products:
            return self._product(eqn, values, self._products[site])
        body = None if is_per_microbatch(eqn) else inline_body(eqn)
        return None if body is None else run(body, 0, values)

    def _noted(self, eqn: Any, values: Sequence[Any]) -> list[Any]:
        results = _compat.bind_equation(eqn, values)
        if eqn.primitive.name == "concatenate":
            pieces: list[Any] = list(values)
        else:
            _, known = self._pieces.get(id(values[0]), (None, []))
            pieces = [_compat.bind_equation(eqn, [piece])[0] for piece in known]
        if len(pieces) > 1:
            self._pieces[id(results[0])] = results[0], pieces
        return results

    def _product(self, eqn: Any, values: Sequence[Any], data: int) -> list[Any]:
        _, pieces = self._pieces[id(values[data])]
        weight, rows = values[1 - data], _contracted(eqn, 1 - data)
        at, summands = _contracted(eqn, data), []
        ends = np.cumsum([0, *(piece.shape[at] for piece in pieces)])
        for piece, (start, stop) in zip(pieces, itertools.pairwise(map(int, ends)), strict=True):
            part = lax.slice_in_dim(weight, start, stop, axis=rows)
            operands = [piece, part] if data == 0 else [part, piece]
            summands += _compat.bind_equation(eqn, operands)
        return [functools.reduce(operator.add, summands)]
