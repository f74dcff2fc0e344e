"""Gathers what is known of each compiled collective: its phase of the step, the state leaf that it moves or sums, its
layer, and how that is known.

A compiled collective, the dataflow around it and the planned step go in; an `Evidence` comes out. XLA does not say why
a collective is there, so four sources are asked, the surest first:

- `dataflow`: where its values come from and where they go (`report.subject`).
- `scope`: splitjax's own name scopes around explicit collectives (`report.op_names`).
- `name`: the module path in the name that JAX gave the operation. Flax Linen and Haiku write one, Flax NNX does not.
- `line`: the user's lines on its stack, where layers have a line in common narrowed down by the weights nearby.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.plan import DENSE_GRADIENTS
from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS
from splitjax.report.dataflow import MIXES, MOVES, SPREADS, Dataflow, Node
from splitjax.report.hlo import CompiledCollective
from splitjax.report.known_step import Step
from splitjax.report.op_names import gradient_scope, is_derivative, is_differentiated, layer_scopes, primitive
from splitjax.report.subject import (
    BACKWARD,
    FORWARD,
    SUMS,
    UPDATE,
    VALUE,
    Around,
    product_behind,
    rows_added_to,
    sharing,
    subject_of,
)

ROWS, FALLBACK = "rows", "fallback"
SUMMED, HANDED = "summed", "handed"
# Beyond this many operations a weight nearby says little about a collective.
_NEAR = 40


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Says what is known of a compiled collective.

    **Attributes:**

    - `collective`: the collective.
    - `phase`: `forward` (of the differentiated function, or of a step without a derivative), `backward`, or `update`.
    - `about`: `gradient` (it sums a gradient), `moved gradient` (it changes the layout of a gradient that is summed),
      `weight` (it brings the parts of a weight together), `state` (it changes the layout of state, old or new),
      `statistic`, `batch`, `saved` (it brings together what devices kept in parts for a rematerialised layer), `rows`
      (it synchronises a table's rows) or `fallback` (all rows, where the capacities of that did not suffice), `summed`
      (a gradient, over the workers that computed it) or `handed` (that sum, to a worker that did not), or `value` for
      any other value.
    - `leaf`: the path of the state or batch leaf that `about` speaks of; empty for a value.
    - `op_name`, `frames`: name and lines of the operation that it serves: what reads its result, or whose partial
      results it sums. XLA names a change of layout after either side of it, by version, or not at all.
    - `layer`: empty where unknown.
    - `known_by`: `dataflow`, `scope`, `name` or `line`: how the layer is known; empty where it is not.
    - `node`: its place in the dataflow; None where the module has no such instruction.
    - `shared_by`: the paths of parameters whose gradients a value may hold together: those of a recurrent cell's gates,
      which are computed as one product, or of biases that get the same gradient, which XLA sums once. Empty for
      anything but a sum that leads to several parameters alike.
    - `rows_of`: the path of the parameter to whose gradient the gathered values are added as rows; empty for anything
      but a gather of ids or cotangents of lookups.
    - `made_by`: of a gather, the layer whose product gave the values, before elementwise operations; empty for none.
    """

    collective: CompiledCollective
    phase: str
    about: str
    leaf: str
    op_name: str
    frames: tuple[str, ...]
    layer: str
    known_by: str
    node: Node | None
    shared_by: tuple[str, ...] = ()
    rows_of: str = ""
    made_by: str = ""


def gather_evidence(collective: CompiledCollective, flow: Dataflow, step: Step) -> Evidence:
    """Gathers what is known of a collective.

    **Arguments:**

    - `collective`: the collective.
    - `flow`: the dataflow of the module that holds it.
    - `step`: the planned step that the module was compiled from.
    """
    node = flow.collective(collective.name, collective.member)
    if (exchange := gradient_scope(collective.op_name)) is not None:
        return _written_out(collective, node, flow, step, *exchange)
    op_name, frames = _served(collective, node, flow)
    phase = _phase(op_name, step)
    about, leaf, shared_by, rows_of, made_by = VALUE, "", (), "", ""
    if node is not None:
        here = Around(collective, node, flow, step, phase)
        about, leaf = subject_of(here)
        shared_by = sharing(here) if phase != FORWARD else ()
        if collective.op == "all_gather":
            rows_of, made_by = rows_added_to(here), product_behind(here)
    if shared_by:
        about, leaf = VALUE, ""
    layer, known_by = step.layer_of(leaf) if leaf else "", "dataflow"
    if not layer:
        layer, known_by = _layer(collective, op_name, frames, node, flow, step)
    known_by = known_by if layer else ""
    return Evidence(collective, phase, about, leaf, op_name, frames, layer, known_by, node, shared_by, rows_of, made_by)


