"""Error feedback for values that are rounded on the wire: what rounding takes away is added the next time the row is touched.

After Seide et al. 2014 ("1-bit stochastic gradient descent") and Karimireddy et al., arXiv 1901.09847. Every worker keeps one residual
table. All residuals and all that was delivered add up to all gradients: nothing is lost, but parts come later.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array

from splitjax.sync.rows import RowSparse


def with_residual(local: RowSparse, residual: Array) -> tuple[RowSparse, Array]:
    """This worker's rows with what was kept back of them, and the residual f[num_rows, *row] without it."""
    kept = residual.at[local.ids].get(mode="fill", fill_value=0)
    rest = residual.at[local.ids].set(jnp.zeros((), residual.dtype), mode="drop")
    return dataclasses.replace(local, values=local.values + kept.astype(local.values.dtype)), rest


def keep(residual: Array, errors: RowSparse) -> Array:
    """The residual with what rounding took away this time (`RowExchange.exchange_values`); ids may repeat."""
    return residual.at[errors.ids].add(errors.values.astype(residual.dtype), mode="drop")
