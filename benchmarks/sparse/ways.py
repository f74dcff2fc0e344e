"""The ways to synchronise one table that the benchmark compares, each as a compiled program on the mesh of a run's
workers.

What is timed is the exchange alone: from a worker's own rows, duplicates summed, to the sum on every worker. Looking
up, adding up duplicates and updating the table are alike for all, and are not in it. Owner-sharded tables are timed
whole: asking, pulling the rows, pushing gradients, and the update, as their exchange has no sum on every worker that
could be timed without.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.sparse.data import Workload, gradient
from splitjax import sync
from splitjax.sync.feedback import keep, with_residual

SPEC = PartitionSpec("data")
LEARNING_RATE = 0.5
# Names as on the page.
DENSE, AGSPARSE, SPARCML, HIERARCHICAL, OMNIREDUCE = (
    "dense",
    "all_gather (AGsparse)",
    "recursive_doubling (SparCML)",
    "hierarchical",
    "blocks (OmniReduce)",
)
SERVER, ZEN, ZEN_ROWS = "parameter_server", "zen, per element as published", "zen, per row with a row bitmap"
ROWS, ROWS_HOT, ROWS_AHEAD, ROWS_BF16 = (
    "row_exchange",
    "row_exchange, hot rows densely",
    "row_exchange, indices sent ahead",
    "row_exchange, bf16 with error feedback",
)
OWNER, OWNER_BF16 = "owner-sharded, pull and push", "owner-sharded, bf16"
SCHEMES: dict[str, sync.Scheme] = {
    DENSE: sync.Dense(),
    AGSPARSE: sync.AllGather(),
    SPARCML: sync.RecursiveDoubling(),
    HIERARCHICAL: sync.Hierarchical(),
    OMNIREDUCE: sync.Blocks(),
    SERVER: sync.ParameterServer(),
    ZEN: sync.Zen(partition="pack"),
    ZEN_ROWS: sync.Zen("row", "pack"),
    ROWS: sync.RowExchange(),
    ROWS_HOT: sync.RowExchange(hot=True),
}


def label_of(scheme: sync.Scheme) -> str:
    """The page's name of a scheme; of options that the page has no name for, the scheme's name with what differs from
    its defaults."""
    found = next((name for name, known in SCHEMES.items() if known == scheme), None)
    if found is not None:
        return found
    usual = type(scheme)()
    fields = [(one.name, getattr(scheme, one.name)) for one in dataclasses.fields(scheme)]
    return ", ".join([scheme.name, *(f"{name}={value}" for name, value in fields if value != getattr(usual, name))])


@dataclasses.dataclass
class Batches:
    """Some steps' rows of all workers, as arrays on the mesh, and the sparsity of these steps."""

    workload: Workload
    mesh: Mesh
    sets: Sequence[Sequence[np.ndarray]]
    arrays: list[tuple[jax.Array, jax.Array, jax.Array]]  # ids [n, k], values [n, k, width], counts [n]
    sparsity: sync.Sparsity

    @property
    def num_workers(self) -> int:
        return self.mesh.size

    def expected(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """The union of a step's rows, and their sums, f32[u, width]."""
        union = np.unique(np.concatenate(self.sets[step]))
        total = np.zeros((union.size, self.workload.width), np.float32)
        for worker, ids in enumerate(self.sets[step]):
            total[np.searchsorted(union, ids)] += gradient(ids, worker, self.workload.width)
        return union, total


def make_batches(workload: Workload, mesh: Mesh, steps: range) -> Batches:
    """The arrays of some steps; each process makes its own workers' rows."""
    sets = workload.sets(steps, mesh.size)
    sparsity = sync.measure(sets, workload.num_rows, workload.width)
    capacity = min(workload.ids(steps[0], 0, mesh.size).size, workload.num_rows)  # as `from_lookups` gives them
    sharding = NamedSharding(mesh, SPEC)
    place = lambda rows: jax.make_array_from_process_local_data(sharding, np.stack(rows), (mesh.size, *rows[0].shape))
    mine = [number for number, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]
    arrays = []
    for step in sets:
        rows = [(step[worker], gradient(step[worker], worker, workload.width)) for worker in mine]
        ids = [np.pad(one, (0, capacity - one.size), constant_values=workload.num_rows) for one, _ in rows]
        values = [np.pad(one, [(0, capacity - len(one)), (0, 0)]) for _, one in rows]
        counts = [np.int32(one.size) for one, _ in rows]
        arrays.append((place(ids), place(values), place(counts)))
    return Batches(workload, mesh, sets, arrays, sparsity)


@dataclasses.dataclass
class Way:
    """One way. `run(step)` waits for the result; `predicted` bytes that a worker sends by the capacities; `formula`: by
    the published formula for these steps (None where there is none); `check(step)` raises `AssertionError` for a wrong
    sum, and returns whether all fitted."""

    run: Callable[[int], Any]
    check: Callable[[int], bool]
    predicted: int
    formula: float | None
    messages: Sequence[Message]


def make_way(name: str, batches: Batches, profiled: sync.Sparsity) -> Way:
    """A way by its name. `profiled`: the sparsity of earlier steps, from which capacities come."""
    if name in (OWNER, OWNER_BF16):
        return _owner(batches, profiled, "bfloat16" if name == OWNER_BF16 else None)
    if name == ROWS_BF16:
        return _feedback(batches, profiled)
    if name == ROWS_AHEAD:
        return _ahead(batches, profiled)
    return scheme_way(SCHEMES[name], batches, profiled)


def scheme_way(scheme: sync.Scheme, batches: Batches, profiled: sync.Sparsity) -> Way:
    """Any scheme with its default program."""
    capacities, workload = scheme.plan(profiled), batches.workload

    def worker(ids: Any, values: Any, counts: Any) -> Any:
        if isinstance(scheme, sync.Dense):  # the sum as a table, which is what it is for
            return lax.psum(sync.RowSparse(ids[0], values[0], counts[0], workload.num_rows).to_dense(), "data")[None]
        found = scheme.attempt(sync.RowSparse(ids[0], values[0], counts[0], workload.num_rows), "data", capacities)
        return found.rows.ids[None], found.rows.values[None], jnp.asarray(found.fits)[None]

    program, messages = compiled(worker, batches.mesh, batches.arrays[0])
    run = lambda step: jax.block_until_ready(program(*_at(batches, step)))
    formula = (
        None if isinstance(scheme, sync.RowExchange) and scheme.wire_dtype else scheme.formula_bytes(batches.sparsity)
    )
    return Way(
        run,
        lambda step: _check(run(step), batches, step),
        scheme.predicted_bytes(capacities, batches.sparsity.table),
        formula,
        messages,
    )


def _feedback(batches: Batches, profiled: sync.Sparsity) -> Way:
    """Rows of two bytes a value; what rounding takes away stays in a table of the worker's own."""
    scheme, workload, mesh = sync.RowExchange(wire_dtype="bfloat16"), batches.workload, batches.mesh
    capacities = scheme.plan(profiled)

    def worker(residual: Any, ids: Any, values: Any, counts: Any) -> Any:
        local = sync.RowSparse(ids[0], values[0], counts[0], workload.num_rows)
        local, rest = with_residual(local, residual)
        found = scheme.exchange_indices(local.ids, local.count, workload.num_rows, "data", capacities)
        rows, _, errors = scheme.exchange_values(local.values, found, workload.num_rows, "data", capacities)
        return keep(rest, errors), (rows.ids[None], rows.values[None], found.fits[None])

    state = [zeros(mesh, workload.num_rows, workload.width)]
    program, messages = compiled(worker, mesh, (state[0], *batches.arrays[0]), donate=True)

    def run(step: int) -> Any:
        state[0], found = program(state[0], *_at(batches, step))
        return jax.block_until_ready(found)

    return Way(
        run,
        lambda step: _check(run(step), batches, step),
        scheme.predicted_bytes(capacities, batches.sparsity.table),
        None,
        messages,
    )


def _ahead(batches: Batches, profiled: sync.Sparsity) -> Way:
    """The values alone: index sets went ahead, as in a step whose forward pass hides them."""
    scheme, workload, mesh = SCHEMES[ROWS], batches.workload, batches.mesh
    capacities, table = scheme.plan(profiled), batches.sparsity.table

    def indices(ids: Any, counts: Any) -> Any:
        return jax.tree.map(
            lambda one: one[None], scheme.exchange_indices(ids[0], counts[0], workload.num_rows, "data", capacities)
        )

    def worker(routes: Any, values: Any) -> Any:
        found = jax.tree.map(lambda one: one[0], routes)
        rows, _, _ = scheme.exchange_values(values[0], found, workload.num_rows, "data", capacities)
        return rows.ids[None], rows.values[None], found.fits[None]

    ask, _ = compiled(indices, mesh, (batches.arrays[0][0], batches.arrays[0][2]))
    routes = [jax.block_until_ready(ask(ids, counts)) for ids, _, counts in batches.arrays]
    program, messages = compiled(worker, mesh, (routes[0], batches.arrays[0][1]))
    run = lambda step: jax.block_until_ready(program(routes[step % len(routes)], _at(batches, step)[1]))
    index_bytes = scheme.predicted_bytes(dataclasses.replace(capacities, push=0, pull=0, hot=0), table)
    predicted = scheme.predicted_bytes(capacities, table) - index_bytes
    return Way(run, lambda step: _check(run(step), batches, step), predicted, batches.sparsity.bound_bytes(), messages)


def _owner(batches: Batches, profiled: sync.Sparsity, wire_dtype: str | None) -> Way:
    """A table sharded by row: ask, pull, push, update of this worker's rows by SGD."""
    workload, mesh, n = batches.workload, batches.mesh, batches.num_workers
    exchange = sync.OwnerSharded(workload.num_rows, sync.plan_owner(profiled), wire_dtype=wire_dtype)

    def worker(shard: Any, ids: Any, values: Any, counts: Any) -> Any:
        room = exchange.room(ids[0].size)
        rows, requests = exchange.pull(shard, exchange.request(ids[0, :room], "data", counts[0]), "data")
        # As in training, gradients come from the rows that were read: the shard can then be updated in place.
        gradients = values[0, :room] + 0.0 * rows
        sgd = lambda shard, total: total.update(shard, lambda old, new: old - LEARNING_RATE * new)
        new, _ = exchange.push(shard, gradients, requests, "data", sgd, every=(ids[0], values[0]))
        return new, (rows[None], requests.fits[None])

    size = -(-workload.num_rows // n)
    state = [zeros(mesh, size, workload.width)]
    program, messages = compiled(worker, mesh, (state[0], *batches.arrays[0]), donate=True)

    def run(step: int) -> Any:
        state[0], found = program(state[0], *_at(batches, step))
        return jax.block_until_ready(found)

    def check(step: int) -> bool:
        """On this worker's rows, from a table of zeros: pulled again after the update."""
        state[0] = zeros(mesh, size, workload.width)
        _, fits = run(step)
        rows, _ = run(step)
        union, total = batches.expected(step)
        for place, found in _local(rows):
            ids = batches.sets[step][place]
            asked = ids[: len(found)]
            np.testing.assert_array_equal(found[: ids.size], -LEARNING_RATE * total[np.searchsorted(union, asked)])
        return all(found.all() for _, found in _local(fits))

    table = batches.sparsity.table
    # Each way (n-1)/n of a worker's rows; who reads what is written as gaps or a bitmap, which belongs to no published
    # formula.
    row_bytes = table.row_bytes // (2 if wire_dtype else 1)
    formula = 2 * (n - 1) / n * batches.sparsity.rows * row_bytes
    return Way(run, check, exchange.predicted_bytes(table), formula, messages)


@dataclasses.dataclass(frozen=True)
class Message:
    """One exchange of a program between the workers: what each of them puts in. `pairs`: of a permutation, (from,
    to)."""

    op: str
    shape: tuple[int, ...]
    dtype: Any
    pairs: tuple[tuple[int, int], ...] = ()


_SENT: dict[str, Callable[[Message, jax.Array], jax.Array]] = {
    "all_gather": lambda one, message: lax.all_gather(message, "data"),
    "psum": lambda one, message: lax.psum(message, "data"),
    "pmax": lambda one, message: lax.pmax(message, "data"),
    "all_to_all": lambda one, message: lax.all_to_all(message, "data", 0, 0),
    "ppermute": lambda one, message: lax.ppermute(message, "data", one.pairs),
}


def messages_of(jaxpr: Any) -> list[Message]:
    """What a program sends on CPU, in its order. What stands in branches and loops is left out: it runs where
    capacities did not suffice."""
    found = []
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        platforms = eqn.params.get("branches_platforms")
        if name in _SENT:
            pairs = tuple(map(tuple, eqn.params.get("perm", ())))
            found += [Message(name, one.aval.shape, one.aval.dtype, pairs) for one in eqn.invars]
        elif platforms is not None:
            found += messages_of(
                next(
                    branch.jaxpr
                    for branch, of in zip(eqn.params["branches"], platforms, strict=True)
                    if of is None or "cpu" in of
                )
            )
        elif name not in ("cond", "while"):
            for value in eqn.params.values():
                inner = getattr(value, "jaxpr", value)
                found += messages_of(inner) if hasattr(inner, "eqns") else []
    return found


def transfer(messages: Sequence[Message], mesh: Mesh) -> Callable[[int], Any]:
    """A program of the same messages one after the other, and nothing else: what the links alone take."""

    def worker(*arrays: Any) -> Any:
        after, out = jnp.zeros((), jnp.float32), []
        for one, array in zip(messages, arrays, strict=True):
            array, after = lax.optimization_barrier((array[0], after))
            first = _SENT[one.op](one, array).reshape(-1)[:1].astype(jnp.float32)
            after = after + first.sum()
            out.append(first[None])
        return out

    sharding = NamedSharding(mesh, SPEC)
    zeros = lambda one: jax.jit(lambda: jnp.zeros((mesh.size, *one.shape), one.dtype), out_shardings=sharding)()
    arrays = [zeros(one) for one in messages]
    program, _ = compiled(worker, mesh, arrays)
    return lambda step: jax.block_until_ready(program(*arrays))


def compiled(worker: Callable, mesh: Mesh, arguments: Sequence[Any], donate: bool = False) -> tuple[Any, list[Message]]:
    """The program, and what it sends."""
    run = jax.shard_map(worker, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False)
    traced = jax.jit(run, donate_argnums=(0,) if donate else ()).trace(*arguments)
    return traced.lower().compile(), messages_of(traced.jaxpr.jaxpr)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def zeros(mesh: Mesh, rows: int, width: int) -> jax.Array:
    """f[rows, width] on every worker, one after the other: a leading dim of 1 would cost a copy of all of it a step."""
    return lax.with_sharding_constraint(jnp.zeros((mesh.size * rows, width), jnp.float32), NamedSharding(mesh, SPEC))


def _at(batches: Batches, step: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    return batches.arrays[step % len(batches.arrays)]


def _local(array: jax.Array) -> list[tuple[int, np.ndarray]]:
    """(worker, its part) of those that this process has."""
    return [(shard.index[0].start or 0, np.asarray(shard.data)[0]) for shard in array.addressable_shards]


def _check(found: Any, batches: Batches, step: int) -> bool:
    """The sum is that of all workers' rows, on every worker of this process."""
    union, total = batches.expected(step)
    if not isinstance(found, Mapping | tuple | list):
        for _, table in _local(found):
            np.testing.assert_array_equal(table[union], total)
        return True
    ids, values, fits = (_local(one) for one in found)
    fitted = all(bool(one) for _, one in fits)
    if fitted:
        for (_, rows), (_, sums) in zip(ids, values, strict=True):
            at = np.searchsorted(rows, union).clip(0, rows.size - 1)
            has = rows[at] == union
            assert (total[~has] == 0).all(), "rows are missing"
            np.testing.assert_array_equal(sums[at[has]], total[has])
            assert np.isin(rows[rows < batches.workload.num_rows], union).all(), "rows that nobody touched"
    return fitted
