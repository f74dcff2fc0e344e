"""Runs the loops of all workers: says what crosses into them, how they run, and joins their results.

The workers are those along the manual axes, over which every parameter is whole; where code says *place*, it means such
a worker's position along these axes. `WorkerLoops` holds the loops of a boundary (`worker_loop.Contribution` is that of
one worker), and a `Runner` decides how they run: `Together`, all alike in a `shard_map`; `truncation` and `rows` (in
`lower/partial`) for workers that differentiate to different depths. What comes out are the results of the boundary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from splitjax.lower.microbatch.accumulate import Env
from splitjax.lower.microbatch.batch_split import Split
from splitjax.lower.microbatch.classify import WHOLE
from splitjax.lower.microbatch.worker_loop import AnalysedBoundary, Contribution
from splitjax.planning.workers import Workers

REPLICATED: PartitionSpec = PartitionSpec()
# ((loss, sums, gradients), unsummed gradients of islands, rows): of one worker, or of all together.
Sums = tuple[Any, Any, Any]


class LoopValues(Protocol):
    """The values of a boundary that a worker's loop reads and returns, as `worker_loop.Contribution` describes them."""

    @property
    def same(self) -> Sequence[int]:
        """The differentiated operands that are the same for all microbatches."""
        ...

    @property
    def on_islands(self) -> Sequence[int]:
        """The differentiated operands that islands read."""
        ...

    @property
    def summed(self) -> Sequence[int]:
        """The returned values that are sums over examples."""
        ...

    @property
    def stacked(self) -> Sequence[int]:
        """The returned values that hold examples."""
        ...

    @property
    def sliced(self) -> Sequence[int]:
        """The differentiated operands that hold examples."""
        ...

    @property
    def fetches(self) -> Collection[int]:
        """The operands whose slices are brought in one microbatch ahead."""
        ...


