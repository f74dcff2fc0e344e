"""What the click models share: one table for all categorical fields, and the checks of their options."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.models._common import ModelError, as_widths, check_rate, check_widths

# Criteo's display advertising data: 26 categorical fields, 13 numbers.
NUM_FIELDS, NUM_DENSE = 26, 13
# Products of two embeddings enter the logit: at the usual 1/sqrt(width) hundreds of them would drown everything else at
# first.
EMBEDDING_INIT = jax.nn.initializers.normal(0.01)


def check_fields(place: str, config: object, *widths: str) -> None:
    """Makes the fields named `widths` of a frozen config tuples, and raises `ModelError` for options that are none."""
    object.__setattr__(config, "field_sizes", as_widths(config.field_sizes, NUM_FIELDS))
    for name in widths:
        object.__setattr__(config, name, as_widths(getattr(config, name), 2))
    check_widths(
        place,
        field_sizes=config.field_sizes,
        num_dense=(config.num_dense,),
        embedding_width=(config.embedding_width,),
        **{name: getattr(config, name) for name in widths},
    )
    check_rate(place, config.dropout)
    num_rows = math.fsum(config.field_sizes)
    if num_rows > np.iinfo(np.int32).max:
        raise ModelError(
            "the table of all fields has more rows than an int32 can number",
            value=int(num_rows),
            place=f"{place}, option 'field_sizes'",
            remedy="hash the fields into fewer rows each",
        )


def table_rows(ids: jax.Array, field_sizes: tuple[int, ...]) -> jax.Array:
    """Ids within each field -> rows of the one table in which field f begins behind the fields before it: i32[B, F] ->
    i32[B, F].

    One table, and not one a field: what has to be exchanged of it is then exchanged at once. Raises `ModelError` for
    ids of another number of fields."""
    if ids.ndim != 2 or ids.shape[1] != len(field_sizes):
        raise ModelError(
            f"ids must be i32[B, {len(field_sizes)}], one for each field",
            value=ids.shape,
            place="the ids given to a click model",
            remedy="give field_sizes with one number of rows for each field of the data",
        )
    return ids + jnp.asarray(np.cumsum((0, *field_sizes[:-1])), ids.dtype)
