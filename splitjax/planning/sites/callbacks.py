"""Decides what a plan does about callbacks (`jax.pure_callback`, `io_callback`, `jax.debug.callback`): what they read
is gathered, and the plan says so.

Their function runs on the host, for one device, and takes whole arrays. Without a constraint XLA gathers as well, later
and with more copies.
"""

from __future__ import annotations

from splitjax.errors import TraceError
from splitjax.mesh import MeshShape
from splitjax.plan import Constraint
from splitjax.planning.sites.sharded_dims import ShardedDims
from splitjax.primitives.foreign.callbacks import CALLBACKS, is_ordered
from splitjax.trace.graph import Graph


def gather_callbacks(
    graph: Graph, sharded: ShardedDims, mesh: MeshShape
) -> tuple[tuple[Constraint, ...], tuple[str, ...]]:
    """Returns constraints that make what callbacks of `graph` read whole, and a sentence for each of them that reads
    something split. `sharded`: what the plan splits on `mesh`.

    Raises `TraceError` for an ordered callback on several devices, which JAX does not have."""
    constraints: list[Constraint] = []
    notes: list[str] = []
    for call in graph.foreign if mesh.num_devices > 1 else ():
        if call.primitive not in CALLBACKS:
            continue
        if is_ordered(call.eqn):
            raise TraceError(
                "an ordered callback runs on one device only",
                value=call.primitive,
                place=call.source,
                remedy="pass ordered=False, or call it outside of the step",
            )
        axes = sorted({axis for dims in call.operand_dims for dim in dims for axis in sharded.axes(dim, call.site)})
        if not axes:
            continue
        why = f"{call.primitive} at {call.source} runs on the host: what it reads is gathered over {', '.join(axes)}"
        notes.append(why)
        constraints += [
            Constraint(call.site, operand, (None,) * len(dims), call.primitive, why)
            for operand, dims in enumerate(call.operand_dims)
            if dims and call.editable
        ]
    return tuple(constraints), tuple(dict.fromkeys(notes))