class RunnableLoops(Protocol):
    """The loops of all workers, as a `Runner` sees them: `WorkerLoops`, or what stands in for them."""

    @property
    def workers(self) -> Workers:
        """The workers."""
        ...

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh that they lie on."""
        ...

    @property
    def island_axes(self) -> tuple[str, ...]:
        """The axes over which gradients of islands are unsummed."""
        ...

    @property
    def contribution(self) -> LoopValues:
        """The values that the loop of a worker reads and returns."""
        ...

    def position(self, v: int) -> int:
        """Returns the position among the boundary's operands that the value `v` has."""
        ...

    def inputs(self) -> tuple[list[Any], ...]:
        """Returns what crosses into the loops."""
        ...

    def in_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Returns the `in_specs` that match `inputs()`."""
        ...

    def row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Returns the `out_specs` of the rows that `at_place` returns."""
        ...

    def whole_row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Returns the specs of these rows on the whole mesh."""
        ...

    def without_values(self) -> RunnableLoops:
        """Returns the same loops without the values that cross into them."""
        ...

    def with_share(self, share: int, offset: Any) -> RunnableLoops:
        """Returns the same for a worker with `share` examples, whose first has the number `offset`."""
        ...

    def at_place(self, inputs: tuple[list[Any], ...], live: frozenset[int] | None = None) -> Sums:
        """Runs the loop of one worker on its `inputs`, differentiating the operands at the positions in `live`."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class WorkerLoops:
    """Holds the loops over microbatches of all workers, for one evaluation of a boundary.

    - `job`: the analysed boundary. `contribution`: the loop of one worker. `env`: the boundary's values so far.
    - `whole_over`: batch axes over which slices that are not differentiated (labels) are wanted whole.
    """

    job: AnalysedBoundary
    contribution: Contribution
    env: Env
    whole_over: Sequence[str]

    @property
    def split(self) -> Split:
        """The way in which the batch is cut into microbatches."""
        return self.job.split

    @property
    def workers(self) -> Workers:
        """The workers whose loops these are."""
        return self.split.workers

    def position(self, v: int) -> int:
        """Returns the position among the boundary's operands that the value `v` has."""
        return self.job.analysis.body.inputs.index(v)

    def inputs(self) -> tuple[list[Any], ...]:
        """Returns what crosses into the loops.

        Lists of: parameters, those that islands read, constants, slices, what is fetched, and the workers' positions
        along each axis (i32[size])."""
        job, loop, env = self.job, self.contribution, self.env
        worked = {v for v in loop.cuts if job.info(v).live} | (job.islands.inputs if job.islands else set())
        return (
            [env[v, WHOLE] for v in loop.same],
            [env[v, WHOLE] for v in loop.on_islands],
            [env[v, WHOLE] for v in loop.shared],
            [
                self.split.cut(env[v, WHOLE], job.info(v).required_layout, () if v in worked else self.whole_over)
                for v in loop.cuts
            ],
            [fetch.cut(env[v, WHOLE]) for v, fetch in loop.fetches.items()],
            [jnp.arange(self.workers.mesh.size(axis), dtype=jnp.int32) for axis in self.workers.axes],
        )

    def in_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Returns the `in_specs` that match `inputs()`: parameters replicated, slices split over the workers."""
        loop = self.contribution
        return (
            [REPLICATED] * len(loop.same),
            [REPLICATED] * len(loop.on_islands),
            [REPLICATED] * len(loop.shared),
            [self.spec(v) for v in loop.cuts],
            [self.spec(v) for v in loop.fetches],
            [PartitionSpec(axis) for axis in self.workers.axes],
        )

    def row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Returns the `out_specs` of the rows: of per-example results, of sliced and of fetched operands."""
        loop = self.contribution
        return tuple([self.spec(v) for v in group] for group in (loop.stacked, loop.sliced, loop.fetches))

    def whole_row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Returns the specs of the same rows on the whole mesh: split over all axes that split the batch."""
        whole = dataclasses.replace(self.split, workers=self.workers.divided(self.workers.shared_axes))
        loop, types = self.contribution, self.job.evaluator.program.types

        def spec(v: int) -> PartitionSpec:
            return whole.cut_spec(len(types[v][0].shape), self.job.info(v).required_layout)

        return tuple([spec(v) for v in group] for group in (loop.stacked, loop.sliced, loop.fetches))

    @property
    def island_axes(self) -> tuple[str, ...]:
        """The axes over which gradients of islands are unsummed."""
        return self.job.islands.axes if self.job.islands else ()

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh of the workers."""
        assert self.split.mesh is not None, "workers along manual axes are on a mesh"
        return self.split.mesh

    def spec(self, v: int) -> PartitionSpec:
        """Returns the spec of the cut value `v` for a `shard_map` over the workers."""
        return self.split.cut_spec(len(self.job.evaluator.program.types[v][0].shape), self.job.info(v).required_layout)

    def without_values(self) -> WorkerLoops:
        """Returns the same for loops that are given what crosses into them."""
        return dataclasses.replace(self, env={})

    def with_share(self, share: int, offset: Any) -> WorkerLoops:
        """Returns the same: all workers have equal shares here, whatever `share` and `offset` say.

        Those of `lower/partial/uneven.py` give a worker `share` examples from number `offset` on."""
        return self

    def at_place(self, inputs: tuple[list[Any], ...], live: frozenset[int] | None = None) -> Sums:
        """Runs the loop of one worker.

        `inputs`: as `inputs()` returns them, the worker's own; `live`: the positions of the boundary's operands that
        the worker differentiates, None for all."""
        params, island_params, constants, scanned, ahead, places = inputs
        contribution = self.contribution
        if live is not None:
            known = enumerate(self.job.analysis.body.inputs)
            contribution = dataclasses.replace(
                contribution, chosen=frozenset(v for position, v in known if position in live)
            )
        copies = [self.job.islands.copies(value) for value in island_params] if self.job.islands else []
        at = {name: place[0] for name, place in zip(self.workers.axes, places, strict=True)}
        (*totals, unsummed), rows = contribution.accumulate((params, copies), constants, scanned, ahead, at)
        return totals, unsummed, rows

    def joined(
        self, totals: Any, unsummed: Any, rows: Any, runner: Runner[WorkerLoops]
    ) -> tuple[Any, dict[int, Any], dict[int, Any]]:
        """Joins the results of all workers: the loss, returned values and gradients, the latter two by value number.

        `totals`, `unsummed`, `rows`: what the `runner` returned; it also scales gradients that are added up here."""
        loop, islands = self.contribution, self.job.islands
        value, sums, grads = totals
        stacked, grad_rows, fetched_rows = rows
        whole = {v: total for v, total in zip(loop.summed, sums, strict=True)}
        whole |= {v: self._whole(row, v) for v, row in zip(loop.stacked, stacked, strict=True)}
        scaled = lambda v, grad: runner.scaled(grad, self.position(v))
        by_operand = dict(zip(loop.same, grads, strict=True))
        by_operand |= {v: scaled(v, self._whole(row, v)) for v, row in zip(loop.sliced, grad_rows, strict=True)}
        if islands:
            exchanged = [
                scaled(v, total)
                for v, total in zip(loop.on_islands, islands.total(unsummed, self.workers.axes), strict=True)
            ]
            by_operand |= {
                v: by_operand[v] + total if v in by_operand else total
                for v, total in zip(loop.on_islands, exchanged, strict=True)
            }
        by_operand |= {
            v: scaled(v, fetch.join(row)) for (v, fetch), row in zip(loop.fetches.items(), fetched_rows, strict=True)
        }
        return value, whole, by_operand

    def _whole(self, rows: Any, v: int) -> Any:
        """Returns the rows of the value `v` for the whole batch."""
        layout = self.job.info(v).required_layout
        return self.split.join(rows, layout, self.job.evaluator.program.types[v][0].shape[layout.dim])


