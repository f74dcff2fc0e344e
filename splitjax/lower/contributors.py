"""Adding up gradients over the workers that computed them, and handing the sum to those that did not.

Inside a `shard_map` over the axis of the workers. What a worker sends for a value of S bytes with n contributors of N workers is
2(n-1)/n S where it contributes; the N-n others are sent the sum once each, by a tree that starts at all contributors. Zeros are
never sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

# A TPU's collectives want groups of equal size. There everybody takes part, with zeros.
_EQUAL_GROUPS = ("tpu",)


def total_of_contributors(values: list[Any], contributors: Sequence[int], axis: str, num_workers: int, platform: str) -> list[Any]:
    """The sum of the contributors' values, on all workers.

    **Arguments:** `values`: of this worker; of one that does not contribute, zeros. `contributors`: places along the axis, the same
    on all workers. `platform`: of the mesh's devices.
    """
    mine = sorted(contributors)
    if not values or num_workers == 1:
        return values
    if not mine:
        return values
    if len(mine) == num_workers or platform in _EQUAL_GROUPS:
        return lax.psum(values, axis)
    if len(mine) > 1:
        alone = [[worker] for worker in range(num_workers) if worker not in mine]
        values = lax.psum(values, axis, axis_index_groups=[mine, *alone])
    place = lax.axis_index(axis)
    for pairs in handing(mine, num_workers):
        received = [lax.ppermute(value, axis, pairs) for value in values]
        takes = jax.numpy.isin(place, jax.numpy.asarray([to for _, to in pairs]))
        values = [jax.numpy.where(takes, new, old) for new, old in zip(received, values, strict=True)]
    return values


def handing(contributors: Sequence[int], num_workers: int) -> list[list[tuple[int, int]]]:
    """Rounds of (from, to): in each, everyone who has the sum hands it to one who has not."""
    have, rounds = list(contributors), []
    lack = [worker for worker in range(num_workers) if worker not in contributors]
    while lack:
        pairs = list(zip(have, lack, strict=False))
        have += [to for _, to in pairs]
        lack = lack[len(pairs) :]
        rounds.append(pairs)
    return rounds


def sent_bytes(num_bytes: int, num_contributors: int, num_workers: int) -> tuple[float, float]:
    """Mean bytes that a worker sends for a value: to add it up, and to hand it on."""
    if num_contributors == 0:
        return 0.0, 0.0
    return 2 * (num_contributors - 1) * num_bytes / num_workers, (num_workers - num_contributors) * num_bytes / num_workers
