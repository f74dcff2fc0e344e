"""Gives workers different numbers of examples: each takes its range out of the whole batch, which all workers get.

A boundary prepared for every share goes in, a runner comes out that stands between `WorkerLoops` and the runner that
truncates. A compiled array has equal parts on all devices, so unequal ones cannot cross into a `shard_map`; the whole
batch can. `UnevenSplit` cuts as `batch_split.Split` does, for a single microbatch. Rows that come out stand in zeros of
the whole batch's size, to be added up over the workers. Where devices share a worker's examples (`islands.py`), they do
so in equal parts: shares are multiples of their number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from splitjax.lower.microbatch.accumulate import Evaluator
from splitjax.lower.microbatch.batch_split import LoopPosition, Split
from splitjax.lower.microbatch.classify import WHOLE
from splitjax.lower.microbatch.loop import PreparedBoundary
from splitjax.lower.microbatch.places import REPLICATED, RunnableLoops, Runner, Sums, WorkerLoops
from splitjax.lower.microbatch.worker_loop import Contribution
from splitjax.planning.workers import Workers
from splitjax.primitives.example_relation import ExampleDim


@dataclasses.dataclass(frozen=True)
class UnevenSplit(Split):
    """Cuts a range of examples out of the whole batch for a place along the axes of the workers. Other axes that are
    manual divide the range.

    - `share`: the number of its examples.
    - `whole`: that of the whole batch.
    - `offset`: i32[], the number of its first example.
    - `share_axes`: the mesh axes along which each place has a share.
    """

    share: int = 0
    whole: int = 0
    offset: Any = 0
    share_axes: tuple[str, ...] = ()

    @property
    def num_contributions(self) -> float:  # pyright: ignore[reportIncompatibleMethodOverride]  # `Split` counts parts
        """The divisor that makes a value that is the same for all workers this worker's part of it."""
        return self.whole / self.share * math.prod(self._sizes(inside=True))

    def _sizes(self, inside: bool) -> tuple[int, ...]:
        """Gives the sizes of the axes that divide a worker's share: those that are manual (`inside`), or the rest."""
        return tuple(
            size for name, size in self.axes if name not in self.share_axes and (name in self.manual) == inside
        )

    @property
    def held(self) -> tuple[Any, ...]:
        """The traced values that it works with: the offset."""
        return (self.offset,)

    def holding(self, held: tuple[Any, ...]) -> Split:
        """Gives the same split with the values of `held`."""
        return dataclasses.replace(self, offset=held[0])

    def cut(self, value: Any, layout: ExampleDim, whole_over: Any = ()) -> Any:
        """Gives the whole `value` with a leading dim of 1, for the only microbatch; `layout` and `whole_over` do not
        matter, since every worker is given all of it."""
        return jnp.asarray(value)[None]

    def cut_spec(self, rank: int, layout: ExampleDim) -> PartitionSpec:
        """Gives the spec of a cut value, which is replicated whatever its `rank` and `layout`."""
        return PartitionSpec()

    def part(self, cut: Any, layout: ExampleDim) -> Any:
        """Gives this worker's range of a whole value `cut` whose examples lie as `layout` says."""
        return self._range(cut, layout)

    def take(self, whole: Any, layout: ExampleDim, slot: LoopPosition) -> Any:
        """Gives the part of a `whole` value, laid out as `layout` says, for the place along the manual axes that `slot`
        holds."""
        own = self._range(jnp.asarray(whole), layout)
        parts = self._sizes(inside=True)
        if not parts:
            return own
        number = jnp.zeros((), jnp.int32)
        for name, size in self.axes:
            if name in self.manual and name not in self.share_axes:
                number = number * size + slot.places[name]
        shape, dim, each = own.shape, layout.dim, self.share // math.prod(parts)
        own = jnp.reshape(own, (*shape[:dim], layout.major, self.share, layout.minor, *shape[dim + 1 :]))
        own = lax.dynamic_slice_in_dim(own, number * each, each, dim + 1)
        return jnp.reshape(own, (*shape[:dim], layout.major * each * layout.minor, *shape[dim + 1 :]))

    def apart(self, part: Any, layout: ExampleDim, whole_size: int) -> Any:
        """Takes the example dim of a `part` apart by axes, so that it can cross into an island or out of it.

        **Arguments:** `layout`: where its examples lie. `whole_size`: of this dim in the whole value (not needed here).
        """
        shape, dim = part.shape, layout.dim
        sizes = [1 if name in self.share_axes or name in self.manual else size for name, size in self.axes]
        each = self.share // math.prod((*self._sizes(inside=True), *self._sizes(inside=False)))
        return jnp.reshape(part, (*shape[:dim], layout.major, *sizes, each, layout.minor, *shape[dim + 1 :]))

    def together(self, apart: Any, layout: ExampleDim) -> Any:
        """Gives the part again that `apart` was made from; its examples lie as `layout` says."""
        return Split.part(self, apart, layout)

    def uncut_local(self, part: Any, layout: ExampleDim, whole_size: int) -> Any:
        """Puts a `part`, whose examples lie as `layout` says, at its place in zeros of the whole value's size along
        that dim, `whole_size`."""
        shape, dim = part.shape, layout.dim
        around = (*shape[:dim], layout.major, self.whole, layout.minor, *shape[dim + 1 :])
        rows = jnp.reshape(part, (*shape[:dim], layout.major, self.share, layout.minor, *shape[dim + 1 :]))
        placed = lax.dynamic_update_slice_in_dim(jnp.zeros(around, part.dtype), rows, self.offset, dim + 1)
        return jnp.reshape(placed, (*shape[:dim], whole_size, *shape[dim + 1 :]))

    def join(self, stacked: Any, layout: ExampleDim, whole_size: int) -> Any:
        """Gives the whole value from the sum over workers, `stacked`, which has a leading dim of 1; `layout` and
        `whole_size` are not needed, as `uncut_local` used them."""
        return stacked[0]

    def _range(self, value: Any, layout: ExampleDim) -> Any:
        """Gives this worker's range of a whole value."""
        shape, dim = value.shape, layout.dim
        value = jnp.reshape(value, (*shape[:dim], layout.major, self.whole, layout.minor, *shape[dim + 1 :]))
        value = lax.dynamic_slice_in_dim(value, self.offset, self.share, dim + 1)
        return jnp.reshape(value, (*shape[:dim], layout.major * self.share * layout.minor, *shape[dim + 1 :]))


