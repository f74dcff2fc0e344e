"""Decoders as they are written today, in plain JAX: layers in a scan, rematerialised, grouped heads, gated MLPs,
experts.

A step takes `pin(where, array)`, which is where a layout that is written by hand constrains activations. The step that
splitjax is given pins nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Pin = Callable[[str, jax.Array], jax.Array]
Tree = Any


def no_pin(where: str, array: jax.Array) -> jax.Array:
    """Constrains nothing."""
    return array


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Says how a decoder is made.

    - `layers`, `width`, `hidden`, `vocab`, `seq`, `examples`: its sizes, and those of the batch.
    - `heads`, `kv_heads`, `head_dim`: of attention.
    - `fused`: query, key and value in one weight, gate and up in one.
    - `tied`: the table is the head, too. `remat`: layers are rematerialised. `dtype`: what products are computed in.
    - `experts`: in each layer's MLP; 0 for a plain one. `top`: how many each token goes to.
    - `rotary`: queries and keys are turned by their positions; otherwise nothing says where a token stands.
    """

    layers: int = 4
    width: int = 128
    hidden: int = 256
    vocab: int = 512
    seq: int = 64
    examples: int = 16
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 16
    fused: bool = False
    tied: bool = False
    remat: bool = True
    dtype: str = "float32"
    experts: int = 0
    top: int = 2
    rotary: bool = False

    @property
    def num_parameters(self) -> int:
        """The number of parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(lambda: self.init(jax.random.key(0)))))

    def init(self, key: jax.Array) -> Tree:
        """Returns parameters that are drawn with `key`, those of layers stacked."""
        keys = iter(jax.random.split(key, 16))

        def normal(*shape: int, fan: int) -> jax.Array:
            return jax.random.normal(next(keys), shape, jnp.float32) * fan**-0.5

        width, inner, kv, count = self.width, self.heads * self.head_dim, self.kv_heads * self.head_dim, self.layers
        layer: dict[str, Any] = {"norm1": jnp.ones((count, width)), "norm2": jnp.ones((count, width))}
        if self.fused:
            layer["qkv"] = normal(count, width, inner + 2 * kv, fan=width)
        else:
            layer |= {
                name: normal(count, width, size, fan=width) for name, size in (("q", inner), ("k", kv), ("v", kv))
            }
        layer["o"] = normal(count, inner, width, fan=inner)
        lead = (count, self.experts) if self.experts else (count,)
        if self.experts:
            layer["router"] = normal(count, width, self.experts, fan=width)
        if self.fused and not self.experts:
            layer["gate_up"] = normal(*lead, width, 2 * self.hidden, fan=width)
        else:
            layer |= {name: normal(*lead, width, self.hidden, fan=width) for name in ("gate", "up")}
        layer["down"] = normal(*lead, self.hidden, width, fan=self.hidden)
        params = {"embed": normal(self.vocab, width, fan=width), "layers": layer, "norm": jnp.ones((width,))}
        if not self.tied:
            params["head"] = normal(width, self.vocab, fan=width)
        return params

    def batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Describes a batch: tokens, and the ones that follow."""
        of = jax.ShapeDtypeStruct((self.examples, self.seq), jnp.int32)
        return {"tokens": of, "targets": of}

    def loss(self, params: Tree, batch: Tree, pin: Pin = no_pin) -> jax.Array:
        """The mean cross entropy of the next token."""
        table = params["embed"].astype(self.dtype)
        x = pin("residual", table[batch["tokens"]])
        layer = lambda x, weights: (self._layer(x, weights, pin), None)
        x, _ = jax.lax.scan(jax.checkpoint(layer) if self.remat else layer, x, params["layers"])
        x = _norm(x, params["norm"])
        head = table.T if self.tied else params["head"].astype(self.dtype)
        logits = pin("logits", x @ head).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    def _layer(self, x: jax.Array, weights: Tree, pin: Pin) -> jax.Array:
        cast = jax.tree.map(lambda w: w.astype(self.dtype), weights)
        x = pin("residual", x + pin("residual", self._attention(_norm(x, weights["norm1"]), cast, pin)))
        mlp = self._experts if self.experts else self._mlp
        return pin("residual", x + pin("residual", mlp(_norm(x, weights["norm2"]), cast, pin)))

    def _attention(self, x: jax.Array, w: Tree, pin: Pin) -> jax.Array:
        inner, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        if self.fused:
            q, k, v = jnp.split(x @ w["qkv"], (inner, inner + kv), -1)
        else:
            q, k, v = x @ w["q"], x @ w["k"], x @ w["v"]
        q = pin("heads", q.reshape(*x.shape[:2], self.heads, self.head_dim))
        k, v = (pin("kv heads", each.reshape(*x.shape[:2], self.kv_heads, self.head_dim)) for each in (k, v))
        if self.rotary:
            q, k = _turned(q), _turned(k)
        if self.kv_heads != self.heads:
            k, v = (jnp.repeat(each, self.heads // self.kv_heads, 2) for each in (k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) * self.head_dim**-0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(self.dtype), v)
        return pin("heads", mixed).reshape(*x.shape[:2], inner) @ w["o"]

    def _mlp(self, x: jax.Array, w: Tree, pin: Pin) -> jax.Array:
        gate, up = jnp.split(x @ w["gate_up"], 2, -1) if self.fused else (x @ w["gate"], x @ w["up"])
        return (jax.nn.silu(pin("hidden", gate)) * pin("hidden", up)) @ w["down"]

    def _experts(self, x: jax.Array, w: Tree, pin: Pin) -> jax.Array:
        """Experts of equal capacity, that of twice an even share of each sequence (GShard's, as MaxText has it)."""
        gates = jax.nn.softmax((x @ w["router"]).astype(jnp.float32))
        best, chosen = jax.lax.top_k(gates, self.top)
        capacity = 2 * self.seq * self.top // self.experts
        routed = jax.nn.one_hot(chosen, self.experts)
        place = (jnp.cumsum(routed.reshape(x.shape[0], -1, self.experts), 1) - 1).reshape(routed.shape)
        seats = jax.nn.one_hot(jnp.where(routed > 0, place, -1).astype(jnp.int32), capacity)  # b s k e c
        combine = jnp.einsum("bsk,bskec->bsec", best, seats).astype(self.dtype)
        dispatch = (combine > 0).astype(self.dtype)
        tokens = pin("experts", jnp.einsum("bsec,bsd->becd", dispatch, x))
        hidden = jax.nn.silu(jnp.einsum("becd,edf->becf", tokens, w["gate"])) * jnp.einsum(
            "becd,edf->becf", tokens, w["up"]
        )
        out = pin("experts", jnp.einsum("becf,efd->becd", pin("expert hidden", hidden), w["down"]))
        return jnp.einsum("bsec,becd->bsd", combine, out)


def make_step(decoder: Decoder, value_and_grad: Callable[..., Any], pin: Pin = no_pin) -> Callable[..., Any]:
    """Returns `step(state, batch) -> (state, loss)` with Adam."""
    optimizer = optax.adam(1e-3)

    def step(state: Tree, batch: Tree) -> tuple[Tree, jax.Array]:
        loss, grads = value_and_grad(lambda params: decoder.loss(params, batch, pin))(state["params"])
        updates, opt = optimizer.update(grads, state["opt"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


def state_of(decoder: Decoder) -> Tree:
    """Describes the state of a step: parameters and Adam's moments."""

    def init() -> Tree:
        params = decoder.init(jax.random.key(0))
        return {"params": params, "opt": optax.adam(1e-3).init(params)}

    return jax.eval_shape(init)


def _turned(x: jax.Array) -> jax.Array:
    """Turns heads [b, s, h, d] by their positions (RoFormer, arXiv 2104.09864, halves of a head as one plane)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), -1).astype(x.dtype)


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale).astype(x.dtype)
