"""Convolutions in the layout that XLA's CPU compiler has a fast kernel for.

It brings convolutions into that layout (examples first, features last) in a program's entry computation only: those in
a branch or a loop, such as the gradients in a branch of partial backpropagation, run through a plain loop nest, several
times slower (seen with jax 0.10.2). Here they are written in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from splitjax import _compat

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


def with_cpu_layouts(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of pytrees of arrays, its convolutions transposed; its derivative is to be taken inside."""

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        found: list[Any] = []

        def flat(*values: Any) -> Any:
            results, tree = jax.tree.flatten(function(*jax.tree.unflatten(structure, values)))
            found.append(tree)
            return results

        closed, _ = _compat.trace(flat, *leaves)
        return jax.tree.unflatten(found[-1], _evaluate(closed, leaves))

    return run


def _evaluate(closed: Any, operands: Sequence[Any]) -> list[Any]:
    jaxpr, consts = _compat.open_jaxpr(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, operands, strict=True))
    read = lambda atom: atom.val if isinstance(atom, _compat.Literal) else env[atom]
    for eqn in jaxpr.eqns:
        values, body = [read(atom) for atom in eqn.invars], eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
        with _compat.equation_context(eqn):
            if eqn.primitive.name == "conv_general_dilated":
                results = [_convolution(eqn.params, *values)]
            elif _compat.is_jaxpr(body):
                results = _evaluate(body, values)
            else:
                results = _compat.bind_equation(eqn, values)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _convolution(params: dict[str, Any], data: Any, weight: Any) -> Any:
    """A convolution by transposing to examples, positions, features; weights to positions, in, out."""
    numbers = params["dimension_numbers"]
    (batch, feature, *where), (out, into, *window) = numbers.lhs_spec, numbers.rhs_spec
    rank = data.ndim
    last, positions = rank - 1, tuple(range(1, rank - 1))
    result = lax.conv_general_dilated(
        lax.transpose(data, (batch, *where, feature)),
        lax.transpose(weight, (*window, into, out)),
        params["window_strides"],
        params["padding"],
        params["lhs_dilation"],
        params["rhs_dilation"],
        lax.ConvDimensionNumbers((0, last, *positions), (last, last - 1, *range(rank - 2)), (0, last, *positions)),
        params["feature_group_count"],
        params["batch_group_count"],
        params["precision"],
        params["preferred_element_type"],
    )
    goes_to = numbers.out_spec  # where examples, features and positions are wanted
    source = dict(zip(goes_to, (0, last, *positions), strict=True))
    return lax.transpose(result, tuple(source[dim] for dim in range(rank)))
