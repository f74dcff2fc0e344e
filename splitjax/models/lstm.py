"""A language model of LSTM layers with projections and a sampled softmax, in Flax Linen and in Flax NNX.

Source: Jozefowicz, Vinyals, Schuster, Shazeer and Wu 2016, "Exploring the limits of language modeling" (arXiv 1602.02410), section 3:
word embeddings, LSTM layers (Hochreiter and Schmidhuber 1997), each followed by a linear projection (after Sak et al. 2014, here behind the
recurrence), a softmax table with as many rows as words, 20 steps of backpropagation through time, 8192 negatives. Not theirs: the
state is zero at the start of each window, as examples are shuffled, and the softmax has no biases.

In training both tables are read by lookups alone: the input table at the tokens, the softmax table at the words to predict and at the
negatives. Their gradients have as many rows as that, and not one for each word of the vocabulary. Evaluation takes the full softmax.

The negatives come with the batch (`splitjax.data.Negatives`), some for each example. `negatives_shared_by` consecutive examples compare
with the negatives of all of them: with 1024 examples a worker, 8 negatives each and `negatives_shared_by=1024` every worker has 8192 of its
own, shared by all its positions. They are part of the batch and not drawn in the step, so that a worker holds its own and reads no other
rows, while the step remains a function of the global batch: the same numbers on every mesh, and again after a resume.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from splitjax.models._common import LINEAR_INIT, ModelError, check_rate, check_widths
from splitjax.models.sampled_softmax import share

Sampled = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class LSTMConfig:
    """The options of an LSTM language model.

    **Arguments:**

    - `vocab_size`: number of words, and of rows of both tables.
    - `max_len`: tokens of an example, as `ModelSpec.example` gives them; the model itself takes any number.
    - `embedding_width`: of a word's vectors in both tables, and of the projections.
    - `hidden_width`: of the LSTM layers.
    - `num_layers`: LSTM layers, each with its projection.
    - `negatives`: words drawn for each example of a training batch.
    - `negatives_shared_by`: so many consecutive examples share their negatives; it divides the batch.
    - `dropout`: rate on the embeddings and on each projection.
    - `dtype`, `param_dtype`: of the computation (the softmax is at least float32), of the parameters.
    """

    vocab_size: int = 10_000
    max_len: int = 20
    embedding_width: int = 128
    hidden_width: int = 256
    num_layers: int = 1
    negatives: int = 64
    negatives_shared_by: int = 8
    dropout: float = 0.0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32

    def __post_init__(self):
        names = ("vocab_size", "max_len", "embedding_width", "hidden_width", "num_layers", "negatives", "negatives_shared_by")
        check_widths("LSTMConfig", **{name: (getattr(self, name),) for name in names})
        check_rate("LSTMConfig", self.dropout)

    @property
    def num_classes(self) -> int:
        return self.vocab_size

    @property
    def dtypes(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "param_dtype": self.param_dtype}


def _zeros(config: LSTMConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The state before the first token, at least float32 (Flax's own has the type of the parameters, which need not be the computation's):
    what a cell adds up over steps needs more digits than bfloat16 has."""
    zeros = jnp.zeros((x.shape[0], config.hidden_width), jnp.promote_types(config.dtype, jnp.float32))
    return zeros, zeros


def _compare(config: LSTMConfig, softmax: Any, hidden: jax.Array, labels: jax.Array, negatives: jax.Array) -> Sampled:
    """As `LinenLSTM.sampled`, from the vectors of the positions and the lookup in the softmax table."""
    if negatives.ndim != 2 or negatives.shape[0] != labels.shape[0]:
        raise ModelError(
            f"negatives must be i32[B, S] for the {labels.shape[0]} examples of the batch", value=negatives.shape,
            place="the negatives given to the LSTM", remedy="draw them with splitjax.data.Negatives",
        )
    hidden, labels, negatives = (share(array, config.negatives_shared_by) for array in (hidden, labels, negatives))
    true_logits = jnp.sum(hidden * softmax(labels), axis=-1)
    sampled_logits = jnp.einsum("gnd,gsd->gns", hidden, softmax(negatives))
    return true_logits, sampled_logits, labels, negatives


