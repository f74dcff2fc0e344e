"""Gives each worker the loss of its own examples, where the loss is no sum over examples, such as behind batch norm.

A boundary's equation and its twin for a worker's examples go in, `OwnLoss` comes out, which a runner takes as it takes
places. With the loss of the whole batch, a worker could not stop early: the statistics' derivatives need all workers.
The forward pass is the step's, traced with one worker's examples; its loss, its gradients and what it returns besides
are averaged over the workers (whole numbers are added up, rows of examples put together). With batch norm every worker
has the statistics of its own examples, as in the published prototype of partial backpropagation. That changes the
numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from splitjax.errors import PartialError, Refusal
from splitjax.lower.microbatch.places import REPLICATED, RunnableLoops, Runner, Sums
from splitjax.lower.products.interpret import evaluate_part
from splitjax.planning.sites.layout import StepLayout
from splitjax.planning.ways import BoundaryCall, SumWithin, example_dim
from splitjax.planning.workers import Workers
from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS
from splitjax.primitives.walk import Site
from splitjax.step.boundary import Boundary, boundary_of
from splitjax.trace.flatten import flatten


@dataclasses.dataclass(frozen=True, eq=False)
class _Groups:
    """The positions of the boundary's operands and auxiliary results, in the words of `worker_loop.Contribution`."""

    same: tuple[int, ...]  # differentiated
    shared: tuple[int, ...]  # the same for all workers
    cuts: tuple[int, ...]  # hold examples
    summed: tuple[int, ...]  # auxiliary results without examples
    stacked: tuple[int, ...]  # with examples
    sliced: tuple[int, ...] = ()
    on_islands: tuple[int, ...] = ()
    fetches: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class OwnLoss:
    """The places of a boundary whose workers have losses of their own: `RunnableLoops`.

    - `boundary`: what the boundary differentiates.
    - `forward`: its closed jaxpr for a worker's examples.
    - `site`, `layout`: where it stands in the step, and the constraints by site.
    - `workers`: who have losses of their own.
    - `example_dims`: per operand the dim that holds examples; None: none does.
    - `aux_dims`: per auxiliary result the dim that holds examples; None: none does.
    - `operands`: the boundary's; empty once its values are not read.
    - `island_axes`: the axes over which gradients of islands are unsummed: there are no islands here.
    """

    boundary: Boundary
    forward: Any
    site: Site
    layout: StepLayout
    workers: Workers
    example_dims: tuple[int | None, ...]
    aux_dims: tuple[int | None, ...]
    operands: Sequence[Any] = ()
    island_axes: tuple[str, ...] = ()

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The whole mesh."""
        return self.layout.mesh

    @property
    def contribution(self) -> _Groups:
        """The boundary's operands and auxiliary results in groups, by position."""
        same = tuple(self.boundary.positions)
        rest = [position for position in range(len(self.example_dims)) if position not in same]
        return _Groups(
            same,
            tuple(p for p in rest if self.example_dims[p] is None),
            tuple(p for p in rest if self.example_dims[p] is not None),
            tuple(k for k, dim in enumerate(self.aux_dims) if dim is None),
            tuple(k for k, dim in enumerate(self.aux_dims) if dim is not None),
        )

    def position(self, v: int) -> int:
        """Gives `v`: `contribution` has positions of operands."""
        return v

    def inputs(self) -> tuple[list[Any], ...]:
        """Gives the operands in the groups of `microbatch.places.WorkerLoops.inputs`."""
        groups = self.contribution
        of = lambda positions: [self.operands[position] for position in positions]
        return (
            of(groups.same),
            [],
            of(groups.shared),
            of(groups.cuts),
            [],
            [jnp.arange(self.workers.mesh.size(axis), dtype=jnp.int32) for axis in self.workers.axes],
        )

    def in_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Gives the specs of `inputs()`: what holds examples is split over the workers."""
        groups = self.contribution
        cut = [_at(self.example_dims[position], self.workers.axes) for position in groups.cuts]
        return (
            [REPLICATED] * len(groups.same),
            [],
            [REPLICATED] * len(groups.shared),
            cut,
            [],
            [PartitionSpec(axis) for axis in self.workers.axes],
        )

    def row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Gives the specs of the auxiliary results that hold examples, split over the workers."""
        return [_at(self.aux_dims[k], self.workers.axes) for k in self.contribution.stacked], [], []

    def whole_row_specs(self) -> tuple[list[PartitionSpec], ...]:
        """Gives the specs of the auxiliary results that hold examples, split over all axes of the batch."""
        return [_at(self.aux_dims[k], self.workers.batch_axes) for k in self.contribution.stacked], [], []

    def without_values(self) -> OwnLoss:
        """Gives the same without the operands."""
        return dataclasses.replace(self, operands=())

    def with_share(self, share: int, offset: Any) -> OwnLoss:
        """Gives the same: all workers have equal shares, so that `share` is 0 and `offset` means nothing."""
        return self

    def at_place(self, inputs: tuple[list[Any], ...], live: frozenset[int] | None = None) -> Sums:
        """Gives a worker's loss, what it returns and its gradients, each as its part of the mean over the workers.

        **Arguments:** `inputs`: its part of `inputs()`. `live`: the positions of the operands that it differentiates;
        None: all. The gradients of the rest are zeros.
        """
        params, _, shared, cuts, _, _ = inputs
        groups = self.contribution
        values = dict(zip((*groups.same, *groups.shared, *groups.cuts), (*params, *shared, *cuts), strict=True))
        chosen = [position for position in groups.same if live is None or position in live]

        def evaluate(some: list[Any]) -> Any:
            every = values | dict(zip(chosen, some, strict=True))
            value, *aux = evaluate_part(
                self.layout.without(self.workers.axes),
                self.forward,
                [every[position] for position in range(len(every))],
                (*self.site, 0),
                None,
                {},
            )
            return value, aux

        (value, aux), grads = jax.value_and_grad(evaluate, has_aux=True, holomorphic=self.boundary.holomorphic)(
            [values[p] for p in chosen]
        )
        computed = dict(zip(chosen, grads, strict=True))
        grads = [self._part(computed[p]) if p in computed else jnp.zeros_like(values[p]) for p in groups.same]
        return (
            (self._part(value), [self._part(aux[k]) for k in groups.summed], grads),
            [],
            ([aux[k] for k in groups.stacked], [], []),
        )

    def _part(self, value: Any) -> Any:
        """Gives a worker's part of the mean of `value`, or of the sum of whole numbers."""
        value = jnp.asarray(value)
        return (
            value / jnp.asarray(self.workers.num_workers, value.dtype)
            if jnp.issubdtype(value.dtype, jnp.inexact)
            else value
        )

    def results(self, runner: Runner[RunnableLoops]) -> list[Any]:
        """Gives the boundary's results, with the loops run by `runner`."""
        (value, sums, grads), _, (rows, _, _) = runner.run(self)
        groups = self.contribution
        aux = dict(zip((*groups.summed, *groups.stacked), (*sums, *rows), strict=True))
        return [value, *(aux[k] for k in range(len(aux))), *grads]


