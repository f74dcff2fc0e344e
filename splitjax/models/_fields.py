"""Holds what the click models share: one table for all categorical fields, and the checks of their options.

Ids within their fields go in, rows of a single table come out. One table in place of 26 is what makes the exchange of
its gradient one collective, so DeepFM and DLRM both look up that way.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.models._common import ModelError, SharedOptions, as_widths, check_rate, check_widths

# Criteo's display advertising data: 26 categorical fields, 13 numbers.
NUM_FIELDS: int = 26
NUM_DENSE: int = 13
# Products of two embeddings enter the logit: at the usual 1/sqrt(width) hundreds of them would drown everything else at
# first.
EMBEDDING_INIT: jax.nn.initializers.Initializer = jax.nn.initializers.normal(0.01)


class ClickOptions(SharedOptions):
    """Gives the config of a click model what follows from its fields; a base without fields of its own.

    **Attributes** that the frozen dataclass below it declares, beside those of `SharedOptions`:

    - `field_sizes`: rows of each categorical field; one number means Criteo's 26 fields of it.
    - `num_dense`: how many numbers an example has.
    - `embedding_width`: of a field's vectors.
    """

    field_sizes: int | tuple[int, ...]
    num_dense: int
    embedding_width: int

    @property
    def field_rows(self) -> tuple[int, ...]:
        """Rows of each categorical field, [F]: `field_sizes` as a tuple."""
        return as_widths(self.field_sizes, NUM_FIELDS)

    @property
    def num_rows(self) -> int:
        """Rows of the table of all fields."""
        return sum(self.field_rows)

    @property
    def num_classes(self) -> int:
        """2: a click, or none."""
        return 2

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """An example's ids within their fields, i32[F], and its numbers, f32[D]."""
        return {
            "ids": jax.ShapeDtypeStruct((len(self.field_rows),), jnp.int32),
            "values": jax.ShapeDtypeStruct((self.num_dense,), jnp.float32),
        }


def check_fields(place: str, config: ClickOptions, *widths: str) -> None:
    """Makes tuples of `field_sizes` and of the fields named `widths` of the frozen `config`, and checks its options.

    `place` names the config in messages. Raises `ModelError` for options that are no widths or no rate, and for more
    rows than an int32 can number.
    """
    object.__setattr__(config, "field_sizes", config.field_rows)
    for name in widths:
        object.__setattr__(config, name, as_widths(getattr(config, name), 2))
    check_widths(
        place,
        field_sizes=config.field_rows,
        num_dense=(config.num_dense,),
        embedding_width=(config.embedding_width,),
        **{name: getattr(config, name) for name in widths},
    )
    check_rate(place, config.dropout)
    num_rows = math.fsum(config.field_rows)
    if num_rows > np.iinfo(np.int32).max:
        raise ModelError(
            "the table of all fields has more rows than an int32 can number",
            value=int(num_rows),
            place=f"{place}, option 'field_sizes'",
            remedy="hash the fields into fewer rows each",
        )


def table_rows(ids: jax.Array, field_sizes: tuple[int, ...]) -> jax.Array:
    """Turns ids within each field into rows of the table of all fields: i32[B, F] -> i32[B, F].

    Field f of `field_sizes`, the number of rows of each, begins behind the rows of the fields before it. One table, and
    not one a field: what has to be exchanged of it is then exchanged at once. Raises `ModelError` where `ids` are of
    another number of fields."""
    if ids.ndim != 2 or ids.shape[1] != len(field_sizes):
        raise ModelError(
            f"ids must be i32[B, {len(field_sizes)}], one for each field",
            value=ids.shape,
            place="the ids given to a click model",
            remedy="give field_sizes with one number of rows for each field of the data",
        )
    return ids + jnp.asarray(np.cumsum((0, *field_sizes[:-1])), ids.dtype)
