"""The protocol of synchronisation schemes: row-sparse values of all workers -> their sum, the same on every worker.

A scheme is a frozen dataclass. `plan` turns a profile into static capacities; `attempt` is the exchange itself, within
them, and says, alike on all workers, whether everything fitted; `synchronise` adds the lossless fallback. Call both
inside a `shard_map` over the data axis with `check_vma=False`: what all-gathers return is alike on all workers, which
the checker cannot know.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from splitjax._registry import NamedRegistry
from splitjax.errors import SyncError
from splitjax.sync import wire
from splitjax.sync.profile import Sparsity, Table
from splitjax.sync.rows import RowSparse, merge
from splitjax.sync.wire import Axis

# Capacities are factors of 2^(1/128) apart: half a percent too much at most, and sizes that drift meet few recompiles.
_PER_OCTAVE = 128


@dataclasses.dataclass(frozen=True)
class Capacities:
    """Static sizes of an exchange; which ones count is the scheme's matter, others are 0.

    **Attributes:**

    - `local`: rows of one worker. `union`: rows of the sum.
    - `push`: items from one worker to one owner. `pull`: items of one owner.
    - `codes`: codes of one worker's list of ids; `code_bits`: bits of one (1: a bitmap).
    - `hot`: rows summed by a dense all-reduce.
    - `levels`: rows of the partial sums that are sent, round by round; of `blocks`, the blocks of one worker.
    """

    local: int = 0
    union: int = 0
    push: int = 0
    pull: int = 0
    codes: int = 0
    code_bits: int = 0
    hot: int = 0
    levels: tuple[int, ...] = ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """Reports what an exchange did.

    **Attributes:**

    - `local_rows`: i32[], this worker's rows. `union_rows`: i32[], rows of the sum. `sent_rows`: i32[], rows that
      this worker really sent point to point or into gathers (each gather counted n-1 times), without the padding
      up to the capacities.
    - `fell_back`: bool[], capacities did not suffice and the fallback ran, on all workers.
    - `incomplete`: bool[], a worker's own rows were cut off before (`RowSparse.overflowed`): the sum lacks them.
    """

    local_rows: Array
    union_rows: Array
    sent_rows: Array
    fell_back: Array
    incomplete: Array


@dataclasses.dataclass(frozen=True)
class Attempt:
    """An exchange within its capacities. `fits`: bool[], alike on all workers (True itself where it always fits); where
    False `rows` lack some. `sent_rows`: as in `Stats`."""

    rows: RowSparse
    fits: Array | bool
    sent_rows: Array


@dataclasses.dataclass(frozen=True)
class Scheme(abc.ABC):
    """Synchronises a row-sparse gradient in some way; subclasses are frozen dataclasses that `register_scheme` makes
    known.

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
    def variants(cls, pattern: str = "auto") -> tuple[Scheme, ...]:
        """Returns the scheme with each choice of options that `sync="auto"` is to weigh; by default the usual options.

        `pattern` says how schemes with owners push, see `wire.PATTERNS`.
        """
        return (cls(),)

    @abc.abstractmethod
    def plan(self, sparsity: Sparsity) -> Capacities:
        """Returns capacities for steps such as those of `sparsity`, with some room for chance."""

    @abc.abstractmethod
    def attempt(self, local: RowSparse, axis: Axis, capacities: Capacities) -> Attempt:
        """Exchanges rows within the capacities, inside `shard_map`; no branches.

        **Arguments:**

        - `local`: this worker's rows.
        - `axis`: the mesh axis or axes of the workers.
        - `capacities`: the room there is.
        """

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
class Link:
    """A worker's link as measured: seconds until a small message has come, bytes a second of a large one."""

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or self.latency_seconds < 0:
            raise SyncError(
                "a link needs a rate above 0 and a latency of at least 0", value=self, remedy="measure it again"
            )


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

    scheme: str | Scheme = "auto"
    lazy: bool = False
    wire_dtype: str | None = None


SchemeClass = TypeVar("SchemeClass", bound=type[Scheme])
# What `sync=` takes besides the names of schemes, and what plans call tables whose workers own the rows.
_TAKEN = ("auto", "owner_sharded")
_REGISTER = "splitjax.sync.register_scheme"