@dataclasses.dataclass(frozen=True, eq=False)
class Balanced:
    """Workers whose shares differ: `RunnableLoops`. Rows are among the sums here.

    - `places`: as of equal shares, in whose words results come out.
    - `jobs`: by share the boundary prepared for it.
    - `num_examples`: of the whole batch.
    - `share`, `offset`: the number of examples of a worker, and the number of its first, i32[]; 0 until it is chosen.
    """

    places: WorkerLoops
    jobs: Mapping[int, PreparedBoundary]
    num_examples: int
    share: int = 0
    offset: Any = 0

    @property
    def island_axes(self) -> tuple[str, ...]:
        """The axes over which gradients of islands are unsummed."""
        return self.places.island_axes

    @property
    def workers(self) -> Workers:
        """The workers whose shares differ."""
        return self.places.workers

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The whole mesh."""
        return self.places.mesh

    @property
    def contribution(self) -> Contribution:
        """The values that a place's loop adds up, rows included."""
        own = self.places.contribution
        return dataclasses.replace(own, summed=(*own.summed, *own.stacked, *own.sliced), stacked=(), sliced=())

    def position(self, v: int) -> int:
        """Gives the position among the boundary's operands of the value `v`."""
        return self.places.position(v)

    def without_values(self) -> Balanced:
        """Gives the same without the values that cross into the loops."""
        return dataclasses.replace(self, places=self.places.without_values())

    def with_share(self, share: int, offset: Any) -> Balanced:
        """Gives the same for a worker that takes `share` examples from number `offset` (i32[]) on."""
        return dataclasses.replace(self, share=share, offset=offset)

    def inputs(self) -> tuple[list[Any], ...]:
        """Gives what crosses into the loops, with whole values instead of slices."""
        params, islands, constants, _, ahead, places = self.places.inputs()
        whole = [self.places.env[v, WHOLE] for v in self.places.contribution.cuts]
        return params, islands, constants, whole, ahead, places

    def in_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Gives the specs of `inputs()`: whole values are replicated."""
        params, islands, constants, cuts, ahead, places = self.places.in_specs()
        return params, islands, constants, [REPLICATED] * len(cuts), ahead, places

    def row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Gives no specs: rows are among the sums."""
        return [], [], []

    def whole_row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Gives no specs: rows are among the sums."""
        return self.row_specs()

    def at_place(self, inputs: tuple[list[Any], ...], live: frozenset[int] | None = None) -> Sums:
        """Runs the loop of a worker with its share of the examples.

        **Arguments:** `inputs`: its part of `inputs()`. `live`: the positions of the operands that it differentiates;
        None: all.
        """
        job, split = self.jobs[self.share], self.places.split
        own = UnevenSplit(
            split.num_microbatches,
            self.workers,
            split.mesh,
            self.share,
            self.num_examples,
            self.offset,
            self.workers.axes,
        )
        islands = job.islands and dataclasses.replace(
            job.islands, evaluator=_divided(job.islands.evaluator, own, job.islands.axes)
        )
        job = dataclasses.replace(job, evaluator=dataclasses.replace(job.evaluator, split=own), islands=islands)
        shared = dataclasses.replace(
            self.places, job=job, contribution=dataclasses.replace(self.places.contribution, job=job)
        )
        params, islands, constants, cuts, ahead, places = inputs
        (value, sums, grads), unsummed, (stacked, sliced, _) = shared.at_place(
            (params, islands, constants, [cut[None] for cut in cuts], ahead, places), live
        )
        return (value, [*sums, *(row[0] for row in (*stacked, *sliced))], grads), unsummed, ([], [], [])


def _divided(evaluator: Evaluator, split: UnevenSplit, axes: tuple[str, ...]) -> Evaluator:
    """Gives the evaluator of an island over `axes`, along which a worker's examples are divided."""
    return dataclasses.replace(evaluator, split=dataclasses.replace(split, workers=split.workers.divided(axes)))


