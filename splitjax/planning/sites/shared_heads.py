"""Keeps heads whole that devices share: keys and values of which there are fewer heads than devices.

The flows of a step come in (`cost.flow`), `Constraint`s and notes come out. Every device computes all of these heads,
which is what their whole weights are for, and reads its own. Left to itself XLA computes only those that a device
reads, and sums the whole cotangent of the layer's input over devices for each of keys and values. Pinned whole, their
own cotangents are brought together instead: those of devices that read the same head are summed, and the heads are
gathered, over parts of the axis (`mesh.axis_parts`).
"""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.cost.flow import WeightFlow
from splitjax.cost.heads import SharedHeads
from splitjax.mesh import MeshShape
from splitjax.plan import Constraint
from splitjax.planning.jax_gradients import BY_SPLITJAX, taken_by_jax
from splitjax.planning.sites.constraints import FREE, example_spec
from splitjax.trace.graph import Graph


def pin_shared_heads(graph: Graph, chain: Sequence[WeightFlow], batch_axes: tuple[str, ...]) -> tuple[Constraint, ...]:
    """Returns the constraints on the heads that devices share, and so on their cotangents.

    **Arguments:** `graph`: of the step. `chain`: its flows. `batch_axes`: the mesh axes that split the batch.
    """
    pins = (_pin(graph, flow, batch_axes) for flow in chain if flow.shared is not None and flow.use.editable)
    return tuple(pin for pin in pins if pin is not None)


def _pin(graph: Graph, flow: WeightFlow, batch_axes: tuple[str, ...]) -> Constraint | None:
    use, shared = flow.use, flow.shared
    spec = example_spec(graph, use.out_dims, batch_axes)
    if spec is None or shared is None:
        return None
    whole = tuple(None if entry == FREE else entry for entry in spec)
    return Constraint(use.site, -1, whole, use.layer, f"heads that devices along {shared.axis} share: all of them")


def shared_notes(graph: Graph, chain: Sequence[WeightFlow], mesh: MeshShape) -> tuple[str, ...]:
    """Returns a sentence for the plan on each weight of `graph` whose heads devices share, or would if JAX's own
    transformations did not take its gradient. `chain`: the flows of the step. `mesh`: the shape of the mesh."""
    notes, by_jax = [], taken_by_jax(graph)
    for flow in chain:
        shared = flow.shared
        if shared is None:
            if flow.sharable is not None and flow.use.param in by_jax:
                notes.append(_left_note(flow.use.param, flow.sharable, mesh))
            continue
        heads = f"{shared.num_heads} heads are" if shared.num_heads > 1 else "a single head is"
        gathered = f", and gathered from {shared.num_heads} groups" if shared.num_heads > 1 else ""
        notes.append(
            f"{flow.use.param}: {heads} copied to the {mesh.size(shared.axis)} devices along {shared.axis}; each"
            " computes all of them with the whole weight, and reads one. Backward, the cotangents of a head are summed"
            f" over the {shared.copies} devices that read it{gathered}"
        )
    return tuple(dict.fromkeys(notes))


def _left_note(param: str, heads: SharedHeads, mesh: MeshShape) -> str:
    """Says what becomes of `heads` that devices would share, with a gradient that JAX takes."""
    number = f"{heads.num_heads} heads are" if heads.num_heads > 1 else "a single head is"
    return (
        f"{param}: {number} read by the {mesh.size(heads.axis)} devices along {heads.axis}, and XLA decides what each"
        f" computes and sends for that; {BY_SPLITJAX}, which keeps them whole on every device and brings their"
        " cotangents together in groups"
    )
