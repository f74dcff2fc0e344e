"""Evaluates the reshape that cuts a batch into the turns of a loop around the gradient: devices send each other the
examples of which they are to have a share in every turn.

The reshape's operand and the axes of its plan come in (`planning.sites.turns`), the batch by turns comes out. It is a
`shard_map` over every axis, in which devices exchange examples by an all-to-all, or by rounds of `ppermute`
(`cost.turning`): over these axes alone XLA splits features between the devices of the others, and gathers them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from splitjax.cost.turning import turn_moves
from splitjax.lower.products.groups import scope
from splitjax.lower.products.local_deal import moved
from splitjax.mesh import MeshShape
from splitjax.planning.sites.mesh_context import MeshContext
from splitjax.planning.sites.turns import LocalTurns


def evaluate_turns(local: LocalTurns, eqn: Any, operands: Sequence[Any], where: MeshContext) -> list[Any] | None:
    """Evaluates the reshape `eqn` on `operands`, and returns its result in a list; None where a surrounding `shard_map`
    handles axes, or this mesh (`where`) does not divide the examples of a turn: it is evaluated as on one device
    then."""
    (value,), dim, num = operands, local.dim, MeshShape.of(where.mesh).size(local.axes)
    turns, examples = eqn.params["new_sizes"][dim], value.shape[dim]
    if where.manual or num < 2 or examples % (turns * num):
        return None
    moves = turn_moves(examples, turns, num)

    def run(part: jax.Array) -> jax.Array:
        before, behind = part.shape[:dim], part.shape[dim + 1 :]
        if moves is None:
            whole_turns = part.reshape(*before, turns // num, examples // turns, *behind)
            return lax.all_to_all(whole_turns, local.axes, dim + 1, dim, tiled=True)
        shares: Any = moved(moves, dim, local.axes, part, lax.axis_index(local.axes))
        return shares.reshape(*before, turns, examples // turns // num, *behind)

    before, behind = local.others[:dim], local.others[dim + 1 :]
    into, out = PartitionSpec(*before, local.axes, *behind), PartitionSpec(*before, None, local.axes, *behind)
    with jax.named_scope(scope("shares", local.leaf)):
        return [where.shard_map(run, where.mesh.axis_names, (into,), out)(value)]
