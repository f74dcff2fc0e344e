"""The loops of all places (workers along the manual axes): what crosses into them, how they run, and how their results
are joined.

A `Runner` decides how they run: `Together`, all alike in a `shard_map`; `truncation.Branches` and `rows` for workers
that differentiate to different depths.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from splitjax.lower.microbatch.accumulate import Env
from splitjax.lower.microbatch.batch_split import Split
from splitjax.lower.microbatch.liveness import WHOLE
from splitjax.lower.microbatch.worker_loop import Contribution

REPLICATED = PartitionSpec()
# ((loss, sums, gradients), unsummed gradients of islands, rows): of one place, or of all together.
Sums = tuple[Any, Any, Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """One evaluation of a boundary's loops. `job`: `loop.Job`; `env`: its values so far."""

    job: Any
    contribution: Contribution
    env: Env
    whole_over: Any  # axes over which slices that are not differentiated are wanted whole

    @property
    def split(self) -> Split:
        return self.job.split

    @property
    def manual(self) -> tuple[tuple[str, int], ...]:
        """The axes of the places, with their sizes."""
        return tuple((name, size) for name, size in self.split.axes if name in self.split.manual)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.manual)

    def position(self, v: int) -> int:
        """The operand of the boundary that a value is."""
        return self.job.analysis.body.inputs.index(v)

    def inputs(self) -> tuple[list[Any], ...]:
        """What crosses into the loops: parameters, those that islands read, constants, slices, what is fetched,
        places."""
        job, one, env = self.job, self.contribution, self.env
        worked = {v for v in one.cuts if job.info(v).live} | (job.islands.inputs if job.islands else set())
        return (
            [env[v, WHOLE] for v in one.same],
            [env[v, WHOLE] for v in one.on_islands],
            [env[v, WHOLE] for v in one.shared],
            [
                self.split.cut(env[v, WHOLE], job.info(v).layout, () if v in worked else self.whole_over)
                for v in one.cuts
            ],
            [fetch.cut(env[v, WHOLE]) for v, fetch in one.fetches.items()],
            [jnp.arange(size, dtype=jnp.int32) for _, size in self.manual],
        )

    def in_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Theirs for a `shard_map` over the places: parameters replicated, slices split."""
        one = self.contribution
        return (
            [REPLICATED] * len(one.same),
            [REPLICATED] * len(one.on_islands),
            [REPLICATED] * len(one.shared),
            [self.spec(v) for v in one.cuts],
            [self.spec(v) for v in one.fetches],
            [PartitionSpec(name) for name in self.axes],
        )

    def row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Those of the rows that come out: of per-example results, of sliced and of fetched operands."""
        one = self.contribution
        return tuple([self.spec(v) for v in group] for group in (one.stacked, one.sliced, one.fetches))

    def whole_row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Theirs on the whole mesh: split over all axes that split the batch."""
        whole = dataclasses.replace(self.split, manual=frozenset(name for name, _ in self.split.axes))
        one, types = self.contribution, self.job.evaluator.program.types
        spec = lambda v: whole.cut_spec(len(types[v][0].shape), self.job.info(v).layout)
        return tuple([spec(v) for v in group] for group in (one.stacked, one.sliced, one.fetches))

    @property
    def island_axes(self) -> tuple[str, ...]:
        """The axes over which gradients of islands are unsummed."""
        return self.job.islands.axes if self.job.islands else ()

    @property
    def mesh(self) -> Mesh:
        assert self.split.mesh is not None
        return self.split.mesh

    def spec(self, v: int) -> PartitionSpec:
        """Of a cut value."""
        return self.split.cut_spec(len(self.job.evaluator.program.types[v][0].shape), self.job.info(v).layout)

    def without_values(self) -> Places:
        """The same for loops that are given what crosses into them."""
        return dataclasses.replace(self, env={})

    def with_share(self, share: int, offset: Any) -> Places:
        """The same for a worker whose share of the examples begins at a number: all have equal shares here
        (`uneven.Balanced`)."""
        return self

    def at_place(self, inputs: tuple[list[Any], ...], live: frozenset[int] | None = None) -> Sums:
        """The loop of one place. `live`: the operands of the boundary that it differentiates; None: all."""
        params, island_params, constants, scanned, ahead, places = inputs
        contribution = self.contribution
        if live is not None:
            known = enumerate(self.job.analysis.body.inputs)
            contribution = dataclasses.replace(
                contribution, chosen=frozenset(v for position, v in known if position in live)
            )
        copies = [self.job.islands.copies(value) for value in island_params] if self.job.islands else []
        at = {name: place[0] for name, place in zip(self.axes, places, strict=True)}
        (*totals, unsummed), rows = contribution.accumulate((params, copies), constants, scanned, ahead, at)
        return totals, unsummed, rows

    def joined(
        self, totals: Any, unsummed: Any, rows: Any, runner: Runner
    ) -> tuple[Any, dict[int, Any], dict[int, Any]]:
        """The results of all places as those of the boundary: the loss, returned values and gradients by value
        number."""
        one, islands = self.contribution, self.job.islands
        value, sums, grads = totals
        stacked, grad_rows, fetched_rows = rows
        whole = {v: total for v, total in zip(one.summed, sums, strict=True)}
        whole |= {v: self._whole(row, v) for v, row in zip(one.stacked, stacked, strict=True)}
        scaled = lambda v, grad: runner.scaled(grad, self.position(v))
        by_operand = dict(zip(one.same, grads, strict=True))
        by_operand |= {v: scaled(v, self._whole(row, v)) for v, row in zip(one.sliced, grad_rows, strict=True)}
        if islands:
            exchanged = [
                scaled(v, total) for v, total in zip(one.on_islands, islands.total(unsummed, self.axes), strict=True)
            ]
            by_operand |= {
                v: by_operand[v] + total if v in by_operand else total
                for v, total in zip(one.on_islands, exchanged, strict=True)
            }
        by_operand |= {
            v: scaled(v, fetch.join(row)) for (v, fetch), row in zip(one.fetches.items(), fetched_rows, strict=True)
        }
        return value, whole, by_operand

    def _whole(self, rows: Any, v: int) -> Any:
        layout = self.job.info(v).layout
        return self.split.join(rows, layout, self.job.evaluator.program.types[v][0].shape[layout.dim])


def over_places(
    places: Any, run: Any, out_specs: Any, extra_specs: tuple[Any, ...] = (), mesh: Mesh | None = None
) -> Any:
    """`run(inputs, *extra)` as a `shard_map` over the places: `Places`, or what stands in for them. `mesh`: another one
    than theirs."""
    # check_vma=False: the body was traced outside, without the marks; sums over places are explicit.
    return jax.shard_map(
        run,
        mesh=mesh or places.mesh,
        in_specs=(places.in_specs(), *extra_specs),
        out_specs=out_specs,
        axis_names=frozenset(places.axes),
        check_vma=False,
    )


class Runner(Protocol):
    """How the loops of all places run."""

    def run(self, places: Places) -> Sums:
        """The sums over all places; gradients of islands unsummed, with a leading dim for the places; rows of all."""
        ...

    def scaled(self, value: Any, position: int) -> Any:
        """A gradient that was added up outside of `run`, as the boundary returns it."""
        ...


class Together:
    """All places do the same."""

    def run(self, places: Places) -> Sums:
        if not places.manual:
            return places.at_place(places.inputs())

        def run(inputs: tuple[list[Any], ...]) -> Sums:
            totals, unsummed, rows = places.at_place(inputs)
            return lax.psum(totals, places.axes), [one[None] for one in unsummed], rows

        return over_places(places, run, (REPLICATED, PartitionSpec(places.axes), places.row_specs()))(places.inputs())

    def scaled(self, value: Any, position: int) -> Any:
        return value
