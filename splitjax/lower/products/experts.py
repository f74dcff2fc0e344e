"""Sends tokens to the devices of their experts and their results back, as explicit all-to-alls, forward and backward.

A value and its planned `Travel` come in, the same value in the other layout comes out, differentiable. It exists so
that what is sent is what was planned: XLA's partitioner makes gathers of such a change of layout where it can make the
operation before it, or the one behind, in another layout.

Each way is a `custom_vjp` of `shard_map`s, as `groups.py` has it: the cotangents travel the other way.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
from jax import lax
from jax.sharding import PartitionSpec

from splitjax.lower.products.groups import Copies, scope
from splitjax.planning.sites.experts import Travel
from splitjax.planning.sites.mesh_context import MeshContext


@dataclasses.dataclass(frozen=True)
class _Way:
    """Describes a way between two layouts of a value, there and back.

    - `where`: the mesh of the evaluation. `axes`, `rest`: as for `Travel`.
    - `example_dim`, `expert_dim`: of the value.
    """

    where: MeshContext
    axes: tuple[str, ...]
    rest: tuple[str, ...]
    example_dim: int
    expert_dim: int

    @property
    def outside(self) -> PartitionSpec:
        """The value where each device has its own examples of all experts."""
        return self.where.spec({self.example_dim: (*self.rest, *self.axes)})

    @property
    def inside(self) -> PartitionSpec:
        """The value where each device has its own experts."""
        return self.where.spec({self.example_dim: self.rest, self.expert_dim: self.axes})

    def to(self, value: jax.Array) -> jax.Array:
        """Returns what a device has inside of what all devices have outside."""
        run = lambda part: lax.all_to_all(part, self.axes, self.expert_dim, self.example_dim, tiled=True)
        return self.where.shard_map(run, self.where.mesh.axis_names, self.outside, self.inside)(value)

    def back(self, value: jax.Array) -> jax.Array:
        """Returns what a device has outside of what all devices have inside."""
        run = lambda part: lax.all_to_all(part, self.axes, self.example_dim, self.expert_dim, tiled=True)
        return self.where.shard_map(run, self.where.mesh.axis_names, self.inside, self.outside)(value)


def arrive(travel: Travel, data: jax.Array, where: MeshContext, copies: Copies) -> jax.Array:
    """Returns the tokens `data` of a product where its experts are. `copies` remembers them by value, and is added to:
    products that read the same tokens (gate and up) send for them once."""
    way = _way(travel, where, travel.data_dims)
    if way is None or not travel.enters:
        return data
    key = id(data), "experts", travel.axes, travel.data_dims[0], travel.data_dims[1]
    if key not in copies:
        with jax.named_scope(scope("enter", travel.layer)):
            copies[key] = data, _go(way, data)
    return copies[key][1]


def depart(travel: Travel, result: jax.Array, where: MeshContext) -> jax.Array:
    """Returns the `result` of a product where its tokens came from."""
    way = _way(travel, where, travel.out_dims)
    if way is None or not travel.leaves:
        return result
    with jax.named_scope(scope("enter", travel.layer)):
        return _return(way, result)


def _way(travel: Travel, where: MeshContext, dims: tuple[int, int]) -> _Way | None:
    """Returns the way of a value with these dims of examples and experts; None where a surrounding `shard_map` handles
    the axes."""
    if where.left(travel.axes) != travel.axes:
        return None
    return _Way(where, travel.axes, travel.rest, *dims)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _go(way: _Way, value: jax.Array) -> jax.Array:
    return way.to(value)


_go.defvjp(lambda way, value: (way.to(value), None), lambda way, _, cotangent: (way.back(cotangent),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _return(way: _Way, value: jax.Array) -> jax.Array:
    return way.back(value)


_return.defvjp(lambda way, value: (way.back(value), None), lambda way, _, cotangent: (way.to(cotangent),))
