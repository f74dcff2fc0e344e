"""Pins gradients to their parts where they leave a boundary, and says which new values devices compute in parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from splitjax import _compat
from splitjax.plan import Constraint, LeafPlan, Spec
from splitjax.planning.sites.sharded_dims import ShardedDims
from splitjax.trace.graph import Graph


def pin_gradients(graph: Graph, leaves: Sequence[LeafPlan], sharded: ShardedDims) -> tuple[Constraint, ...]:
    """Returns constraints on the results of the boundaries of `graph`, which pin every gradient of `leaves` that is
    split to its parts. Whole ones of heads that devices share, and of what is no product's weight and meets split dims,
    are pinned whole: XLA would update each state leaf in parts otherwise (`sharded`: what the plan splits), and gather
    all of them. So are those that are made of a batch's statistics, before they are cut: XLA would take the statistics
    in parts."""
    planned = {leaf.path: leaf for leaf in leaves}
    pins: list[Constraint] = []
    used = {use.param for use in graph.uses}
    of_statistics = {path for each in graph.statistics for path in each.scales}
    for gradient in graph.gradients:
        leaf = planned.get(gradient.param)
        if leaf is None or gradient.shape != leaf.shape:
            continue
        if leaf.gradient is not None:
            if leaf.path in of_statistics:
                whole = "statistics of the batch: the whole gradient, which is made of these"
                pins.append(Constraint(gradient.site, -1 - gradient.result, leaf.spec, gradient.param, whole))
            why = "sharded state: a part of the gradient"
            pins.append(Constraint(gradient.site, -1 - gradient.result, leaf.gradient, gradient.param, why))
        elif leaf.path not in used and _meets_split(graph, leaf, sharded, range(len(leaf.shape))):
            why = "met by what is split: the whole gradient"
            pins.append(Constraint(gradient.site, -1 - gradient.result, leaf.spec, gradient.param, why))
        elif graph.inside_heads and _meets_split(graph, leaf, sharded, _dims_of_heads(graph, leaf)):
            why = "heads that devices share: the whole gradient"
            pins.append(Constraint(gradient.site, -1 - gradient.result, leaf.spec, gradient.param, why))
    return tuple(pins)


def _meets_split(graph: Graph, leaf: LeafPlan, sharded: ShardedDims, dims: Iterable[int]) -> bool:
    """Tells whether a parameter keeps one of its `dims` whole, while others split the same dim."""
    atoms = graph.leaf(leaf.path).dims
    return any(
        bool(set(sharded.in_boundaries.get(graph.local[atoms[dim][0]], ())) - set(leaf.axes_by_dim[dim]))
        for dim in dims
        if atoms[dim]
    )


def _dims_of_heads(graph: Graph, leaf: LeafPlan) -> Iterator[int]:
    """Yields the dims of a parameter that count heads and what lies inside of each."""
    for dim, atoms in enumerate(graph.leaf(leaf.path).dims):
        inside = [graph.local[atom] in graph.inside_heads for atom in atoms]
        if any(inside) and not inside[0]:
            yield dim


def updated_in_parts(
    jaxpr: _compat.ClosedJaxpr, leaves: Sequence[LeafPlan], matched: Mapping[int, int]
) -> dict[int, Spec]:
    """Maps the result positions of new values that devices compute in parts to the parts' specs.

    **Arguments:**

    - `jaxpr`: of the step.
    - `leaves`: of the plan, by flat argument.
    - `matched`: flat argument -> position of the result that replaces it.

    Such values are gathered only as they leave the step, so that the update runs where gradient and state are. What is
    handed through is not gathered.
    """
    inner, _ = _compat.open_jaxpr(jaxpr)
    return {
        target: gradient
        for source, target in matched.items()
        if (gradient := leaves[source].gradient) is not None and inner.outvars[target] not in inner.invars
    }
