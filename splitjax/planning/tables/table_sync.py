"""Says how a table is synchronised by rows, as a value: its layout, its workers, its lookups and its exchange.

`planning.tables.finding` makes a `TableSync` of what the plan and the user say about a table; the exchanges
(`lower.tables.table_rows`, `lower.tables.owned_rows`) and those who place residuals read it.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from jax.sharding import PartitionSpec

from splitjax.plan import Spec, spec_axes
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.exchange import Exchange


@dataclasses.dataclass(frozen=True)
class IdCut:
    """Says how a lookup's ids are cut.

    - `dim`: the dim that lies over the workers; None for ids that all of them have.
    - `mode`: what ids outside the table mean, as for a gather.
    """

    dim: int | None
    mode: str


@dataclasses.dataclass(frozen=True)
class TableSync:
    """Says how a table is synchronised.

    - `param`: its path.
    - `leaf`: its flat argument.
    - `leaves`: the flat arguments whose rows its update reads or writes, itself first.
    - `shape`, `dtype`: of the table, [num_rows, *row].
    - `spec`: its layout.
    - `axes`: the mesh axes of its workers, over which its lookups are summed.
    - `num_workers`: the workers along these axes.
    - `lookups`: how the ids of each lookup are cut.
    - `row_size`: the number of values of a row on a device.
    - `exchange`: how they are. It has no capacities in the first steps, in which all rows are gathered and the ids
      returned.
    - `joins`: the path of the table in whose messages its rows travel, as both are looked up by the same ids; empty for
      one that has messages of its own.
    """

    param: str
    leaf: int
    leaves: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: Any
    spec: Spec
    axes: tuple[str, ...]
    num_workers: int
    lookups: tuple[IdCut, ...]
    row_size: int
    exchange: Exchange
    joins: str = ""

    @property
    def num_rows(self) -> int:
        """The number of rows of the whole table."""
        return self.shape[0]

    @property
    def wire_dtype(self) -> str | None:
        """The dtype to which values are rounded on the wire; then each worker has a residual."""
        return self.exchange.wire_dtype

    @property
    def capacities(self) -> Capacities | None:
        """The room that the exchange has; None while steps are observed."""
        return self.exchange.capacities

    @property
    def residual_shape(self) -> tuple[int, ...]:
        """The shape of all workers' residuals, [num_workers, num_rows, *row]."""
        return (self.num_workers, *self.shape)

    @property
    def residual_spec(self) -> PartitionSpec:
        """The layout of all workers' residuals: each worker has its own; rows are split as the table's."""
        return PartitionSpec(self.axes, None, *self.row_spec)

    @property
    def row_spec(self) -> tuple[Any, ...]:
        """The layout of a row: over axes that are none of the workers'."""
        return (*self.spec[1:], *(None,) * (len(self.shape) - len(self.spec)))

    @functools.cached_property
    def row_axes(self) -> tuple[str, ...]:
        """The axes over which the table is split by rows."""
        return spec_axes(self.spec[:1])


def cut(dim: int | None, axes: tuple[str, ...], num_ids_dims: int = 0, row_spec: tuple[Any, ...] = ()) -> PartitionSpec:
    """Gives the spec of a lookup's ids, or of its cotangents.

    **Arguments:** `dim`: the dim of the ids that lies over the workers; None: none. `axes`: the mesh axes of the
    workers. `num_ids_dims`: of cotangents, the number of their dims before the row's. `row_spec`: of cotangents, the
    layout of a row.
    """
    entries: list[Any] = [None] * max(num_ids_dims, 0 if dim is None else dim + 1)
    if dim is not None:
        entries[dim] = axes
    return PartitionSpec(*entries, *row_spec)
