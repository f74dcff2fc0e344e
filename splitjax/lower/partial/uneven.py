"""Workers with different numbers of examples: each takes its range out of the whole batch, which every worker is given.

As `batch_split.Split`, for one microbatch. Rows that come out stand in zeros of the whole batch's size, to be added up
over the workers. Where devices share a worker's examples (`islands.py`), they do so in equal parts: shares are
multiples of their number.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from splitjax.lower.microbatch.accumulate import Evaluator
from splitjax.lower.microbatch.batch_split import Slot, Split
from splitjax.lower.microbatch.example_relation import Layout
from splitjax.lower.microbatch.liveness import WHOLE
from splitjax.lower.microbatch.places import REPLICATED, Places, Runner, Sums
from splitjax.lower.microbatch.worker_loop import Contribution


@dataclasses.dataclass(frozen=True)
class UnevenSplit(Split):
    """`share` of `whole` examples, from number `offset` (i32[]) on, of a place along the axes `workers`; other axes
    that are manual divide it."""

    share: int = 0
    whole: int = 0
    offset: Any = 0
    workers: tuple[str, ...] = ()

    @property
    def num_contributions(self) -> float:  # type: ignore[override]
        """By what a value that is the same for all workers is divided to be this worker's part of it."""
        return self.whole / self.share * math.prod(self._sizes(inside=True))

    def _sizes(self, inside: bool) -> tuple[int, ...]:
        """Of the axes that divide a worker's share: those that are manual (or not)."""
        return tuple(size for name, size in self.axes if name not in self.workers and (name in self.manual) == inside)

    @property
    def held(self) -> tuple[Any, ...]:
        return (self.offset,)

    def holding(self, held: tuple[Any, ...]) -> Split:
        return dataclasses.replace(self, offset=held[0])

    def cut(self, value: Any, layout: Layout, whole_over: Any = ()) -> Any:
        return jnp.asarray(value)[None]

    def cut_spec(self, rank: int, layout: Layout) -> PartitionSpec:
        return PartitionSpec()

    def part(self, cut: Any, layout: Layout) -> Any:
        return self._range(cut, layout)

    def take(self, whole: Any, layout: Layout, slot: Slot) -> Any:
        own = self._range(jnp.asarray(whole), layout)
        parts = self._sizes(inside=True)
        if not parts:
            return own
        number = jnp.zeros((), jnp.int32)
        for name, size in self.axes:
            if name in self.manual and name not in self.workers:
                number = number * size + slot.places[name]
        shape, dim, each = own.shape, layout.dim, self.share // math.prod(parts)
        own = jnp.reshape(own, (*shape[:dim], layout.major, self.share, layout.minor, *shape[dim + 1 :]))
        own = lax.dynamic_slice_in_dim(own, number * each, each, dim + 1)
        return jnp.reshape(own, (*shape[:dim], layout.major * each * layout.minor, *shape[dim + 1 :]))

    def apart(self, part: Any, layout: Layout, whole_size: int) -> Any:
        shape, dim = part.shape, layout.dim
        sizes = [1 if name in self.workers or name in self.manual else size for name, size in self.axes]
        each = self.share // math.prod((*self._sizes(inside=True), *self._sizes(inside=False)))
        return jnp.reshape(part, (*shape[:dim], layout.major, *sizes, each, layout.minor, *shape[dim + 1 :]))

    def together(self, apart: Any, layout: Layout) -> Any:
        return Split.part(self, apart, layout)

    def uncut_local(self, part: Any, layout: Layout, whole_size: int) -> Any:
        shape, dim = part.shape, layout.dim
        around = (*shape[:dim], layout.major, self.whole, layout.minor, *shape[dim + 1 :])
        rows = jnp.reshape(part, (*shape[:dim], layout.major, self.share, layout.minor, *shape[dim + 1 :]))
        placed = lax.dynamic_update_slice_in_dim(jnp.zeros(around, part.dtype), rows, self.offset, dim + 1)
        return jnp.reshape(placed, (*shape[:dim], whole_size, *shape[dim + 1 :]))

    def join(self, stacked: Any, layout: Layout, whole_size: int) -> Any:
        return stacked[0]

    def _range(self, value: Any, layout: Layout) -> Any:
        shape, dim = value.shape, layout.dim
        value = jnp.reshape(value, (*shape[:dim], layout.major, self.whole, layout.minor, *shape[dim + 1 :]))
        value = lax.dynamic_slice_in_dim(value, self.offset, self.share, dim + 1)
        return jnp.reshape(value, (*shape[:dim], layout.major * self.share * layout.minor, *shape[dim + 1 :]))


