"""Writes lists of sorted ids for sending: as numbers, as a bitmap over their range, or as gaps.

Lists of ids go in and arrays of codes come out, and back; which code is shortest depends on how many ids there
are.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from splitjax import kernels
from splitjax.errors import SyncError
from splitjax.sync.local import decode_gaps, encode_gaps, spread_gaps

NUMBERS, GAPS16, GAPS8, BITMAP = 32, 16, 8, 1
_DTYPES = {NUMBERS: jnp.int32, GAPS16: jnp.uint16, GAPS8: jnp.uint8, BITMAP: jnp.uint32}


@dataclasses.dataclass(frozen=True)
class IdCode:
    """Lists of at most `capacity` sorted unique ids below `size`, each as `num_codes` codes.

    **Attributes:**

    - `bits`: 32 for plain i32 numbers, 1 for a bitmap of `size` bits, 8 and 16 for gaps (`local.encode_gaps`).
    - `num_codes`: codes of a list of gaps; of the others it follows from `capacity` and `size`.
    """

    bits: int
    capacity: int
    size: int
    num_codes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of one list."""
        return self.length * jnp.dtype(_DTYPES[self.bits]).itemsize

    @property
    def length(self) -> int:
        """Codes of one list."""
        return {NUMBERS: self.capacity, BITMAP: kernels.num_words(self.size)}.get(self.bits, self.num_codes)

    def encode(self, ids: Array, counts: Array) -> tuple[Array, Array]:
        """Lists i32[m, capacity] of `counts` i32[m] ids -> codes [m, length], and whether each fitted (bool[m])."""
        if self.bits not in _DTYPES:
            raise SyncError("ids are sent with 1, 8, 16 or 32 bits", value=self.bits, place="Capacities.code_bits")
        fits = counts <= self.capacity
        if self.bits == NUMBERS:
            return ids, fits
        if self.bits == BITMAP:
            return kernels.encode_ids(ids, self.size), fits
        codes, needed = jax.vmap(
            lambda list_ids, count: encode_gaps(list_ids, count, self.num_codes, _DTYPES[self.bits])
        )(ids, counts)
        return codes, fits & (needed <= self.num_codes)

    def decode(self, codes: Array) -> Array:
        """Decodes `codes` [m, length] into lists i32[m, capacity], filled up with `size`."""
        if self.bits == NUMBERS:
            return codes
        if self.bits == BITMAP:
            return kernels.decode(codes, self.capacity, self.size)[0]
        return decode_gaps(codes, self.capacity, self.size)

    def spread(self, codes: Array) -> Array:
        """Decodes `codes` as `decode`, but into as many entries as is cheapest, with `size` between ids too: i32[m,
        ...]."""
        return self.decode(codes) if self.bits in (NUMBERS, BITMAP) else spread_gaps(codes, self.size)


def num_gap_codes(ids: np.ndarray, bits: int) -> int:
    """Counts the codes of `bits` bits that a sorted list of `ids` needs as gaps."""
    gaps = np.diff(ids, prepend=-1) - 1
    return int(np.sum(gaps // ((1 << bits) - 1) + 1))


def shortest(lists: list[np.ndarray], capacity: int, size: int) -> IdCode:
    """Chooses the code with the fewest bytes for `lists` such as these, with room for chance.

    A list has at most `capacity` ids below `size`.
    """
    codes = [IdCode(BITMAP, capacity, size)]
    for bits in (GAPS8, GAPS16):
        needed = max((num_gap_codes(ids, bits) for ids in lists), default=0)
        # Room in the codes as in the ids, but never more than any list of that many ids needs.
        most = capacity + size // ((1 << bits) - 1)
        codes.append(
            IdCode(bits, capacity, size, min(needed + capacity - min((ids.size for ids in lists), default=0), most))
        )
    return min(codes, key=lambda code: code.num_bytes)


def always(capacity: int, size: int) -> IdCode:
    """Chooses the code with the fewest bytes in which every list of at most `capacity` ids below `size` fits."""
    gaps = [IdCode(bits, capacity, size, capacity + size // ((1 << bits) - 1)) for bits in (GAPS8, GAPS16)]
    return min(
        [IdCode(BITMAP, capacity, size), *gaps, IdCode(NUMBERS, capacity, size)], key=lambda code: code.num_bytes
    )
