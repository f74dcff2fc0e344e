"""The same step on one device with every sum taken in another order.

A step is traced, and its jaxpr evaluated with the operands of each sum permuted along the dims that it sums over:
matrix products and convolutions along what they contract (features forward, examples in a weight's gradient), plain
sums along what they reduce. Which terms are added is unchanged, so is every random bit: in exact arithmetic the result
is the same, and what differs is rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax import _compat
from splitjax.lower.products.rebuilding import REBUILD
from splitjax.primitives.calls import CallKind, call_body, kind_of
from splitjax.primitives.interpreter import RunBody, evaluate
from splitjax.primitives.walk import Site, walk

# By length of a dim, the order in which it is summed: i32[length].
Orders = Mapping[int, jax.Array]


def reorderable(step: Callable[..., Any], *example: Any) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """`(orders, *arguments) -> step(*arguments)` with its sums in those orders, and the lengths that `orders` needs.

    `example`: the step's arguments or their shapes."""
    closed, shapes = _compat.trace(step, *example)
    structure = jax.tree.structure(shapes)

    def reordered(orders: Orders, *arguments: Any) -> Any:
        return jax.tree.unflatten(structure, _run(closed, jax.tree.leaves(arguments), orders))

    return reordered, tuple(sorted(_lengths(closed)))


def draw_orders(lengths: Sequence[int], seed: int) -> dict[int, np.ndarray]:
    """A permutation at random for each length."""
    return {length: np.random.default_rng((seed, length)).permutation(length).astype(np.int32) for length in lengths}


def summed_dims(eqn: Any) -> tuple[tuple[int, int], ...]:
    """The dims that an equation sums over, as (operand, dim); those of both operands of a product side by side. Empty
    for others."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (left, right), _ = params["dimension_numbers"]
        return tuple(pair for dims in zip(left, right, strict=True) for pair in ((0, dims[0]), (1, dims[1])))
    if name == "conv_general_dilated" and params["feature_group_count"] == params["batch_group_count"] == 1:
        numbers = params["dimension_numbers"]
        return (0, numbers.lhs_spec[1]), (1, numbers.rhs_spec[1])
    if name == "reduce_sum":
        return tuple((0, axis) for axis in params["axes"])
    return ()


def _is_seen_through(eqn: Any) -> bool:
    """Tells whether the body of `eqn` stands for it where nothing is differentiated any more, or is looped over."""
    return call_body(eqn) is not None or kind_of(eqn) is CallKind.SCAN


def _lengths(closed: Any) -> set[int]:
    return {
        visit.eqn.invars[operand].aval.shape[dim]
        for visit in walk(closed, enter=lambda visit: _is_seen_through(visit.eqn))
        for operand, dim in summed_dims(visit.eqn)
    }


def _run(closed: Any, operands: Sequence[Any], orders: Orders) -> list[Any]:
    def reorder(eqn: Any, values: list[Any], site: Site, run: RunBody) -> list[Any] | None:
        body = call_body(eqn)
        if body is not None:
            return run(body, 0, values)
        if kind_of(eqn) is CallKind.SCAN:
            return REBUILD[CallKind.SCAN](run, eqn, values)
        for operand, dim in summed_dims(eqn):
            values[operand] = jnp.take(values[operand], orders[values[operand].shape[dim]], axis=dim)
        return None

    return evaluate(closed, operands, reorder)
