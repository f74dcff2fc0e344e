"""Lays batches out on a step's mesh: says which rows of the global batch a process needs, and each device's part of
them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from splitjax.errors import BatchError


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Lays out the global batches of one size on the devices. Call it with this process's examples.

    **Attributes:**

    - `shardings`: of every array of the batch, by its name.
    - `batch_size`: B, of the global batch.
    - `rows`: of every array, i64[b], the rows of the global batch that this process's devices hold, ascending: what it
      has to read.
    """

    shardings: Mapping[str, NamedSharding]
    batch_size: int
    rows: Mapping[str, np.ndarray]

    @classmethod
    def of(cls, shardings: Mapping[str, NamedSharding], batch_size: int) -> Placement:
        """Returns the placement of batches of `batch_size` examples, from the layout `shardings` that a step gives its
        batch (`step.shardings(state, batch)[1]`)."""
        return cls(
            dict(shardings), batch_size, {name: _rows(sharding, batch_size) for name, sharding in shardings.items()}
        )

    @property
    def common_rows(self) -> np.ndarray:
        """Returns i64[b], the rows of the global batch that this process's devices hold, where they are the same of
        every array. Raises `BatchError` where they differ."""
        first, *others = self.rows.values()
        if any(not np.array_equal(first, rows) for rows in others):
            raise BatchError(
                "this process holds other rows of some arrays of the batch",
                value={name: len(rows) for name, rows in self.rows.items()},
                place="Placement.common_rows",
                remedy="read the rows `placement.rows[name]` of each array",
            )
        return first

    def __call__(self, local_batch: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        """Returns this process's rows, `local_batch` with [b, ...] of every array, as its part of global arrays [B,
        ...].

        Raises `BatchError` for what maps no names to arrays, and for arrays that are not of their rows, or that the
        step's batch does not have."""
        if not hasattr(local_batch, "items"):
            raise BatchError(
                "a batch that is laid out maps names to arrays",
                value=type(local_batch).__name__,
                place="Placement",
                remedy="give a dict of arrays; of a pair (position, batch) that is none of splitjax.data, place the"
                " second: data.prefetch(pairs, lambda pair: (pair[0], place(pair[1])))",
            )
        if set(local_batch) != set(self.shardings):
            raise BatchError(
                "the batch has other arrays than the step was planned with",
                value=sorted(local_batch),
                place="Placement",
                remedy=f"give {', '.join(sorted(self.shardings))}",
            )
        return {name: self._place(name, np.asarray(array)) for name, array in local_batch.items()}

    def _place(self, name: str, array: np.ndarray) -> jax.Array:
        rows = self.rows[name]
        if array.shape[:1] != rows.shape:
            raise BatchError(
                f"this process's part of the batch has {len(rows)} rows",
                value=array.shape,
                place=name,
                remedy="read the rows `placement.rows[name]` of the global batch, in this order",
            )
        shape = (self.batch_size, *array.shape[1:])

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None, "JAX asks for a part of an array by its slices"
            start, stop, _ = index[0].indices(self.batch_size)
            first, last = np.searchsorted(rows, (start, stop))
            return array[(slice(first, last), *index[1:])]

        return jax.make_array_from_callback(shape, self.shardings[name], part)


def _rows(sharding: NamedSharding, batch_size: int) -> np.ndarray:
    """The rows of an array's example dim that this process's devices hold."""
    # Other dims do not matter for rows; a spec never has more entries than the array dims.
    spec = sharding.spec[:1]
    only_rows = NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*spec))
    indices = only_rows.addressable_devices_indices_map((batch_size,)).values()
    spans = {index[0].indices(batch_size)[:2] for index in indices if index is not None}
    return np.unique(np.concatenate([np.arange(*span) for span in sorted(spans)]))


def batch_layout(step: Any, state: Any, example: Mapping[str, Any]) -> Placement:
    """Returns how `step(state, batch)` wants its batches, from the shapes of `state` and of `example`, a batch."""
    sizes = {leaf.shape[0] for leaf in jax.tree.leaves(example)}
    return Placement.of(step.shardings(state, example)[1], max(sizes))