@dataclasses.dataclass(frozen=True, eq=False)
class OwnLossWay:
    """Runs a boundary whose workers have losses of their own.

    - `boundary`: what the boundary differentiates. `forward`: its closed jaxpr for a worker's examples.
    - `workers`: who have losses of their own.
    - `example_dims`, `aux_dims`: per operand and per auxiliary result the dim that holds examples; None: none does.
    """

    boundary: Boundary
    forward: Any
    workers: Workers
    example_dims: tuple[int | None, ...]
    aux_dims: tuple[int | None, ...]
    how: str = dataclasses.field(default="own loss", init=False)
    why: str = dataclasses.field(default="the loss is no sum over examples", init=False)

    def sum_within(self, position: int) -> SumWithin:
        """Gives how the gradient of the operand at `position` is added up within a worker."""
        return SumWithin.FIRST

    def run(self, call: BoundaryCall, runner: Runner[RunnableLoops]) -> list[Any]:
        """Returns the results of the boundary `call`, with the workers' losses run by `runner`."""
        own = OwnLoss(
            self.boundary,
            self.forward,
            call.site,
            call.layout,
            self.workers,
            self.example_dims,
            self.aux_dims,
            call.operands,
        )
        return own.results(runner)


def own_loss(eqn: Any, twin: Any, workers: Workers) -> OwnLossWay | Refusal:
    """Prepares a boundary whose workers have losses of their own.

    **Arguments:**

    - `eqn`: the boundary's equation.
    - `twin`: the same, traced with a worker's examples.
    - `workers`: who have losses of their own.

    Returns a refusal, a `PartialError`, where the loss draws random numbers, or differentiates examples.
    """
    boundary, local = boundary_of(eqn.params), boundary_of(twin.params)
    dims = tuple(example_dim(a.aval.shape, b.aval.shape) for a, b in zip(eqn.invars, twin.invars, strict=True))
    num_aux = boundary.num_aux
    aux = tuple(
        example_dim(a.aval.shape, b.aval.shape)
        for a, b in zip(eqn.outvars[1 : 1 + num_aux], twin.outvars[1 : 1 + num_aux], strict=True)
    )
    # Every worker would draw the same.
    draws = sorted({op.primitive for op in flatten(local.forward).ops} & OPERATIONS.with_trait(Trait.DRAWS))
    if draws:
        return Refusal(
            f"{boundary.label}: the loss mixes examples and draws random numbers ({draws[0]}), of which every worker"
            " would draw the same",
            value=draws[0],
            place=boundary.label,
            remedy='use assignment="temporal", or norms of single examples instead of batch norm',
            kind=PartialError,
        )
    if any(dims[position] is not None for position in boundary.positions):
        name = next(boundary.names[position] for position in boundary.positions if dims[position] is not None)
        return Refusal(
            f"{boundary.label}: it differentiates examples",
            value=name,
            place=boundary.label,
            remedy='use assignment="temporal", or sync="dense"',
            kind=PartialError,
        )
    return OwnLossWay(boundary, local.forward, workers, dims, aux)


def _at(dim: int | None, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*[None] * dim, axes) if dim is not None else REPLICATED
