"""Layouts written by hand for the decoders: shardings of the state, and constraints of activations, as MaxText has
them.

A weight is *stored* over `store`, and computed over `tensor` (columns, then rows) and `expert`; what is stored over
axes of the batch XLA gathers where it is used. With activations constrained and without are two rivals, and the page
has the better one of each step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.modern.models import Decoder, Pin, make_step, no_pin, state_of

Axes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describes a layout by hand: the axes that each role has; empty for none.

    - `batch`: of the examples. `store`: of the weights besides. `tensor`, `expert`: of heads and columns, of experts.
    - `largest`: every weight is stored on its largest dim over `store`, and nothing is computed in parts (FSDP).
    - `features`: of the features of the residual stream, of experts' tokens and of the scales of norms.
    - `stored_by_expert`: what is no expert's weight is stored over `expert` besides `store`.
    """

    batch: Axes
    store: Axes = ()
    tensor: Axes = ()
    expert: Axes = ()
    largest: bool = False
    features: Axes = ()
    stored_by_expert: bool = False

    def spec(self, name: str, shape: tuple[int, ...]) -> P:
        """The spec of the parameter `name`, whose layers are stacked in its first dim where it is one of a layer."""
        store, tensor, expert = self.store or None, self.tensor or None, self.expert or None
        if self.stored_by_expert and len(shape) < 4:
            store = (*self.store, *self.expert) or None
        if self.largest:
            if "norm" in name:
                return P()
            dims = range(name not in ("embed", "head"), len(shape))
            at = max(dims, key=lambda dim: shape[dim])
            return P(*(store if dim == at else None for dim in range(len(shape))))
        table: Mapping[str, tuple[Any, ...]] = {
            "embed": (tensor, store),
            "head": (store, tensor),
            "o": (None, tensor, store),
            "down": (None, expert, tensor, store) if len(shape) == 4 else (None, tensor, store),
            "router": (None, store, None),
        }
        columns = (None, expert, store, tensor) if len(shape) == 4 else (None, store, tensor)
        if "norm" in name:
            return P(*(None,) * (len(shape) - 1), self.features) if self.features else P()
        return P(*table.get(name, columns))

    def activation(self, where: str) -> P:
        """The spec of the activations at a place of the decoder."""
        batch, tensor, expert = self.batch, self.tensor or None, self.expert or None
        own = tuple(axis for axis in batch if axis not in self.expert) or None
        return {
            "residual": P(batch, None, self.features or None),
            "logits": P(batch, None, tensor),
            "heads": P(batch, None, tensor, None),
            "kv heads": P(batch, None, tensor, None),
            "hidden": P(batch, None, tensor),
            "experts": P(own, expert, None, self.features or None),
            "expert hidden": P(own, expert, None, tensor),
        }[where]

    def pin(self, mesh: Mesh) -> Pin:
        """Constrains activations on `mesh`; places whose size does not divide are left to XLA."""

        def constrain(where: str, array: jax.Array) -> jax.Array:
            spec = self.activation(where)
            for size, axes in zip(array.shape, spec, strict=False):
                parts = 1
                for axis in (axes,) if isinstance(axes, str) else axes or ():
                    parts *= mesh.shape[axis]
                if size % parts:
                    return array
            return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

        return constrain

    def shardings(self, tree: Any, mesh: Mesh) -> Any:
        """The shardings of a state: optimizer state lies as its parameter does."""

        def of(path: Any, leaf: Any) -> NamedSharding:
            name = str(path[-1].key) if hasattr(path[-1], "key") else ""
            return NamedSharding(mesh, self.spec(name, leaf.shape) if leaf.ndim else P())

        return jax.tree_util.tree_map_with_path(of, tree)


def by_hand(decoder: Decoder, layout: Layout, mesh: Mesh, constrained: bool) -> Any:
    """Lowers the step of `decoder` with a layout by hand: `jax.jit` with shardings, donated state, and, if
    `constrained`, constraints of activations."""
    state = state_of(decoder)
    placed = layout.shardings(state, mesh)
    batch = dict.fromkeys(decoder.batch(), NamedSharding(mesh, P(layout.batch)))
    step = jax.jit(
        make_step(decoder, jax.value_and_grad, layout.pin(mesh) if constrained else no_pin),
        in_shardings=(placed, batch),
        out_shardings=(placed, NamedSharding(mesh, P())),
        donate_argnums=0,
    )
    return step.lower(state, decoder.batch())
