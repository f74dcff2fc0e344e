"""Evaluates the dealing out of a fused weight's columns: devices send each other the columns that are theirs.

The operation's operand and the axes of its plan come in (`planning.sites.dealing`), the dealt weight comes out. It is a
`shard_map` over these axes alone, whatever the weight is stored over besides, with one `ppermute` for each round of the
moves (`cost.dealing`); its derivative takes the moves back.
"""

from __future__ import annotations

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
from splitjax.planning.sites.mesh_context import MeshContext


def evaluate_deal(local: LocalDeal, eqn: Any, operands: Sequence[Any], where: MeshContext) -> list[Any] | None:
    """Evaluates the equation `eqn` on `operands`, and returns its result in a list; None where a surrounding
    `shard_map` handles the axes, or this mesh (`where`) has not as many devices along them: the operation is evaluated
    as on one device then."""
    (value,), dim, num = operands, eqn.params["dim"], eqn.params["num"]
    if where.left(local.axes) != local.axes or MeshShape.of(where.mesh).size(local.axes) != num:
        return None
    sizes, stored = (tuple(map(int, eqn.params[name])) for name in ("sizes", "stored"))
    if sum(stored) != value.shape[dim]:
        return None
    moves = find_moves(sizes, num, stored)
    spec = PartitionSpec(*(None,) * dim, local.axes)

    def run(part: jax.Array, here: jax.Array) -> jax.Array:
        return lax.expand_dims(moved(moves, dim, local.axes, part, here[0]), (dim,))

    # Where a device stands is an operand: XLA refuses `axis_index` where it brings it out of a manual region.
    places = jnp.arange(num, dtype=jnp.int32)
    return [where.shard_map(run, local.axes, (spec, PartitionSpec(local.axes)), spec)(value, places)]


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
