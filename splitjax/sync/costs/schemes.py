"""The protocol of what a scheme costs that adds up the row-sparse values of all workers.

A profile of sparsity comes in; capacities, bytes, messages and seconds come out. How a scheme runs is the other half
(`sync.running.Scheme`), which planning does not know.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

from splitjax.machines.links import Link
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.profile import Sparsity, Table


@dataclasses.dataclass(frozen=True)
class SchemeCosts(abc.ABC):
    """Says what it costs to synchronise a row-sparse gradient in some way; subclasses are frozen dataclasses, whose
    fields are the options of the scheme.

    - `name`: what users call it.
    - `needs_whole_rows`: whether it tells rows by their values, so that devices that have parts of rows would not
      agree.
    """

    name: ClassVar[str]
    # it tells rows by their values, so that devices that have parts of rows would not agree
    needs_whole_rows: ClassVar[bool] = False

    def takes(self, table: Table) -> bool:
        """Tells whether it can exchange a table of the size of `table`."""
        return True

    @classmethod
    def variants(cls, pattern: str = "auto") -> tuple[SchemeCosts, ...]:
        """Returns the scheme with each choice of options that `sync="auto"` is to weigh; by default the usual options.

        `pattern` says how schemes with owners push, see `sync.costs.messages.PATTERNS`.
        """
        return (cls(),)

    @abc.abstractmethod
    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns capacities for steps such as those of `sparsity`, with some room for chance."""

    @abc.abstractmethod
    def predicted_bytes(self, capacities: Capacities, table: Table) -> int:
        """Returns what a worker sends in `attempt`, padding included, for a `table` with these `capacities`: the sum
        over its collectives by the ring formulas (`cost.ring`)."""

    @abc.abstractmethod
    def formula_bytes(self, sparsity: Sparsity) -> float:
        """Returns what the busiest link carries for `sparsity` by the published formula, without padding; the class
        says which."""

    @abc.abstractmethod
    def num_messages(self, capacities: Capacities, table: Table) -> int:
        """Returns how many messages a worker sends one after the other in `attempt`, on CPU, for a `table` with
        these `capacities`: each costs a latency (`wire.gather_messages`)."""

    def predicted_seconds(self, sparsity: Sparsity, link: Link, capacities: Capacities | None = None) -> float:
        """Returns bytes over the rate of a `link`, and a latency per message; work on the worker itself is not
        counted.

        `sparsity` is the profile, `capacities` the room there is (None: what `plan` gives).
        """
        capacities = capacities or self.plan(sparsity)
        sent = self.predicted_bytes(capacities, sparsity.table)
        return sent / link.bytes_per_second + self.num_messages(capacities, sparsity.table) * link.latency_seconds


@dataclasses.dataclass(frozen=True)
class ByRows:
    """Says what to do with a table's gradient, as `sync=` takes it.

    **Attributes:**

    - `scheme`: a scheme, its name, or `"auto"`.
    - `lazy`: also for updates that change rows without gradient (momentum, Adam, weight decay): these rows are
      then left alone until they have one. Changes the numbers, as PyTorch's `SparseAdam` and TensorFlow's
      `LazyAdam` do.
    - `wire_dtype`: "bfloat16" for values rounded on the wire, with error feedback: each worker keeps what that
      takes away, in an array of the table's size. Changes the numbers. For `row_exchange`, and for tables whose
      workers own the rows.
    """

    scheme: str | SchemeCosts = "auto"
    lazy: bool = False
    wire_dtype: str | None = None
