"""Says what a table whose gradient goes by rows stores and sends, and what it leaves of what a whole table sends.

A layout's prediction has the dense exchange of every gradient. Where a table goes by rows, its rows take the place of
that: for the plan as they were observed (`planning.table_plan`), for a choice of layouts as many as there can be.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from splitjax.plan import Collective, PurposeKind

ID_BYTES = 4
# What is sent for a table as a whole array, and is not where it goes by rows.
_OF_WHOLE_TABLES = frozenset({PurposeKind.GRADIENT, PurposeKind.GRADIENT_HANDED, PurposeKind.STORED_WEIGHT})


@dataclasses.dataclass(frozen=True)
class RowTable:
    """Is a table that goes by rows under some layout.

    - `param`: its path. `leaves`: the flat arguments of which its update reads and writes these rows alone.
    - `gradient_bytes`: what a device has of its gradient. `sent`: what a device sends for it.
    - `is_owned`: whether workers own its rows. `joins`: the table in whose messages its rows travel then, and are
      counted; empty for one that has its own.
    """

    param: str
    leaves: tuple[int, ...]
    gradient_bytes: int
    sent: tuple[Collective, ...]
    is_owned: bool = False
    joins: str = ""


def beside_rows(sent: Sequence[Collective], by_rows: Collection[str]) -> tuple[Collective, ...]:
    """Returns those collectives of `sent` that are left where the tables at the paths `by_rows` go by rows.

    The dense exchanges of their gradients are not, nor are the gathers of tables that are stored in pieces: their rows
    are pulled, or left to XLA, which mostly finds them where they are."""
    return tuple(
        collective
        for collective in sent
        if not (collective.purpose.leaf in by_rows and collective.purpose.kind in _OF_WHOLE_TABLES)
    )
