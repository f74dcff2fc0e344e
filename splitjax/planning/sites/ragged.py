"""Says what becomes of experts that are evaluated by `jax.lax.ragged_dot`, of which XLA's partitioner makes no parts.

A step's graph and its layout come in, sentences for the plan come out. Tokens that are sorted by expert lie where their
expert is for no device. Where the experts' weights are stored in parts, each device computes its own rows with the
weights of all experts, which are gathered as those of any other layer (`scatter.py`); the tokens of all devices are
gathered to be sorted, and their results to be brought back, as planned (`cost.collectives`). Elsewhere XLA gathers
tokens and weights, and every device computes all of it (TPU, jax 0.10.2; on CPU the weights alone).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from splitjax.cost.use_links import RAGGED
from splitjax.display.figures import bytes_text
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.primitives.walk import Site
from splitjax.rules.match import axes_text
from splitjax.trace.graph import Graph, Use, itemsize


def ragged_notes(
    graph: Graph, leaves: Sequence[LeafPlan], mesh: MeshShape, batch_axes: tuple[str, ...], divided: Collection[Site]
) -> tuple[str, ...]:
    """Returns a sentence on each layer of `graph` that is evaluated by ragged products, laid out as `leaves` on `mesh`,
    whose batch lies over `batch_axes`. `divided`: the sites of products of which each device computes its own rows."""
    planned = {leaf.path: leaf for leaf in leaves}
    return tuple(
        dict.fromkeys(
            _divided_note(use, mesh, batch_axes)
            if use.site in divided
            else _note(use, planned[use.param], mesh, batch_axes)
            for use in graph.uses
            if use.primitive == RAGGED and not use.backward and mesh.present((*planned[use.param].axes, *batch_axes))
        )
    )


def _divided_note(use: Use, mesh: MeshShape, batch_axes: tuple[str, ...]) -> str:
    return (
        f"{use.layer} is evaluated by ragged_dot: each device computes its own rows with the weights of all experts,"
        f" and XLA gathers the tokens of all devices along {axes_text(mesh, batch_axes)} to sort them by expert and to"
        f" bring results back ({bytes_text(_tokens(use))} where this layer reads them). Tokens that are dealt out by"
        " capacity travel to their experts alone"
    )


def _tokens(use: Use) -> int:
    """Returns the bytes of what a use reads, of all devices."""
    return math.prod(use.data_shape) * itemsize(use.data_dtype)


def _note(use: Use, leaf: LeafPlan, mesh: MeshShape, batch_axes: tuple[str, ...]) -> str:
    tokens, stored = _tokens(use), bool(set(leaf.axes) & set(batch_axes))
    parts = []
    if batch_axes:
        parts.append(f"the tokens of all devices along {axes_text(mesh, batch_axes)} ({bytes_text(tokens)})")
    if split := mesh.present(leaf.axes):
        parts.append(f"all of {leaf.path} along {axes_text(mesh, split)} ({bytes_text(leaf.whole_bytes(mesh))})")
    return (
        f"{use.layer} is evaluated by ragged_dot, which XLA does not divide among devices: it may gather"
        f" {' and '.join(parts)}, and compute all of it everywhere, which this plan does not count;"
        f" {_remedy(use, stored)}"
    )


def _remedy(use: Use, stored: bool) -> str:
    """Says what to do instead. `stored`: whether the weights are stored in parts, which boundaries gather."""
    others = "deal tokens out by capacity, or call splitjax.jax_kernels.gmm, which keeps megablox's kernel whole"
    if use.in_boundary or not stored:
        return others
    return (
        "take its gradient with splitjax.value_and_grad instead of JAX's own, inside of which each device computes its"
        f" own rows, {others}"
    )
