"""Reads what a compiler says where a program does not fit into a device's memory.

The message of JAX's error comes in; the bytes that the program needs come out, as far as the compiler says so. A TPU's
compiler gives up above the memory of the chip, or above the limit that it was given, in two places: early, by a sum
over lifetimes, and late, by the assignment of buffers.
"""

from __future__ import annotations

import dataclasses
import re

# "... the total memory required for HLO temporaries (143.05G) exceeds available HBM (15.75G).": arguments and results
# are among these temporaries (seen with libtpu 0.0.42: 20.00G for x + 1 over 10 GiB).
_EARLY = re.compile(r"memory required for HLO temporaries \(([^)]+)\) exceeds available HBM \(([^)]+)\)")
# "Ran out of memory in memory space hbm. Used 727.16M of 725.00M hbm. ..."
_LATE = re.compile(r"Ran out of memory in memory space hbm\. Used (\S+) of (\S+) hbm")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGTP]?)B?")


@dataclasses.dataclass(frozen=True)
class OutOfMemory:
    """Holds what a compiler said: `needed_bytes`, what the program needs of a device's main memory, and
    `available_bytes`, what there is; both to the two decimals that it prints."""

    needed_bytes: int
    available_bytes: int


def read_refusal(message: str) -> OutOfMemory | None:
    """Returns what the `message` of an error says of the memory that a program needs; None where it is about something
    else, such as the memory of the cores."""
    found = _EARLY.search(message) or _LATE.search(message)
    sizes = [_SIZE.fullmatch(text) for text in found.groups()] if found else []
    if len(sizes) != 2 or sizes[0] is None or sizes[1] is None:
        return None
    return OutOfMemory(_bytes_of(sizes[0]), _bytes_of(sizes[1]))


def _bytes_of(size: re.Match[str]) -> int:
    """Returns the bytes of a size as XLA writes it: K is 1024 bytes."""
    return round(float(size[1]) * 1024 ** " KMGTP".index(size[2] or " "))
