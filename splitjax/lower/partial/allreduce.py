"""Adds gradients up over the workers that computed them, and hands the sum to those that did not.

Each worker's values and the numbers of the contributors go in, the sums come out on all workers, inside a `shard_map`
over the axes of the workers. A plain sum over all workers would send zeros for those that stopped early. Here, what a
worker sends for a value of S bytes with n contributors of N workers is 2(n-1)/n S where it contributes; the N-n others
are sent the sum once each, by a tree that starts at all contributors. Zeros are never sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from splitjax.lower.products.groups import scope
from splitjax.partial.contributors import handing, in_groups

# Name scopes of the two kinds of collectives, by which `report.op_names` knows them.
SUMMED, HANDED = "summed", "handed"


def total_of_contributors(
    values: Sequence[jax.Array],
    contributors: Sequence[int],
    axes: tuple[str, ...],
    num_workers: int,
    platform: str,
    names: Sequence[str] = (),
) -> list[jax.Array]:
    """Gives the sums of the contributors' values, on all workers.

    **Arguments:**

    - `values`: those of this worker; zeros where it does not contribute.
    - `contributors`: their numbers among the workers, the same on all workers.
    - `axes`: the mesh axes of the workers, major first.
    - `num_workers`: the number of workers along these axes.
    - `platform`: that of the mesh's devices.
    - `names`: of the parameters whose gradients the values are, for reports; empty: none.
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
    """Calls a collective in the name scope of what it does (`SUMMED` or `HANDED`) for the parameter `name`."""
    with jax.named_scope(scope(what, name)) if name else contextlib.nullcontext():
        return collective(*operands, **options)
