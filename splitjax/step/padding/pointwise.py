"""Says what operations on single entries do with padded operands, and what then stands in the padding.

Where such an operation is not defined, or its derivative, at what may stand there (the logarithm of zero), it gets a
harmless number instead: a value that is not finite would reach the rest through a product with zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from splitjax import _compat
from splitjax.primitives.elementwise import ELEMENTWISE
from splitjax.primitives.operation import Domain
from splitjax.primitives.table import OPERATIONS
from splitjax.step.padding.values import (
    Sizes,
    array_of,
    fill_of,
    fitted,
    grown,
    masked,
    padded,
    sizes_of,
)

# A number at which all of them are defined, with finite derivatives.
_HARMLESS = 0.5
# What operations make of numbers, as far as somebody needs it: optimizers, mostly.
_NUMBERS: dict[str, Callable[..., float]] = {
    "add": lambda a, b: a + b,
    "add_any": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "max": lambda a, b: max(a, b),
    "min": lambda a, b: min(a, b),
    "neg": lambda a: -a,
    "abs": math.fabs,
    "sign": lambda a: math.copysign(1.0, a) if a else 0.0,
    "square": lambda a: a * a,
    "sqrt": math.sqrt,
    "rsqrt": lambda a: 1 / math.sqrt(a),
    "exp": math.exp,
    "exp2": lambda a: math.pow(2.0, a),
    "tanh": math.tanh,
    "sin": math.sin,
    "round": lambda a: float(round(a)),
    "floor": lambda a: float(math.floor(a)),
}
_SAME = frozenset(
    "convert_element_type copy copy_p reduce_precision name stop_gradient sharding_constraint real".split()
)
# What is zero where one operand is, whatever finite number the other one is.
_ZERO_WITH = {"mul": (0, 1), "div": (0,), "and": (0, 1)}


def pointwise(eqn: Any, values: Sequence[Any], wanted: Sequence[Sizes], is_differentiated: bool) -> list[Any] | None:
    """Returns the results of an operation on single entries; None for another one.

    **Arguments:** `eqn`: its equation. `values`: its operands. `wanted`: per result the dims that are to be padded.
    `is_differentiated`: whether JAX takes its derivative later."""
    name = eqn.primitive.name
    if name not in ELEMENTWISE and name != "optimization_barrier":
        return None
    if name == "optimization_barrier":
        results = _compat.bind_equation(eqn, [array_of(value) for value in values])
        return [
            padded(result, variable.aval.shape, sizes_of(value), fill_of(value))
            for result, variable, value in zip(results, eqn.outvars, values, strict=True)
        ]
    shape = tuple(eqn.outvars[0].aval.shape)
    if not all(jnp.issubdtype(v.aval.dtype, jnp.number) or v.aval.dtype == bool for v in (*eqn.invars, *eqn.outvars)):
        return None  # keys of random numbers
    if any(not _meets(tuple(v.aval.shape), shape) for v in eqn.invars):
        return None
    sizes = dict(wanted[0])
    for value in values:
        sizes.update(sizes_of(value))
    operands = [
        _beside(value, tuple(variable.aval.shape), shape, sizes)
        for variable, value in zip(eqn.invars, values, strict=True)
    ]
    is_divisor = name == "integer_pow" and eqn.params["y"] < 0
    domain = OPERATIONS.of("reciprocal" if is_divisor else name, eqn.params).domain
    if domain is not None:
        for position in domain.operands:
            if is_differentiated or not _is_safe(domain, position, operands[position]):
                operands[position] = masked(operands[position], _harmless(name, operands[position]))
    results = _compat.bind_equation(_grown_params(eqn, shape, sizes), [array_of(value) for value in operands])
    fill = _fill(name, operands)
    return [
        padded(result, shape, sizes, fill if jnp.issubdtype(variable.aval.dtype, jnp.floating) else None)
        for result, variable in zip(results, eqn.outvars, strict=True)
    ]


def _meets(own: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Tells whether an operand of the shape `own` is a number, or has the dims of the result, of size 1 perhaps."""
    return own == () or (len(own) == len(shape) and all(n in (1, size) for n, size in zip(own, shape, strict=True)))


def _beside(value: Any, own: tuple[int, ...], shape: tuple[int, ...], sizes: Sizes) -> Any:
    """Returns an operand of the shape `own` with the dims padded in which it has all of the result's."""
    if own == ():
        return value
    return fitted(value, own, {dim: size for dim, size in sizes.items() if own[dim] == shape[dim]})


def _harmless(name: str, value: Any) -> float | int:
    """Returns a number of the operand's type at which an operation is defined; of powers one that gives zero, which
    then is not to be masked again in sums, and in the backward pass."""
    if not jnp.issubdtype(array_of(value).dtype, jnp.inexact):
        return 1
    is_power = name in ("exp", "exp2") and jnp.issubdtype(array_of(value).dtype, jnp.floating)
    return -math.inf if is_power else _HARMLESS


def _is_safe(domain: Domain, position: int, value: Any) -> bool:
    """Tells whether an operation is defined at what stands in the padding of an operand, by its `domain`."""
    fill = fill_of(value)
    if fill is None or not math.isfinite(fill):
        return not sizes_of(value)
    return domain.holds is not None and domain.holds(position, fill)


def _fill(name: str, operands: Sequence[Any]) -> float | None:
    """Returns what stands in the padding of the result, where it is known."""
    fills = [fill_of(value) for value in operands]
    if name in _SAME:
        return fills[0]
    if any(fills[k] == 0 for k in _ZERO_WITH.get(name, ()) if sizes_of(operands[k])):
        return 0.0
    if name == "integer_pow":
        return 0.0 if fills[0] == 0 else None
    if name == "select_n":
        return fills[1] if len(set(fills[1:])) == 1 else None
    if name not in _NUMBERS or any(fill is None for fill in fills):
        return None
    try:
        return float(_NUMBERS[name](*fills))
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _grown_params(eqn: Any, shape: tuple[int, ...], sizes: Sizes) -> Any:
    """Returns an equation whose parameters name the size of its result, if they do, with the padded one."""
    return _compat.with_params(eqn, shape=grown(shape, sizes)) if "shape" in eqn.params else eqn
