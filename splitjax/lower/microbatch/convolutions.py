"""Writes convolutions in the layout for which XLA's CPU compiler has a fast kernel.

The compiler brings convolutions into that layout (examples first, features last) in a program's entry computation only:
those in a branch or a loop, such as the gradients in a branch of partial backpropagation, run through a plain loop
nest, several times slower (seen with jax 0.10.2). A function comes in; the same function comes out, whose convolutions
stand between transpositions that put them into that layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from splitjax import _compat

_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}


def with_cpu_layouts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `function`, of pytrees of arrays, with its convolutions transposed into the fast layout.

    A derivative is to be taken inside of `function`, so that its convolutions are transposed too."""

    def run(*args: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        trees: list[Any] = []  # of the results, which only tracing tells

        def flat(*values: Any) -> Any:
            results, tree = jax.tree.flatten(function(*jax.tree.unflatten(structure, values)))
            trees.append(tree)
            return results

        closed, _ = _compat.trace(flat, *leaves)
        return jax.tree.unflatten(trees[-1], _evaluate(closed, leaves))

    return run


def _evaluate(closed: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr, transposing the convolutions in it and in the calls that it makes."""
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
    """Convolves `data` with `weight`, transposed to (examples, positions, features) and (positions, in, out)."""
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
