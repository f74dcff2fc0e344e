"""Says what becomes of experts that are evaluated by `jax.lax.ragged_dot`, of which XLA's partitioner makes no parts.

A step's graph and its layout come in, sentences for the plan come out. Tokens that are sorted by expert lie where their
expert is for no device: XLA gathers the tokens, and the weights of all experts, and every device computes all of it
(TPU, jax 0.10.2; on CPU the weights alone). No exchange of tokens is planned for them (`cost.collectives`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitjax.cost.collectives import RAGGED
from splitjax.display.figures import bytes_text
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.rules.match import axes_text
from splitjax.trace.graph import Graph, Use, itemsize


def ragged_notes(
    graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape, batch_axes: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns a sentence on each layer of `graph` that is evaluated by ragged products, laid out as `leaves` on `mesh`,
    whose batch lies over `batch_axes`."""
    planned = {leaf.path: leaf for leaf in leaves}
    return tuple(
        dict.fromkeys(
            _note(use, planned[use.param], mesh, batch_axes)
            for use in graph.uses
            if use.primitive == RAGGED and not use.backward and mesh.present((*planned[use.param].axes, *batch_axes))
        )
    )


def _note(use: Use, leaf: LeafPlan, mesh: MeshShape, batch_axes: tuple[str, ...]) -> str:
    tokens = math.prod(use.data_shape) * itemsize(use.data_dtype)
    parts = []
    if batch_axes:
        parts.append(f"the tokens of all devices along {axes_text(mesh, batch_axes)} ({bytes_text(tokens)})")
    if split := mesh.present(leaf.axes):
        parts.append(f"all of {leaf.path} along {axes_text(mesh, split)} ({bytes_text(leaf.whole_bytes(mesh))})")
    return (
        f"{use.layer} is evaluated by ragged_dot, which XLA does not divide among devices: it may gather"
        f" {' and '.join(parts)}, and compute all of it everywhere, which this plan does not count; deal tokens out by"
        " capacity, or wrap megablox's kernel: splitjax.jax_kernels.gmm"
    )
