"""Lets workers on CPUs keep the memory of a step for the next.

XLA's CPU runtime asks for its temporary buffers anew in each call, and glibc gives large ones, and what is free at the
end of the heap, back to the system. The next call gets new pages for them, each of which the kernel fills with zeros
first (`python -m benchmarks kept_memory` times that). Told not to give back, glibc hands out the same pages again. The
environment says so, because glibc reads it before a program runs.

In comes the environment of the launcher, out come variables for its workers. Other C libraries do not know them.
"""

from __future__ import annotations

from collections.abc import Mapping

# No buffer is mapped by itself, which is given back when it is freed; nor is the end of the heap, of less than 1 TiB.
# All threads share one heap: the others' are of 64 MiB, and what is larger is mapped by itself after all.
_KEEPING: Mapping[str, str] = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_ARENA_MAX": "1",
}
_TUNED_BY = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")  # whoever sets one of these has decided


def kept_memory(base: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables with which workers keep memory, for the environment `base` of the launcher; none where that
    tunes the allocator itself, or replaces it."""
    return {} if any(name.startswith(_TUNED_BY) for name in base) else dict(_KEEPING)