def register_scheme(cls: SchemeClass) -> SchemeClass:
    """Makes the scheme `cls` known by its `name`; a decorator.

    From then on `sync="name"` takes it, `sync="auto"` weighs its `variants`, and plans and checkpoints are read back
    with it. `cls` is a `Scheme`, a frozen dataclass whose fields are its options: plain values, each with a default.

    Raises `SyncError` for a class that is no such scheme, and for a name that another class has.
    """
    if not (isinstance(cls, type) and issubclass(cls, Scheme)):
        raise _unfit(cls, "a scheme is a class derived from splitjax.sync.Scheme", "derive it from Scheme")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name or name in _TAKEN:
        raise _unfit(name, f"{cls.__name__} needs a name of its own", 'write name: ClassVar[str] = "my_scheme"')
    unwritten = sorted(getattr(cls, "__abstractmethods__", ()))
    if unwritten:
        raise _unfit(cls, f"{cls.__name__} lacks {', '.join(unwritten)}", "write what splitjax.sync.Scheme declares")
    if "__dataclass_params__" not in vars(cls) or not vars(cls)["__dataclass_params__"].frozen:
        raise _unfit(
            cls, f"{cls.__name__} is no frozen dataclass", "decorate it with @dataclasses.dataclass(frozen=True)"
        )
    for field in dataclasses.fields(cls):
        if field.init and field.default is dataclasses.MISSING:
            raise _unfit(field.name, f"an option of {cls.__name__} has no default", "give every option a default")
    SCHEMES.add(name, cls, same=_same_class)
    return cls


def _unfit(value: Any, message: str, remedy: str) -> SyncError:
    return SyncError(message, value=value, place=_REGISTER, remedy=remedy)


def _same_class(known: type, again: type) -> bool:
    """Tells whether a class is one that is known, of a module that was loaded again."""
    return (known.__module__, known.__qualname__) == (again.__module__, again.__qualname__)


def _accept(name: str, loaded: Any) -> None:
    """Registers the class that an entry point called `name` has loaded, where importing it did not."""
    if not (isinstance(loaded, type) and issubclass(loaded, Scheme)):
        raise TypeError(f"it names {loaded!r}, which is no class derived from splitjax.sync.Scheme")
    if loaded.name != name:
        raise TypeError(f"it names {loaded.__name__}, whose name is {loaded.name!r}")
    register_scheme(loaded)


SCHEMES: NamedRegistry[type[Scheme]] = NamedRegistry(
    "scheme", group="splitjax.schemes", error=SyncError, register=_REGISTER, accept=_accept
)


def by_name(which: str | Scheme) -> Scheme:
    """Returns the scheme called `which`, with its default options; a scheme is itself. Raises `SyncError` for an
    unknown name, `ExtensionError` for one whose package cannot be loaded."""
    return which if isinstance(which, Scheme) else SCHEMES.find(which, place="sync")()


def synchronise(
    which: Scheme, local: RowSparse, axis: Axis, capacities: Capacities, then: Callable[[RowSparse], Any] | None = None
) -> tuple[Any, Stats]:
    """Adds up all workers' rows, whatever the capacities, and applies `then` to the sum.

    Where they do not suffice, all workers alike gather all rows instead. As that result has more room, what reads
    it runs inside the branch, once for each size: give it as `then`. To update tables in place,
    `synchronise_into`.

    **Arguments:**

    - `which`: the scheme. `local`: this worker's rows. `axis`: the mesh axis or axes of the workers.
    - `capacities`: the room there is.
    - `then`: the rows of the sum -> any pytree, whose shapes do not depend on their capacity (such as a norm). By
      default the rows themselves, padded to where every sum fits: `lossless_rows`.

    **Returns:** what `then` returns, the same on every worker, and `Stats`.
    """
    if _is_trivial(local, axis):
        return _alone(local, then)
    return finish(which.attempt(local, axis, capacities), local, axis, then)


def finish(
    attempt: Attempt, local: RowSparse, axis: Axis, then: Callable[[RowSparse], Any] | None = None
) -> tuple[Any, Stats]:
    """Does what `synchronise` does after the `attempt`: uses its rows, or all workers alike gather all.

    `local`, `axis` and `then` are those of `synchronise`.
    """
    room = max(lossless_rows(local, axis), attempt.rows.capacity)
    then = then or (lambda rows: rows.padded(room))
    if attempt.fits is True:
        return then(attempt.rows), _stats(attempt, attempt.rows.count, local, axis)
    out, union_rows = lax.cond(
        attempt.fits,
        lambda: (then(attempt.rows), attempt.rows.count),
        lambda: (lambda rows: (then(rows), rows.count))(gather_all(local, axis)),
    )
    return out, _stats(attempt, union_rows, local, axis)


def synchronise_into(
    which: Scheme,
    local: RowSparse,
    axis: Axis,
    capacities: Capacities,
    carry: Any,
    then: Callable[[RowSparse, Any], Any],
) -> tuple[Any, Stats]:
    """Synchronises what is updated in place, such as tables: XLA copies whole what a branch returns, but not what a
    loop carries.

    **Arguments:**

    - `which`, `local`, `axis`, `capacities`: as `synchronise`.
    - `carry`: any pytree.
    - `then`: (the rows of the sum, carry) -> the new carry, of the same shapes and dtypes.

    **Returns:** the new carry, and `Stats`.
    """
    if _is_trivial(local, axis):
        return _alone(local, lambda rows: then(rows, carry))
    return finish_into(which.attempt(local, axis, capacities), local, axis, carry, then)


