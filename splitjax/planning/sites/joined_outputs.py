"""Decides where outputs of column-split products are brought together: where their columns are joined with others.

The flows of a step come in (`cost.flow`), `Constraint`s come out. Each device along `model` has some columns of such an
output (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). Where no product reads these columns as they are,
but they are concatenated with other values (the dense vector of a DLRM, which stands beside the products of its
features), the parts of the joined dim lie otherwise. Left to itself, XLA pads, permutes and exchanges the parts of
every value behind them, forward and backward. Pinned whole wherever it is read, the output is gathered once, as the
plan has it, and its cotangent is whole where it comes back, so that each device takes its columns of it. What is
stacked with such an output (another tower of the DLRM) is gathered, too: of parts beside whole columns XLA would sum
all products over the devices.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.cost.flow import WeightFlow
from splitjax.plan import Constraint
from splitjax.planning.sites.constraints import FREE
from splitjax.trace.graph import Graph


def pin_joined_outputs(graph: Graph, chain: Sequence[WeightFlow]) -> tuple[Constraint, ...]:
    """Returns the constraints on what reads the outputs of column-split products whose columns are joined with other
    values: these dims are whole, the others as XLA has them. `graph`: of the step. `chain`: its flows."""
    flows = {flow.use.site: flow for flow in chain if flow.joined is not None}
    return tuple(
        Constraint(
            each.site,
            each.operand,
            tuple(None if is_joined else FREE for is_joined in each.is_joined),
            split[-1].use.layer,
            f"columns over {' x '.join(split[-1].free)} that are joined with other values: all of them",
        )
        for each in graph.joined
        if (split := [flows[site] for site in each.uses if site in flows])
    )
