"""Says how devices exchange the examples of a batch that a step cuts into the turns of a loop around the gradient, and
what that sends.

Each device holds consecutive examples, and is to hold its share of every turn's. Where the turns divide by the devices,
each has those of whole turns, and sends every other device as many: an all-to-all. Elsewhere examples move as columns
of a fused weight do (`cost.dealing`), in rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from splitjax.cost.dealing import Moves, find_moves
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.trace.graph import itemsize
from splitjax.trace.stepping import TurnedBatch


def turn_axes(turned: TurnedBatch, leaf: LeafPlan, mesh: MeshShape) -> tuple[str, ...]:
    """Returns the axes of `mesh` over which the examples of every turn lie, major first: those that split the examples
    of the batch leaf, laid out as `leaf`, where they divide the examples of a turn; else none, and XLA is left with
    it."""
    axes = _split_by(turned, turned.dim, leaf, mesh)
    num, examples = mesh.size(axes), turned.shape[turned.dim]
    return axes if num > 1 and examples % (num * turned.turns) == 0 else ()


def other_axes(turned: TurnedBatch, leaf: LeafPlan, mesh: MeshShape) -> tuple[tuple[str, ...], ...]:
    """Returns by dim the axes of `mesh` that split a value that is cut into turns, but for those of its examples: what
    splits the dims of the batch leaf, laid out as `leaf`, that the value has whole; none elsewhere."""
    return tuple(
        _split_by(turned, dim, leaf, mesh) if dim != turned.dim and of is not None and size == leaf.shape[of] else ()
        for dim, (size, of) in enumerate(zip(turned.shape, turned.leaf_dims, strict=True))
    )


def _split_by(turned: TurnedBatch, dim: int, leaf: LeafPlan, mesh: MeshShape) -> tuple[str, ...]:
    """Returns the axes that split the dim of the batch leaf that `dim` of the value is: the step may have transposed
    the leaf before it cuts it."""
    of = turned.leaf_dims[dim]
    return () if of is None or of >= len(leaf.axes_by_dim) else mesh.present(leaf.axes_by_dim[of])


def turn_moves(num_examples: int, turns: int, num: int) -> Moves | None:
    """Returns the moves that give each of `num` devices its share of every one of the `turns` of a batch of
    `num_examples`; None where it is an all-to-all."""
    return None if turns % num == 0 else find_moves((num_examples // turns,) * turns, num)


def sent_for_turns(turned: TurnedBatch, leaf: LeafPlan, mesh: MeshShape) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yields what gives each device its share of every turn: (op, axes, bytes that the op's formula takes)."""
    axes = turn_axes(turned, leaf, mesh)
    if not axes:
        return
    num, examples = mesh.size(axes), turned.shape[turned.dim]
    others = tuple(axis for split in other_axes(turned, leaf, mesh) for axis in split)
    example_bytes = math.prod(turned.shape) // examples // mesh.size(others) * itemsize(turned.dtype)
    moves = turn_moves(examples, turned.turns, num)
    if moves is None:
        yield "all_to_all", axes, examples // num * example_bytes
        return
    for _ in moves.rounds:
        yield "collective_permute", axes, moves.unit * example_bytes
