"""Defines a small decoder Transformer, in Flax Linen and in Flax NNX.

A `TransformerConfig` goes in, a Flax model comes out that predicts the next token.

Source: Vaswani et al. 2017 (arXiv 1706.03762) for attention; the decoder of Radford et al. 2019 (GPT-2) for learned
positions and for normalisation before each sublayer. Queries, keys, values and output have a projection each, whose
head dim is a dim of the kernel: a plan can shard heads without looking inside a fused one. Both versions name their
layers alike (`block1.attention.query`, `block1.mlp.up`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from splitjax.models._common import ModelError, SharedOptions, at_least_float32, check_rate, check_widths, token_inputs

# GPT-2's initial scale of position embeddings.
_POSITION_INIT = jax.nn.initializers.normal(0.02)


@dataclasses.dataclass(frozen=True)
class TransformerConfig(SharedOptions):
    """Holds the options of a decoder Transformer.

    **Arguments:**

    - `vocab_size`: number of tokens, and of logits per position.
    - `max_len`: number of learned positions, so the longest sequence.
    - `num_layers`, `d_model`, `num_heads`: blocks, width of the residual stream, attention heads (a divisor of it).
    - `d_ff`: hidden width of each block's MLP; default `4 * d_model`.
    - `dropout`: rate on the embeddings and on the output of each sublayer.
    - `tied`: use the token embedding as the last layer's kernel too.
    - `dtype`, `param_dtype`: of the computation (the softmax is at least float32), of the parameters.
    """

    vocab_size: int = 256
    max_len: int = 128
    num_layers: int = 2
    d_model: int = 128
    num_heads: int = 4
    d_ff: int | None = None
    dropout: float = 0.0
    tied: bool = False
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        place = "TransformerConfig"
        if self.d_ff is None:
            object.__setattr__(self, "d_ff", self.feed_forward_width)
        names = ("vocab_size", "max_len", "num_layers", "d_model", "num_heads", "d_ff")
        check_widths(place, **{name: (getattr(self, name),) for name in names})
        check_rate(place, self.dropout)
        if self.d_model % self.num_heads:
            raise ModelError(
                f"num_heads must divide d_model, {self.d_model}",
                value=self.num_heads,
                place=f"{place}, option 'num_heads'",
                remedy="choose a divisor of d_model, or a d_model that is a multiple of num_heads",
            )

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An example's tokens, i32[max_len]."""
        return token_inputs(self.max_len)

    @property
    def feed_forward_width(self) -> int:
        """Hidden width of each block's MLP: `d_ff`, or `4 * d_model`."""
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def num_classes(self) -> int:
        """Width of the logits: `vocab_size`."""
        return self.vocab_size

    @property
    def heads(self) -> tuple[int, int]:
        """Number of heads, width of a head."""
        return self.num_heads, self.d_model // self.num_heads


def causal_attention(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Attends by scaled dot products, where position t sees positions 0 to t.

    `query`, `key`, `value` and the result are [B, T, heads, head width]. The softmax is computed in float32 or wider,
    because bfloat16 has too few digits to sum over a long row.

    Source: Vaswani et al. 2017, section 3.2.1.
    """
    length, head_width = query.shape[1], query.shape[-1]
    scores = at_least_float32(jnp.einsum("bqhd,bkhd->bhqk", query * head_width**-0.5, key))
    visible = jnp.tril(jnp.ones((length, length), dtype=bool))
    weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


def _check_length(config: TransformerConfig, tokens: jax.Array) -> None:
    if tokens.ndim != 2 or tokens.shape[1] > config.max_len:
        raise ModelError(
            f"tokens must be i32[B, T] with T at most max_len, {config.max_len}",
            value=tokens.shape,
            place="the tokens given to the transformer",
            remedy="cut the sequences, or build the model with a larger max_len",
        )


class LinenAttention(nn.Module):
    """Attends causally to its own input: [B, T, d_model] -> [B, T, d_model]."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        query, key, value = (
            nn.DenseGeneral(config.heads, name=name, **config.dtypes)(x) for name in ("query", "key", "value")
        )
        x = causal_attention(query, key, value)
        return nn.DenseGeneral(config.d_model, axis=(-2, -1), name="out", **config.dtypes)(x)


class LinenFeedForward(nn.Module):
    """Applies two dense layers around a GELU: [B, T, d_model] -> [B, T, d_model]."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        config = self.config
        x = nn.gelu(nn.Dense(config.feed_forward_width, name="up", **config.dtypes)(x))
        return nn.Dense(config.d_model, name="down", **config.dtypes)(x)


class LinenDecoderBlock(nn.Module):
    """Adds attention, then an MLP, each after a layer norm, to their input: [B, T, d_model] -> [B, T, d_model]."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        config = self.config
        y = LinenAttention(config, name="attention")(nn.LayerNorm(name="norm1", **config.dtypes)(x))
        x = x + (nn.Dropout(config.dropout, deterministic=not train)(y) if config.dropout else y)
        y = LinenFeedForward(config, name="mlp")(nn.LayerNorm(name="norm2", **config.dtypes)(x))
        return x + (nn.Dropout(config.dropout, deterministic=not train)(y) if config.dropout else y)