@dataclasses.dataclass(frozen=True, eq=False)
class Balanced:
    """Places whose shares differ, as `places.Places`. `jobs`: the boundary prepared for every share (`loop.Job`);
    `places`: as of equal shares, in whose words results come out. Rows are among the sums here."""

    places: Places
    jobs: Mapping[int, Any]
    num_examples: int
    share: int = 0
    offset: Any = 0

    @property
    def island_axes(self) -> tuple[str, ...]:
        return self.places.island_axes

    @property
    def axes(self) -> tuple[str, ...]:
        return self.places.axes

    @property
    def mesh(self) -> Any:
        return self.places.mesh

    @property
    def contribution(self) -> Contribution:
        one = self.places.contribution
        return dataclasses.replace(one, summed=(*one.summed, *one.stacked, *one.sliced), stacked=(), sliced=())

    def position(self, v: int) -> int:
        return self.places.position(v)

    def without_values(self) -> Balanced:
        return dataclasses.replace(self, places=self.places.without_values())

    def with_share(self, share: int, offset: Any) -> Balanced:
        """The same for a worker that takes `share` examples from number `offset` on."""
        return dataclasses.replace(self, share=share, offset=offset)

    def inputs(self) -> tuple[list[Any], ...]:
        params, islands, constants, _, ahead, places = self.places.inputs()
        one = self.places.contribution
        return params, islands, constants, [self.places.env[v, WHOLE] for v in one.cuts], ahead, places

    def in_specs(self) -> tuple[list[PartitionSpec], ...]:
        params, islands, constants, cuts, ahead, places = self.places.in_specs()
        return params, islands, constants, [REPLICATED] * len(cuts), ahead, places

    def row_specs(self) -> tuple[list[PartitionSpec], ...]:
        return [], [], []

    whole_row_specs = row_specs

    def at_place(self, inputs: tuple[list[Any], ...], live: frozenset[int] | None = None) -> Sums:
        job, split = self.jobs[self.share], self.places.split
        own = UnevenSplit(
            split.num_microbatches,
            split.axes,
            split.manual,
            split.mesh,
            self.share,
            self.num_examples,
            self.offset,
            self.axes,
        )
        islands = job.islands and dataclasses.replace(
            job.islands, evaluator=_divided(job.islands.evaluator, own, {*split.manual, *job.islands.axes})
        )
        job = dataclasses.replace(job, evaluator=dataclasses.replace(job.evaluator, split=own), islands=islands)
        one = dataclasses.replace(
            self.places, job=job, contribution=dataclasses.replace(self.places.contribution, job=job)
        )
        params, islands, constants, cuts, ahead, places = inputs
        (value, sums, grads), unsummed, (stacked, sliced, _) = one.at_place(
            (params, islands, constants, [cut[None] for cut in cuts], ahead, places), live
        )
        return (value, [*sums, *(row[0] for row in (*stacked, *sliced))], grads), unsummed, ([], [], [])


def _divided(evaluator: Evaluator, split: UnevenSplit, manual: set[str]) -> Evaluator:
    """The evaluator of an island, in which more axes are manual."""
    return dataclasses.replace(evaluator, split=dataclasses.replace(split, manual=frozenset(manual)))


@dataclasses.dataclass(frozen=True, eq=False)
class Balancing:
    """A runner that gives workers unequal shares and leaves the rest to another."""

    runner: Runner
    jobs: Mapping[int, Any]
    num_examples: int

    def run(self, places: Places) -> Sums:
        totals, unsummed, _ = self.runner.run(Balanced(places, self.jobs, self.num_examples))
        value, every, grads = totals
        one = places.contribution
        sums, rows = every[: len(one.summed)], every[len(one.summed) :]
        cut = [
            places.split.cut(row, places.job.info(v).layout)
            for v, row in zip((*one.stacked, *one.sliced), rows, strict=True)
        ]
        return (value, sums, grads), unsummed, (cut[: len(one.stacked)], cut[len(one.stacked) :], [])

    def scaled(self, value: Any, position: int) -> Any:
        return self.runner.scaled(value, position)
