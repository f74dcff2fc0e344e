"""Workers that each have the loss of their own examples: for losses that are no sum over examples, such as those behind
batch norm.

The forward pass is the step's, traced with one worker's examples; its loss, its gradients and what it returns besides
are averaged over the workers (whole numbers are added up, rows of examples put together). With batch norm every worker
has the statistics of its own examples, as in the published prototype of partial backpropagation. That changes the
numbers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from splitjax.errors import PartialError
from splitjax.lower import gradient
from splitjax.lower.microbatch.places import REPLICATED, Runner, Sums
from splitjax.lower.products.interpret import Layout, Site, evaluate_part
from splitjax.trace.flatten import flatten

# What draws random numbers: every worker would draw the same.
_DRAWS = frozenset({"random_bits", "threefry2x32", "random_gamma", "rng_bit_generator", "rng_uniform"})


@dataclasses.dataclass(frozen=True, eq=False)
class _Group:
    """Positions of the boundary's operands and auxiliary results, in the words of `worker_loop.Contribution`."""

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
    """As `places.Places`, for one boundary. `example_dims`: per operand, `aux_dims`: per auxiliary result, of the dim
    that holds examples."""

    boundary: gradient.Boundary
    forward: Any  # of one worker
    site: Site
    layout: Layout
    mesh: Mesh
    axes: tuple[str, ...]
    batch_axes: tuple[str, ...]
    example_dims: tuple[int | None, ...]
    aux_dims: tuple[int | None, ...]
    operands: Sequence[Any] = ()
    island_axes: tuple[str, ...] = ()

    @property
    def contribution(self) -> _Group:
        same = tuple(self.boundary.positions)
        others = [position for position in range(len(self.example_dims)) if position not in same]
        return _Group(
            same,
            tuple(p for p in others if self.example_dims[p] is None),
            tuple(p for p in others if self.example_dims[p] is not None),
            tuple(k for k, dim in enumerate(self.aux_dims) if dim is None),
            tuple(k for k, dim in enumerate(self.aux_dims) if dim is not None),
        )

    @property
    def num_workers(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def position(self, v: int) -> int:
        return v

    def inputs(self) -> tuple[list[Any], ...]:
        one = self.contribution
        of = lambda positions: [self.operands[position] for position in positions]
        return (
            of(one.same),
            [],
            of(one.shared),
            of(one.cuts),
            [],
            [jnp.arange(self.mesh.shape[axis], dtype=jnp.int32) for axis in self.axes],
        )

    def in_specs(self) -> tuple[list[PartitionSpec], ...]:
        one = self.contribution
        cut = [_at(self.example_dims[position], self.axes) for position in one.cuts]
        return (
            [REPLICATED] * len(one.same),
            [],
            [REPLICATED] * len(one.shared),
            cut,
            [],
            [PartitionSpec(axis) for axis in self.axes],
        )

    def row_specs(self) -> tuple[list[PartitionSpec], ...]:
        return [_at(self.aux_dims[k], self.axes) for k in self.contribution.stacked], [], []

    def whole_row_specs(self) -> tuple[list[PartitionSpec], ...]:
        return [_at(self.aux_dims[k], self.batch_axes) for k in self.contribution.stacked], [], []

    def without_values(self) -> OwnLoss:
        return dataclasses.replace(self, operands=())

    def with_share(self, share: int, offset: Any) -> OwnLoss:
        return self

    def at_place(self, inputs: tuple[list[Any], ...], live: frozenset[int] | None = None) -> Sums:
        """One worker's loss, what it returns and its gradients, each as its part of the mean."""
        params, _, shared, cuts, _, _ = inputs
        one = self.contribution
        values = dict(zip((*one.same, *one.shared, *one.cuts), (*params, *shared, *cuts), strict=True))
        chosen = [position for position in one.same if live is None or position in live]

        def evaluate(some: list[Any]) -> Any:
            every = values | dict(zip(chosen, some, strict=True))
            value, *aux = evaluate_part(
                self.layout.without(self.axes),
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
        found = dict(zip(chosen, grads, strict=True))
        grads = [self._part(found[p]) if p in found else jnp.zeros_like(values[p]) for p in one.same]
        return (
            (self._part(value), [self._part(aux[k]) for k in one.summed], grads),
            [],
            ([aux[k] for k in one.stacked], [], []),
        )

    def _part(self, value: Any) -> Any:
        value = jnp.asarray(value)
        return value / jnp.asarray(self.num_workers, value.dtype) if jnp.issubdtype(value.dtype, jnp.inexact) else value

    def results(self, runner: Runner) -> list[Any]:
        """The boundary's results."""
        (value, sums, grads), _, (rows, _, _) = runner.run(self)
        one = self.contribution
        aux = dict(zip((*one.summed, *one.stacked), (*sums, *rows), strict=True))
        return [value, *(aux[k] for k in range(len(aux))), *grads]


def own_loss(
    eqn: Any,
    twin: Any,
    operands: Sequence[Any],
    site: Site,
    layout: Layout,
    mesh: Mesh,
    axes: tuple[str, ...],
    batch_axes: tuple[str, ...],
) -> OwnLoss:
    """A boundary whose workers have losses of their own. `twin`: its equation, traced with one worker's examples.
    Raises `PartialError` where it draws random numbers, or differentiates examples."""
    boundary, local = gradient.boundary_of(eqn.params), gradient.boundary_of(twin.params)
    dims = tuple(_differs(a.aval.shape, b.aval.shape) for a, b in zip(eqn.invars, twin.invars, strict=True))
    num_aux = boundary.num_aux
    aux = tuple(
        _differs(a.aval.shape, b.aval.shape)
        for a, b in zip(eqn.outvars[1 : 1 + num_aux], twin.outvars[1 : 1 + num_aux], strict=True)
    )
    draws = sorted({op.primitive for op in flatten(local.forward).ops} & _DRAWS)
    if draws:
        raise PartialError(
            f"{boundary.label}: the loss mixes examples and draws random numbers ({draws[0]}), of which every worker"
            " would draw the same",
            value=draws[0],
            place=boundary.label,
            remedy='use assignment="temporal", or norms of single examples instead of batch norm',
        )
    if any(dims[position] is not None for position in boundary.positions):
        name = next(boundary.names[position] for position in boundary.positions if dims[position] is not None)
        raise PartialError(
            f"{boundary.label}: it differentiates examples",
            value=name,
            place=boundary.label,
            remedy='use assignment="temporal", or sync="dense"',
        )
    return OwnLoss(boundary, local.forward, site, layout, mesh, axes, batch_axes, dims, aux, operands)


def _differs(whole: Sequence[int], part: Sequence[int]) -> int | None:
    return next((dim for dim, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b), None)


def _at(dim: int | None, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*[None] * dim, axes) if dim is not None else REPLICATED