def over_places(
    places: RunnableLoops,
    run: Callable[..., Any],
    out_specs: Any,
    extra_specs: tuple[Any, ...] = (),
    mesh: Mesh | AbstractMesh | None = None,
) -> Callable[..., Any]:
    """Returns `run(inputs, *extra)` as a `shard_map` over the workers of `places`.

    `out_specs`, `extra_specs`: the specs of the results and of the extra arguments; `mesh`: another mesh than that of
    `places`."""
    # check_vma=False: the body was traced outside, without the marks; sums over workers are explicit.
    return jax.shard_map(
        run,
        mesh=mesh or places.mesh,
        in_specs=(places.in_specs(), *extra_specs),
        out_specs=out_specs,
        axis_names=frozenset(places.workers.axes),
        check_vma=False,
    )


_Loops = TypeVar("_Loops", bound=RunnableLoops, contravariant=True)


class Runner(Protocol[_Loops]):
    """Decides how the loops of all workers run. The parameter is the type of loops that it can run."""

    def run(self, places: _Loops) -> Sums:
        """Runs the loops `places`, and returns the sums over all workers.

        Gradients of islands are unsummed, with a leading dim for the workers; rows are those of all workers."""
        ...

    def scaled(self, value: Any, position: int) -> Any:
        """Returns a gradient that was added up outside of `run` as the boundary returns it.

        `value`: the gradient; `position`: that of its operand."""
        ...


class Together:
    """Lets all workers do the same, in one `shard_map`."""

    def run(self, places: RunnableLoops) -> Sums:
        """Runs the loops `places` and returns the sums over all workers, as `Runner.run`."""
        axes = places.workers.axes
        if not axes:
            return places.at_place(places.inputs())

        def run(inputs: tuple[list[Any], ...]) -> Sums:
            totals, unsummed, rows = places.at_place(inputs)
            return lax.psum(totals, axes), [grad[None] for grad in unsummed], rows

        return over_places(places, run, (REPLICATED, PartitionSpec(axes), places.row_specs()))(places.inputs())

    def scaled(self, value: Any, position: int) -> Any:
        """Returns the gradient `value` of the operand at `position` as it is."""
        return value
