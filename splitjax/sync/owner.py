"""Owner-sharded tables: worker i stores a part of the rows (those with id % n = i, or the i-th range); a step pulls the
rows that it reads and pushes their gradients.

The least that can be sent: (n-1)/n k (w + ids) bytes each way for k rows of w bytes. Rows that no batch reads are
neither sent nor held twice. Ids are sent once: owners remember who asked for what (`Requests`), so gradients travel as
bare rows.

Capacities are per worker and per pair of workers. Where more rows are asked for of one owner, the exchange runs again
for the rest: all workers alike, as often as the fullest pair needs, in a loop in the same program; where a worker reads
more rows in all, with room for everything. Call inside `shard_map` with `check_vma=False`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from splitjax.errors import SyncError
from splitjax.sync import wire
from splitjax.sync.codes import decode, encode
from splitjax.sync.costs.codes import IdCode, always
from splitjax.sync.costs.owner import OwnerShardedCosts
from splitjax.sync.costs.partition import Partition
from splitjax.sync.local import rounded_away, send_order, set_rows, sum_rows, take_rows, unite
from splitjax.sync.rows import RowSparse
from splitjax.sync.synchronising import once
from splitjax.sync.wire import Axis

AGAIN: str = "splitjax:again"  # the name scope of further passes, which hardly ever run


@dataclasses.dataclass(frozen=True)
class OwnerSharded(OwnerShardedCosts):
    """The exchange of one owner-sharded table of `num_rows` rows over an axis, as it runs; `costs.owner` says what its
    options are, and what it costs."""

    def read(self, shard: Array, ids: Array, axis: Axis) -> tuple[Array, Array, Requests]:
        """Reads the rows of lookups, however many rows that is: `unite`, `request` and `pull` in one.

        **Arguments:**

        - `shard`: as `pull` has it.
        - `ids`: i32[m], those looked up, in any order (`num_rows`: none).
        - `axis`: the mesh axis or axes of the workers.

        **Returns:** f[m, *row]; where each id stands among the rows asked for, i32[m] (past their end for none,
        and for those that there was no room to ask for); and the requests.
        """
        (looked,), slots, requests = self.read_each([shard], ids, axis)
        return looked, slots, requests

    def read_each(self, shards: Sequence[Array], ids: Array, axis: Axis) -> tuple[tuple[Array, ...], Array, Requests]:
        """Reads rows of several tables that are looked up by the same `ids`, in the messages of one: ids are sent once.

        `shards` are this worker's rows of each, f[size, *row]; all else is as in `read`, with the rows of each.
        """
        most = min(ids.size, self.num_rows)
        unique, slots, count = unite(ids, self.num_rows, self.room(most))
        requests = self.request(unique, axis, count if unique.size < most else None)
        rows, requests = self._pull_each(shards, requests, axis)
        looked = tuple(take_rows(each, slots) for each in rows)
        if requests.lacks is None:
            return looked, slots, requests

        def whole(_: tuple[Array, ...]) -> tuple[Array, ...]:
            unlimited = dataclasses.replace(self, capacities=dataclasses.replace(self.capacities, local=0))
            return unlimited.read_each(shards, ids, axis)[0]

        with jax.named_scope(AGAIN):
            return once(requests.lacks, whole, looked), slots, requests

    def room(self, most: int) -> int:
        """Returns for how many rows of a worker a request has room, where there are at most `most`."""
        return min(self.capacities.local or most, most)

    def request(self, ids: Array, axis: Axis, count: Array | None = None) -> Requests:
        """Tells owners along `axis` which rows this worker reads: `ids` i32[k], unique, sorted, filled up with
        `num_rows`.

        `count`, i32[]: the exact number of rows, where it may exceed k; then some are not asked for, as
        `Requests.lacks` says. None: `ids` are all. Needs no parameters or gradients, so that it can run ahead of
        the step that reads the rows.
        """
        n, partition = lax.axis_size(axis), self._partition(axis)
        code = always(self.capacities.push, partition.size)
        order, codes, passes = self._ask(ids, ids < self.num_rows, partition, code)
        is_cut = count is not None
        if is_cut:  # said by the sign, as a number of its own would be one more array in the message
            passes = jnp.where(count > ids.size, -passes, passes)
        (codes, passes), sources = wire.exchange([codes, jnp.full((n,), passes)], axis, self.pattern)
        asked = decode(code, codes)[jnp.argsort(sources)]
        owned, slots, count = unite(asked, partition.size, self.capacities.pull)
        return Requests(
            ids, order, asked, owned, slots, count, jnp.abs(passes).max(), (passes < 0).any() if is_cut else None
        )

    def pull(self, shard: Array, requests: Requests, axis: Axis) -> tuple[Array, Requests]:
        """Fetches the rows that were asked for.

        **Arguments:**

        - `shard`: f[size, *row], this worker's rows (`shard_table`).
        - `requests`: as `request` returned them.
        - `axis`: the mesh axis or axes of the workers.

        **Returns:** f[k, *row] in the order of the ids (zeros where there is none), and the requests, which now
        know whether all gradients will have room.
        """
        (rows,), requests = self._pull_each([shard], requests, axis)
        return rows, requests

    def _pull_each(self, shards: Sequence[Array], requests: Requests, axis: Axis) -> tuple[tuple[Array, ...], Requests]:
        """Fetches the rows that were asked for of several tables; see `pull`."""
        partition = self._partition(axis)
        code = always(self.capacities.push, partition.size)
        fits = (requests.count <= self.capacities.pull) & (requests.num_passes <= 1)
        fits = fits if requests.lacks is None else fits & ~requests.lacks
        rows = tuple(jnp.zeros((requests.ids.size, *shard.shape[1:]), shard.dtype) for shard in shards)
        rows, good = self._answer(rows, shards, requests.asked, requests.order, fits, axis)

        def again(state: tuple[tuple[Array, ...], Array]) -> tuple[tuple[Array, ...], Array]:
            rows, waiting = state
            order, codes, _ = self._ask(requests.ids, waiting, partition, code)
            (codes,), sources = wire.exchange([codes], axis, self.pattern)
            rows, _ = self._answer(rows, shards, decode(code, codes)[jnp.argsort(sources)], order, fits, axis)
            return rows, waiting.at[order].set(False, mode="drop")

        waiting = (requests.ids < self.num_rows).at[requests.order].set(False, mode="drop")
        with jax.named_scope(AGAIN):
            _, rows, _ = lax.while_loop(
                lambda state: state[0] < requests.num_passes,
                lambda state: (state[0] + 1, *again(state[1:])),
                (jnp.int32(1), rows, waiting),
            )
        return rows, dataclasses.replace(requests, fits=good)

    def push(
        self,
        shard: Any,
        values: Array,
        requests: Requests,
        axis: Axis,
        then: Callable[[Any, RowSparse], Any],
        every: tuple[Array, Array] | None = None,
    ) -> tuple[Any, Array | None]:
        """Sends the rows' gradients to their owners, which add them up and update.

        **Arguments:**

        - `shard`: a pytree that `then` takes and returns, such as this worker's rows of parameter and optimizer
          state.
        - `values`: f[k, *row], in the order of the requested ids. `requests`: as `pull` returned them.
        - `axis`: the mesh axis or axes of the workers.
        - `then`: (shard, the sum as `RowSparse` over this worker's positions) -> the new shard.
        - `every`: all rows of this worker, (i32[m], f[m, *row]) as `collect_all` takes them. None: those that
          were requested.

        **Returns:** the new shard, and what a smaller `wire_dtype` rounded away, f[k, *row] (None without one).

        Raises `SyncError` without `every` for requests that may lack rows: their gradients would be lost.
        """
        if every is None and requests.lacks is not None:
            raise SyncError(
                "the gradients of rows that there was no room to ask for would be lost",
                value=f"room for {requests.ids.size} rows",
                place="push(every=...)",
                remedy="pass all ids and gradients of this worker, or request all rows (without count)",
            )
        if requests.fits is None:
            raise SyncError(
                "whether gradients have room is known after the pull",
                value="requests that were not pulled",
                place="push(requests)",
                remedy="pass the requests that `pull` returned",
            )
        fits = requests.fits
        owned, lost = self.collect(values, requests, axis)
        whole = lambda shard: then(shard, self.collect_all(*(every or (requests.ids, values)), axis))
        new = once(~fits, whole, once(fits, lambda shard: then(shard, owned), shard))
        return new, lost

    def collect(self, values: Array, requests: Requests, axis: Axis) -> tuple[RowSparse, Array | None]:
        """Adds up the gradients `values` of this worker's rows, over their positions, where `requests.fits`.

        `axis` is the mesh axis or axes of the workers. Returns the sum, and what rounding took away.
        """
        ((owned, lost),) = self.collect_each([values], requests, axis)
        return owned, lost

    def collect_each(
        self, values: Sequence[Array], requests: Requests, axis: Axis
    ) -> tuple[tuple[RowSparse, Array | None], ...]:
        """Adds up the gradients of this worker's rows of several tables that were read by `read_each`, in the message
        of one. `values` are those of each; all else is as in `collect`, whose results it returns for each."""
        partition, pull = self._partition(axis), self.capacities.pull
        rounded = [each.astype(self.wire_dtype or each.dtype) for each in values]
        blocks, sources = wire.exchange([take_rows(each, requests.order) for each in rounded], axis, self.pattern)
        slots, found = requests.slots[sources].reshape(-1), []
        for own, sent, received in zip(values, rounded, blocks, strict=True):
            sums = sum_rows(received.reshape(-1, *own.shape[1:]), slots, pull, own.dtype, has_no_gaps=True)
            owned = RowSparse(requests.owned, sums, requests.count, partition.size)
            found.append((owned, rounded_away(own, sent) if self.wire_dtype else None))
        return tuple(found)

    def collect_all(self, ids: Array, values: Array, axis: Axis) -> RowSparse:
        """Adds up all gradients of this worker's rows from all workers, whatever their number.

        **Arguments:**

        - `ids`: i32[m], duplicates allowed, of this worker.
        - `values`: f[m, *row], of this worker.
        - `axis`: the mesh axis or axes of the workers.
        """
        partition = self._partition(axis)
        ids, every = wire.gather([ids, values.astype(self.wire_dtype or values.dtype)], axis)
        positions = jnp.where(partition.owner(ids) == lax.axis_index(axis), partition.position(ids), partition.size)
        room = min(ids.size, partition.size)
        unique, slots, count = unite(positions, partition.size, room)
        total = sum_rows(every.reshape(-1, *values.shape[1:]), slots.reshape(-1), room, values.dtype, has_no_gaps=True)
        return RowSparse(unique, total, count, partition.size)

    def _ask(self, ids: Array, waiting: Array, partition: Partition, code: IdCode) -> tuple[Array, Array, Array]:
        """For each owner the rows that it is asked for next: where they stand in `ids`, their codes; passes needed in
        all."""
        n = partition.num_owners
        order, counts = send_order(jnp.where(waiting, partition.owner(ids), n), n, code.capacity)
        positions = jnp.concatenate([partition.position(ids), jnp.full((1,), partition.size, jnp.int32)])[order]
        codes, _ = encode(code, positions, jnp.minimum(counts, code.capacity))
        return order, codes, jnp.max(-(-counts // code.capacity))

    def _answer(
        self, rows: Sequence[Array], shards: Sequence[Array], asked: Array, order: Array, fits: Array, axis: Axis
    ) -> tuple[tuple[Array, ...], Array]:
        n = lax.axis_size(axis)
        flags = jnp.full((n,), fits.astype(jnp.int32))
        answers = [take_rows(shard, asked).astype(self.wire_dtype or shard.dtype) for shard in shards]
        (*blocks, flags), sources = wire.exchange([*answers, flags], axis, self.pattern)
        places = order[sources].reshape(-1)
        new = tuple(
            set_rows(own, places, block.reshape(-1, *own.shape[1:]).astype(own.dtype), is_sorted=False)
            for own, block in zip(rows, blocks, strict=True)
        )
        return new, (flags > 0).all()

    def _partition(self, axis: Axis) -> Partition:
        return Partition(self.ownership, self.num_rows, lax.axis_size(axis))


def owner_sharded(costs: OwnerShardedCosts) -> OwnerSharded:
    """Returns the exchange of which `costs` says what it costs, as it runs."""
    return OwnerSharded(**{field.name: getattr(costs, field.name) for field in dataclasses.fields(costs)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Requests:
    """Records who reads which rows, as a worker and owner knows it.

    **Attributes:**

    - `ids`: i32[k], the rows that this worker reads. `order`: i32[n, push], for each owner where in `ids` they
      stand (k: none).
    - `asked`: i32[n, push], for each worker the positions that it reads here. `owned`: i32[pull], all of them,
      sorted; `slots`: i32[n, push], where in `owned` each stands; `count`: i32[], their exact number.
    - `num_passes`: i32[], how often the fullest pair must be served. `lacks`: bool[], some worker reads rows that
      it had no room to ask for; None where every worker asked for all. `fits`: bool[], set by `pull`: one pass,
      nothing lacks, and all owners have room. All alike on all workers.
    """

    ids: Array
    order: Array
    asked: Array
    owned: Array
    slots: Array
    count: Array
    num_passes: Array
    lacks: Array | None = None
    fits: Array | None = None


def shard_table(table: Array, num_workers: int) -> Array:
    """Lays out a logical `table` [num_rows, ...] as `num_workers` owners store it, [n * size, ...].

    Worker i's rows are the i-th part, padded with zeros.
    """
    size = -(-table.shape[0] // num_workers)
    padded = jnp.pad(table, [(0, size * num_workers - table.shape[0]), *[(0, 0)] * (table.ndim - 1)])
    return padded.reshape(size, num_workers, *table.shape[1:]).swapaxes(0, 1).reshape(padded.shape)


def logical_table(stored: Array, num_rows: int, num_workers: int) -> Array:
    """Returns the table of `num_rows` rows that `num_workers` owners have `stored`: the inverse of `shard_table`."""
    by_owner = stored.reshape(num_workers, -1, *stored.shape[1:])
    return by_owner.swapaxes(0, 1).reshape(stored.shape)[:num_rows]
