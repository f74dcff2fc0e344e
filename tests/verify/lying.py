"""Operations that are wrong on purpose: on several devices they give twice what they give on one. They stand for errors
of XLA's partitioner."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

import splitjax
from splitjax.primitives.table import OPERATIONS

FACTOR = 2.0


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    batching.defvectorized(primitive)
    return primitive


@contextlib.contextmanager
def taught() -> Iterator[None]:
    """Teaches splitjax the dims of these operations, for as long as it lasts: other tests look at all that it knows."""
    for primitive in (lying_p, honest_p):
        splitjax.register_dims(primitive.name, "... -> ...")
    try:
        yield
    finally:
        for primitive in (lying_p, honest_p):
            OPERATIONS.forget(primitive.name)


def _lower_lie(ctx, x):
    axes = ctx.module_context.axis_context
    num_devices = getattr(axes, "num_devices", None) or (axes.mesh.size if hasattr(axes, "mesh") else 1)
    return mlir.lower_fun(lambda y: y * y.dtype.type(FACTOR) if num_devices > 1 else y, multiple_results=False)(ctx, x)


lying_p, honest_p = _primitive("lying"), _primitive("honest")
mlir.register_lowering(lying_p, _lower_lie)
mlir.register_lowering(honest_p, lambda ctx, x: [x])
ad.deflinear2(lying_p, lambda cotangent, x: [cotangent])
ad.deflinear2(honest_p, lambda cotangent, x: [lying_p.bind(cotangent)])


def lie(x: jax.Array) -> jax.Array:
    """`x`; on several devices its double. The gradient is right."""
    return lying_p.bind(x)


def lie_backward(x: jax.Array) -> jax.Array:
    """`x`; on several devices its gradient is doubled."""
    return honest_p.bind(x)
