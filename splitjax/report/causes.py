"""Says in words why a compiled collective is there.

What is known of a collective (`report.evidence`) goes in, a text comes out. What the plan foresaw has the plan's own
reason. This module speaks of the rest: small sums that plans leave out (`cost.collectives`), and what XLA's partitioner
moved on its own. A collective of which neither the operation nor the value is known has no cause: there is no label for
whatever is left over.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.plan import DENSE_GRADIENTS, beside
from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS
from splitjax.report.dataflow import Dataflow
from splitjax.report.evidence import FALLBACK, HANDED, ROWS, SUMMED, Evidence
from splitjax.report.known_step import Step
from splitjax.report.op_names import is_derivative, primitive
from splitjax.report.subject import BACKWARD, BATCH, GRADIENT, MOVED, STATE, STATISTIC, SUMS, WEIGHT

_STATE = ("param", "optimizer", "statistic")
_COMBINES = (Trait.REDUCES, Trait.SCANS)


def cause_of(evidence: Evidence, flow: Dataflow, step: Step, layer: str = "") -> str:
    """Returns the reason of a collective that no planned one explains; empty where there is no evidence for any.

    **Arguments:**

    - `evidence`: what is known of the collective.
    - `flow`: the dataflow of the module that holds it.
    - `step`: the planned step that the module was compiled from.
    - `layer`: the layer beside whose name the reason stands, if it does (`splitjax.plan.beside`).
    """
    collective, leaf = evidence.collective, beside(evidence.leaf, layer) or "a parameter of the layer"
    over = f"split over {collective.axis}"
    if evidence.about == GRADIENT:
        further = any(
            planned.purpose.leaf == evidence.leaf and planned.purpose.kind in DENSE_GRADIENTS
            for planned in step.plan.collectives
        )
        return f"a further part of the gradient of {leaf}" if further else f"gradient of {leaf}"
    if evidence.about == FALLBACK:
        when = "in steps for which its capacities do not suffice"
        return f"all rows of the gradient of {leaf}, {when}: not counted"
    if evidence.about == ROWS:
        return f"rows of the gradient of {leaf}"
    if evidence.about == SUMMED:
        return f"gradient of {leaf}"
    if evidence.about == HANDED:
        return f"gradient of {leaf}, handed to workers that did not compute it"
    if evidence.about == MOVED:
        return f"the gradient of {leaf} is summed in another layout than its update needs"
    if evidence.about == WEIGHT:
        return f"{leaf} is laid out otherwise than the {evidence.phase} pass reads it"
    if evidence.about == STATE:
        node = evidence.node
        new = node is not None and all(step.leaf(flow.origin(source)) is None for source in flow.sources(node))
        return (
            f"XLA computes the new {leaf} in another layout than the plan has for it"
            if new
            else f"{leaf} is laid out otherwise than it is read"
        )
    if evidence.about == STATISTIC:
        return f"batch statistics: {leaf}"
    if evidence.about == BATCH:
        return f"{leaf} is laid out otherwise than it is read"
    operation = primitive(evidence.op_name)
    if not operation:
        return ""
    if collective.op in SUMS:
        return _sum(evidence, operation, over, flow, step)
    if operation == "sharding_constraint":
        return f"a sharding constraint in the step, where the value is {over}"
    traits = _traits(operation)
    if not traits.isdisjoint(_COMBINES):
        # `reduce` is `argmax` and the like
        name = "argmax or another reduction of several values" if operation == "reduce" else operation
        return f"{name} over a dim that is {over}"
    if Trait.PRODUCT in traits:
        return f"XLA brings together an operand of {operation} that is {over}"
    return f"XLA changes the layout of what {operation} reads or gives, {over}"


def _traits(operation: str) -> frozenset[Trait]:
    """Returns the traits of the primitive called `operation`; none where the table does not know it."""
    known = OPERATIONS.get(operation)
    return frozenset() if known is None else known.traits


def _sum(evidence: Evidence, operation: str, over: str, flow: Dataflow, step: Step) -> str:
    """Returns the reason of an all-reduce or reduce-scatter, by the operation whose partial results it adds up."""
    collective = evidence.collective
    if not collective.shape:
        return _scalar(evidence, operation, flow, step)
    if step.kinds.get(evidence.layer) == "norm" and operation.startswith("reduce"):
        shapes = [leaf.shape for leaf in step.plan.leaves if step.layers.get(leaf.path) == evidence.layer]
        # the examples of any layer are split over the first of them
        batch_axes = step.plan.mesh.present(step.plan.batch_axes)
        of_batch = (
            bool(batch_axes) and batch_axes[0] in collective.axis.split("+") and _has_shape(collective.shape, shapes)
        )
        what = "batch statistics" if of_batch else f"statistics of a normalisation whose features are {over}"
        return what if evidence.phase != BACKWARD else f"cotangents of {what}"
    traits = _traits(operation)
    if Trait.PRODUCT in traits:
        return f"partial results of {operation} whose contracted dim is {over}"
    if Trait.TAKES in traits:
        return f"lookup ({operation}) in an array that is {over}: each device finds what it holds"
    if Trait.WRITES in traits:
        return f"partial results of {operation} whose updates are {over}"
    if not traits.isdisjoint(_COMBINES):
        return f"{'reduction' if operation == 'reduce' else operation} over a dim that is {over}"
    if Trait.COLLECTIVE in traits or operation == "psum_scatter":
        return f"a collective that the step asks for ({operation})"
    return f"partial results of {operation}, {over}"


def _has_shape(shape: Sequence[int], shapes: Sequence[Sequence[int]]) -> bool:
    """Tells whether `shape` is among `shapes`, dims of size 1 aside, or is an even part of a vector among them."""
    plain = [n for n in shape if n > 1]
    return any(
        plain == [n for n in whole if n > 1] or (len(plain) == 1 and len(whole) == 1 and whole[0] % plain[0] == 0)
        for whole in shapes
    )


def _scalar(evidence: Evidence, operation: str, flow: Dataflow, step: Step) -> str:
    """Returns the reason of a sum to a scalar: it comes from gradients (a norm), it comes from the batch and the
    derivative or the update reads it (a mask's sum), or it is only returned."""
    name = operation if operation.startswith("reduce") else f"sum ({operation})"
    if evidence.node is None:
        return f"{name} to a scalar, in the {evidence.phase} pass"
    cone = [node for _, node in flow.walk([evidence.node], flow.users)]
    to_state = any(
        step.roles.get(step.leaf(flow.argument(source)) or "") in _STATE
        for node in cone
        for source in flow.sources(node)
    )
    sources = [node for _, node in flow.walk([evidence.node], flow.sources)]
    roles = {step.roles.get(step.leaf(flow.argument(node)) or "", "") for node in sources}
    if to_state and evidence.phase == BACKWARD:
        return f"{name} to a scalar of the backward pass"
    if to_state and any(is_derivative(flow.instruction(node).op_name) for node in sources):
        return f"{name} to a scalar that the update depends on, such as the global norm of the gradients"
    if to_state and "batch" in roles:
        return f"{name} to a scalar that gradients depend on, such as the sum of a mask"
    if to_state and roles & set(_STATE):
        return f"{name} to a scalar that the update depends on, such as the norm of a parameter"
    if flow.results & set(cone):
        return f"{name} to a scalar that the step returns, such as loss or accuracy"
    if flow.decisions & set(cone):
        return f"{name} to a scalar that decides which branch is taken"
    return f"{name} to a scalar, in the {evidence.phase} pass"
