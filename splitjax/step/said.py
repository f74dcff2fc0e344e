"""Collects what users say of where the arguments of a step live: in the metadata of their models, or by the shardings
of the arrays themselves.

A call taken apart and the user's mesh come in; `Said`s come out, which `rules.pins` makes pins of. Flax's boxes are
looked for only where Flax is loaded: whoever has none needs no Flax.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from splitjax._layout_names import LayoutNames, LogicalRules, box_type
from splitjax.plan import Spec, SpecEntry
from splitjax.rules.pins import OPEN, Said
from splitjax.step.arguments import Bound


def said_of(bound: Bound, mesh: Mesh | AbstractMesh | None) -> tuple[Said, ...]:
    """Returns what is said of the arguments of a call.

    **Arguments:** `bound`: the call, taken apart. `mesh`: the user's; None for none, on which no array is placed.

    Three may say something: Flax Linen's boxes (`nn.Partitioned`, `nn.LogicallyPartitioned`), a static argument that
    knows the annotations of objects (`splitjax_annotations`, which gives `Said`s with the flat position of their leaf),
    and the `NamedSharding` of an array that is committed to this mesh. Logical axis rules are those of Flax's context
    when this is called, and of the annotation itself."""
    said = list(_boxed(bound))
    for _, static in bound.signature.static:
        for argument, leaf, how, names, logical in _annotated(static):
            start, stop = bound.spans[argument]
            if start + leaf < stop and hasattr(bound.leaves[start + leaf], "shape"):
                path = bound.arguments[start + leaf].path
                said.append(Said(path, how, entries_of(names), logical_rules(logical)))
    if mesh is not None:
        said += _placed(bound, mesh)
    return tuple(said)


def entries_of(names: Any) -> tuple[SpecEntry, ...]:
    """Returns what an annotation names per dim, from a tuple of names, a `PartitionSpec` or a `NamedSharding`."""
    names = names.spec if isinstance(names, NamedSharding) else names
    return tuple(
        OPEN
        if entry is PartitionSpec.UNCONSTRAINED
        else entry
        if entry is None or isinstance(entry, str)
        else tuple(entry) or None
        for entry in names
    )


def logical_rules(own: Sequence[Any] | None, is_first: bool = False) -> LogicalRules | None:
    """Returns the logical axis rules in force: those of Flax's context and an annotation's `own`; None without any.
    `is_first`: whether its own replace those of the context, as Linen has it, or stand beside them."""
    spmd = sys.modules.get("flax.core.spmd")
    context = () if spmd is None else tuple(spmd.get_logical_axis_rules() or ())
    rules = tuple(own or ()) if is_first and own else (*context, *(own or ()))
    return tuple((name, meant) for name, meant in rules) or None


def is_logical(box: Any) -> bool:
    """Returns whether the names of a Linen box are logical ones, which rules turn into axes."""
    return hasattr(box, "rules")


def with_layout(box: Any, **written: Any) -> Any:
    """Returns a Linen box with the fields `written`, `names` among them, in place of what its user wrote there, which
    `users_box` gives back."""
    own = users_box(box)
    users = tuple((field, getattr(own, field)) for field in written)
    return own.replace(**{**written, "names": LayoutNames(written["names"], users, rules_of(box))})


def users_box(box: Any) -> Any:
    """Returns a Linen box as its user wrote it, whatever `with_layout` has written into it."""
    return box.replace(**dict(box.names.users)) if isinstance(box.names, LayoutNames) else box


def rules_of(box: Any) -> LogicalRules | None:
    """Returns the logical axis rules for what the user wrote into a Linen box: those in force, or else those that were
    when a layout was written into it, for a state goes on where `nn.logical_axis_rules` has ended."""
    if not is_logical(box):
        return None
    return logical_rules(users_box(box).rules, is_first=True) or getattr(box.names, "logical", None)


def _boxed(bound: Bound) -> Iterator[Said]:
    """Returns what Linen's boxes say."""
    boxes = box_type()
    if boxes is None:
        return
    static = dict(bound.signature.static)
    for number, arg in enumerate(bound.args):
        if number in static:
            continue
        position = bound.spans[number][0]
        for node in jax.tree.leaves(arg, is_leaf=lambda node: isinstance(node, boxes)):
            size = len(jax.tree.leaves(node))
            if isinstance(node, boxes) and size == 1:
                path = bound.arguments[position].path
                how = "nn.with_logical_partitioning" if is_logical(node) else "nn.with_partitioning"
                place = path.removesuffix("/value").replace("/", ".")
                yield Said(path, f"{how} of {place}", entries_of(users_box(node).names), rules_of(node))
            position += size


def _annotated(static: Any) -> Sequence[tuple[int, int, str, Any, Any]]:
    """Returns what a static argument knows of annotations: position of the argument, number of the leaf in it, who says
    so, names, logical axis rules of its own."""
    annotations = getattr(static, "splitjax_annotations", None)
    return () if annotations is None else annotations()


def _placed(bound: Bound, mesh: Mesh | AbstractMesh) -> Iterator[Said]:
    """Returns what the shardings of arrays on `mesh` say."""
    for leaf, argument in zip(bound.leaves, bound.arguments, strict=True):
        spec = placed_spec(leaf, mesh)
        if spec is not None:
            yield Said(argument.path, f"the sharding of the array {argument.path}", spec, is_placed=True)


def placed_spec(leaf: Any, mesh: Mesh | AbstractMesh) -> Spec | None:
    """Returns where an array, or a description of one, lies on `mesh`, whatever the types of its axes; None where it is
    committed to no `NamedSharding` on it."""
    where = getattr(leaf, "sharding", None)
    if not isinstance(where, NamedSharding) or not getattr(leaf, "committed", True):
        return None
    if (where.mesh.axis_names, where.mesh.axis_sizes) != (mesh.axis_names, mesh.axis_sizes):
        return None
    if isinstance(where.mesh, Mesh) and isinstance(mesh, Mesh) and (where.mesh.devices != mesh.devices).any():
        return None
    return entries_of(where.spec)