def finish_into(
    attempt: Attempt, local: RowSparse, axis: Axis, carry: Any, then: Callable[[RowSparse, Any], Any]
) -> tuple[Any, Stats]:
    """Does what `synchronise_into` does after the `attempt`.

    `local`, `axis`, `carry` and `then` are those of `synchronise_into`.
    """
    if attempt.fits is True:
        return then(attempt.rows, carry), _stats(attempt, attempt.rows.count, local, axis)

    def whole(state: tuple[Any, Array]) -> tuple[Any, Array]:
        rows = gather_all(local, axis)
        return then(rows, state[0]), rows.count

    fits = jnp.asarray(attempt.fits)
    carry = once(fits, lambda carry: then(attempt.rows, carry), carry)
    carry, union_rows = once(~fits, whole, (carry, attempt.rows.count))
    return carry, _stats(attempt, union_rows, local, axis)


def once(condition: Array, function: Callable[[Any], Any], carry: Any) -> Any:
    """Evaluates `function(carry)` where the `condition` (bool[], alike on all workers) holds, else returns the
    carry: a loop of one turn or none."""
    return lax.while_loop(
        lambda state: state[0], lambda state: (jnp.bool_(False), function(state[1])), (condition, carry)
    )[1]


def _stats(attempt: Attempt, union_rows: Array, local: RowSparse, axis: Axis) -> Stats:
    fell_back = jnp.logical_not(attempt.fits)
    sent = jnp.where(fell_back, local.capacity * (lax.axis_size(axis) - 1), 0) + attempt.sent_rows
    incomplete = lax.pmax(local.overflowed.astype(jnp.int32), axis) > 0
    return Stats(local.count, union_rows, sent.astype(jnp.int32), fell_back, incomplete)


def _is_trivial(local: RowSparse, axis: Axis) -> bool:
    """One worker alone, or room for no rows, which is alike on all workers."""
    return lax.axis_size(axis) == 1 or not local.capacity


def _alone(local: RowSparse, then: Callable[[RowSparse], Any] | None) -> tuple[Any, Stats]:
    """This worker's rows are the sum."""
    return then(local) if then else local, Stats(
        local.count, local.count, jnp.int32(0), jnp.bool_(False), local.overflowed
    )


def lossless_rows(local: RowSparse, axis: Axis) -> int:
    """Returns the capacity that always suffices for the sum of rows such as `local` over the workers of `axis`."""
    return min(local.capacity * lax.axis_size(axis), local.num_rows)


def gather_all(local: RowSparse, axis: Axis) -> RowSparse:
    """Gathers the rows `local` of every worker of `axis` on all workers, at full capacity: the fallback."""
    ids, values = wire.gather([local.ids, local.values], axis)
    return merge(ids, values, local.num_rows, lossless_rows(local, axis))


def bucket(size: float, most: int | None = None) -> int:
    """Returns the next `size` of the series 1, 2, ... 128, and on in steps of 2^(1/128), but not more than `most`."""
    size = max(math.ceil(size), 0)
    capacity = (
        size if size <= _PER_OCTAVE else math.ceil(2 ** (math.ceil(math.log2(size) * _PER_OCTAVE - 1e-9) / _PER_OCTAVE))
    )
    return capacity if most is None else min(capacity, most)


def roomy(largest: float, most: int) -> int:
    """Returns a capacity for a count of which `largest` was the largest seen, at most `most`: 1.5 standard
    deviations of a Poisson count above it.

    Less would let more steps overflow, and a step that falls back sends many times as much; more would be padding
    in every message. A table that overflows often, as where examples vary together, is observed again, and gets
    the room of all that was seen.
    """
    return max(bucket(largest + 1.5 * math.sqrt(largest), most), 1)


def union_capacity(sparsity: Sparsity) -> int:
    """Returns room for the union of all workers' rows, by `sparsity`."""
    return partial_capacity(sparsity, sparsity.num_workers)


def check_levels(which: Scheme, capacities: Capacities, num_levels: int) -> None:
    """Raises `SyncError` where `capacities` have other than `num_levels` levels: they were planned for another
    number of workers.

    `which` is the scheme, for the message.
    """
    if len(capacities.levels) != num_levels:
        raise SyncError(
            f"{which.name} needs capacities for {num_levels} rounds here",
            value=capacities.levels,
            place="Capacities.levels",
            remedy="plan with a profile of as many workers as the axis has",
        )


def local_capacity(sparsity: Sparsity) -> int:
    """Returns room for a worker's rows, by `sparsity`."""
    return partial_capacity(sparsity, 1)


def partial_capacity(sparsity: Sparsity, num_workers: int) -> int:
    """Returns room for the union of any `num_workers` neighbouring workers' rows, from a multiple of that number on,
    by `sparsity`."""
    unions = (
        np.unique(np.concatenate(step[first : first + num_workers])).size
        for step in sparsity.samples
        for first in range(0, len(step), num_workers)
    )
    return roomy(max(unions, default=0), sparsity.table.num_rows)
