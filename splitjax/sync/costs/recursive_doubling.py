"""What `recursive_doubling` costs (SparCML, Renggli et al., SC'19): partners swap sparse partial sums, which turn dense
when they fill.

A profile comes in; capacities, bytes and messages come out. `sync.recursive_doubling` runs it.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from splitjax import kernels
from splitjax.errors import SyncError
from splitjax.sync.costs.capacities import Capacities, local_capacity, partial_capacity, union_capacity
from splitjax.sync.costs.messages import shift_messages
from splitjax.sync.costs.registry import register_costs
from splitjax.sync.costs.schemes import SchemeCosts
from splitjax.sync.profile import Sparsity, Table

_ID_BYTES, _VERDICT_BYTES = 4, 4


@register_costs
@dataclasses.dataclass(frozen=True)
class RecursiveDoublingCosts(SchemeCosts):
    """Sum over rounds i of U(2^i) (w + 4) bytes: Zen's 2dM sum gamma^(2^(i-1)) with an index a row (arXiv 2309.13254).

    In round i partners 2^i apart swap the sums of 2^i workers each. With n workers, not a power of two, those from the
    largest power on hand their rows to a partner first, and get the result from it at the end (section 5.3 of SparCML).

    `dense_above`: rounds whose partial sums fill more than this share of the rows swap whole tables, and so do all
    later ones. None: where that is fewer bytes, which is SparCML's threshold: half of the values where each has an
    index, nearly all rows where a row has one. Raises `SyncError` for what is no share.
    """

    name: ClassVar[str] = "recursive_doubling"
    dense_above: float | None = None

    def __post_init__(self) -> None:
        share = self.dense_above
        if share is not None and not (isinstance(share, (int, float)) and 0 <= share <= 1):
            raise SyncError(
                "not a share of the rows",
                value=share,
                place="RecursiveDoubling(dense_above=...)",
                remedy="a number from 0 to 1, or None",
            )

    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns room for the partial sums of every round in steps such as those of `sparsity`."""
        n, rounds = sparsity.num_workers, num_rounds(sparsity.num_workers)
        folded = n > 1 << rounds  # then a partner's sum is of up to twice as many workers
        levels = [partial_capacity(sparsity, 1)] if folded else []
        for i in range(rounds):
            levels.append(max([partial_capacity(sparsity, min(n, (1 + folded) << i)), *levels]))
        return Capacities(local=local_capacity(sparsity), union=union_capacity(sparsity), levels=tuple(levels))

    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns the bytes that a worker sends for a `table` with these `capacities`, padding included."""
        return sum(self._swapped_bytes(capacities, table)) + sum(self._folded_bytes(capacities, table))

    def _swapped_bytes(self, capacities: Capacities, table: Table) -> list[int]:
        """Returns the bytes of each round's message."""
        levels = capacities.levels[1:] if self._folded(table) else capacities.levels
        return [_message_bytes(level, table, whole) for level, whole in zip(levels, self._dense_rounds(levels, table))]

    def _folded_bytes(self, capacities: Capacities, table: Table) -> list[int]:
        """Returns the bytes of the message that a worker past the last power of two sends first, and of the one that
        it gets in the end."""
        if not self._folded(table):
            return []
        is_dense = any(self._dense_rounds(capacities.levels[1:], table))
        return [_message_bytes(capacities.levels[0], table, False), _message_bytes(capacities.union, table, is_dense)]

    def _dense_rounds(self, levels: tuple[int, ...], table: Table) -> list[bool]:
        dense = [self._is_dense(level, table) for level in levels]
        return [any(dense[: i + 1]) for i in range(len(dense))]

    @staticmethod
    def _folded(table: Table) -> int:
        return table.num_workers - (1 << num_rounds(table.num_workers))

    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns the bytes that the class's formula gives for `sparsity`, without padding."""
        per_row, n = sparsity.table.row_bytes + _ID_BYTES, sparsity.num_workers
        rounds = num_rounds(n)
        doubled = sum(min(sparsity.union(min(1 << i, n)) * per_row, sparsity.table.num_bytes) for i in range(rounds))
        return doubled + (min(sparsity.union(n) * per_row, sparsity.table.num_bytes) if n > 1 << rounds else 0)

    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other for a `table` with these `capacities`, on
        CPU."""
        return sum(shift_messages(2, 1, size) for size in self._swapped_bytes(capacities, table)) + len(
            self._folded_bytes(capacities, table)
        )

    def _is_dense(self, rows: int, table: Table) -> bool:
        if self.dense_above is None:
            return _message_bytes(rows, table, True) < _message_bytes(rows, table, False)
        return rows > self.dense_above * table.num_rows


def _message_bytes(rows: int, table: Table, is_dense: bool) -> int:
    if is_dense:
        return table.num_bytes + 4 * kernels.num_words(table.num_rows) + _VERDICT_BYTES
    return rows * (table.row_bytes + _ID_BYTES) + 4 + _VERDICT_BYTES


def num_rounds(num_workers: int) -> int:
    """Returns in how many rounds `num_workers` workers swap, without those past the last power of two."""
    return num_workers.bit_length() - 1
