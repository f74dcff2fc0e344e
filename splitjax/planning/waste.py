"""Finds what a plan wastes: products that devices repeat, parameters that lie against their rules, and moments in
blocks that stay whole.

A laid out and predicted step comes in, `PlanWarning`s come out. Numbers are right in all of these cases, which is why
somebody has to say it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from splitjax.cost import Prediction
from splitjax.cost.compute import apart_axes, split_axes
from splitjax.plan import PlanWarning
from splitjax.planning.draft import Draft
from splitjax.planning.padding import find_padding
from splitjax.rules.blocks import in_blocks
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
    return tuple(filter(None, (_repeated(draft, predicted), _unfit(draft), _in_blocks(draft))))


def _repeated(draft: Draft, predicted: Prediction) -> PlanWarning | None:
    """Warns of products that several devices compute alike."""
    compute, mesh, graph = predicted.compute, draft.shape, draft.graph
    if compute.over_ideal <= MAX_OVER_IDEAL:
        return None
    extra: dict[str, int] = {}  # layer -> flops beyond its even share
    idle: dict[str, int] = {}  # axis -> the same, of the layers that it does not share
    whole: dict[str, int] = {}  # the same, of layers whose examples are on every device of some batch axis
    partial: dict[str, int] = {}  # of these, those of products that see no dim of all examples
    batch_axes, wanted = draft.layout.batch_axes, draft.request.rules.batch_axes(mesh)
    apart = apart_axes(graph, predicted.leaves, mesh, batch_axes)
    for flow in predicted.flows:
        shared = split_axes(graph, flow, mesh, batch_axes, apart)
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
                if not any(graph.is_example(dim) for dim in (*flow.use.data_dims, *flow.use.out_dims)):
                    partial[layer] = partial.get(layer, 0) + beyond
    axes = [axis for axis in mesh.names if axis in idle]
    over = " and ".join(f"{axis}={mesh.size(axis)}" for axis in axes)
    message = (
        f"each device computes {compute.over_ideal:.2f} times its even share of the products: the devices along {over}"
        f" repeat each other's work in {_largest(extra)}"
    )
    remedy = _remedy(draft, axes, extra, whole, partial, bool(apart))
    return PlanWarning("compute", round(compute.over_ideal, 4), message, remedy)


def _remedy(
    draft: Draft,
    axes: Iterable[str],
    extra: dict[str, int],
    whole: dict[str, int],
    partial: dict[str, int],
    is_apart: bool,
) -> str:
    """Says what would share most of the repeated products: of parameters that a size kept from their rules, that size;
    where the examples are not split, a batch that is not cut, or that divides; else rules or a mesh that fit the step.
    `is_apart`: whether the arrays of the batch have numbers of examples of their own."""
    layout, mesh = draft.layout, draft.shape
    layers = {path: layer.name for layer in layout.layers for path in layer.params}
    unfit = {path: why for path, why in layout.unfit.items() if layers.get(path) in extra}
    by_sizes = sum(extra[layer] for layer in {layers[path] for path in unfit})
    if unfit and by_sizes >= sum(whole.values()):
        (why, *_) = unfit.values()
        return f"change the sizes that do not divide ({why})" + _or_padded(draft, unfit, "them")
    if whole and not is_apart and 2 * sum(partial.values()) > sum(whole.values()):
        if draft.graph.cuts:
            return _uncut(draft)
    elif whole:
        what = (
            "leading dims of the batch's arrays" if is_apart else "number of examples in a batch, or in a microbatch,"
        )
        return f"let the {what} divide by {axes_text(mesh, draft.request.rules.batch_axes(mesh))}"
    names = " and ".join(axes)
    return (
        f"take a rule set that splits these layers, or their examples, over {names}, or give the devices of {names} to"
        " an axis that does"
    )


def _uncut(draft: Draft) -> str:
    """Says how devices could share the examples of a batch that the step cuts into parts."""
    mesh = draft.shape
    # Those of a loop around the gradient are what is repeated. Of others a single example is seldom: one is logged.
    cuts = [each for each in draft.graph.cuts if each.looped] or [each for each in draft.graph.cuts if each.part > 1]
    if len({(each.part, each.whole) for each in cuts}) != 1:
        return "let these layers read the whole batch, and cut what they make: the step gives them parts of it"
    cut = cuts[0]
    at = f" ({cut.source})" if cut.source else ""
    if cut.part == 1:
        return f"the step reads single examples{at}: take their gradients by jax.vmap, which devices share"
    what = f"the step reads {cut.part} of {cut.whole} examples at a time{at}: "
    if cut.whole % cut.part:
        return what + "let these layers read the whole batch, and cut what they make"
    axes, number = draft.request.rules.batch_axes(mesh), cut.whole // cut.part
    size = "" if cut.part % mesh.size(axes) == 0 else f", with parts that divide by {axes_text(mesh, axes)}"
    reshape = f"reshape the batch to [{number}, {cut.part}] and scan over it{size}"
    if cut.looped or draft.graph.num_boundaries > 1:
        return f"{what}{reshape}, or take the gradient of the whole batch with microbatches={number}"
    return f"{what}let these layers read the whole batch, and cut what they make, or {reshape}"


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
    remedy = "change the sizes to ones that divide, or the mesh" + _or_padded(draft, sizes, "what does not divide")
    return PlanWarning("whole", round(share, 4), message, remedy)


def _in_blocks(draft: Draft) -> PlanWarning | None:
    """Warns of state in blocks of flattened parameters that is whole over axes over which its parameter is split, or
    over which it would be with `shard_state=True`."""
    graph, mesh, layout = draft.graph, draft.shape, draft.layout
    planned = {leaf.path: leaf for leaf in layout.leaves}
    shared = layout.batch_axes if draft.request.shard_state else ()
    sizes: dict[str, int] = {}
    over: set[str] = set()
    for param in graph.params:
        wanted = {*planned[param.path].axes, *shared}
        missed = {axis for leaf in in_blocks(graph, param) for axis in wanted - set(planned[leaf.path].axes)}
        if missed := missed & mesh.wide:
            sizes[param.path] = param.size
            over |= missed
    share = sum(sizes.values()) / max(sum(leaf.size for leaf in graph.params), 1)
    if share <= MAX_UNFIT:
        return None
    axes = axes_text(mesh, [axis for axis in mesh.names if axis in over])
    message = (
        f"moments of {100 * share:.3g} % of the parameters stay whole over {axes}: {_largest(sizes)}; they are stored"
        " flattened, in blocks that are no parts of the dims along which these are split"
    )
    remedy = (
        "let the optimizer cut the last dim of each array into blocks, x.reshape(*x.shape[:-1], -1, size), which lie as"
        " the array does where their number divides"
    )
    return PlanWarning("state", round(share, 4), message, remedy)


def _or_padded(draft: Draft, unfit: Collection[str], what: str) -> str:
    """Goes on with a remedy: that `what` does not divide may be stored padded, where some of the parameters `unfit`
    would be; or what padding leaves as it is, where it is asked for already."""
    request = draft.request
    if request.uneven == "pad":
        return f"; {NOT_PADDED}"
    padding = find_padding(dataclasses.replace(draft, request=dataclasses.replace(request, uneven="pad")))
    would_be = any(leaf.path in unfit and leaf.index in padding for leaf in draft.graph.params)
    return f", or store {what} padded: {PAD}" if would_be else ""


def _largest(sizes: dict[str, int]) -> str:
    """Names the largest entries."""
    names = sorted(sizes, key=lambda name: -sizes[name])
    more = len(names) - _NUM_SHOWN
    return ", ".join(names[:_NUM_SHOWN]) + (f" and {more} more" if more > 0 else "")