@dataclasses.dataclass(frozen=True, eq=False)
class Balancing:
    """A `microbatch.places.Runner` that gives workers unequal shares and leaves the rest to another runner.

    - `runner`: runs the loops.
    - `jobs`: by share the boundary prepared for it.
    - `num_examples`: of the whole batch.
    """

    runner: Runner[RunnableLoops]
    jobs: Mapping[int, PreparedBoundary]
    num_examples: int

    def run(self, places: WorkerLoops) -> Sums:
        """Runs the loops of all `places`, and cuts the rows out of the sums as the places expect them."""
        totals, unsummed, _ = self.runner.run(Balanced(places, self.jobs, self.num_examples))
        value, every, grads = totals
        contribution = places.contribution
        num_sums, num_stacked = len(contribution.summed), len(contribution.stacked)
        sums, rows = every[:num_sums], every[num_sums:]
        cut = [
            places.split.cut(row, places.job.info(v).required_layout)
            for v, row in zip((*contribution.stacked, *contribution.sliced), rows, strict=True)
        ]
        return (value, sums, grads), unsummed, (cut[:num_stacked], cut[num_stacked:], [])

    def scaled(self, value: Any, position: int) -> Any:
        """Scales `value`, a sum of contributions to the gradient of operand number `position`, as `runner` does."""
        return self.runner.scaled(value, position)
