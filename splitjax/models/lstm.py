"""Defines a language model of LSTM layers with projections and a sampled softmax, in Flax Linen and in Flax NNX.

An `LSTMConfig` goes in, a Flax model comes out.

Source: Jozefowicz, Vinyals, Schuster, Shazeer and Wu 2016, "Exploring the limits of language modeling" (arXiv
1602.02410), section 3: word embeddings, LSTM layers (Hochreiter and Schmidhuber 1997), each followed by a linear
projection (after Sak et al. 2014, here behind the recurrence), a softmax table with as many rows as words, 20 steps of
backpropagation through time, 8192 negatives. Not theirs: the state is zero at the start of each window, as examples are
shuffled, and the softmax has no biases.

In training both tables are read by lookups alone: the input table at the tokens, the softmax table at the words to
predict and at the negatives. Their gradients have as many rows as that, and not one for each word of the vocabulary.
Evaluation takes the full softmax.

The negatives come with the batch (`splitjax.data.Negatives`): each example has its own, which all its positions share.
They are part of the batch and not drawn in the step, so that a worker holds those of its examples and reads no other
rows, while the step remains a function of the global batch: the same numbers on every mesh, and again after a resume.
For many positions to share many negatives examples may be long: with `bptt` the state starts anew every so many tokens.
1024 windows of 20 tokens that share 8192 negatives are one example of 20,480.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from splitjax.models._common import (
    LINEAR_INIT,
    ModelError,
    SharedOptions,
    check_rate,
    check_widths,
    recurrent_init,
    token_inputs,
)

# Logits of the labels [B, T], logits of the negatives [B, T, S], labels i32[B, T], negatives i32[B, S].
Sampled: TypeAlias = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class LSTMConfig(SharedOptions):
    """Holds the options of an LSTM language model.

    **Arguments:**

    - `vocab_size`: number of words, and of rows of both tables.
    - `max_len`: positions of an example, as `ModelSpec.example` gives them; the model itself takes any number.
    - `bptt`: steps of backpropagation through time: an example is cut into windows of so many tokens, which divide it.
      None: one window.
    - `embedding_width`: of a word's vectors in both tables, and of the projections.
    - `hidden_width`: of the LSTM layers.
    - `num_layers`: LSTM layers, each with its projection.
    - `negatives`: words drawn for each example of a training batch.
    - `dropout`: rate on the embeddings and on each projection.
    - `dtype`, `param_dtype`: of the computation (the softmax is at least float32), of the parameters.
    """

    vocab_size: int = 10_000
    max_len: int = 20
    bptt: int | None = None
    embedding_width: int = 128
    hidden_width: int = 256
    num_layers: int = 1
    negatives: int = 256
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        names = ("vocab_size", "max_len", "embedding_width", "hidden_width", "num_layers", "negatives")
        check_widths("LSTMConfig", bptt=(self.bptt or 1,), **{name: (getattr(self, name),) for name in names})
        check_rate("LSTMConfig", self.dropout)

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An example's tokens, i32[max_len]."""
        return token_inputs(self.max_len)

    @property
    def num_negatives(self) -> int:
        """Words that a training batch brings drawn for each example: `negatives`."""
        return self.negatives

    @property
    def num_classes(self) -> int:
        """Width of the logits: `vocab_size`."""
        return self.vocab_size


def _windows(config: LSTMConfig, tokens: jax.Array) -> jax.Array:
    """Cuts examples into windows: i32[B, T] -> i32[B, windows, bptt], or as it is without `bptt`."""
    if config.bptt is None:
        return tokens
    if tokens.shape[1] % config.bptt:
        raise ModelError(
            f"bptt, {config.bptt}, must divide the positions of an example",
            value=tokens.shape,
            place="the tokens given to the LSTM",
            remedy="cut the text into examples of a multiple of it (seq_len), or choose another bptt",
        )
    return tokens.reshape((tokens.shape[0], -1, config.bptt))


