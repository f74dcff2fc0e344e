"""Evaluates the loop of a recurrent layer on the examples of each worker, in a `shard_map` over the workers.

The operands of the loop and what is known of them come in (`planning.sites.loops`), its results come out. Weights that
are stored over the workers' axes are gathered before the loop, and their gradients reduce-scattered behind that of the
backward pass: once each, where XLA adds up in every iteration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from splitjax.planning.sites.loops import LocalLoop
from splitjax.planning.sites.mesh_context import MeshContext

Dims = Sequence[tuple[int, tuple[str, ...]]]


def evaluate_loop(
    loop: LocalLoop, operands: Sequence[Any], where: MeshContext, run: Callable[[list[Any]], list[Any]]
) -> list[Any]:
    """Evaluates a loop on `operands`, and returns its results.

    **Arguments:** `loop`: how workers run it. `where`: the mesh, where no surrounding `shard_map` handles an axis of
    the workers. `run`: evaluates `loop.eqn` on a worker's operands.
    """

    def local(*parts: jax.Array) -> list[Any]:
        return run([_whole(part, dims) for part, dims in zip(parts, loop.stored, strict=True)])

    def spec(dim: int | None, stored: Dims) -> PartitionSpec:
        axes_of = dict(stored) if dim is None else {dim: loop.axes}
        return where.spec(axes_of) if axes_of else PartitionSpec()

    entering = tuple(map(spec, loop.operand_dims, loop.stored))
    leaving = [spec(dim, ()) for dim in loop.result_dims]
    return list(where.shard_map(local, loop.axes, entering, leaving)(*operands))


def _whole(part: jax.Array, dims: Dims) -> jax.Array:
    """Gathers an operand of which each worker has a part along `dims`."""
    for dim, axes in dims:
        part = lax.all_gather(part, axes, axis=dim, tiled=True)
    return part
