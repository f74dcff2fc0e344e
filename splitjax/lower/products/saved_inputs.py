"""Evaluates rematerialised calls whose inputs are kept in parts for the backward pass.

The equation of such a call, its operands and what its plan keeps in parts (`cost.saved`) come in, with an evaluator of
its body; its results come out. The forward pass computes the body on what it is given. Kept are the operands, of some
of them a device's own part alone; the backward pass gathers the parts, and computes the body again for its derivative,
as `jax.checkpoint` does. Each call gathers for itself, also where another reads the same activation (`cost.saved`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from splitjax.cost.saved import SavedInput
from splitjax.lower.products.groups import scope
from splitjax.mesh import MeshShape
from splitjax.planning.sites.mesh_context import MeshContext

# Evaluates the body of a call: operands -> results.
RunCall = Callable[[Sequence[Any]], list[Any]]


def evaluate_saved(
    saved: Sequence[SavedInput], eqn: Any, operands: Sequence[Any], where: MeshContext, run: RunCall
) -> list[Any] | None:
    """Evaluates the rematerialised call `eqn` on `operands`, and returns its results; None where a surrounding
    `shard_map` handles the axes, or where the examples do not divide, as those of a microbatch may not.

    **Arguments:** `saved`: what is kept in parts of this call. `where`: the mesh of the evaluation. `run`: evaluates
    the body of the call."""
    ways = {each.operand: _Parts(each, where) for each in saved if _divides(each, operands[each.operand], where)}
    if not ways:
        return None

    @jax.custom_vjp
    def call(*values: Any) -> list[Any]:
        return run(values)

    def forward(*values: Any) -> tuple[list[Any], list[Any]]:
        kept = [ways[at].own(value) if at in ways else value for at, value in enumerate(values)]
        return run(values), kept

    def backward(kept: list[Any], cotangents: list[Any]) -> tuple[Any, ...]:
        if eqn.params["prevent_cse"]:  # keeps XLA from making one of both computations
            kept, cotangents = lax.optimization_barrier((kept, cotangents))
        values = [ways[at].whole(value) if at in ways else value for at, value in enumerate(kept)]
        _, pull = jax.vjp(lambda *again: run(again), *values)
        return pull(cotangents)

    call.defvjp(forward, backward)
    return list(call(*operands))


def _divides(saved: SavedInput, value: jax.Array, where: MeshContext) -> bool:
    examples = MeshShape.of(where.mesh).size(where.left(saved.batch_axes))
    return where.left(saved.axes) == saved.axes and value.shape[saved.example_dim] % examples == 0


class _Parts:
    """Cuts an activation into the parts of devices, and puts these together. `saved`: what is planned. `where`: the
    mesh of the evaluation."""

    def __init__(self, saved: SavedInput, where: MeshContext) -> None:
        self._saved, self._where = saved, where
        examples = {saved.example_dim: saved.batch_axes}
        self._outside, self._inside = where.spec(examples), where.spec({**examples, saved.dim: saved.axes})

    def own(self, value: jax.Array) -> jax.Array:
        """Returns the activation of which each device has its part, of one that every device has whole."""
        dim, axes = self._saved.dim, self._saved.axes
        size = value.shape[dim] // MeshShape.of(self._where.mesh).size(axes)
        cut = lambda whole: lax.dynamic_slice_in_dim(whole, lax.axis_index(axes) * size, size, dim)
        return self._where.shard_map(cut, self._where.mesh.axis_names, (self._outside,), self._inside)(value)

    def whole(self, value: jax.Array) -> jax.Array:
        """Returns the activation that every device has whole, of one of which each has its part."""
        dim, axes = self._saved.dim, self._saved.axes
        gather = lambda part: lax.all_gather(part, axes, axis=dim, tiled=True)
        with jax.named_scope(scope("saved", self._saved.layer)):
            return self._where.shard_map(gather, self._where.mesh.axis_names, (self._inside,), self._outside)(value)
