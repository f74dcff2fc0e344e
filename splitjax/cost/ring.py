"""What one device sends in a collective, by the bandwidth-optimal algorithms, in whole bytes (rounded up).

Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH" (IJHPCA 19(1), sections
on allgather, reduce-scatter, allreduce, alltoall); the same figures as Patarasuk and Yuan 2009 for rings.
"""

from __future__ import annotations


def all_gather_bytes(num_devices: int, whole_bytes: int) -> int:
    """Ring all-gather of `whole_bytes`, of which each device holds 1/n: each sends n-1 blocks of 1/n (n >= 1)."""
    return _share(num_devices - 1, whole_bytes, num_devices)


def reduce_scatter_bytes(num_devices: int, whole_bytes: int) -> int:
    """Ring (or pairwise) reduce-scatter: each device holds a summand of `whole_bytes` and ends with 1/n of the sum (n
    >= 1)."""
    return _share(num_devices - 1, whole_bytes, num_devices)


def all_reduce_bytes(num_devices: int, whole_bytes: int) -> int:
    """Rabenseifner's (or a ring) all-reduce of `whole_bytes` per device: a reduce-scatter, then an all-gather (n >=
    1)."""
    return _share(2 * (num_devices - 1), whole_bytes, num_devices)


def all_to_all_bytes(num_devices: int, local_bytes: int) -> int:
    """Pairwise all-to-all: each device sends all of its `local_bytes` but the part that is its own (n >= 1)."""
    return _share(num_devices - 1, local_bytes, num_devices)


def _share(parts: int, num_bytes: int, num_devices: int) -> int:
    return -(-parts * num_bytes // num_devices)
