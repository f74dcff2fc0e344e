"""Decides where what comes from a replicated layer becomes columns: where the columns of a split layer are added to it.

The flows of a step come in (`cost.flow`), `Constraint`s come out. A vision transformer's residual stream begins at a
convolution that every worker runs on its own examples, and all layers that add to it are split by columns: devices
exchange examples for columns once, where the first of these is added, and what follows has columns. Left to itself, XLA
takes the stream to columns for every sum, and back for what normalises it in between.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from splitjax.cost.flow import WeightFlow, brought
from splitjax.cost.use_links import Met
from splitjax.plan import Constraint, Spec, spec_entry
from splitjax.planning.sites.constraints import FREE, example_spec
from splitjax.trace.graph import Graph


def pin_met(graph: Graph, chain: Sequence[WeightFlow], batch_axes: tuple[str, ...]) -> Iterator[Constraint]:
    """Yields the constraints on what the columns of split layers meet that replicated layers made: every worker's
    examples where these made it, columns where they meet it.

    **Arguments:** `graph`: of the step. `chain`: its flows. `batch_axes`: the mesh axes over which replicated layers
    split the examples, major first."""
    for flow, met, workers in _met(graph, chain, batch_axes):
        head = chain[met.head].use
        made = example_spec(graph, head.out_dims, batch_axes)
        if made is not None:
            yield Constraint(head.site, -1, made, head.layer, f"{_why(flow)}: every worker makes its examples")
        groups = example_spec(graph, met.dims, tuple(axis for axis in batch_axes if axis not in flow.free))
        entry = spec_entry(flow.free)
        columns = tuple(
            of_examples if graph.is_example(dim) else entry if dim and graph.soft[dim[0]] == met.label else FREE
            for dim, of_examples in zip(met.dims, groups or workers, strict=True)
        )
        yield Constraint(met.site, met.operand, columns, flow.use.layer, f"{_why(flow)}: becomes columns, too")


def pin_met_in_turns(graph: Graph, chain: Sequence[WeightFlow], batch_axes: tuple[str, ...]) -> Iterator[Constraint]:
    """Yields the constraints that come before those of `pin_met` where examples come in turns: every worker has its own
    examples of a turn. XLA would bring those of all turns together before the loop, and those of a turn in it again.
    Arguments as there."""
    for flow, met, workers in _met(graph, chain, batch_axes):
        yield Constraint(met.site, met.operand, workers, flow.use.layer, f"{_why(flow)}: examples of a turn")


def _why(flow: WeightFlow) -> str:
    return f"meets columns over {' x '.join(flow.free)}"


def _met(
    graph: Graph, chain: Sequence[WeightFlow], batch_axes: tuple[str, ...]
) -> Iterator[tuple[WeightFlow, Met, Spec]]:
    """Yields the uses whose columns meet what becomes columns, what that is, and its spec before."""
    for flow in chain:
        met = brought(flow, chain)
        workers = None if met is None else example_spec(graph, met.dims, batch_axes)
        if met is not None and workers is not None:
            yield flow, met, workers
