"""Finds what a plan wastes: products that devices repeat, and parameters that lie against their rules.

A laid out and predicted step comes in, `PlanWarning`s come out. Numbers are right in all of these cases, which is why
somebody has to say it.
"""

from __future__ import annotations

from collections.abc import Iterable

from splitjax.cost import Prediction
from splitjax.cost.compute import split_axes
from splitjax.plan import PlanWarning
from splitjax.planning.draft import Draft
from splitjax.rules.match import axes_text

# A device that computes more than this over its even share is worth a warning.
MAX_OVER_IDEAL = 1.1
# So are parameters that do not lie as their rules would have them, above this share of all.
MAX_UNFIT = 0.01
_NUM_SHOWN = 3
# The option that makes sizes divide, and what it leaves as it is.
PAD = 'uneven="pad"'
NOT_PADDED = (
    f"{PAD} leaves sizes below the number of parts, weights that hold several side by side, and heads that the step"
    " reshapes into one dim with others"
)


def find_waste(draft: Draft, predicted: Prediction) -> tuple[PlanWarning, ...]:
    """Returns the warnings of a plan.

    **Arguments:** `draft`: every decision about the step. `predicted`: what its layout costs."""
    return tuple(filter(None, (_repeated(draft, predicted), _unfit(draft))))


def _repeated(draft: Draft, predicted: Prediction) -> PlanWarning | None:
    """Warns of products that several devices compute alike."""
    compute, mesh, graph = predicted.compute, draft.shape, draft.graph
    if compute.over_ideal <= MAX_OVER_IDEAL:
        return None
    extra: dict[str, int] = {}  # layer -> flops beyond its even share
    idle: dict[str, int] = {}  # axis -> the same, of the layers that it does not share
    whole: dict[str, int] = {}  # the same, of layers whose examples are on every device of some batch axis
    batch_axes, wanted = draft.layout.batch_axes, draft.request.rules.batch_axes(mesh)
    for flow in predicted.flows:
        shared = split_axes(graph, flow, mesh, batch_axes)
        missed = [axis for axis in mesh.present(mesh.names) if axis not in shared]
        beyond = flow.use.flops // mesh.size(shared) - flow.use.flops // mesh.num_devices
        if not missed or not beyond:
            continue
        layer = predicted.structure.names.get(flow.use.param, flow.use.layer)
        extra[layer] = extra.get(layer, 0) + beyond
        for axis in missed:
            idle[axis] = idle.get(axis, 0) + beyond
            if axis in wanted:
                whole[layer] = whole.get(layer, 0) + beyond
    axes = [axis for axis in mesh.names if axis in idle]
    over = " and ".join(f"{axis}={mesh.size(axis)}" for axis in axes)
    message = (
        f"each device computes {compute.over_ideal:.2f} times its even share of the products: the devices along {over}"
        f" repeat each other's work in {_largest(extra)}"
    )
    return PlanWarning("compute", round(compute.over_ideal, 4), message, _remedy(draft, axes, extra, whole))


def _remedy(draft: Draft, axes: Iterable[str], extra: dict[str, int], whole: dict[str, int]) -> str:
    """Says what would share most of the repeated products: of parameters that a size kept from their rules, that size;
    where the examples are not split, a batch that divides; else rules or a mesh that fit the step."""
    layout, mesh = draft.layout, draft.shape
    layers = {path: layer.name for layer in layout.layers for path in layer.params}
    unfit = {path: why for path, why in layout.unfit.items() if layers.get(path) in extra}
    by_sizes = sum(extra[layer] for layer in {layers[path] for path in unfit})
    if unfit and by_sizes >= sum(whole.values()):
        (why, *_) = unfit.values()
        is_padded = draft.request.uneven == "pad"
        other = f"; {NOT_PADDED}" if is_padded else f", or store them padded: {PAD}"
        return f"change the sizes that do not divide ({why}){other}"
    if whole:
        return (
            "let the number of examples in a batch, or in a microbatch, divide by"
            f" {axes_text(mesh, draft.request.rules.batch_axes(mesh))}"
        )
    names = " and ".join(axes)
    return (
        f"take a rule set that splits these layers, or their examples, over {names}, or give the devices of {names} to"
        " an axis that does"
    )


def _unfit(draft: Draft) -> PlanWarning | None:
    """Warns of parameters that do not lie as their rules would have them. A pinned plan keeps what it says of that."""
    request, graph = draft.request, draft.graph
    if request.followed is not None:
        return None
    if request.pinned is not None:
        return next((warning for warning in request.pinned.warnings if warning.kind == "whole"), None)
    if not draft.layout.unfit:
        return None
    sizes = {leaf.path: leaf.size for leaf in graph.params if leaf.path in draft.layout.unfit}
    share = sum(sizes.values()) / max(sum(leaf.size for leaf in graph.params), 1)
    if share <= MAX_UNFIT:
        return None
    largest = max(sizes, key=lambda path: sizes[path])
    message = (
        f"{100 * share:.3g} % of the parameters do not lie as the rules {draft.layout.rules!r} would have them first:"
        f" {_largest(sizes)}; {largest}: {draft.layout.unfit[largest]}"
    )
    remedy = "change the sizes to ones that divide, or the mesh" + (
        f"; {NOT_PADDED}" if request.uneven == "pad" else f", or store what does not divide padded: {PAD}"
    )
    return PlanWarning("whole", round(share, 4), message, remedy)


def _largest(sizes: dict[str, int]) -> str:
    """Names the largest entries."""
    names = sorted(sizes, key=lambda name: -sizes[name])
    more = len(names) - _NUM_SHOWN
    return ", ".join(names[:_NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")
