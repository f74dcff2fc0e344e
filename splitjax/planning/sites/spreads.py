"""Decides which biases and scales have their gradients summed into parts: those that are laid along the examples, as
products of weights are (`scatter.py`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.cost.flow import WeightFlow
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.planning.sites.exchange import STAY, Exchange
from splitjax.planning.sites.leaving import leaving
from splitjax.planning.sites.parts import Parts, gained_dims, read_once, split_dims
from splitjax.trace.graph import Graph


@dataclasses.dataclass(frozen=True)
class Summed:
    """Describes an elementwise operation in which a bias or scale meets the examples, and whose gradient is summed into
    parts.

    - `site`: of the operation's equation. `layer`: the layer whose bias or scale it is.
    - `operand`: the operand position of the bias or scale.
    - `axes`: the mesh axes over which the examples are split.
    - `example_dim`: of the result.
    - `parts`: dims of the operand along which its gradient is cut, with the axes.
    - `kept`: dims of the operand that other axes split, as the rules have them.
    """

    site: tuple[int, ...]
    layer: str
    operand: int
    axes: tuple[str, ...]
    example_dim: int
    parts: Parts
    kept: Parts


def derive_spreads(
    graph: Graph,
    leaves: Sequence[LeafPlan],
    mesh: MeshShape,
    batch_axes: tuple[str, ...],
    exchanges: Sequence[Exchange],
    chain: Sequence[WeightFlow],
) -> tuple[Summed, ...]:
    """Derives the biases and scales whose gradient is summed into parts.

    `graph`, `leaves`, `mesh`, `batch_axes`, `exchanges` and `chain` are those of `derive_scatters`. It is known how the
    examples lie before the first split layer, over all batch axes; behind it, the same where no split layer's columns
    stay in its group; and within a layer split by columns, over the axes that it leaves. Biases and scales elsewhere
    are left to XLA.
    """
    planned = {leaf.path: leaf for leaf in leaves if leaf.gradient is not None}
    split = {leaf.path for leaf in leaves if leaf.role == "param" and set(leaf.axes) & set(batch_axes)}
    crossings = [use.site for use in graph.uses if use.param in split and not use.backward]
    columns = {
        graph.leaf(use.param).layer: exchange
        for exchange in exchanges
        if exchange.leave == STAY
        for use in graph.uses
        if use.site == exchange.site
    }
    in_groups = _columns_in_groups(graph, chain, batch_axes)
    sums: list[Summed] = []
    for spread in graph.spreads:
        leaf = planned.get(spread.param)
        if leaf is None or not read_once(graph, spread.dims, leaf, spread.trips):
            continue
        own = set(leaf.axes) & set(batch_axes)
        column = columns.get(graph.leaf(spread.param).layer)
        if own:
            axes = column.rest if column is not None and own == set(column.axes) else ()
        else:
            met = {graph.local[atom] for dim in spread.dims for atom in dim}
            is_first = all(spread.site < site for site in crossings)
            axes = batch_axes if is_first or met.isdisjoint(in_groups) else ()
        parts, kept = gained_dims(graph, spread.dims, leaf, axes), split_dims(graph, spread.dims, leaf, mesh)
        if axes and parts and kept is not None and spread.num_examples % mesh.size(axes) == 0:
            sums.append(Summed(spread.site, spread.layer, spread.operand, axes, spread.example_dim, parts, kept))
    return tuple(sums)


def _columns_in_groups(graph: Graph, chain: Sequence[WeightFlow], batch_axes: Sequence[str]) -> set[int]:
    """Returns the local classes of the columns that split layers make of a group's examples, but for those of layers
    whose outputs return to the workers whose examples they are (`leaving.py`)."""
    returning = {flow.use.site for flow in leaving(graph, chain)}
    return {
        graph.local[atom]
        for flow in chain
        if not set(flow.axes).isdisjoint(batch_axes) and flow.use.site not in returning
        for dim in flow.use.out_dims
        if not graph.is_example(dim)
        for atom in dim
    }
