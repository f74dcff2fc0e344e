"""Decides what a plan does about operations that XLA's partitioner computes wrongly.

A step's graph, with its suspects marked, and what the plan splits come in; constraints, sites of operations that are
evaluated otherwise, and notes for the plan come out, or an error. It exists because a program that XLA splits wrongly
gives other numbers without a word.

An operation of the table (`splitjax.partitioner.DEFECTS`) that nothing sharded reaches is left alone. For the others
the row's action is taken: convolutions are evaluated device by device (`local_convolution.py`), some operations as
others of the same meaning (`rewrites.py`), others have the dims in question gathered, and where nothing helps the plan
is refused. Inside a custom derivative rule (`jax.custom_vjp`, `jax.custom_jvp`), of whose dims nothing is known, they
run whole on every device.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from splitjax import _compat
from splitjax.cost.convolutions import LocalConvolution
from splitjax.errors import PartitionerError
from splitjax.mesh import MeshShape
from splitjax.partitioner import COVERED, Action, Defect, Touched, defect_named, defect_of
from splitjax.plan import Constraint, LeafPlan, spec_axes, spec_text
from splitjax.planning.sites.constraints import FREE
from splitjax.planning.sites.sharded_dims import ShardedDims
from splitjax.rules.sharded_state import is_in_order
from splitjax.trace.flatten import FlatStep, Op, flatten
from splitjax.trace.graph import Graph
from splitjax.trace.suspect_dims import Suspect
from splitjax.trace.suspects import operation_of


@dataclasses.dataclass(frozen=True)
class Remedies:
    """Holds what is done about the suspects of a step.

    - `constraints`: gather what is read by operations that run whole.
    - `notes`: a sentence for every row of the table that was applied.
    """

    constraints: tuple[Constraint, ...] = ()
    notes: tuple[str, ...] = ()


def apply_remedies(reached: Mapping[str, Sequence[Suspect]], graph: Graph) -> Remedies:
    """Returns what is done about the suspects `reached` by something split, as `reached_suspects` finds them in
    `graph`.

    Raises `PartitionerError` for an operation that would be computed wrongly and cannot be evaluated otherwise."""
    constraints: list[Constraint] = []
    notes: list[str] = []
    for name, suspects in reached.items():
        row = defect_named(name)
        _refuse(row, suspects)
        if row.action is Action.WHOLE:
            constraints += [
                constraint for suspect in suspects if suspect.editable for constraint in _whole(row, suspect)
            ]
        hidden = [suspect for suspect in suspects if not suspect.editable]
        for chosen, remedy in (
            (suspects if not hidden else [suspect for suspect in suspects if suspect.editable], row.remedy),
            (hidden, _IN_A_RULE),
        ):
            if chosen:
                notes.append(
                    f"{_places(graph, chosen)}: {remedy}, because XLA's partitioner gets it wrong ({row.name})"
                )
    return Remedies(tuple(constraints), tuple(notes))


_IN_A_RULE = "inside a custom derivative rule, where it is gathered and runs whole on every device"


def reached_suspects(
    graph: Graph, mesh: MeshShape, sharded: ShardedDims, convolutions: Sequence[LocalConvolution]
) -> dict[str, list[Suspect]]:
    """Finds the suspects of a step that a plan makes wrong, and returns them by the name of their row.

    **Arguments:**

    - `graph`: of the step. `mesh`: the shape of the mesh.
    - `sharded`: what the plan splits.
    - `convolutions`: those of the suspects that are evaluated device by device.
    """
    reached: dict[str, list[Suspect]] = collections.defaultdict(list)
    if mesh.num_devices == 1:
        return reached
    local = {convolution.site for convolution in convolutions}
    for suspect in graph.suspects:
        row = defect_named(suspect.defect)
        if row.uneven:
            suspect = _unevenly_split(suspect, row, graph, mesh)
            is_reached = bool(suspect.touched) and (suspect.editable or suspect.rule_at is not None)
        elif suspect.convolution is not None:
            is_reached = suspect.site in local and _is_split(suspect, sharded)
        else:  # what is refused cannot be compiled for several devices, split or not
            is_reached = row.action is Action.REFUSE or _is_split(suspect, sharded)
        if is_reached:
            reached[suspect.defect].append(suspect)
    return reached


def guarded_sites(reached: Mapping[str, Sequence[Suspect]]) -> frozenset[tuple[int, ...]]:
    """Returns the sites of calls with custom derivative rules in which suspects run whole (`whole_inside`). `reached`:
    as `reached_suspects` gives it."""
    return frozenset(
        suspect.rule_at for suspects in reached.values() for suspect in suspects if suspect.rule_at is not None
    )


def whole_inside(
    jaxpr: _compat.ClosedJaxpr | _compat.Jaxpr, mesh: MeshShape
) -> tuple[tuple[Constraint, ...], frozenset[tuple[int, ...]]]:
    """Treats a jaxpr of whose dims nothing is known, such as that of a derivative rule.

    Returns the constraints that gather what every suspect of `jaxpr` reads and gives, and the sites of those that are
    rewritten instead. Of a row with `uneven` dims only those are gathered that some axis of `mesh` does not divide.
    """
    constraints: list[Constraint] = []
    rewritten = set()
    flat = flatten(jaxpr)
    for op in flat.ops:
        covered = defect_of(operation_of(op, flat)) if op.primitive in COVERED else None
        if covered is None or not op.editable:
            continue
        if covered[0].uneven:
            constraints += _uneven_inside(op, covered, flat, mesh)
            continue
        if covered[0].action is Action.REWRITE:
            rewritten.add(op.site)
            continue
        ranks = {position: len(flat.shapes[v]) for position, v in enumerate(op.inputs)} | {
            -1: len(flat.shapes[op.outputs[0]])
        }
        constraints += [
            Constraint(op.site, position, (None,) * rank, op.primitive, f"{covered[0].name}: {_IN_A_RULE}")
            for position, rank in ranks.items()
            if rank
        ]
    return tuple(constraints), frozenset(rewritten)


def _uneven_inside(op: Op, covered: tuple[Defect, Touched], flat: FlatStep, mesh: MeshShape) -> list[Constraint]:
    """Gathers the dims of an operation that XLA could split unevenly."""
    row, touched = covered
    pinned: list[Constraint] = []
    for position, dims in touched.items():
        shape = flat.shapes[op.inputs[position] if position >= 0 else op.outputs[0]]
        uneven = {dim for dim in dims if _is_uneven(shape[dim], row, mesh)}
        if uneven:
            spec = tuple(None if dim in uneven else FREE for dim in range(len(shape)))
            pinned.append(Constraint(op.site, position, spec, op.primitive, f"{row.name}: {row.remedy}"))
    return pinned


def _is_uneven(size: int, row: Defect, mesh: MeshShape) -> bool:
    """Returns whether XLA could split a dim of this size unevenly, and gets that wrong. On a mesh of one axis most rows
    are right."""
    axis_sizes = [mesh.size(axis) for axis in mesh.present(mesh.names)]
    reaches = row.beside_examples or len(axis_sizes) > 1
    return reaches and size > 1 and any(size % count for count in axis_sizes)


def _is_split(suspect: Suspect, sharded: ShardedDims) -> bool:
    return sharded.reaches((tensor.chosen for tensor in suspect.touched), suspect.site)


def _unevenly_split(suspect: Suspect, row: Defect, graph: Graph, mesh: MeshShape) -> Suspect:
    """Returns the suspect with those of its dims that XLA could split unevenly, of which the examples are none. Where
    the indices run along the examples as well (the ids of an embedding), most rows have no such dims: XLA splits the
    examples then."""
    size_of = lambda dim: math.prod(graph.atom_sizes[atom] for atom in dim)
    along_examples = any(graph.is_example(dim) for tensor in suspect.touched for dim in tensor.chosen)
    touched = []
    for tensor in suspect.touched if row.beside_examples or not along_examples else ():
        uneven = (dim for dim in tensor.dims if _is_uneven(size_of(tensor.atoms[dim]), row, mesh))
        dims = tuple(dim for dim in uneven if not graph.is_example(tensor.atoms[dim]))
        if dims:
            touched.append(dataclasses.replace(tensor, dims=dims))
    return dataclasses.replace(suspect, touched=tuple(touched))


def check_orders(leaves: Sequence[LeafPlan], mesh: MeshShape) -> None:
    """Raises `PartitionerError` for one of `leaves`, or its gradient, that several axes split along a dim in another
    order than that of `mesh`, beside another split dim. Neither rules nor sharded state give such a layout; a plan that
    was edited may."""
    for leaf in leaves:
        for spec in (leaf.spec, leaf.gradient or ()):
            # One axis is in order by itself.
            several = any(isinstance(entry, tuple) and len(entry) > 1 for entry in spec)
            if several and not is_in_order(tuple(spec_axes((entry,)) for entry in spec), mesh):
                row = defect_named("axes-out-of-mesh-order")
                raise PartitionerError(
                    f"XLA's partitioner computes {row.operation} wrongly if {row.condition}",
                    value=spec_text(spec),
                    place=leaf.path,
                    remedy=(
                        f"list the axes of a dim in the order of the mesh ({', '.join(mesh.names)}), or split one dim"
                        " alone"
                    ),
                )


def rewritten_sites(graph: Graph, mesh: MeshShape) -> frozenset[tuple[int, ...]]:
    """Returns the sites of operations of `graph` that are evaluated as others of the same meaning (`rewrites.py`).

    They are, split or not, wherever `mesh` has several devices: it costs nothing.
    """
    if mesh.num_devices == 1:
        return frozenset()
    return frozenset(
        suspect.site
        for suspect in graph.suspects
        if suspect.editable and defect_named(suspect.defect).action is Action.REWRITE
    )


def _refuse(row: Defect, suspects: Sequence[Suspect]) -> None:
    """Raises `PartitionerError` for the first suspect about which nothing can be done."""
    for suspect in suspects:
        if row.action is Action.REFUSE or not (suspect.editable or suspect.rule_at is not None):
            inside = "" if suspect.editable else "; it stands inside a call that cannot be evaluated otherwise"
            raise PartitionerError(
                f"XLA's partitioner computes {row.operation} wrongly if {row.condition} ({row.consequence}){inside}",
                value=row.name,
                place=suspect.source or suspect.primitive,
                remedy=(
                    "use a rule set that leaves what the operation reads whole, or a mesh with one device along the"
                    " axis; or take the operation out of that call"
                    if not suspect.editable
                    else (
                        "use a rule set that leaves what the operation reads whole, or a mesh with one device along the"
                        " axis"
                    )
                ),
            )


def _whole(row: Defect, suspect: Suspect) -> list[Constraint]:
    """Pins the dims in question to be whole on every device; XLA decides about the others."""
    return [
        Constraint(
            suspect.site,
            tensor.position,
            tuple(None if dim in tensor.dims else FREE for dim in range(len(tensor.atoms))),
            suspect.primitive,
            f"{row.name}: {row.remedy}",
        )
        for tensor in suspect.touched
    ]


def _places(graph: Graph, suspects: Sequence[Suspect]) -> str:
    """Names the suspects, such as `3 operations conv_general_dilated, the first in layer stem at train.py:12`."""
    first = suspects[0]
    layer = next((use.layer for use in graph.uses if use.site == first.site), None)
    where = " ".join(
        part for part in (f"in layer {layer}" if layer else "", f"at {first.source}" if first.source else "") if part
    )
    if len(suspects) == 1:
        return f"{first.primitive} {where}".strip()
    return f"{len(suspects)} operations {first.primitive}" + (f", the first {where}" if where else "")
