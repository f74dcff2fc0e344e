"""Decides where outputs of column-split products are brought together: where their columns are joined with others.

The flows of a step come in (`cost.flow`), `Constraint`s come out. Each device along `model` has some columns of such an
output (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). Where no product reads these columns as they are,
but they are concatenated with other values (the dense vector of a DLRM, which stands beside the products of its
features), the parts of the joined dim lie otherwise. Left to itself, XLA pads, permutes and exchanges the parts of
every value behind them, forward and backward. Pinned whole wherever it is read, the output is gathered once, as the
plan has it, and its cotangent is whole where it comes back, so that each device takes its columns of it. What is
stacked with such an output (another tower of the DLRM) is gathered, too: of parts beside whole columns XLA would sum
all products over the devices. Scores that are put in order (a router's, of which the largest are taken) are gathered
where there are no more of them than features that their layer reads: XLA would split what is made of the order, too.

Columns that are multiplied with rows of a table that is split by rows (a sampled softmax) are gathered likewise: rows
are whole, and so are their cotangents. Where the product reads columns of another one, its output is pinned in parts
first: XLA would take whole cotangents and its kept parts of the input to the gradient of the weight, and move that. Its
input is pinned whole for the same gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from splitjax.cost.flow import Axes, WeightFlow, feeding
from splitjax.plan import Constraint, spec_entry
from splitjax.planning.sites.constraints import FREE
from splitjax.primitives.walk import Site
from splitjax.trace.graph import Graph


def pin_joined_outputs(graph: Graph, chain: Sequence[WeightFlow], batch_axes: Axes) -> tuple[Constraint, ...]:
    """Returns the constraints on what reads the outputs of column-split products whose columns are joined with other
    values: these dims are whole, the others as XLA has them, but for examples of what is put in order. `graph`: of the
    step. `chain`: its flows. `batch_axes`: the axes over which its examples lie."""
    flows = {flow.use.site: flow for flow in chain if flow.joined is not None}
    return tuple(_pins(graph, chain, flows, batch_axes))


def _pins(
    graph: Graph, chain: Sequence[WeightFlow], flows: Mapping[Site, WeightFlow], batch_axes: Axes
) -> Iterator[Constraint]:
    pinned: set[Site] = set()
    for each in graph.joined:
        split = [flows[site] for site in each.uses if site in flows]
        if not split:
            continue
        flow = split[-1]
        met = "compared with others" if each.tables else "put in order" if each.is_ordered else "joined with others"
        why = f"columns over {' x '.join(flow.free)} that are {met}"
        if each.tables and flow.use.site not in pinned and feeding(flow.producer, flow.free, chain) is not None:
            pinned.add(flow.use.site)
            entry = spec_entry(flow.free)
            is_column = [bool(dim) and graph.local[dim[0]] == each.label for dim in flow.use.out_dims]
            parts = tuple(entry if of_columns else FREE for of_columns in is_column)
            if flow.use.data is not None:
                features = tuple(FREE if graph.is_example(dim) else None for dim in flow.use.data_dims)
                yield Constraint(flow.use.site, flow.use.data, features, flow.use.layer, f"{why}: whole features")
            yield Constraint(flow.use.site, -1, parts, flow.use.layer, f"{why}: parts of them and of their cotangents")
        whole = tuple(None if is_joined else FREE for is_joined in each.is_joined)
        if each.is_ordered and each.example_dim is not None:
            # Left open, XLA deals examples out over the columns' axes for it, too, and gathers them behind.
            apart = spec_entry(tuple(axis for axis in batch_axes if axis not in flow.axes))
            whole = (*whole[: each.example_dim], apart, *whole[each.example_dim + 1 :])
        yield Constraint(each.site, each.operand, whole, flow.use.layer, f"{why}: all of them")
