"""Decides where outputs of split layers return to the workers whose examples they are.

The flows of a step come in (`cost.flow`), `Constraint`s come out. Behind a column-split layer whose output a replicated
layer reads, or which is added to what one made, devices exchange columns for examples (Krizhevsky, "One weird trick",
arXiv 1404.5997, section 4). Left to itself, XLA does so where the two meet, behind what is computed in between; and
what the backward pass reads of that again, such as the input of a learned scale, it moves once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitjax.cost.flow import WeightFlow, feeding, leaves_group
from splitjax.plan import Constraint, LeafPlan, spec_entry
from splitjax.planning.sites.constraints import FREE, example_spec
from splitjax.trace.graph import Graph


def leaving(graph: Graph, chain: Sequence[WeightFlow]) -> Iterator[WeightFlow]:
    """Yields the flows of `chain` whose outputs leave their group at once: no split layer reads their columns."""
    sources = [feeding(flow.producer, flow.axes, chain) for flow in chain]
    in_columns = {source.use.site for source in sources if source is not None}
    for flow in chain:
        known = flow.free and not flow.contracted and flow.use.site in graph.outputs
        if known and leaves_group(flow, chain) and flow.use.site not in in_columns:
            yield flow


def pin_leaving(
    graph: Graph, chain: Sequence[WeightFlow], leaves: Sequence[LeafPlan], batch_axes: tuple[str, ...]
) -> Iterator[Constraint]:
    """Yields the constraints on the outputs of column-split layers that leave their group, behind those of their biases
    that are split as they are: parts of a group's columns first, as their cotangents are in the end, then every
    device's examples.

    **Arguments:** `graph`: of the step. `chain`: its flows. `leaves`: of the plan. `batch_axes`: the mesh axes over
    which replicated layers split the examples, major first."""
    planned = {leaf.path: leaf for leaf in leaves}
    for flow in leaving(graph, chain):
        output = graph.outputs[flow.use.site]
        site, dims = output.use, output.dims
        for behind, its_dims, param in output.behind:
            if not set(planned[param].axes) & set(flow.free):
                break
            site, dims = behind, its_dims
        spec = example_spec(graph, dims, batch_axes)
        if spec is None:
            continue
        why = f"columns over {' x '.join(flow.free)} that a replicated layer meets"
        rest = tuple(axis for axis in batch_axes if axis not in flow.free)
        of_columns = {graph.soft[dim[0]] for dim in graph.leaf(flow.use.param).dims if dim}
        entry = spec_entry(flow.free)
        parts = tuple(
            of_examples if graph.is_example(dim) else entry if dim and graph.soft[dim[0]] in of_columns else FREE
            for dim, of_examples in zip(dims, example_spec(graph, dims, rest) or spec, strict=True)
        )
        yield Constraint(site, -1, parts, flow.use.layer, f"{why}: parts of them, and of their cotangents")
        yield Constraint(site, -1, spec, flow.use.layer, f"{why}: every device has its examples")
