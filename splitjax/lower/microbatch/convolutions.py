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
from splitjax.primitives.calls import CallKind, inline_body, names
from splitjax.primitives.interpreter import RunBody, Selective, evaluate
from splitjax.primitives.walk import Site


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
        return jax.tree.unflatten(trees[-1], evaluate(closed, leaves, _FAST))

    return run


def _with_fast_convolutions(eqn: Any, values: list[Any], site: Site, run: RunBody) -> Sequence[Any] | None:
    """Evaluates a convolution between transpositions, and the body of a call in its place."""
    if eqn.primitive.name == "conv_general_dilated":
        return [_convolution(eqn.params, *values)]
    body = inline_body(eqn)
    return None if body is None else run(body, 0, values)


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


_FAST = Selective(_with_fast_convolutions, names(CallKind.INLINE) | {"conv_general_dilated"})
