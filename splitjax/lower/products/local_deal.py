"""Evaluates the dealing out of a fused weight's columns: devices send each other the columns that are theirs, or those
that all of them need.

The operation's operand and the axes of its plan come in (`planning.sites.dealing`), the dealt weight comes out. It is a
`shard_map` over these axes alone, whatever the weight is stored over besides, with one `ppermute` for each round of the
moves (`cost.dealing`); its derivative takes the moves back. What is copied is gathered, and its derivative, which all
devices have whole, is cut.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from splitjax.cost.dealing import Moves, find_moves
from splitjax.mesh import MeshShape
from splitjax.planning.sites.dealing import LocalDeal
from splitjax.planning.sites.layout import named_sharding
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.primitives.dealt import copy, deal


def evaluate_deal(local: LocalDeal, eqn: Any, operands: Sequence[Any], where: MeshContext) -> list[Any] | None:
    """Evaluates the equation `eqn` on `operands`, and returns its result in a list; None where a surrounding
    `shard_map` handles the axes, or this mesh (`where`) has not as many devices along them: the operation is evaluated
    as on one device then."""
    (value,), dim, num = operands, eqn.params["dim"], eqn.params["num"]
    if not _fits(local, num, where):
        return None
    sizes, stored = (tuple(map(int, eqn.params[name])) for name in ("sizes", "stored"))
    if sum(stored) != value.shape[dim]:
        return None
    if not local.axes:  # XLA would deal what is whole out in parts, and send them
        return [lax.with_sharding_constraint(deal(value, dim, sizes, stored, num), named_sharding(where.mesh, ()))]
    moves = find_moves(sizes, num, stored)
    spec = PartitionSpec(*(None,) * dim, local.axes)

    def run(part: jax.Array, here: jax.Array) -> jax.Array:
        return lax.expand_dims(moved(moves, dim, local.axes, part, here[0]), (dim,))

    # Where a device stands is an operand: XLA refuses `axis_index` where it brings it out of a manual region.
    places = jnp.arange(num, dtype=jnp.int32)
    return [where.shard_map(run, local.axes, (spec, PartitionSpec(local.axes)), spec)(value, places)]


def _fits(local: LocalDeal, num: int, where: MeshContext) -> bool:
    """Tells whether no surrounding `shard_map` handles the axes, and there are `num` devices along them, if there are
    axes."""
    if not local.axes:
        return not where.manual
    return where.left(local.axes) == local.axes and MeshShape.of(where.mesh).size(local.axes) == num


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def moved(moves: Moves, dim: int, axes: tuple[str, ...], part: jax.Array, here: jax.Array) -> jax.Array:
    """Returns a device's columns after the `moves`: `part` holds those before, along `dim`. `here`: its place along
    `axes`."""
    units = part.reshape(*part.shape[:dim], moves.places, moves.unit, *part.shape[dim + 1 :])
    table = np.zeros((moves.num, moves.places), np.int32)  # by device and place, which of the values below comes there
    for _, place, to, at in moves.kept:
        table[to, at] = place
    values = [units]
    for number, edges in enumerate(moves.rounds):
        sent = np.zeros(moves.num, np.int32)
        for source, place, to, at in edges:
            sent[source], table[to, at] = place, moves.places + number
        unit = lax.dynamic_slice_in_dim(units, jnp.asarray(sent)[here], 1, axis=dim)
        values.append(lax.ppermute(unit, axes, [(source, to) for source, _, to, _ in edges]))
    every, mine = lax.concatenate(values, dim), jnp.asarray(table)[here]
    # A slice for each place, where a lookup of all would be a gather, and for reports a new value.
    taken = [lax.dynamic_slice_in_dim(every, mine[at], 1, axis=dim) for at in range(moves.places)]
    return lax.concatenate(taken, dim).reshape(part.shape)


def _forward(
    moves: Moves, dim: int, axes: tuple[str, ...], part: jax.Array, here: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return moved(moves, dim, axes, part, here), here


def _backward(
    moves: Moves, dim: int, axes: tuple[str, ...], here: jax.Array, change: jax.Array
) -> tuple[jax.Array, None]:
    return moved(moves.reverse, dim, axes, change, here), None


moved.defvjp(_forward, _backward)


def evaluate_copy(local: LocalDeal, eqn: Any, operands: Sequence[Any], where: MeshContext) -> list[Any] | None:
    """Evaluates the equation `eqn`, which copies columns that are dealt out to all devices; the arguments and the
    result are those of `evaluate_deal`."""
    (value,), dim = operands, eqn.params["dim"]
    num = value.shape[dim]
    if not _fits(local, num, where):
        return None
    copying = _Copying(where, local, dim, tuple(map(int, eqn.params["sizes"])))
    return list(copied(copying, value, jnp.arange(num, dtype=jnp.int32)))


@dataclasses.dataclass(frozen=True)
class _Copying:
    """Says how columns are copied.

    - `where`: the mesh of the evaluation. `local`: as planned. `dim`: the one that counts shares.
    - `sizes`: of the parts that are cut out.

    Every axis that splits what is copied is manual: of one that is left to it XLA makes the operand of an explicit
    all-gather whole (CPU and TPU, jax 0.10.2).
    """

    where: MeshContext
    local: LocalDeal
    dim: int
    sizes: tuple[int, ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes that split the shares; all of the mesh where none does."""
        split = (*self.local.axes, *(axis for _, axes in self.local.stored for axis in axes))
        return split or tuple(self.where.mesh.axis_names)

    @property
    def shares(self) -> PartitionSpec:
        """How the shares lie."""
        return self.where.spec({self.dim: self.local.axes, **dict(self.local.stored)})

    @property
    def whole(self) -> PartitionSpec:
        """How the columns lie that all devices have: behind the dim of shares is one dim less."""
        return self.where.spec({self.dim: (), **{dim - (dim > self.dim): axes for dim, axes in self.local.stored}})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def copied(copying: _Copying, shares: jax.Array, places: jax.Array) -> tuple[jax.Array, ...]:
    """Returns all columns of `shares` in their parts, whole on every device. `places`: where devices stand along the
    axes."""

    def run(part: jax.Array) -> tuple[jax.Array, ...]:
        axes, dim = copying.local.axes, copying.dim
        every = lax.all_gather(part, axes, axis=dim, tiled=True) if axes else part
        return tuple(copy(every, dim, copying.sizes))

    return copying.where.shard_map(run, copying.axes, (copying.shares,), copying.whole)(shares)


def _copied_forward(copying: _Copying, shares: jax.Array, places: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    return copied(copying, shares, places), places


def _copied_backward(copying: _Copying, places: jax.Array, changes: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
    dim, num = copying.dim, places.shape[0]
    width = sum(copying.sizes) // num

    def run(here: jax.Array, *changes: jax.Array) -> jax.Array:
        whole = lax.concatenate(changes, dim)
        if not copying.local.axes:
            return whole.reshape(*whole.shape[:dim], num, width, *whole.shape[dim + 1 :])
        return lax.expand_dims(lax.dynamic_slice_in_dim(whole, here[0] * width, width, axis=dim), (dim,))

    specs = PartitionSpec(copying.local.axes or None), *[copying.whole] * len(changes)
    return copying.where.shard_map(run, copying.axes, specs, copying.shares)(places, *changes), None


copied.defvjp(_copied_forward, _copied_backward)
