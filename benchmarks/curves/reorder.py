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
from jax import lax

from splitjax import _compat

# By length of a dim, the order in which it is summed: i32[length].
Orders = Mapping[int, jax.Array]
# Calls whose body stands for them once nothing is to be differentiated any more; the parameters that hold it.
_CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr",
}  # fmt: skip


def reorderable(step: Callable[..., Any], *example: Any) -> tuple[Callable[..., Any], tuple[int, ...]]:
    """`(orders, *arguments) -> step(*arguments)` with its sums in those orders, and the lengths that `orders` needs.

    `example`: the step's arguments or their shapes."""
    closed, shapes = _compat.trace(step, *example)
    structure = jax.tree.structure(shapes)
    lengths: set[int] = set()
    _lengths(closed, lengths)

    def reordered(orders: Orders, *arguments: Any) -> Any:
        return jax.tree.unflatten(structure, _run(closed, jax.tree.leaves(arguments), orders))

    return reordered, tuple(sorted(lengths))


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


def _body(eqn: Any) -> Any | None:
    return eqn.params.get(_CALLS.get(eqn.primitive.name, ""))


def _lengths(closed: Any, lengths: set[int]) -> None:
    inner, _ = _compat.open_jaxpr(closed)
    for eqn in inner.eqns:
        lengths.update(eqn.invars[operand].aval.shape[dim] for operand, dim in summed_dims(eqn))
        body = eqn.params["jaxpr"] if eqn.primitive.name == "scan" else _body(eqn)
        if body is not None:
            _lengths(body, lengths)


def _run(closed: Any, operands: Sequence[Any], orders: Orders) -> list[Any]:
    inner, consts = _compat.open_jaxpr(closed)
    values = dict(zip(inner.constvars, consts, strict=True))
    values.update(zip(inner.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _compat.Literal) else values[atom]

    for eqn in inner.eqns:
        values.update(zip(eqn.outvars, _evaluate(eqn, [read(atom) for atom in eqn.invars], orders), strict=True))
    return [read(atom) for atom in inner.outvars]


def _evaluate(eqn: Any, operands: list[Any], orders: Orders) -> list[Any]:
    body = _body(eqn)
    if body is not None:
        return _run(body, operands, orders)
    if eqn.primitive.name == "scan":
        return _scan(eqn, operands, orders)
    for operand, dim in summed_dims(eqn):
        operands[operand] = jnp.take(operands[operand], orders[operands[operand].shape[dim]], axis=dim)
    return _compat.bind_equation(eqn, operands)


def _scan(eqn: Any, operands: list[Any], orders: Orders) -> list[Any]:
    params = eqn.params
    num_consts, num_carry = _compat.scan_counts(params)
    consts, carry, xs = (
        operands[:num_consts],
        operands[num_consts : num_consts + num_carry],
        operands[num_consts + num_carry :],
    )

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _run(params["jaxpr"], [*consts, *carry, *x], orders)
        return results[:num_carry], results[num_carry:]

    carry, ys = lax.scan(body, carry, xs, length=params["length"], reverse=params["reverse"], unroll=params["unroll"])
    return [*carry, *ys]
