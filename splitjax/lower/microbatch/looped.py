"""Runs the loops of recurrent layers on each worker's own examples, in a boundary that runs whole otherwise.

A boundary with a recurrence comes in whose weights are stored in parts; a `Looped` comes out, or None where its loops
cannot run so. It exists beside `microbatched` because a loop around all of a boundary holds every weight of it whole,
those of layers beside the recurrence, too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from splitjax import _compat
from splitjax.errors import Refusal
from splitjax.lower.microbatch.classify import NodeAnalysis
from splitjax.lower.microbatch.microbatch import Accumulation, Analysed, analyse, local_examples
from splitjax.lower.microbatch.pairing import Node, Ref
from splitjax.lower.products.interpret import evaluate_part
from splitjax.lower.way import Whole
from splitjax.plan import LeafPlan
from splitjax.planning.sites.loops import LocalLoop
from splitjax.planning.ways import BoundaryCall, DecidedStep, example_dim
from splitjax.planning.workers import Workers
from splitjax.primitives.example_relation import EXAMPLES, SAME, Info
from splitjax.primitives.walk import Site, holds_boundary
from splitjax.step.boundary import boundary_forward, boundary_of, expand
from splitjax.trace.graph import Use

_WHY = (
    "the loops of its recurrent layers run on each worker's examples, with whole weights: their gradients are exchanged"
    " once, behind the loops"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Looped(Whole):
    """Evaluates a boundary with all examples at once, but some loops in it on each worker's own.

    - `loops`: these loops, by their sites in the boundary's forward.
    - `gathered`: by parameter, the axes along which workers have it whole in a loop.
    """

    why: str = _WHY
    loops: tuple[LocalLoop, ...] = ()
    gathered: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def evaluate(self, call: BoundaryCall) -> list[Any]:
        """Returns the results of the boundary `call`."""
        prefix = (*call.site, 0)
        sites = call.layout.sites.with_loops(
            [dataclasses.replace(loop, site=(*prefix, *loop.site)) for loop in self.loops]
        )
        layout = dataclasses.replace(call.layout, sites=sites)
        return expand(
            call.eqn.params,
            call.operands,
            lambda jaxpr, operands: evaluate_part(layout, jaxpr, operands, prefix, None, {}),
        )


def looped(step: DecidedStep, eqn: Any, site: Site, workers: Workers, recurrent: Collection[str]) -> Looped | None:
    """Finds the loops of a boundary that workers can run on their own examples.

    **Arguments:**

    - `step`: the step around the boundary. `eqn`, `site`: the boundary's equation, and where it stands.
    - `workers`: who share the batch; over their axes weights of the loops may be stored.
    - `recurrent`: the names of the layers whose loops are meant.

    Returns None where there is no such loop, one of them mixes examples, or stands inside of a rematerialised
    function."""
    if workers.num_workers == 1:
        return None
    forward = boundary_forward(eqn)[0]
    size = local_examples(step.num_examples, 1, workers)
    twin = size if isinstance(size, Refusal) else step.twin_of(eqn, site, size)
    if isinstance(twin, Refusal) or any(map(holds_boundary, _compat.open_jaxpr(forward)[0].eqns)):
        return None
    dims = [example_dim(a.aval.shape, b.aval.shape) for a, b in zip(eqn.invars, twin.invars, strict=True)]
    analysed = analyse(eqn.params, Accumulation(dims, boundary_forward(twin)[0], 1, workers))
    if analysed is None or isinstance(analysed, Refusal) or not analysed.batch.is_exact:
        return None
    prefix, leaves = (*site, 0), _leaves(step, eqn, site, analysed)
    uses = [use for use in step.graph.uses if use.site[: len(prefix)] == prefix]
    loops: list[LocalLoop] = []
    gathered: dict[str, tuple[str, ...]] = {}
    left = [use for use in uses if use.layer in recurrent and use.trips > 1]
    for node, known in zip(analysed.analysis.body.nodes, analysed.analysis.by_node, strict=True):
        inside = [use for use in uses if use.site[len(prefix) :][: len(node.site)] == node.site]
        if node.name != "scan" or not any(use.layer in recurrent for use in inside):
            continue
        loop = _local(node, known, analysed, leaves, workers)
        if loop is None:
            return None
        loops.append(loop)
        left = [use for use in left if use not in inside]
        outside = _params(use for use in step.graph.uses if use not in inside)
        gathered |= dict.fromkeys(_params(inside) - outside, workers.axes)
    return Looped(loops=tuple(loops), gathered=gathered) if loops and not left else None


def _params(uses: Iterable[Use]) -> set[str]:
    """Returns the paths of the parameters that `uses` are made of."""
    return {path for use in uses for path in (use.param, *use.beside)}


def _local(
    node: Node, known: NodeAnalysis, analysed: Analysed, leaves: Mapping[int, LeafPlan], workers: Workers
) -> LocalLoop | None:
    """Describes the loop `node`, of which `known` is known; None where it mixes examples. `leaves`: the layouts of
    parameters, by the values that they are."""
    relations = (*known.operands, *known.outcome.infos)
    if not known.plain or not all(map(_is_apart, relations)):
        return None
    dims = tuple(None if info.layout is None else info.layout.dim for info in relations)
    num_operands = len(known.operands)
    made_by = {v: one for one in analysed.analysis.body.nodes for v in one.outputs}
    return LocalLoop(
        node.site,
        node.part,
        workers.axes,
        dims[:num_operands],
        dims[num_operands:],
        tuple(_stored(ref, leaves, made_by, workers) for ref in node.inputs),
    )


def _is_apart(info: Info) -> bool:
    """Tells whether a value is the same for all examples, or holds them one after the other."""
    return info.kind == SAME or (info.kind == EXAMPLES and info.required_layout.major == 1)


def _leaves(step: DecidedStep, eqn: Any, site: Site, analysed: Analysed) -> dict[int, LeafPlan]:
    """Returns the layouts of the parameters that a boundary differentiates, by their values in its forward."""
    planned = {leaf.path: leaf for leaf in step.plan.leaves}
    params = {gradient.result: gradient.param for gradient in step.graph.gradients if gradient.site == site}
    return {
        analysed.analysis.body.inputs[position]: planned[params[result]]
        for result, position in boundary_of(eqn.params).gradients
        if params.get(result) in planned
    }


def _stored(
    ref: Ref, leaves: Mapping[int, LeafPlan], made_by: Mapping[int, Node], workers: Workers
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Returns the dims of an operand that are split over axes of the workers alone, with these axes: where it is a
    parameter, perhaps in another dtype."""
    node = made_by.get(ref) if isinstance(ref, int) else None
    if node is not None and node.name == "convert_element_type":
        return _stored(node.inputs[0], leaves, made_by, workers)
    leaf = leaves.get(ref) if isinstance(ref, int) else None
    by_dim = () if leaf is None else leaf.axes_by_dim
    wide = ((dim, tuple(axis for axis in axes if axis in workers.mesh.wide)) for dim, axes in enumerate(by_dim))
    return tuple((dim, axes) for dim, axes in wide if axes and set(axes) <= set(workers.axes))
