"""Orders the collectives of a step's tables alike on all devices.

Each exchange joins a `CollectiveOrder`, which gives it the predicate that it waits for. It exists because devices that
meet in different collectives wait for ever.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(eq=False)
class CollectiveOrder:
    """Puts the collectives of a step's tables in an order that is the same on all devices: pulls one after the other,
    each with its further passes; then the exchanges of gradients; behind all of them, one after the other, those that
    gather everything.

    XLA's CPU backend orders the collectives of a computation, but not those inside a branch against others: on each
    device they would come as it happens, and devices that meet in different ones wait forever. An optimisation barrier
    is gone by then; so data orders them.

    - `token`: i32[] from 0 on, which every branch waits for and hands on; None before the first exchange.
    """

    token: Any = None

    def join(self, fits: Any) -> None:
        """Orders later exchanges after one that has no branch. `fits`: bool[], known when that has ended."""
        self.token = fits.astype(jnp.int32) + (0 if self.token is None else self.token)

    def ready(self) -> Any:
        """Gives True, bool[], known when all exchanges before have ended."""
        return jnp.bool_(True) if self.token is None else self.token != -1

    def next(self, fits: Any) -> Any:
        """Gives `fits`, bool[], known when all exchanges before have ended."""
        return fits & self.ready()


def known_at_the_end(fits: Any, values: Any) -> Any:
    """Gives `fits`, bool[], but not before the exchange's `values` are there, which may be sent after that is
    decided."""
    if not values.size:
        return fits
    # A word has no more bits than that; but XLA does not know, and has to wait for it.
    bits = lax.bitcast_convert_type(values.reshape(-1)[0], jnp.dtype(f"uint{8 * values.dtype.itemsize}"))
    return fits & (lax.population_count(bits) <= 8 * values.dtype.itemsize)
