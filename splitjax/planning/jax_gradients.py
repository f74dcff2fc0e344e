"""Says what a step sends more than it has to, because JAX's own transformations take its gradient.

A step's graph comes in; the parameters of which JAX takes the gradient come out, and sentences for the plan. JAX has
traced the backward pass of these before it is planned, and XLA decides what is sent for it; inside of
`splitjax.value_and_grad` the plan does. What the plan knows to be worse is said by those who know it, each with the
same remedy (`fused`, and in `sites` `shared_heads`, `experts`, `ragged`; here, of recurrent layers).
"""

from __future__ import annotations

from splitjax.cost.loop_sums import loop_sums
from splitjax.mesh import MeshShape
from splitjax.planning.workers import Workers
from splitjax.rules.match import axes_text
from splitjax.trace.graph import Graph

BY_SPLITJAX = "take the gradient by splitjax.value_and_grad"


def taken_by_jax(graph: Graph) -> frozenset[str]:
    """Returns the paths of the parameters of which JAX's own transformations take the gradient: those of layers of
    which a backward pass that they have traced reads a parameter, or what it meets."""
    if not any(use.backward for use in graph.uses):
        return frozenset()
    layers = {use.layer for use in graph.uses if use.backward or (use.data_twins and not use.in_boundary)}
    return frozenset(use.param for use in graph.uses if use.layer in layers)


def recurrence_notes(graph: Graph, mesh: MeshShape, batch_axes: tuple[str, ...]) -> tuple[str, ...]:
    """Returns a sentence on each recurrent layer whose gradients JAX takes, and XLA so sums in every iteration of its
    loop over the devices that share the batch, along `batch_axes`."""
    shared, taken = Workers.beside(mesh, batch_axes, ()).axes, taken_by_jax(graph)
    if not shared or not taken:
        return ()
    # Without boundaries that are left to XLA, these are those of JAX's transformations alone.
    often: dict[str, int] = graph.once(loop_sums, frozenset())
    notes = []
    for layer in graph.layers:
        summed = [path for path in layer.params if path in often]
        if summed and not taken.isdisjoint(layer.params):
            times = max(often[path] for path in summed)
            notes.append(
                f"{layer.name}: gradients of its recurrence ({', '.join(summed)}) are summed over"
                f" {axes_text(mesh, shared)} in each of {times} iterations; {BY_SPLITJAX}, which sums them once behind"
                " the loop"
            )
    return tuple(notes)