def _written_out(
    collective: CompiledCollective, node: Node | None, flow: Dataflow, step: Step, about: str, name: str
) -> Evidence:
    """Returns what is known of an exchange of gradients that splitjax wrote out: `about` and `name` of its scope."""
    leaf = step.dotted(name)
    shared_by = sharing(Around(collective, node, flow, step, BACKWARD)) if node is not None and about == SUMMED else ()
    layer = step.layer_of(leaf)
    return Evidence(
        collective, BACKWARD, about, leaf, collective.op_name, collective.frames, layer, "scope", node, shared_by
    )


def _asks_for_a_collective(name: str) -> bool:
    """Returns whether the primitive `name` is a collective, or asks XLA for one where it has to change a layout."""
    operation = OPERATIONS.get(name)
    return operation is not None and (operation.has(Trait.COLLECTIVE) or name == "sharding_constraint")


def _served(collective: CompiledCollective, node: Node | None, flow: Dataflow) -> tuple[str, tuple[str, ...]]:
    """Returns (name, lines) of the operation that a collective serves."""
    asked_for = _asks_for_a_collective(primitive(collective.op_name))
    if node is None or (collective.op_name and (asked_for or collective.op in SUMS)):
        return collective.op_name, collective.frames
    if collective.op not in SUMS:
        onward = lambda at: flow.users(at) if at == node or flow.opcode(at) in MOVES else ()
        readers = [
            at for _, at in flow.walk([node], onward) if flow.opcode(at) not in MOVES and flow.instruction(at).op_name
        ]
        # A weight that both passes read is there for the forward pass already.
        readers.sort(key=lambda at: is_derivative(flow.instruction(at).op_name))
        if readers:
            return flow.instruction(readers[0]).op_name, flow.lines(readers[0]) or collective.frames
    if collective.op_name:
        return collective.op_name, collective.frames
    for distance, at in flow.walk([node], flow.sources):
        if distance > _NEAR:
            break
        if at != node and flow.instruction(at).op_name and flow.opcode(at) != "parameter":
            return flow.instruction(at).op_name, flow.lines(at)
    return "", collective.frames


def _phase(op_name: str, step: Step) -> str:
    if is_derivative(op_name):
        return BACKWARD
    # An evaluation takes the state of an optimizer along, and differentiates nothing.
    differentiates = any(planned.purpose.kind in DENSE_GRADIENTS for planned in step.plan.collectives) or (
        any(role == "optimizer" for role in step.roles.values()) and step.has_backward
    )
    return FORWARD if is_differentiated(op_name) or not differentiates else UPDATE


def _layer(
    collective: CompiledCollective, op_name: str, frames: Sequence[str], node: Node | None, flow: Dataflow, step: Step
) -> tuple[str, str]:
    """Returns (layer, how it is known) from the names and lines of the operation that a collective serves."""
    name, is_layer = step.named(op_name)
    if is_layer:
        return name, "scope" if layer_scopes(op_name) else "name"
    lines = step.at_line(frames, primitive(op_name))
    if not collective.shape:  # a loss may stand on the line of the last layer
        lines = ()
    if len(lines) == 1:
        return lines[0], "line"
    if not name and not lines:
        return "", ""
    near = _layers_nearby(node, flow, step) if node is not None else ()
    inside = [layer for layer in near if layer in lines or (name and layer.startswith(name + "/"))]
    if inside:
        return inside[0], "line" if lines else "name"
    return name, "name"


def _layers_nearby(node: Node, flow: Dataflow, step: Step) -> tuple[str, ...]:
    """Returns the layers of the parameters that stand nearest to a collective in the dataflow, before or after it,
    nearest first."""
    distances: dict[str, int] = {}
    for before in (True, False):

        def onward(reached: Node, before: bool = before) -> tuple[Node, ...]:
            if reached != node and flow.opcode(reached) in MIXES and flow.opcode(reached) != "reduce":
                return ()
            return flow.sources(reached) if before else flow.users(reached)

        for distance, reached in flow.walk([node], onward):
            if distance > _NEAR:
                break
            if reached == node:
                continue
            for source in flow.sources(reached):
                leaf = step.leaf(flow.origin(source, MOVES | SPREADS))
                layer = step.layer_of(leaf) if leaf is not None else ""
                if layer and distances.get(layer, distance + 1) > distance:
                    distances[layer] = distance
    return tuple(sorted(distances, key=lambda layer: (distances[layer], step.order[layer])))
