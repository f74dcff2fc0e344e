"""Small Pallas kernels with derivative rules of their own, as people write them, run by Pallas's interpreter."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def _attention_kernel(q_ref, k_ref, v_ref, out_ref, total_ref):
    q, k, v = q_ref[0, :, 0], k_ref[0, :, 0], v_ref[0, :, 0]
    weights = jnp.exp(q @ k.T)
    total = weights.sum(-1, keepdims=True)
    out_ref[0, :, 0] = (weights / total) @ v
    total_ref[0, 0] = total[:, 0]


def _attention_backward_kernel(q_ref, k_ref, v_ref, total_ref, ct_ref, dq_ref, dk_ref, dv_ref):
    q, k, v, ct = q_ref[0, :, 0], k_ref[0, :, 0], v_ref[0, :, 0], ct_ref[0, :, 0]
    weights = jnp.exp(q @ k.T) / total_ref[0, 0][:, None]
    of_weights = ct @ v.T
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdims=True))
    dq_ref[0, :, 0] = of_scores @ k
    dk_ref[0, :, 0] = of_scores.T @ q
    dv_ref[0, :, 0] = weights.T @ ct


def _each_head(shape):
    """The block of one head of one example in an array [batch, positions, heads, head_dim]."""
    return pl.BlockSpec((1, shape[1], 1, shape[3]), lambda b, h: (b, 0, h, 0))


def _forward(q, k, v):
    return pl.pallas_call(
        _attention_kernel,
        (
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((q.shape[0], q.shape[2], q.shape[1]), q.dtype),
        ),
        grid=(q.shape[0], q.shape[2]),
        in_specs=[_each_head(q.shape), _each_head(k.shape), _each_head(v.shape)],
        out_specs=(_each_head(q.shape), pl.BlockSpec((1, 1, q.shape[1]), lambda b, h: (b, h, 0))),
        interpret=True,
        name="attention_forward",
    )(q, k, v)


@jax.custom_vjp
def attention(q, k, v):
    """Attention of queries [b, s, h, d] to keys and values [b, t, h, d]."""
    return _forward(q, k, v)[0]


def _attention_forward(q, k, v):
    out, total = _forward(q, k, v)
    return out, (q, k, v, total)


def _attention_backward(kept, ct):
    q, k, v, total = kept
    return pl.pallas_call(
        _attention_backward_kernel,
        tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)),
        grid=(q.shape[0], q.shape[2]),
        in_specs=[
            *(_each_head(x.shape) for x in (q, k, v)),
            pl.BlockSpec((1, 1, q.shape[1]), lambda b, h: (b, h, 0)),
            _each_head(ct.shape),
        ],
        out_specs=tuple(_each_head(x.shape) for x in (q, k, v)),
        interpret=True,
        name="attention_backward",
    )(q, k, v, total, ct)


attention.defvjp(_attention_forward, _attention_backward)


def _scale_kernel(x_ref, scale_ref, out_ref):
    x = x_ref[...]
    out_ref[...] = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale_ref[...]


@jax.custom_vjp
def rms_norm(x, scale):
    """Divides x [b, ..., f] by the root of its mean square over f, times scale [f]."""
    return pl.pallas_call(_scale_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True, name="rms_norm")(
        x, scale
    )


def _plain_norm(x, scale):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


rms_norm.defvjp(lambda x, scale: (rms_norm(x, scale), (x, scale)), lambda kept, ct: jax.vjp(_plain_norm, *kept)[1](ct))
