"""Takes the derivative rules that an equation of the traced step brings along out of it, as jaxprs.

An equation comes in; its rule comes out, and an evaluation of the equation otherwise with the same rule
(`custom_call`). It exists because editing the body of such an equation would lose its rule.

A `custom_jvp` or `custom_vjp` equation is bound and differentiated once, abstractly; what comes out can be evaluated
otherwise, and made into an equation with the same rule again (`custom_call`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax import _compat


@dataclasses.dataclass(frozen=True)
class ForwardRule:
    """Holds a forward-mode rule as a jaxpr.

    - `jaxpr`: (operands, tangents of floating-point operands) -> results, tangents of the floating-point results.
    - `results`: the positions of the floating-point results.
    """

    jaxpr: _compat.ClosedJaxpr
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ReverseRule:
    """Holds a reverse-mode rule as two jaxprs.

    - `forward`: operands -> results, residuals.
    - `backward`: (residuals, cotangents of `results`) -> gradients of the operands at `positions`.
    - `positions`: of the floating-point operands. `results`: of the floating-point results.
    """

    forward: _compat.ClosedJaxpr
    backward: _compat.ClosedJaxpr
    positions: tuple[int, ...]
    results: tuple[int, ...]


def jvp_of(eqn: Any) -> tuple[tuple[int, ...], ForwardRule]:
    """Returns the operand positions that have tangents, and the rule of the `custom_jvp` equation `eqn`."""
    positions, results = _floating(eqn.invars), _floating(eqn.outvars)

    def rule(operands: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], Any]:
        function = lambda *differentiated: _outputs(eqn, operands, positions, differentiated, results)
        floating, changes, rest = jax.jvp(function, [operands[i] for i in positions], tangents, has_aux=True)
        return _merged(len(eqn.outvars), results, floating, rest), changes

    types = _types(eqn.invars)
    return positions, ForwardRule(_compat.trace(rule, types, [types[i] for i in positions])[0], results)


def vjp_of(eqn: Any) -> ReverseRule:
    """Returns the rule of the `custom_vjp` equation `eqn`, in its two parts."""
    positions, results = _floating(eqn.invars), _floating(eqn.outvars)
    trees: list[Any] = []

    def forward(*operands: Any) -> tuple[list[Any], Any]:
        function = lambda *differentiated: _outputs(eqn, operands, positions, differentiated, results)
        floating, pull, rest = jax.vjp(function, *(operands[i] for i in positions), has_aux=True)
        residuals, tree = jax.tree.flatten(pull)
        trees[:] = [tree]
        return _merged(len(eqn.outvars), results, floating, rest), residuals

    closed, (_, residuals) = _compat.trace(forward, *_types(eqn.invars))
    cotangents = [_types(eqn.outvars)[k] for k in results]
    backward, _ = _compat.trace(
        lambda kept, given: jax.tree.unflatten(trees[0], kept)(given), list(residuals), cotangents
    )
    return ReverseRule(closed, backward, positions, results)


EvalRule = Callable[[_compat.ClosedJaxpr, Sequence[Any]], list[Any]]  # evaluates a jaxpr of a rule on flat operands


def custom_call(
    eqn: Any, body: Callable[..., list[Any]], run: EvalRule, rule: tuple[tuple[int, ...], ForwardRule] | ReverseRule
) -> Callable[..., list[Any]]:
    """Returns the function of a custom-rule equation, with its rule, evaluated otherwise: operands -> results.

    **Arguments:**

    - `eqn`: the equation, a call of a function with a custom derivative rule.
    - `body`: operands -> results, where nothing is differentiated.
    - `run`: evaluates the jaxprs of `rule` on flat operands.
    - `rule`: what `jvp_of` or `vjp_of` gives for the equation.
    """
    return (
        _with_reverse(eqn, body, run, rule) if isinstance(rule, ReverseRule) else _with_forward(eqn, body, run, *rule)
    )


def _with_forward(
    eqn: Any, body: Callable[..., list[Any]], run: EvalRule, positions: tuple[int, ...], rule: ForwardRule
) -> Callable[..., list[Any]]:
    function = jax.custom_jvp(body)

    @function.defjvp
    def derive(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        evaluated = run(rule.jaxpr, [*primals, *(tangents[i] for i in positions)])
        results, changes = evaluated[: len(eqn.outvars)], iter(evaluated[len(eqn.outvars) :])
        return results, [
            next(changes) if number in rule.results else np.zeros(np.shape(result), jax.dtypes.float0)
            for number, result in enumerate(results)
        ]

    return function


def _with_reverse(
    eqn: Any, body: Callable[..., list[Any]], run: EvalRule, rule: ReverseRule
) -> Callable[..., list[Any]]:
    function = jax.custom_vjp(body)

    def forward(*operands: Any) -> tuple[list[Any], tuple[Any, Any]]:
        evaluated = run(rule.forward, operands)
        return evaluated[: len(eqn.outvars)], (operands, evaluated[len(eqn.outvars) :])

    def backward(kept: tuple[Any, Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        operands, residuals = kept
        gradients = iter(run(rule.backward, [*residuals, *(cotangents[k] for k in rule.results)]))
        return tuple(
            next(gradients)
            if i in rule.positions
            else np.zeros(np.shape(value), jax.dtypes.float0)
            if not jnp.issubdtype(value.dtype, jnp.inexact)
            else jnp.zeros_like(value)
            for i, value in enumerate(operands)
        )

    function.defvjp(forward, backward)
    return function


def _outputs(
    eqn: Any, operands: Sequence[Any], positions: Sequence[int], differentiated: Sequence[Any], results: Sequence[int]
) -> tuple[list[Any], list[Any]]:
    """Evaluates an equation with the values `differentiated` at `positions`: the floating-point results, and the
    rest."""
    merged = list(operands)
    for i, value in zip(positions, differentiated, strict=True):
        merged[i] = value
    values = _compat.bind_equation(eqn, merged)
    return [values[k] for k in results], [value for k, value in enumerate(values) if k not in results]


def _merged(count: int, results: Sequence[int], floating: Sequence[Any], rest: Sequence[Any]) -> list[Any]:
    """Puts the results that `_outputs` took apart into their order again."""
    first, second = iter(floating), iter(rest)
    return [next(first) if k in results else next(second) for k in range(count)]


def _floating(variables: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, v in enumerate(variables) if jnp.issubdtype(v.aval.dtype, jnp.inexact))


def _types(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
