"""Balanced and other parallelism with owners: push items to their owners, which add them up, and pull the sums.

Zen's point-to-point, one-shot, parallel corner of the design space (Wang et al., arXiv 2309.13254, section 3). What
differs between the schemes that use it is what an item is, who owns it (`partition`), and how ids are written
(`codes`). One message each way: ids, values and counts travel together.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import Array, lax

from splitjax.sync import wire
from splitjax.sync.codes import decode, encode
from splitjax.sync.costs.owners import OwnerExchange
from splitjax.sync.local import send_order, sum_rows, take_rows, unite
from splitjax.sync.wire import Axis


@dataclasses.dataclass(frozen=True)
class Owned:
    """Holds what owners sent back, alike on all workers.

    - `items`: i32[n, pull] (`num_items`: none), and `values`: [n, pull, ...], their sums.
    - `fits`: bool[], alike on all workers.
    - `sent_items`: i32[], items that this worker sent, gathers counted n-1 times.
    """

    items: Array
    values: Array
    fits: Array
    sent_items: Array


def push_and_pull(which: OwnerExchange, items: Array, values: Array, good: Array, axis: Axis) -> Owned:
    """Pushes items to their owners and pulls the sums.

    **Arguments:**

    - `which`: who owns what, and how ids are written.
    - `items`: i32[m], unique, ascending; `num_items` for none. `values`: [m, ...].
    - `good`: bool[], False where this worker had no room before: then nothing fits.
    - `axis`: the mesh axis or axes of the workers.
    """
    n, me = which.partition.num_owners, lax.axis_index(axis)
    order, counts = send_order(which.partition.owner(items), n, which.push.capacity)
    positions = jnp.concatenate([which.partition.position(items), jnp.full((1,), which.partition.size, jnp.int32)])[
        order
    ]
    codes, fitted = encode(which.push, positions, counts)
    (codes, values), sources = wire.exchange([codes, take_rows(values, order)], axis, which.pattern)
    del sources  # whose they were does not matter to a sum
    owned, slots, count = unite(decode(which.push, codes), which.partition.size, which.pull.capacity)
    sums = sum_rows(values.reshape(-1, *values.shape[2:]), slots.reshape(-1), which.pull.capacity, has_no_gaps=True)
    codes, pulled = encode(which.pull, owned[None], count[None])
    verdict = jnp.where(good & fitted.all() & pulled[0], count, -1)
    codes, sums, counts_of = wire.gather([codes[0], sums, verdict], axis)
    owners = jnp.arange(n, dtype=jnp.int32)[:, None]
    sent = (
        jnp.minimum(counts, which.push.capacity).sum() - jnp.minimum(counts[me], which.push.capacity) + (n - 1) * count
    )
    return Owned(which.partition.item(owners, decode(which.pull, codes)), sums, (counts_of >= 0).all(), sent)