class LinenTransformer(nn.Module):
    """Predicts tokens: i32[B, T] -> [B, T, vocab_size] logits in `config.dtype`, those at t for token t + 1."""

    config: TransformerConfig

    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        _check_length(config, tokens)
        embed = nn.Embed(config.vocab_size, config.d_model, name="token_embedding", **config.dtypes)
        shape = (config.max_len, config.d_model)
        positions = self.param("position_embedding", _POSITION_INIT, shape, config.param_dtype)
        x = embed(tokens) + positions[: tokens.shape[1]].astype(config.dtype)
        if config.dropout:
            x = nn.Dropout(config.dropout, deterministic=not train)(x)
        for index in range(1, config.num_layers + 1):
            x = LinenDecoderBlock(config, name=f"block{index}")(x, train=train)
        x = nn.LayerNorm(name="final_norm", **config.dtypes)(x)
        if config.tied:
            return embed.attend(x)
        return nn.Dense(config.vocab_size, use_bias=False, name="logits", **config.dtypes)(x)


class NnxAttention(nnx.Module):
    """Attends causally to its own input: [B, T, d_model] -> [B, T, d_model]."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        options = {"rngs": rngs, **config.dtypes}
        self.query: nnx.LinearGeneral = nnx.LinearGeneral(config.d_model, config.heads, **options)
        self.key: nnx.LinearGeneral = nnx.LinearGeneral(config.d_model, config.heads, **options)
        self.value: nnx.LinearGeneral = nnx.LinearGeneral(config.d_model, config.heads, **options)
        self.out: nnx.LinearGeneral = nnx.LinearGeneral(config.heads, config.d_model, axis=(-2, -1), **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(causal_attention(self.query(x), self.key(x), self.value(x)))


class NnxFeedForward(nnx.Module):
    """Applies two dense layers around a GELU: [B, T, d_model] -> [B, T, d_model]."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.up: nnx.Linear = nnx.Linear(config.d_model, config.feed_forward_width, rngs=rngs, **config.dtypes)
        self.down: nnx.Linear = nnx.Linear(config.feed_forward_width, config.d_model, rngs=rngs, **config.dtypes)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(nnx.gelu(self.up(x)))


class NnxDecoderBlock(nnx.Module):
    """Adds attention, then an MLP, each after a layer norm, to their input: [B, T, d_model] -> [B, T, d_model]."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.norm1: nnx.LayerNorm = nnx.LayerNorm(config.d_model, rngs=rngs, **config.dtypes)
        self.attention: NnxAttention = NnxAttention(config, rngs=rngs)
        self.norm2: nnx.LayerNorm = nnx.LayerNorm(config.d_model, rngs=rngs, **config.dtypes)
        self.mlp: NnxFeedForward = NnxFeedForward(config, rngs=rngs)
        self.config = config
        if config.dropout:
            self.dropout1: nnx.Dropout = nnx.Dropout(config.dropout, rngs=rngs)
            self.dropout2: nnx.Dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        y = self.attention(self.norm1(x))
        x = x + (self.dropout1(y, deterministic=not train) if self.config.dropout else y)
        y = self.mlp(self.norm2(x))
        return x + (self.dropout2(y, deterministic=not train) if self.config.dropout else y)


class NnxTransformer(nnx.Module):
    """Predicts tokens: i32[B, T] -> [B, T, vocab_size] logits in `config.dtype`, those at t for token t + 1."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.token_embedding: nnx.Embed = nnx.Embed(config.vocab_size, config.d_model, rngs=rngs, **config.dtypes)
        shape = (config.max_len, config.d_model)
        self.position_embedding: nnx.Param[jax.Array] = nnx.Param(
            _POSITION_INIT(rngs.params(), shape, config.param_dtype)
        )
        if config.dropout:
            self.dropout: nnx.Dropout = nnx.Dropout(config.dropout, rngs=rngs)
        for index in range(1, config.num_layers + 1):
            setattr(self, f"block{index}", NnxDecoderBlock(config, rngs=rngs))
        self.final_norm: nnx.LayerNorm = nnx.LayerNorm(config.d_model, rngs=rngs, **config.dtypes)
        if not config.tied:
            self.logits: nnx.Linear = nnx.Linear(
                config.d_model, config.vocab_size, use_bias=False, rngs=rngs, **config.dtypes
            )

    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        _check_length(self.config, tokens)
        x = self.token_embedding(tokens) + self.position_embedding[: tokens.shape[1]].astype(self.config.dtype)
        if self.config.dropout:
            x = self.dropout(x, deterministic=not train)
        for index in range(1, self.config.num_layers + 1):
            x = getattr(self, f"block{index}")(x, train=train)
        x = self.final_norm(x)
        return self.token_embedding.attend(x) if self.config.tied else self.logits(x)
