"""Adding up gradients over the workers that computed them, and handing the sum to those that did not.

Inside a `shard_map` over the axis of the workers. What a worker sends for a value of S bytes with n contributors of N
workers is 2(n-1)/n S where it contributes; the N-n others are sent the sum once each, by a tree that starts at all
contributors. Zeros are never sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from splitjax.lower.products.groups import scope

# A TPU's collectives want groups of equal size. There everybody takes part, with zeros.
_EQUAL_GROUPS = ("tpu",)
# Name scopes of the two, by which `report.evidence` knows them.
SUMMED, HANDED = "summed", "handed"


def in_groups(axes: Sequence[str], platform: str) -> bool:
    """Whether only the contributors take part in a sum over workers: groups of them are named along one axis, on
    devices that have them."""
    return len(axes) == 1 and platform not in _EQUAL_GROUPS


def total_of_contributors(
    values: Sequence[Any],
    contributors: Sequence[int],
    axes: tuple[str, ...],
    num_workers: int,
    platform: str,
    names: Sequence[str] = (),
) -> list[Any]:
    """The sum of the contributors' values, on all workers.

    **Arguments:** `values`: of this worker; of one that does not contribute, zeros. `contributors`: places along the
    axes, the same on all workers. `platform`: of the mesh's devices. `names`: of the parameters whose gradients the
    values are, for reports.
    """
    mine, values = sorted(contributors), list(values)
    names = names or [""] * len(values)
    if not mine or num_workers == 1:
        return values
    if len(mine) == num_workers or not in_groups(axes, platform):
        return [_named(SUMMED, name, lax.psum, value, axes) for value, name in zip(values, names, strict=True)]
    (axis,) = axes
    if len(mine) > 1:
        groups = [mine, *([worker] for worker in range(num_workers) if worker not in mine)]
        values = [
            _named(SUMMED, name, lax.psum, value, axis, axis_index_groups=groups)
            for value, name in zip(values, names, strict=True)
        ]
    place = lax.axis_index(axis)
    for pairs in handing(mine, num_workers):
        received = [
            _named(HANDED, name, lax.ppermute, value, axis, pairs) for value, name in zip(values, names, strict=True)
        ]
        takes = jax.numpy.isin(place, jax.numpy.asarray([to for _, to in pairs]))
        values = [jax.numpy.where(takes, new, old) for new, old in zip(received, values, strict=True)]
    return values


def _named(what: str, name: str, collective: Callable[..., Any], *operands: Any, **options: Any) -> Any:
    with jax.named_scope(scope(what, name)) if name else contextlib.nullcontext():
        return collective(*operands, **options)


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
    return 2 * (num_contributors - 1) * num_bytes / num_workers, (
        num_workers - num_contributors
    ) * num_bytes / num_workers
