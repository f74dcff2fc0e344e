"""The protocol of how the rows of a table travel in one evaluation of a step, whichever exchange was planned for it.

What an `Exchange` says (`sync.costs.exchange`), a table and its array go in before the forward pass: `RowsInStep` come
out. The cotangents of its lookups (`RowGradients`) go in behind the backward pass: `SummedRows` come out, which write
the state. Rows of several tables that are looked up by the same ids go together. `table_rows` and `owned_rows` have an
implementation each; `sparse` knows of this protocol alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jax.sharding import AbstractMesh, Mesh

from splitjax.lower.products.row_values import Rows
from splitjax.lower.tables.collective_order import CollectiveOrder
from splitjax.planning.tables.lookups import EditedLookup
from splitjax.planning.tables.table_sync import TableSync


@dataclasses.dataclass(frozen=True, eq=False)
class Surroundings:
    """Holds what is around the exchanges of all tables of a step.

    - `mesh`: the whole mesh.
    - `order`: of the collectives of all tables of the step, which every exchange joins.
    """

    mesh: Mesh | AbstractMesh
    order: CollectiveOrder


@dataclasses.dataclass(frozen=True, eq=False)
class LookedUp:
    """Holds the lookups of a table at a gradient boundary.

    - `table`: how the table is synchronised. `array`: the table, f[num_rows, *row].
    - `loops`: per lookup the number of loops that it stands in.
    - `ids`: per lookup i[...], as the gathers have them, where the exchange pulls rows; None where they are known only
      behind the forward pass.
    """

    table: TableSync
    array: Any
    loops: Sequence[int]
    ids: Sequence[Any] | None


@dataclasses.dataclass(frozen=True, eq=False)
class RowGradients:
    """Holds what a backward pass gives for the rows of a table.

    - `ids`, `values`: per lookup its ids i[...], and the cotangents of its rows f[..., *row].
    - `residual`: f[n, num_rows, *row], what rounding took away in earlier steps, of a table that has a `wire_dtype`;
      else None.
    """

    ids: Sequence[Any]
    values: Sequence[Any]
    residual: Any = None


class SummedRows(Protocol):
    """The sums of the rows of a table, and what is needed where there was no room for everything."""

    @property
    def table(self) -> TableSync:
        """Returns how the table is synchronised."""
        ...

    @property
    def residual(self) -> Any:
        """Returns what rounding took away, f[n, num_rows, *row], of a table that has a `wire_dtype`; else None."""
        ...

    @property
    def observed(self) -> dict[str, Any]:
        """Returns what the step returns of it: `fell_back` bool[], and while capacities are not known `touched`."""
        ...

    def write(self, leaves: Mapping[int, Any], new: Mapping[int, Rows]) -> dict[int, Any]:
        """Writes the rows that the update changes (`new`) into the state's `leaves`, by flat argument."""
        ...

    def total(self, leaves: Mapping[int, Any], eqn: Any, value: Rows) -> Any:
        """Reduces `value` over all touched rows, as the equation `eqn` does. `leaves`: the table's, by flat
        argument."""
        ...


class RowsInStep(Protocol):
    """The rows of a table from before the forward pass until they are exchanged, with those of all tables that travel
    in its messages."""

    def given(self, of_table: int, lookup: EditedLookup, number: int) -> Any:
        """Returns what `lookup` is differentiated by, which is number `number` of those of table `of_table`, as these
        are counted."""
        ...

    def push(self, ready: Any, gradients: Sequence[RowGradients]) -> Sequence[SummedRows]:
        """Exchanges the gradients of the rows; returns the sums of each table.

        **Arguments:**

        - `ready`: bool[], True once all pulls have ended.
        - `gradients`: of the rows of each table.
        """
        ...


# Begins the exchange of the rows of a table, and of those of the tables that travel in its messages.
BeginRows = Callable[[Surroundings, Sequence[LookedUp]], RowsInStep]


def placed(table: TableSync, loops: Sequence[int], ids: Sequence[Any]) -> TableSync:
    """Gives the `table` with the dims of lookups as they are here: behind those of their `loops`. Lookups whose `ids`
    have no examples are cut where a dim divides."""
    lookups = []
    for lookup, num_loops, numbers in zip(table.lookups, loops, ids, strict=True):
        dim = None if lookup.dim is None else lookup.dim + num_loops
        if dim is None:
            dim = next((d for d, size in enumerate(numbers.shape) if size % table.num_workers == 0), None)
        lookups.append(dataclasses.replace(lookup, dim=dim))
    return dataclasses.replace(table, lookups=tuple(lookups))
