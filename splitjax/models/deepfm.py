"""Defines DeepFM, a click model of a factorisation machine and a deep network over the same embeddings.

A `DeepFMConfig` goes in, a Flax model comes out, in Linen and in NNX: a model nearly all of whose parameters are a
table, of which a step reads few rows.

Source: Guo, Tang, Ye, Li and He 2017, "DeepFM: a factorization-machine based neural network for CTR prediction" (arXiv
1703.04247), section 2; the second order by Rendle 2010, "Factorization machines" (ICDM), lemma 3.1. A number of the
data is a field whose only feature has that number as its value. Both versions name their parts alike.
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

ZEROS: jax.nn.initializers.Initializer = jax.nn.initializers.zeros


@dataclasses.dataclass(frozen=True)
class DeepFMConfig(ClickOptions):
    """Holds the options of a DeepFM.

    **Arguments:**

    - `field_sizes`: rows of each categorical field; one number means Criteo's 26 fields of it.
    - `num_dense`: how many numbers an example has.
    - `embedding_width`: of the vectors that the factorisation machine multiplies and the deep network reads.
    - `features`: widths of the deep network's hidden layers; one number means two layers of it.
    - `dropout`: rate after each hidden layer.
    - `dtype`, `param_dtype`: of the computation, of the parameters.
    """

    field_sizes: int | tuple[int, ...] = 1000
    num_dense: int = NUM_DENSE
    embedding_width: int = 16
    features: int | tuple[int, ...] = (256, 256)
    dropout: float = 0.0
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    def __post_init__(self) -> None:
        check_fields("DeepFMConfig", self, "features")

    @property
    def num_factors(self) -> int:
        """Vectors that an example is made of: one a field, one a number."""
        return len(self.field_rows) + self.num_dense

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of the deep network's hidden layers: `features` as a tuple."""
        return as_widths(self.features, 2)


def second_order(factors: jax.Array) -> jax.Array:
    """Sums the products of all pairs of an example's vectors `factors`: [B, F, K] -> [B].

    Half of the square of the sum less the sum of the squares: F K products in place of F (F - 1) K / 2.
    Source: Rendle 2010, lemma 3.1."""
    return (jnp.square(factors.sum(1)) - jnp.square(factors).sum(1)).sum(-1) / 2


class LinenDeepFM(nn.Module):
    """Predicts clicks: i32[B, F] ids within their fields, f32[B, D] numbers -> [B] logits in `config.dtype`.

    While it is trained (`train`) it drops values where the config says so.
    """

    config: DeepFMConfig

    @nn.compact
    def __call__(self, ids: jax.Array, values: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        rows, values = table_rows(ids, config.field_rows), values.astype(config.dtype)
        embedded = nn.Embed(
            config.num_rows, config.embedding_width, embedding_init=EMBEDDING_INIT, name="embedding", **config.dtypes
        )(rows)
        weights = nn.Embed(config.num_rows, 1, embedding_init=ZEROS, name="first_order", **config.dtypes)(rows)
        shape = (config.num_dense, config.embedding_width)
        of_values = self.param("dense_embedding", EMBEDDING_INIT, shape, config.param_dtype).astype(config.dtype)
        factors = jnp.concatenate([embedded, values[:, :, None] * of_values], axis=1)
        first = (
            weights.sum((1, 2))
            + nn.Dense(1, kernel_init=ZEROS, name="dense_first_order", **config.dtypes)(values)[:, 0]
        )
        x = factors.reshape((factors.shape[0], -1))
        for index, features in enumerate(config.widths, start=1):
            x = nn.relu(nn.Dense(features, kernel_init=RELU_INIT, name=f"dense{index}", **config.dtypes)(x))
            if config.dropout:
                x = nn.Dropout(config.dropout, deterministic=not train)(x)
        deep = nn.Dense(1, use_bias=False, kernel_init=LINEAR_INIT, name="logits", **config.dtypes)(x)[:, 0]
        return first + second_order(factors) + deep


class NnxDeepFM(nnx.Module):
    """Predicts clicks: i32[B, F] ids within their fields, f32[B, D] numbers -> [B] logits in `config.dtype`.

    While it is trained (`train`) it drops values where the config says so.
    """

    def __init__(self, config: DeepFMConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        options = {"rngs": rngs, **config.dtypes}
        self.embedding: nnx.Embed = nnx.Embed(
            config.num_rows, config.embedding_width, embedding_init=EMBEDDING_INIT, **options
        )
        self.first_order: nnx.Embed = nnx.Embed(config.num_rows, 1, embedding_init=ZEROS, **options)
        shape = (config.num_dense, config.embedding_width)
        self.dense_embedding: nnx.Param[jax.Array] = nnx.Param(EMBEDDING_INIT(rngs.params(), shape, config.param_dtype))
        self.dense_first_order: nnx.Linear = nnx.Linear(config.num_dense, 1, kernel_init=ZEROS, **options)
        inputs = config.num_factors * config.embedding_width
        for index, features in enumerate(config.widths, start=1):
            setattr(self, f"dense{index}", nnx.Linear(inputs, features, kernel_init=RELU_INIT, **options))
            if config.dropout:
                setattr(self, f"dropout{index}", nnx.Dropout(config.dropout, rngs=rngs))
            inputs = features
        self.logits: nnx.Linear = nnx.Linear(inputs, 1, use_bias=False, kernel_init=LINEAR_INIT, **options)

    def __call__(self, ids: jax.Array, values: jax.Array, *, train: bool = False) -> jax.Array:
        config = self.config
        rows, values = table_rows(ids, config.field_rows), values.astype(config.dtype)
        of_values = self.dense_embedding[...].astype(config.dtype)
        factors = jnp.concatenate([self.embedding(rows), values[:, :, None] * of_values], axis=1)
        first = self.first_order(rows).sum((1, 2)) + self.dense_first_order(values)[:, 0]
        x = factors.reshape((factors.shape[0], -1))
        for index in range(1, len(config.widths) + 1):
            x = nnx.relu(getattr(self, f"dense{index}")(x))
            if config.dropout:
                x = getattr(self, f"dropout{index}")(x, deterministic=not train)
        return first + second_order(factors) + self.logits(x)[:, 0]
