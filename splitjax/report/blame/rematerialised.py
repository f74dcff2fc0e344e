"""Finds involuntary full rematerialisations in a compiled module: arrays that are gathered whole to keep a part of.

The dataflow of a module and one of its collectives come in; what a device keeps of the gathered array comes out. Where
XLA's partitioner finds no way from one layout to another, it gathers the array on every device and has each cut out its
part, by its own number; a warning goes to the log, once, and not where the program comes from a cache. In the module
that is an all-gather whose result is only read by slices that begin where `partition-id` says (`ReplicatePartial` and
the last resort of `PartitionedHlo::Reshard` in XLA's `spmd_partitioner.cc`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

from splitjax.codec import Count
from splitjax.mesh import MeshShape
from splitjax.plan import Spec, SpecEntry, spec_text
from splitjax.report.dataflow import MOVES, Dataflow, Node

# Between a gather and its slices: what takes padding away or adds it, where sizes do not divide, and arranges anew.
_BETWEEN = frozenset(
    opcode for opcode in MOVES - {"dynamic-slice", "concatenate", "dynamic-update-slice"} if "all-" not in opcode
) - {"collective-permute", "collective-permute-start", "collective-broadcast"}
_FAR = 40


@dataclasses.dataclass(frozen=True)
class Rematerialised:
    """Says that a collective gathers an array whole of which each device keeps a part.

    **Attributes:**

    - `whole`: the dims of the gathered array. `kept`: those of the part that a device keeps.
    - `held`: those of the part that it had.
    - `remedy`: a layout to stop at on the way, from which each move is a single collective, as a sentence; empty where
      none is known. `stop`: that layout.
    """

    whole: tuple[Count, ...]
    kept: tuple[Count, ...]
    held: tuple[Count, ...]
    remedy: str = ""
    stop: Spec = ()


def rematerialised(node: Node | None, flow: Dataflow, mesh: MeshShape, axis: str) -> Rematerialised | None:
    """Returns what becomes of the array that a collective gathers; None where all of it is used, or it gathers none.

    **Arguments:** `node`: the collective in the dataflow `flow` of its module. `mesh`: the module's. `axis`: the axes
    that it gathers over, joined by `+`."""
    if node is None or not flow.opcode(node).startswith("all-gather"):
        return None
    whole, slices = flow.instruction(node).shape.dims, list(_slices(node, flow))
    if not whole or not slices or any(each is None for each in slices):
        return None
    kept = max((flow.instruction(each).shape.dims for each in slices if each is not None), key=math.prod)
    operands = flow.sources(node)
    held = flow.instruction(operands[0]).shape.dims if operands else ()
    if math.prod(kept) >= math.prod(whole):
        return None
    return Rematerialised(whole, kept, held, *_remedy(held, whole, kept, axis, mesh))


def _slices(node: Node, flow: Dataflow) -> Iterator[Node | None]:
    """Yields what reads a gathered array: the slices that a device cuts out by its own number, and None for anything
    else."""
    for reader in flow.users(node):
        opcode = flow.opcode(reader)
        if opcode == "dynamic-slice" and node in flow.operands(reader)[0]:
            yield reader if _by_device(reader, flow) else None
        elif opcode in _BETWEEN:
            yield from _slices(reader, flow)
        else:
            yield None
    if node in flow.results:
        yield None


def _by_device(cut: Node, flow: Dataflow) -> bool:
    """Returns whether a slice begins where the number of the device says."""
    starts = [source for operand in flow.operands(cut)[1:] for source in operand]
    walked = itertools.takewhile(lambda reached: reached[0] <= _FAR, flow.walk(starts, flow.sources))
    return any(flow.opcode(reached) in ("partition-id", "replica-id") for _, reached in walked)


def _remedy(
    held: Sequence[int], whole: Sequence[int], kept: Sequence[int], axis: str, mesh: MeshShape
) -> tuple[str, Spec]:
    """Returns what removes a rematerialisation: a layout to stop at on the way, from which each move is a single
    collective, as a sentence and as that layout; empty where none is known. It is known where one dim was split over
    the axes that are gathered, and what is kept is another dim split over some of them: these move between the dims
    first, and the rest is gathered."""
    if not len(held) == len(whole) == len(kept):
        return "", ()
    before = [dim for dim, (part, size) in enumerate(zip(held, whole, strict=True)) if part < size]
    after = [dim for dim, (part, size) in enumerate(zip(kept, whole, strict=True)) if part < size]
    axes = axis.split("+")
    if len(before) != 1 or len(after) != 1 or before == after or len(axes) < 2:
        return "", ()
    parts = -(-whole[after[0]] // kept[after[0]])
    moving = [name for name in axes if mesh.size((name,)) == parts]
    if len(moving) != 1:
        return "", ()
    staying = tuple(name for name in axes if name != moving[0])
    stop: list[SpecEntry] = [None] * len(whole)
    stop[before[0]] = staying[0] if len(staying) == 1 else staying
    stop[after[0]] = moving[0]
    sentence = (
        f"constrain it to {spec_text(tuple(stop))} on the way (jax.lax.with_sharding_constraint): {moving[0]} then"
        f" moves from dim {before[0]} to dim {after[0]} by an all-to-all, and only {'+'.join(staying)} is gathered, of"
        " the part that is kept"
    )
    return sentence, tuple(stop)