class LinenLSTM(nn.Module):
    """i32[B, T] tokens -> [B, T, vocab_size] logits in `config.dtype`, those at t for token t + 1."""

    config: LSTMConfig

    def setup(self):
        config = self.config
        self.embedding = nn.Embed(config.vocab_size, config.embedding_width, **config.dtypes)
        self.dropout = nn.Dropout(config.dropout)
        for index in range(1, config.num_layers + 1):
            setattr(self, f"lstm{index}", nn.RNN(nn.OptimizedLSTMCell(config.hidden_width, **config.dtypes)))
            projection = nn.Dense(config.embedding_width, use_bias=False, kernel_init=LINEAR_INIT, **config.dtypes)
            setattr(self, f"projection{index}", projection)
        self.softmax = nn.Embed(config.vocab_size, config.embedding_width, **config.dtypes)

    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        return self.softmax.attend(self.hidden(tokens, train=train))

    def hidden(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        """i32[B, T] -> [B, T, embedding_width], what the rows of the softmax table are multiplied with."""
        x = self.dropout(self.embedding(tokens), deterministic=not train)
        for index in range(1, self.config.num_layers + 1):
            x = getattr(self, f"projection{index}")(getattr(self, f"lstm{index}")(x, initial_carry=_zeros(self.config, x)))
            x = self.dropout(x, deterministic=not train)
        return x

    def sampled(self, tokens: jax.Array, labels: jax.Array, negatives: jax.Array, *, train: bool = True) -> Sampled:
        """What `sampled_cross_entropy` compares, examples that share their negatives being one of the G: logits [G, N] of the labels and
        [G, N, S] of the negatives, labels i32[G, N], negatives i32[G, S].

        From i32[B, T], i32[B, T] and i32[B, negatives]; G = B / shared_by, N = shared_by T, S = shared_by negatives. Raises
        `ModelError` if `negatives_shared_by` does not divide B."""
        return _compare(self.config, self.softmax, self.hidden(tokens, train=train), labels, negatives)


class NnxLSTM(nnx.Module):
    """i32[B, T] tokens -> [B, T, vocab_size] logits in `config.dtype`, those at t for token t + 1."""

    def __init__(self, config: LSTMConfig, *, rngs: nnx.Rngs):
        self.config = config
        options = {"rngs": rngs, **config.dtypes}
        self.embedding = nnx.Embed(config.vocab_size, config.embedding_width, **options)
        if config.dropout:
            self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        for index in range(1, config.num_layers + 1):
            cell = nnx.LSTMCell(config.embedding_width, config.hidden_width, **options)
            setattr(self, f"lstm{index}", nnx.RNN(cell, rngs=False))
            projection = nnx.Linear(config.hidden_width, config.embedding_width, use_bias=False, kernel_init=LINEAR_INIT, **options)
            setattr(self, f"projection{index}", projection)
        self.softmax = nnx.Embed(config.vocab_size, config.embedding_width, **options)

    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        return self.softmax.attend(self.hidden(tokens, train=train))

    def hidden(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        """As `LinenLSTM.hidden`."""
        x = self._drop(self.embedding(tokens), train)
        for index in range(1, self.config.num_layers + 1):
            x = getattr(self, f"projection{index}")(getattr(self, f"lstm{index}")(x, initial_carry=_zeros(self.config, x)))
            x = self._drop(x, train)
        return x

    def _drop(self, x: jax.Array, train: bool) -> jax.Array:
        return self.dropout(x, deterministic=not train) if self.config.dropout else x

    def sampled(self, tokens: jax.Array, labels: jax.Array, negatives: jax.Array, *, train: bool = True) -> Sampled:
        """As `LinenLSTM.sampled`."""
        return _compare(self.config, self.softmax, self.hidden(tokens, train=train), labels, negatives)
