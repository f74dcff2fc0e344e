"""Writes lists of sorted ids for sending, and reads them: as numbers, as a bitmap over their range, or as gaps.

Lists of ids go in and arrays of codes come out, and back, by an `IdCode` (`costs.codes`), which says how.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from splitjax import kernels
from splitjax.errors import SyncError
from splitjax.sync.costs.codes import BITMAP, GAPS8, GAPS16, NUMBERS, IdCode
from splitjax.sync.local import decode_gaps, encode_gaps, spread_gaps

_GAPS = {GAPS16: jnp.uint16, GAPS8: jnp.uint8}


def encode(code: IdCode, ids: Array, counts: Array) -> tuple[Array, Array]:
    """Lists i32[m, capacity] of `counts` i32[m] `ids` -> codes [m, length] by `code`, and whether each fitted
    (bool[m]). Raises `SyncError` for a code of other than 1, 8, 16 or 32 bits."""
    fits = counts <= code.capacity
    if code.bits == NUMBERS:
        return ids, fits
    if code.bits == BITMAP:
        return kernels.encode_ids(ids, code.size), fits
    if code.bits not in _GAPS:
        raise SyncError(
            "ids are sent with 1, 8, 16 or 32 bits",
            value=code.bits,
            place="Capacities.code_bits",
            remedy="give one of these",
        )
    codes, needed = jax.vmap(lambda list_ids, count: encode_gaps(list_ids, count, code.num_codes, _GAPS[code.bits]))(
        ids, counts
    )
    return codes, fits & (needed <= code.num_codes)


def decode(code: IdCode, codes: Array) -> Array:
    """Decodes `codes` [m, length], written by `code`, into lists i32[m, capacity], filled up with its `size`."""
    if code.bits == NUMBERS:
        return codes
    if code.bits == BITMAP:
        return kernels.decode(codes, code.capacity, code.size)[0]
    return decode_gaps(codes, code.capacity, code.size)


def spread(code: IdCode, codes: Array) -> Array:
    """Decodes `codes` as `decode`, but into as many entries as is cheapest, with `size` between ids too: i32[m,
    ...]."""
    return decode(code, codes) if code.bits in (NUMBERS, BITMAP) else spread_gaps(codes, code.size)
