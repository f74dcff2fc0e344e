"""Says what a user's own `shard_map` takes whole although the plan splits it: XLA gathers it there, which no plan asked
for."""

from __future__ import annotations

from collections.abc import Iterator

from splitjax.planning.sites.sharded_dims import ShardedDims
from splitjax.primitives.foreign.manual import spec_of
from splitjax.trace.graph import ForeignCall, Graph


def manual_notes(graph: Graph, sharded: ShardedDims) -> tuple[str, ...]:
    """Returns a sentence for every `shard_map` of `graph` that takes a dim whole which `sharded` says is split."""
    notes = []
    for call in graph.foreign:
        if call.primitive == "shard_map":
            gathered = list(_gathered(call, sharded))
            if gathered:
                notes.append(
                    f"shard_map at {call.source}: {', '.join(gathered)}, because its in_specs take the dim whole: name"
                    " the axis there if each device can do with its part"
                )
    return tuple(dict.fromkeys(notes))


def _gathered(call: ForeignCall, sharded: ShardedDims) -> Iterator[str]:
    in_specs, _ = spec_of(call.eqn.params)
    for operand, (dims, spec) in enumerate(zip(call.operand_dims, in_specs, strict=True)):
        named = {axis for entry in spec for axis in entry}
        for position, dim in enumerate(dims):
            axes = [axis for axis in sharded.axes(dim, call.site) if axis not in named]
            if axes:
                yield f"dim {position} of operand {operand} is gathered over {', '.join(axes)}"
