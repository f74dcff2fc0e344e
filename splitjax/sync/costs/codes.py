"""Says how lists of sorted ids are written for sending, and how many bytes that takes.

They are written as numbers, as a bitmap over their range, or as gaps.

Lists of ids, or how many there are, come in; the shortest `IdCode` comes out. `sync.codes` writes and reads with it.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from splitjax.kernels import num_words

NUMBERS, GAPS16, GAPS8, BITMAP = 32, 16, 8, 1
_CODE_BYTES = {NUMBERS: 4, GAPS16: 2, GAPS8: 1, BITMAP: 4}


@dataclasses.dataclass(frozen=True)
class IdCode:
    """Lists of at most `capacity` sorted unique ids below `size`, each as `num_codes` codes.

    **Attributes:**

    - `bits`: 32 for plain i32 numbers, 1 for a bitmap of `size` bits, 8 and 16 for gaps (`sync.local.encode_gaps`).
    - `num_codes`: codes of a list of gaps; of the others it follows from `capacity` and `size`.
    """

    bits: int
    capacity: int
    size: int
    num_codes: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of one list."""
        return self.length * _CODE_BYTES[self.bits]

    @property
    def length(self) -> int:
        """Codes of one list."""
        return {NUMBERS: self.capacity, BITMAP: num_words(self.size)}.get(self.bits, self.num_codes)


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
