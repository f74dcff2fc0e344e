"""Counts what one device sends in a collective, by the bandwidth-optimal algorithms, in whole bytes (rounded up).

The size of a value and a number of devices come in, bytes come out. Predictions (`cost.collectives`), the reading of
compiled programs (`report.hlo`) and schemes of tables (`sync`) count with the same functions, so that what they say can
be compared.

Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH" (IJHPCA 19(1), sections
on allgather, reduce-scatter, allreduce, alltoall); the same figures as Patarasuk and Yuan 2009 for rings.
"""

from __future__ import annotations


def all_gather_bytes(num_devices: int, whole_bytes: int) -> int:
    """Returns what a device sends in a ring all-gather of a value of `whole_bytes`, of which each of the `num_devices`
    (n >= 1) holds 1/n: n - 1 blocks of 1/n."""
    return _share(num_devices - 1, whole_bytes, num_devices)


def reduce_scatter_bytes(num_devices: int, whole_bytes: int) -> int:
    """Returns what a device sends in a ring (or pairwise) reduce-scatter, where each of the `num_devices` (n >= 1)
    holds a summand of `whole_bytes` and ends with 1/n of the sum: n - 1 blocks of 1/n."""
    return _share(num_devices - 1, whole_bytes, num_devices)


def all_reduce_bytes(num_devices: int, whole_bytes: int) -> int:
    """Returns what a device sends in Rabenseifner's (or a ring) all-reduce over `num_devices` (n >= 1), each of which
    holds a summand of `whole_bytes`: a reduce-scatter, then an all-gather, 2 (n - 1) blocks of 1/n."""
    return _share(2 * (num_devices - 1), whole_bytes, num_devices)


def all_to_all_bytes(num_devices: int, local_bytes: int) -> int:
    """Returns what a device sends in a pairwise all-to-all over `num_devices` (n >= 1): all of its `local_bytes` but
    the 1/n that is its own."""
    return _share(num_devices - 1, local_bytes, num_devices)


def carried_bytes(op: str, num_devices: int, sent_bytes: int) -> float:
    """Returns the bytes of the array behind what a device sends, by the formulas above: 0 for a single device.

    `op`: `all_reduce`, `all_gather`, `reduce_scatter` or `all_to_all`, over `num_devices`. `sent_bytes`: by a device.
    """
    if num_devices < 2:
        return 0.0
    share = (num_devices - 1) / num_devices
    return sent_bytes / (2 * share if op == "all_reduce" else share)


def _share(parts: int, num_bytes: int, num_devices: int) -> int:
    """Returns `parts` blocks of 1/n of `num_bytes`, rounded up."""
    return -(-parts * num_bytes // num_devices)
