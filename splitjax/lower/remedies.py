"""What a plan does about operations that XLA's partitioner computes wrongly: graph + table -> constraints and notes, or an error.

An operation of the table (`splitjax.partitioner.DEFECTS`) that nothing sharded reaches is left alone. For the others the
row's action is taken: convolutions are evaluated device by device (`local_convolution.py`), other operations run whole on
every device, and where neither is possible the plan is refused.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from splitjax.errors import PartitionerError
from splitjax.mesh import MeshShape
from splitjax.partitioner import Action, Defect, defect_named
from splitjax.plan import Constraint
from splitjax.trace.graph import Graph, Suspect


@dataclasses.dataclass(frozen=True)
class Remedies:
    """Constraints that gather operations which run whole, and one note for every row of the table that was applied."""

    constraints: tuple[Constraint, ...] = ()
    notes: tuple[str, ...] = ()


def apply_remedies(graph: Graph, mesh: MeshShape, is_reached: Callable[[Suspect], bool]) -> Remedies:
    """What is done about the suspects of a step on a mesh. `is_reached`: whether something sharded reaches an operation.

    Raises `PartitionerError` for an operation that would be computed wrongly and cannot be evaluated otherwise."""
    if mesh.num_devices == 1:
        return Remedies()
    reached: dict[str, list[Suspect]] = collections.defaultdict(list)
    for suspect in graph.suspects:
        if is_reached(suspect):
            reached[suspect.defect].append(suspect)
    constraints: list[Constraint] = []
    notes = []
    for name, suspects in reached.items():
        row = defect_named(name)
        _refuse(row, suspects)
        if row.action is Action.WHOLE:
            constraints += [constraint for suspect in suspects for constraint in _whole(row, suspect)]
        notes.append(f"{_places(graph, suspects)}: {row.remedy}, because XLA's partitioner computes it wrongly ({row.name})")
    return Remedies(tuple(constraints), tuple(notes))


def _refuse(row: Defect, suspects: Sequence[Suspect]) -> None:
    for suspect in suspects:
        if row.action is Action.REFUSE or not suspect.editable:
            inside = "" if suspect.editable else "; it stands inside a custom derivative rule, where it cannot be evaluated otherwise"
            raise PartitionerError(
                f"XLA's partitioner computes {row.operation} wrongly if {row.condition} ({row.consequence}){inside}",
                value=row.name, place=suspect.source or suspect.primitive,
                remedy="use a rule set that leaves what the operation reads whole, or a mesh with one device along the axis; "
                "or write the operation without a custom derivative rule" if not suspect.editable else
                "use a rule set that leaves what the operation reads whole, or a mesh with one device along the axis",
            )


def _whole(row: Defect, suspect: Suspect) -> list[Constraint]:
    """Pins all operands and results of an operation to be whole on every device."""
    operands = [(position, dims) for position, dims in enumerate(suspect.operand_dims)]
    results = [(-1 - position, dims) for position, dims in enumerate(suspect.result_dims)]
    return [
        Constraint(suspect.site, position, (None,) * len(dims), suspect.primitive, f"{row.name}: {row.remedy}")
        for position, dims in (*operands, *results) if dims
    ]


def _places(graph: Graph, suspects: Sequence[Suspect]) -> str:
    """`3 operations conv_general_dilated, the first in layer stem at train.py:12`."""
    first = suspects[0]
    layer = next((use.layer for use in graph.uses if use.site == first.site), None)
    where = " ".join(part for part in (f"in layer {layer}" if layer else "", f"at {first.source}" if first.source else "") if part)
    if len(suspects) == 1:
        return f"{first.primitive} {where}".strip()
    return f"{len(suspects)} operations {first.primitive}" + (f", the first {where}" if where else "")