def _zeros(config: LSTMConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the state before the first token, at least float32: what a cell adds up over steps needs more digits than
    bfloat16 has. (Flax's own has the type of the parameters, which need not be the computation's.)"""
    zeros = jnp.zeros((*x.shape[:-2], config.hidden_width), jnp.promote_types(config.dtype, jnp.float32))
    return zeros, zeros


class _Table(Protocol):
    """Looks rows up by number, as the embeddings of both libraries do: i32[...] -> [..., embedding_width]."""

    def __call__(self, inputs: jax.Array) -> jax.Array: ...


def _compare(softmax: _Table, hidden: jax.Array, labels: jax.Array, negatives: jax.Array) -> Sampled:
    """Returns what `LinenLSTM.sampled` does, from the vectors of the positions and the lookup in the softmax table."""
    if negatives.ndim != 2 or negatives.shape[0] != labels.shape[0]:
        raise ModelError(
            f"negatives must be i32[B, S] for the {labels.shape[0]} examples of the batch",
            value=negatives.shape,
            place="the negatives given to the LSTM",
            remedy="draw them with splitjax.data.Negatives",
        )
    true_logits = jnp.sum(hidden * softmax(labels), axis=-1)
    return true_logits, jnp.einsum("btd,bsd->bts", hidden, softmax(negatives)), labels, negatives


class LinenLSTM(nn.Module):
    """Predicts words: i32[B, T] tokens -> [B, T, vocab_size] logits in `config.dtype`, those at t for token t + 1."""

    config: LSTMConfig

    def setup(self) -> None:
        """Makes the layers, as Flax asks for it; they are made here since two methods share them."""
        config = self.config
        self.embedding: nn.Embed = nn.Embed(config.vocab_size, config.embedding_width, **config.dtypes)
        self.dropout: nn.Dropout = nn.Dropout(config.dropout)
        for index in range(1, config.num_layers + 1):
            setattr(
                self,
                f"lstm{index}",
                nn.RNN(
                    nn.OptimizedLSTMCell(config.hidden_width, recurrent_kernel_init=recurrent_init, **config.dtypes)
                ),
            )
            projection = nn.Dense(config.embedding_width, use_bias=False, kernel_init=LINEAR_INIT, **config.dtypes)
            setattr(self, f"projection{index}", projection)
        self.softmax: nn.Embed = nn.Embed(config.vocab_size, config.embedding_width, **config.dtypes)

    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        return self.softmax.attend(self.hidden(tokens, train=train))

    def hidden(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        """Returns what the rows of the softmax table are multiplied with: `tokens` i32[B, T] -> [B, T,
        embedding_width].

        With `train` the dropout rate applies.
        """
        x = self.dropout(self.embedding(_windows(self.config, tokens)), deterministic=not train)
        for index in range(1, self.config.num_layers + 1):
            x = getattr(self, f"projection{index}")(
                getattr(self, f"lstm{index}")(x, initial_carry=_zeros(self.config, x))
            )
            x = self.dropout(x, deterministic=not train)
        return x.reshape((*tokens.shape, -1))

    def sampled(self, tokens: jax.Array, labels: jax.Array, negatives: jax.Array, *, train: bool = True) -> Sampled:
        """Returns what `sampled_cross_entropy` compares.

        **Arguments:** `tokens` and `labels`, i32[B, T], the words read and to predict; `negatives`, i32[B, S], the
        drawn ones; with `train` the dropout rate applies.

        **Returns:** logits [B, T] of the labels, logits [B, T, S] of the negatives, labels, negatives. Raises
        `ModelError` for negatives of another number of examples.
        """
        return _compare(self.softmax, self.hidden(tokens, train=train), labels, negatives)


class NnxLSTM(nnx.Module):
    """Predicts words: i32[B, T] tokens -> [B, T, vocab_size] logits in `config.dtype`, those at t for token t + 1."""

    def __init__(self, config: LSTMConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        options = {"rngs": rngs, **config.dtypes}
        self.embedding: nnx.Embed = nnx.Embed(config.vocab_size, config.embedding_width, **options)
        if config.dropout:
            self.dropout: nnx.Dropout = nnx.Dropout(config.dropout, rngs=rngs)
        for index in range(1, config.num_layers + 1):
            cell = nnx.LSTMCell(
                config.embedding_width, config.hidden_width, recurrent_kernel_init=recurrent_init, **options
            )
            setattr(self, f"lstm{index}", nnx.RNN(cell, rngs=False))
            projection = nnx.Linear(
                config.hidden_width, config.embedding_width, use_bias=False, kernel_init=LINEAR_INIT, **options
            )
            setattr(self, f"projection{index}", projection)
        self.softmax: nnx.Embed = nnx.Embed(config.vocab_size, config.embedding_width, **options)

    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        return self.softmax.attend(self.hidden(tokens, train=train))

    def hidden(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        """Computes what `LinenLSTM.hidden` does, from the same `tokens` and `train`."""
        x = self._drop(self.embedding(_windows(self.config, tokens)), train)
        for index in range(1, self.config.num_layers + 1):
            x = getattr(self, f"projection{index}")(
                getattr(self, f"lstm{index}")(x, initial_carry=_zeros(self.config, x))
            )
            x = self._drop(x, train)
        return x.reshape((*tokens.shape, -1))

    def _drop(self, x: jax.Array, train: bool) -> jax.Array:
        return self.dropout(x, deterministic=not train) if self.config.dropout else x

    def sampled(self, tokens: jax.Array, labels: jax.Array, negatives: jax.Array, *, train: bool = True) -> Sampled:
        """Computes what `LinenLSTM.sampled` does, from the same `tokens`, `labels`, `negatives` and `train`."""
        return _compare(self.softmax, self.hidden(tokens, train=train), labels, negatives)
