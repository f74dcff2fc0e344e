"""Lets the boxes of Flax Linen name the layout that a state has.

States on a plan and their shardings come in; the same states come out, in which every `nn.Partitioned` and
`nn.LogicallyPartitioned` names the mesh axes that split its array. A box whose user named them already, directly or
through the logical axis rules in force, is as the user wrote it. Any other keeps beside these names what the user wrote
(`step.said`): the layout that a rule or a plan decided is no annotation, and pins nothing when the state is planned
again.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from splitjax._layout_names import box_type
from splitjax.plan import Spec
from splitjax.step.said import entries_of, is_logical, logical_rules, users_box, with_layout


def name_layout(states: Any, shardings: Any) -> Any:
    """Returns `states`, a pytree with boxes perhaps, with boxes that name the layouts in `shardings`, a pytree of
    `NamedSharding`s of the same structure."""
    boxes = box_type()
    if boxes is None:
        return states
    is_box = lambda node: isinstance(node, boxes)
    return jax.tree.map(
        lambda node, where: _named(node, where.value) if is_box(node) else node, states, shardings, is_leaf=is_box
    )


def _named(box: Any, where: Any) -> Any:
    """Returns a box that names the layout `where` of its array."""
    if not isinstance(where, NamedSharding):  # a box around several arrays
        return box
    users, ndim = users_box(box), len(box.value.shape)
    layout, own = _padded(entries_of(where.spec), ndim), _padded(entries_of(users.names), ndim)
    if _padded(_as_flax_reads(users), ndim) == layout:
        return users
    # A name of a whole dim stays, for `nn.scan` looks for that of its own dim.
    names = tuple(
        entry or (name if isinstance(name, str) and name not in where.mesh.axis_names else None)
        for entry, name in zip(layout, own, strict=True)
    )
    if not is_logical(box):
        return users if names == own else with_layout(box, names=names)
    axes = dict.fromkeys(entry for entry in layout if isinstance(entry, str))
    return with_layout(box, names=names, rules=tuple((axis, axis) for axis in axes))


def _as_flax_reads(box: Any) -> Spec:
    """Returns the spec that Flax makes of the names of a box."""
    if not is_logical(box):
        return entries_of(box.names)
    from flax.linen.spmd import logical_to_mesh_axes  # Flax is loaded, or there would be no box

    rules = logical_rules(box.rules, is_first=True) or ()
    return entries_of(logical_to_mesh_axes(box.names, rules) or ())


def _padded(spec: Spec, ndim: int) -> Spec:
    return (*spec, *(None,) * (ndim - len(spec)))
