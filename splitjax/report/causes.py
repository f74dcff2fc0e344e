"""Why a compiled collective is there, in words, from what is known of it: never a label for whatever is left over.

What the plan foresaw has the plan's own reason. This module speaks of the rest: small sums that plans leave out (`cost.collectives`), and
what XLA's partitioner moved on its own. A collective of which neither the operation nor the value is known has no cause.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.report.dataflow import Dataflow
from splitjax.report.evidence import (
    BACKWARD,
    BATCH,
    FORWARD,
    GRADIENT,
    STATE,
    STATISTIC,
    WEIGHT,
    Evidence,
    Step,
    primitive,
)

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")
_LOOKUPS = ("gather", "dynamic_slice")
_ADDITIONS = ("scatter-add", "scatter_add", "scatter", "dynamic_update_slice")
_SUMS = ("all_reduce", "reduce_scatter")
# JAX's names of reductions; `reduce` is `argmax` and the like.
_REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce", "argmax", "argmin", "reduce_precision")
_ORDERS = ("sort", "top_k", "approx_top_k", "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev")


def cause_of(one: Evidence, flow: Dataflow, step: Step) -> str:
    """The reason of a collective that no planned one explains; empty where there is no evidence for any."""
    collective = one.collective
    over = f"split over {collective.axis}"
    if one.about == GRADIENT:
        return f"gradient of {one.leaf}"
    if one.about == WEIGHT:
        return f"{one.leaf} is laid out otherwise than the {one.phase} pass reads it"
    if one.about == STATE:
        new = one.node is not None and all(step.leaf(flow.origin(source)) is None for source in flow.sources(one.node))
        return f"XLA computes the new {one.leaf} in another layout than the plan has for it" if new else f"{one.leaf} is laid out otherwise than it is read"
    if one.about == STATISTIC:
        return f"batch statistics: {one.leaf}"
    if one.about == BATCH:
        return f"{one.leaf} is laid out otherwise than it is read"
    operation = primitive(collective.op_name)
    if not operation:
        return ""
    if collective.op in _SUMS:
        return _sum(one, operation, over, flow, step)
    if operation == "sharding_constraint":
        return f"a sharding constraint in the step, where the value is {over}"
    if operation in _REDUCTIONS or operation in _ORDERS:
        name = "argmax or another reduction of several values" if operation == "reduce" else operation
        return f"{name} over a dim that is {over}"
    if operation in _PRODUCTS:
        return f"XLA brings together an operand of {operation} that is {over}"
    return f"XLA changes the layout of what {operation} reads or gives, {over}"


def _sum(one: Evidence, operation: str, over: str, flow: Dataflow, step: Step) -> str:
    collective = one.collective
    if not collective.shape:
        return _scalar(one, operation, flow, step)
    if step.kinds.get(one.layer) == "norm" and operation.startswith("reduce"):
        shapes = [leaf.shape for leaf in step.plan.leaves if step.layers.get(leaf.path) == one.layer]
        of_batch = set(collective.axis.split("+")) <= set(step.plan.batch_axes) and _has_shape(collective.shape, shapes)
        what = "batch statistics" if of_batch else f"statistics of a normalisation whose features are {over}"
        return what if one.phase != BACKWARD else f"cotangents of {what}"
    if operation in _PRODUCTS:
        return f"partial results of {operation} whose contracted dim is {over}"
    if operation in _LOOKUPS:
        return f"lookup ({operation}) in an array that is {over}: each device finds what it holds"
    if operation in _ADDITIONS:
        return f"partial results of {operation} whose updates are {over}"
    if operation in _REDUCTIONS or operation in _ORDERS:
        return f"{'reduction' if operation == 'reduce' else operation} over a dim that is {over}"
    if operation in ("psum", "psum_invariant", "reduce_scatter", "psum_scatter", "pmax", "pmin"):
        return f"a collective that the step asks for ({operation})"
    return f"partial results of {operation}, {over}"


def _has_shape(shape: Sequence[int], shapes: Sequence[Sequence[int]]) -> bool:
    plain = [n for n in shape if n > 1]
    return any(plain == [n for n in other if n > 1] or (len(plain) == 1 and len(other) == 1 and other[0] % plain[0] == 0) for other in shapes)


def _scalar(one: Evidence, operation: str, flow: Dataflow, step: Step) -> str:
    """A scalar: of gradients (a norm), of the batch and read by the update or the derivative (a mask's sum), or only returned."""
    assert one.node is not None or not one.layer
    name = operation if operation.startswith("reduce") else f"sum ({operation})"
    if one.node is None:
        return f"{name} to a scalar, in the {one.phase} pass"
    reaches = any(
        step.roles.get(step.leaf(flow.argument(source)) or "") in ("param", "optimizer", "statistic")
        for _, node in flow.walk([one.node], flow.users) for source in flow.sources(node)
    )
    if not reaches:
        return f"{name} over the batch for a value that the step returns, such as loss or accuracy"
    if one.phase == FORWARD:
        return f"{name} over the batch to a scalar that gradients depend on, such as the sum of a mask"
    if one.phase == BACKWARD:
        return f"{name} to a scalar of the backward pass"
    return f"{name} to a scalar that the update depends on, such as the global norm of the gradients"
