"""What a drawn operation may stand in: a jit, remat, a scan, a branch, custom derivatives, vmaps of every kind, forward
mode."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.partitioner.draw import Case

Build = Callable[[Mapping[str, Any]], Case]
_EXTRA = 2  # the size of the dim that a vmap or a stack of weights adds


def _around(change: Callable[[Case], Callable[..., Any]]) -> Callable[[Build, Mapping[str, Any]], Case]:
    def wrap(build: Build, params: Mapping[str, Any]) -> Case:
        case = build(params)
        return dataclasses.replace(case, run=change(case))

    return wrap


def _custom_vjp(case: Case) -> Callable[..., Any]:
    function = jax.custom_vjp(lambda *operands: case.run(*operands))
    function.defvjp(
        lambda *operands: (case.run(*operands), operands),
        lambda operands, tangents: jax.vjp(case.run, *operands)[1](tangents),
    )
    return function


def _custom_jvp(case: Case) -> Callable[..., Any]:
    function = jax.custom_jvp(lambda *operands: case.run(*operands))
    function.defjvp(lambda operands, tangents: jax.jvp(case.run, operands, tangents))
    return function


def _scan(case: Case) -> Callable[..., Any]:
    """Two iterations on the same operands, the floating-point data scaled; results are stacked."""

    def run(*operands: Any) -> Any:
        def body(carry: Any, factor: Any) -> Any:
            scaled = [
                x * factor.astype(x.dtype) if one.is_float and one.role == "data" else x
                for one, x in zip(case.inputs, operands, strict=True)
            ]
            return carry + factor, case.run(*scaled)

        total, results = lax.scan(body, jnp.zeros(()), jnp.asarray([1.0, 0.75]))
        return results

    return run


def _cond(case: Case) -> Callable[..., Any]:
    """A branch that is taken, beside one of zeros."""

    def run(*operands: Any) -> Any:
        shapes = jax.eval_shape(case.run, *operands)
        total = sum(jnp.sum(x.astype(jnp.float32)) for x in operands)
        zeros = lambda *_: tuple(jnp.zeros(one.shape, one.dtype) for one in shapes)
        return lax.cond(total > -1e9, case.run, zeros, *operands)

    return run


def _jvp(case: Case) -> Callable[..., Any]:
    """Forward mode: the tangents for tangents that are half of the operands."""

    def run(*operands: Any) -> Any:
        places = [k for k, one in enumerate(case.inputs) if one.is_float]

        def of_floats(*floats: Any) -> Any:
            whole = list(operands)
            for place, value in zip(places, floats, strict=True):
                whole[place] = value
            return case.run(*whole)

        floats = tuple(operands[k] for k in places)
        return jax.jvp(of_floats, floats, tuple(0.5 * x for x in floats))[1]

    return run


def _scan_weights(build: Build, params: Mapping[str, Any]) -> Case:
    """A scan over stacked weights, as over layers."""
    case = build(params)
    weights = [k for k, one in enumerate(case.inputs) if one.role == "weight"]

    def run(*operands: Any) -> Any:
        def body(carry: Any, layer: Any) -> Any:
            whole = list(operands)
            for place, value in zip(weights, layer, strict=True):
                whole[place] = value
            return carry, case.run(*whole)

        return lax.scan(body, 0, tuple(operands[k] for k in weights))[1]

    if not weights:
        raise ValueError("no weights to scan over")
    return Case(_stacked(case, "weight"), run)


def _stacked(case: Case, *roles: str) -> tuple[Any, ...]:
    """Inputs with a dim more: in front of a weight's, behind the examples of data."""

    def wider(one: Any) -> Any:
        if one.role not in roles:
            return one
        shape = (_EXTRA, *one.shape) if one.role == "weight" else (one.shape[0], _EXTRA, *one.shape[1:])
        return dataclasses.replace(one, shape=shape)

    return tuple(wider(one) for one in case.inputs)


def _vmap(*roles: str) -> Callable[[Build, Mapping[str, Any]], Case]:
    def wrap(build: Build, params: Mapping[str, Any]) -> Case:
        case = build(params)
        dims = [None if one.role not in roles else 0 if one.role == "weight" else 1 for one in case.inputs]
        if all(dim is None for dim in dims):
            raise ValueError("nothing to map over")
        return Case(_stacked(case, *roles), lambda *operands: jax.vmap(case.run, in_axes=tuple(dims))(*operands))

    return wrap


def _per_example(build: Build, params: Mapping[str, Any]) -> Case:
    """A vmap over the examples: the operation sees one at a time."""
    case, single = _single(build, params)
    dims = tuple(0 if one.role == "data" else None for one in case.inputs)
    return Case(case.inputs, lambda *operands: jax.vmap(single, in_axes=dims)(*operands))


def _per_example_gradient(build: Build, params: Mapping[str, Any]) -> Case:
    """The gradients of each example on its own for the weights, as differential privacy wants them."""
    case, single = _single(build, params)
    dims = tuple(0 if one.role == "data" else None for one in case.inputs)
    weights = tuple(k for k, one in enumerate(case.inputs) if one.role == "weight")
    if not weights:
        raise ValueError("no weights to differentiate for")

    def gradient(*operands: Any) -> Any:
        return jax.grad(lambda *inner: sum(jnp.sum(jnp.sin(result)) for result in single(*inner)), argnums=weights)(
            *operands
        )

    return Case(case.inputs, lambda *operands: jax.vmap(gradient, in_axes=dims)(*operands))


def _single(build: Build, params: Mapping[str, Any]) -> tuple[Case, Callable[..., Any]]:
    """The case, and its operation on one example without the dim of examples."""
    case = build(params)
    if "batch" not in params:
        raise ValueError("the operation has no number of examples")
    alone = build({**params, "batch": 1})
    for one, inner in zip(case.inputs, alone.inputs, strict=True):
        if inner.shape != (one.shape if one.role != "data" else (1, *one.shape[1:])):
            raise ValueError("the operation mixes examples")

    def single(*operands: Any) -> Any:
        return alone.run(*[x[None] if one.role == "data" else x for one, x in zip(case.inputs, operands, strict=True)])

    return case, single


WRAPPERS: dict[str, Callable[[Build, Mapping[str, Any]], Case]] = {
    "plain": lambda build, params: build(params),
    "jit": _around(lambda case: jax.jit(case.run)),
    "remat": _around(lambda case: jax.checkpoint(case.run)),
    "custom_vjp": _around(_custom_vjp),
    "custom_jvp": _around(_custom_jvp),
    "scan": _around(_scan),
    "cond": _around(_cond),
    "jvp": _around(_jvp),
    "scan_weights": _scan_weights,
    "vmap_data": _vmap("data"),
    "vmap_weights": _vmap("weight"),
    "vmap_both": _vmap("data", "weight"),
    "per_example": _per_example,
    "per_example_gradient": _per_example_gradient,
}
# Half of the draws stand alone, so that what is found is plain; the rest is divided among the others.
SHARES = ("plain",) * 12 + tuple(name for name in WRAPPERS if name != "plain")
