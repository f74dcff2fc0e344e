"""Divides items (rows, blocks of rows, elements) among workers: who owns an item, and where in its part it stands.

Both directions are arithmetic on item numbers, so that no worker needs a table of owners.
"""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array

KINDS: tuple[str, ...] = ("range", "strided", "hashed")

Items = TypeVar("Items", Array, np.ndarray)  # on a device, or on the host


@dataclasses.dataclass(frozen=True)
class Partition:
    """`num_items` items over `num_owners` owners, each with positions 0..`size`-1.

    **Attributes:**

    - `kind`: `range` (equal consecutive ranges, OmniReduce and parameter servers), `strided` (item % n), or `hashed`:
      of each n consecutive items every owner gets one, in an order rotated by a hash of the n's number. As balanced as
      a universal hash of the items (Zen's h0), and both directions are arithmetic: no table of positions.
    """

    kind: str
    num_items: int
    num_owners: int

    @property
    def size(self) -> int:
        """Positions of one owner."""
        return -(-self.num_items // self.num_owners)

    def owner(self, items: Items) -> Items:
        """Returns the owners of `items`, i32 -> i32; `num_owners` for items past the end (which stand for nothing)."""
        n = self.num_owners
        if self.kind == "range":
            owner = items // max(self.size, 1)
        elif self.kind == "strided":
            owner = items % n
        else:
            owner = (items + _turn(items // n, n)) % n
        return _namespace(items).where(items < self.num_items, owner, n)

    def position(self, items: Items) -> Items:
        """Returns where `items` stand in their owners' parts; `size` for items past the end."""
        position = items % max(self.size, 1) if self.kind == "range" else items // self.num_owners
        return _namespace(items).where(items < self.num_items, position, self.size)

    def item(self, owner: Array, positions: Array) -> Array:
        """Returns the items at `positions` of an `owner` (shapes broadcast); `num_items` for positions past the end."""
        n = self.num_owners
        if self.kind == "range":
            items = owner * self.size + positions
        elif self.kind == "strided":
            items = positions * n + owner
        else:
            items = positions * n + (owner - _turn(positions, n)) % n
        good = (positions < self.size) & (items < self.num_items)
        return _namespace(positions).where(good, items, self.num_items)


def _turn(number: Items, n: int) -> Items:
    """A pseudo-random turn 0..n-1: the finaliser of MurmurHash3 (Appleby, public domain)."""
    xp = _namespace(number)
    h = number.astype(xp.uint32)
    h = (h ^ (h >> 16)) * xp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * xp.uint32(0xC2B2AE35)
    return ((h ^ (h >> 16)) % xp.uint32(n)).astype(xp.int32)


def _namespace(values: Array | np.ndarray) -> ModuleType:
    """Returns numpy for arrays on the host, else `jax.numpy`."""
    return np if isinstance(values, np.ndarray) else jnp
