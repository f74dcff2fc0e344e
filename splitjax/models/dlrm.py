"""Defines DLRM, a click model of dot products between embeddings and what a network makes of the numbers.

A `DLRMConfig` goes in, a Flax model comes out, in Linen and in NNX: a model nearly all of whose parameters are a table,
of which a step reads few rows.

Source: Naumov et al. 2019, "Deep learning recommendation model for personalization and recommendation systems" (arXiv
1906.00091), section 2. Both versions name their parts alike.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx
from jax.typing import DTypeLike

from splitjax.models._common import LINEAR_INIT, RELU_INIT, as_widths
from splitjax.models._fields import EMBEDDING_INIT, NUM_DENSE, ClickOptions, check_fields, table_rows


@dataclasses.dataclass(frozen=True)
class DLRMConfig(ClickOptions):
    """Holds the options of a DLRM.

    **Arguments:**

    - `field_sizes`: rows of each categorical field; one number means Criteo's 26 fields of it.
    - `num_dense`: how many numbers an example has.
    - `embedding_width`: of the vectors whose dot products are taken.
    - `bottom_features`: widths of the hidden layers over the numbers, before the one of `embedding_width`; one number
      means two of it.
    - `features`: widths of the hidden layers over the dot products; one number means two layers of it.
    - `dropout`: rate after each of the latter.
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    field_sizes: int | tuple[int, ...] = 1000
    num_dense: int = NUM_DENSE
    embedding_width: int = 16
    bottom_features: int | tuple[int, ...] = (128, 64)
    features: int | tuple[int, ...] = (256, 128)
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        check_fields("DLRMConfig", self, "bottom_features", "features")

    @property
    def bottom_widths(self) -> tuple[int, ...]:
        """Widths of the layers over the numbers, the last of `embedding_width`: [L]."""
        return (*as_widths(self.bottom_features, 2), self.embedding_width)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the hidden layers over the dot products: `features` as a tuple."""
        return as_widths(self.features, 2)


def interactions(vectors: jax.Array) -> jax.Array:
    """Takes the dot product of every pair of an example's `vectors` once: [B, F, K] -> [B, F (F - 1) / 2].

    Those of vector i with the vectors before it stand behind those of vector i - 1. Source: Naumov et al. 2019, section
    2.1.3.
    """
    products = jnp.einsum("bfk,bgk->bfg", vectors, vectors)
    # Slices and not one gather: every plan knows what a slice does to the example dim, forward and backward.
    return jnp.concatenate([products[:, index, :index] for index in range(1, vectors.shape[1])], axis=1)


class LinenDLRM(nn.Module):
    """Predicts clicks: i32[B, F] ids within their fields, f32[B, D] numbers -> [B] logits in `config.dtype`.

    While it is trained (`train`) it drops values where the config says so.
    """

    config: DLRMConfig

    @nn.compact
    def __call__(self, ids: jax.Array, values: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        x = values.astype(config.dtype)
        for index, features in enumerate(config.bottom_widths, start=1):
            x = nn.relu(nn.Dense(features, kernel_init=RELU_INIT, name=f"bottom{index}", **config.dtypes)(x))
        table = nn.Embed(
            config.num_rows, config.embedding_width, embedding_init=EMBEDDING_INIT, name="embedding", **config.dtypes
        )
        embedded = table(table_rows(ids, config.field_rows))
        x = jnp.concatenate([x, interactions(jnp.concatenate([x[:, None], embedded], axis=1))], axis=1)
        for index, features in enumerate(config.widths, start=1):
            x = nn.relu(nn.Dense(features, kernel_init=RELU_INIT, name=f"top{index}", **config.dtypes)(x))
            if config.dropout:
                x = nn.Dropout(config.dropout, deterministic=not train)(x)
        return nn.Dense(1, kernel_init=LINEAR_INIT, name="logits", **config.dtypes)(x)[:, 0]


class NnxDLRM(nnx.Module):
    """Predicts clicks: i32[B, F] ids within their fields, f32[B, D] numbers -> [B] logits in `config.dtype`.

    While it is trained (`train`) it drops values where the config says so.
    """

    def __init__(self, config: DLRMConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        options = {"rngs": rngs, **config.dtypes}
        inputs = config.num_dense
        for index, features in enumerate(config.bottom_widths, start=1):
            setattr(self, f"bottom{index}", nnx.Linear(inputs, features, kernel_init=RELU_INIT, **options))
            inputs = features
        self.embedding: nnx.Embed = nnx.Embed(
            config.num_rows, config.embedding_width, embedding_init=EMBEDDING_INIT, **options
        )
        num_vectors = len(config.field_rows) + 1
        inputs = config.embedding_width + num_vectors * (num_vectors - 1) // 2
        for index, features in enumerate(config.widths, start=1):
            setattr(self, f"top{index}", nnx.Linear(inputs, features, kernel_init=RELU_INIT, **options))
            if config.dropout:
                setattr(self, f"dropout{index}", nnx.Dropout(config.dropout, rngs=rngs))
            inputs = features
        self.logits: nnx.Linear = nnx.Linear(inputs, 1, kernel_init=LINEAR_INIT, **options)

    def __call__(self, ids: jax.Array, values: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        x = values.astype(config.dtype)
        for index in range(1, len(config.bottom_widths) + 1):
            x = nnx.relu(getattr(self, f"bottom{index}")(x))
        embedded = self.embedding(table_rows(ids, config.field_rows))
        x = jnp.concatenate([x, interactions(jnp.concatenate([x[:, None], embedded], axis=1))], axis=1)
        for index in range(1, len(config.widths) + 1):
            x = nnx.relu(getattr(self, f"top{index}")(x))
            if config.dropout:
                x = getattr(self, f"dropout{index}")(x, deterministic=not train)
        return self.logits(x)[:, 0]
