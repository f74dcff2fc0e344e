"""Primitives of one's own: elementwise, a product, and a normalisation of rows, with derivatives, batching and a
lowering, as another library would bring them. splitjax knows none of them until it is taught."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from splitjax.primitives.table import OPERATIONS


def _define(name, evaluate, shape):
    primitive = Primitive(name)
    primitive.def_impl(jax.jit(evaluate))
    primitive.def_abstract_eval(lambda *avals: ShapedArray(shape(*avals), avals[0].dtype))
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate, multiple_results=False))
    batching.primitive_batchers[primitive] = lambda values, dims: (
        jax.vmap(evaluate, in_axes=dims)(*values),
        0,
    )
    return primitive


# x * sin(x), number by number. Its derivative is made of JAX's operations.
wave_p = _define("own_wave", lambda x: x * jnp.sin(x), lambda x: x.shape)
ad.defjvp(wave_p, lambda tangent, x: tangent * (jnp.sin(x) + x * jnp.cos(x)))

# b i, i o -> b o; its transposes are products of their own: b o, i o -> b i and b i, b o -> i o.
product_p = _define("own_product", lambda x, w: x @ w, lambda x, w: (x.shape[0], w.shape[1]))
product_data_p = _define("own_product_data", lambda ct, w: ct @ w.T, lambda ct, w: (ct.shape[0], w.shape[0]))
product_weight_p = _define("own_product_weight", lambda x, ct: x.T @ ct, lambda x, ct: (x.shape[1], ct.shape[1]))
ad.defbilinear(
    product_p,
    lambda ct, x, w: product_data_p.bind(ct, w),
    lambda ct, x, w: product_weight_p.bind(x, ct),
)

# b i, i o -> b o, but not linear: the largest of the sums, which parts of i do not add up to.
_tropical = lambda x, w: (x[:, :, None] + w).max(1)
tropical_p = _define("own_tropical", _tropical, lambda x, w: (x.shape[0], w.shape[1]))
ad.defjvp(
    tropical_p,
    lambda tangent, x, w: jax.jvp(lambda x: _tropical(x, w), (x,), (tangent,))[1],
    lambda tangent, x, w: jax.jvp(lambda w: _tropical(x, w), (w,), (tangent,))[1],
)

# Every row less its mean, over its standard deviation.
_normalise = lambda x: (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-3)
normalise_p = _define("own_normalise", _normalise, lambda x: x.shape)
ad.primitive_jvps[normalise_p] = lambda primals, tangents: jax.jvp(_normalise, primals, tangents)

# b f -> f: a sum over the examples.
total_p = _define("own_total", lambda x: x.sum(0), lambda x: x.shape[1:])
ad.deflinear2(total_p, lambda ct, x: [jnp.broadcast_to(ct, x.aval.shape)])


@contextlib.contextmanager
def forgotten(*primitives: Primitive) -> Iterator[None]:
    """Takes what a test teaches of the primitives out of the table again: other tests look at all that it knows."""
    try:
        yield
    finally:
        for primitive in primitives:
            OPERATIONS.forget(primitive if isinstance(primitive, str) else primitive.name)
