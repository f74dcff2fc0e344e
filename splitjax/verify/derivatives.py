"""The derivative rules that an equation of the traced step brings along, as jaxprs at the sizes of the trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from splitjax import _compat


@dataclasses.dataclass(frozen=True)
class ForwardRule:
    """`jaxpr`: (operands, tangents of floating-point operands) -> results, tangents of the floating-point `results`."""

    jaxpr: Any
    results: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class ReverseRule:
    """`forward`: operands -> results, residuals. `backward`: (residuals, cotangents of `results`) -> gradients of
    `positions`."""

    forward: Any
    backward: Any
    positions: tuple[int, ...]
    results: tuple[int, ...]


def jvp_of(eqn: Any) -> tuple[tuple[int, ...], ForwardRule]:
    """The operand positions that have tangents, and the rule of a `custom_jvp` equation."""
    positions, results = _floating(eqn.invars), _floating(eqn.outvars)

    def rule(operands, tangents):
        function = lambda *differentiated: _outputs(eqn, operands, positions, differentiated, results)
        found, changes, others = jax.jvp(function, [operands[i] for i in positions], tangents, has_aux=True)
        return _merged(len(eqn.outvars), results, found, others), changes

    types = _types(eqn.invars)
    with jax.enable_x64(False):
        return positions, ForwardRule(_compat.trace(rule, types, [types[i] for i in positions])[0], results)


def vjp_of(eqn: Any) -> ReverseRule:
    """The rule of a `custom_vjp` equation, in its two parts."""
    positions, results = _floating(eqn.invars), _floating(eqn.outvars)
    trees: list[Any] = []

    def forward(*operands):
        function = lambda *differentiated: _outputs(eqn, operands, positions, differentiated, results)
        found, pull, others = jax.vjp(function, *(operands[i] for i in positions), has_aux=True)
        residuals, tree = jax.tree.flatten(pull)
        trees[:] = [tree]
        return _merged(len(eqn.outvars), results, found, others), residuals

    with jax.enable_x64(False):
        closed, (_, residuals) = _compat.trace(forward, *_types(eqn.invars))
        cotangents = [_types(eqn.outvars)[k] for k in results]
        backward, _ = _compat.trace(
            lambda kept, given: jax.tree.unflatten(trees[0], kept)(given), list(residuals), cotangents
        )
    return ReverseRule(closed, backward, positions, results)


def _outputs(
    eqn: Any, operands: Sequence[Any], positions: Sequence[int], differentiated: Sequence[Any], results: Sequence[int]
) -> tuple[list, list]:
    merged = list(operands)
    for i, value in zip(positions, differentiated, strict=True):
        merged[i] = value
    found = _compat.bind_equation(eqn, merged)
    return [found[k] for k in results], [one for k, one in enumerate(found) if k not in results]


def _merged(count: int, results: Sequence[int], found: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    first, second = iter(found), iter(others)
    return [next(first) if k in results else next(second) for k in range(count)]


def _floating(variables: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, v in enumerate(variables) if jnp.issubdtype(v.aval.dtype, jnp.inexact))


def _types(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]
