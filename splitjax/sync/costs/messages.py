"""Counts the messages of an exchange that a worker waits for one after the other, on CPU: each costs a latency.

Numbers of workers and bytes come in, numbers of messages come out. `sync.wire` sends them so: by the same thresholds.
"""

from __future__ import annotations

import math

# How a push goes. "kernel" is `kernels.exchange_rows`, for rows alone. "auto": on TPU and GPU one all-to-all, which
# serves all links at once (the kernel for rows, on TPU, where it pays). On CPU, by gloo, all-to-all waits for nobody in
# between, and permutations come nearer to the link's rate.
PATTERNS: tuple[str, ...] = ("auto", "ppermute", "all_to_all", "kernel")
# By `benchmarks sparse --only messages`, 16 processes behind links of 100 Mb/s: 15 messages of 14 KiB take 22 ms by
# all-to-all and 40 by permutations, of 27 KiB 38 and 42, of 37 KiB 57 and 51. A gather in rounds that double takes 13
# ms for 7 KiB, where the ring takes 36; for 32 KiB 77 and 44.
MOST_AT_ONCE, _MOST_DOUBLED = 28 << 10, 64 << 10  # bytes of one message
# Two workers that swap messages with each other have one connection. Who comes second finds the other ready, sends at
# once, and what says that it can receive waits behind that: large messages go one after the other (1 MiB each way takes
# 156 ms, in parts 94; 256 KiB 24).
_MOST_SWAPPED, _MOST_PARTS = 256 << 10, 512  # bytes of one part; parts, each of which is an operation of the program


def gather_messages(n: int, num_bytes: int) -> int:
    """Returns how many messages of a `wire.gather` over `n` workers a worker waits for one after the other on CPU, for
    parts of `num_bytes` bytes."""
    return math.ceil(math.log2(n)) if doubles(n, num_bytes) else n - 1


def exchange_messages(n: int, num_bytes: int, pattern: str) -> int:
    """Returns the same for a `wire.exchange` or `wire.push_rows` over `n` workers by `pattern`, for a worker's part of
    `num_bytes` bytes. At once they take half the time."""
    at_once = pattern in ("all_to_all", "kernel") or (pattern == "auto" and num_bytes <= MOST_AT_ONCE)
    return n // 2 if at_once else sum(shift_messages(n, shift, num_bytes) for shift in range(1, n))


def shift_messages(n: int, shift: int, num_bytes: int) -> int:
    """Returns the same where each of `n` workers sends `num_bytes` bytes to the one `shift` places further on: parts
    of what two swap."""
    return swapped_parts(num_bytes) if 2 * shift == n else 1


def swapped_parts(num_bytes: int) -> int:
    """Returns the number of parts in which two workers swap messages of `num_bytes` bytes."""
    return max(1, min(math.ceil(num_bytes / _MOST_SWAPPED), _MOST_PARTS))


def doubles(n: int, num_bytes: int) -> bool:
    """Tells whether parts of `num_bytes` bytes of `n` workers are gathered in rounds that double."""
    return n > 2 and n // 2 * num_bytes <= _MOST_DOUBLED
