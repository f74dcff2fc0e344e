"""Defines what a traced step does with tables: lookups of their rows, and updates of the rows that were looked up."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Lookup:
    """Describes a gather of rows from a table.

    - `site`: of the gather's equation.
    - `operand_dtype`: dtype of the table as the gather reads it.
    - `num_ids`: rows picked, with all repetitions of a loop.
    - `trips`: how often the gather runs per step.
    - `mode`: what ids outside the table mean: clip, fill_or_drop, promise_in_bounds.
    - `source`: the user's file:line.
    """

    site: tuple[int, ...]
    operand_dtype: str
    num_ids: int
    trips: int
    mode: str
    source: str


@dataclasses.dataclass(frozen=True)
class RowUpdate:
    """Describes an update that can run on the rows alone that a step touched.

    - `leaves`: the flat arguments whose rows it reads or writes, the table first.
    - `totals`: values behind the gradient that are sums over its rows (a norm): fillers of zero add nothing to them.
    """

    leaves: tuple[int, ...]
    totals: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class LookupTable:
    """Describes a parameter with row lookups.

    - `param`: its path; `boundary`: the site of the gradient boundary that differentiates it.
    - `num_rows`: the number of its rows.
    - `lookups`: all of its lookups.
    - `update`: how its update runs on touched rows alone; None if it cannot, or if the gradient is dense.
    - `reason`: why the table's gradient stays dense, with the line; empty if it need not.
    - `lazy_update`: how its update runs on touched rows where it changes others too, and these are to be left alone
      all the same, which changes the numbers.
    """

    param: str
    boundary: tuple[int, ...]
    num_rows: int
    lookups: tuple[Lookup, ...]
    update: RowUpdate | None
    reason: str = ""
    lazy_update: RowUpdate | None = None

    @property
    def is_sparse(self) -> bool:
        """Tells whether its gradient can stay rows from lookup to update."""
        return not self.reason
