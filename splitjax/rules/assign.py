"""Assigns a layout to every argument of a step: parameters by rule, the rest of the state by what it follows,
batches over their axes.

A traced graph, a rule set and the mesh's shape go in; an `Assignment` comes out, from which the plan is made.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from splitjax.errors import MeshError, Refusal, RuleError, UnavailableError
from splitjax.mesh import MeshShape
from splitjax.plan import LayerPlan, LeafPlan, Spec, spec_entry, spec_text
from splitjax.roles import LATER, ROLE_BY_NAME, ROLE_NAMES, Role
from splitjax.rules.blocks import in_blocks
from splitjax.rules.decide import decide
from splitjax.rules.decisions import Axes, Decisions
from splitjax.rules.match import axes_text, dim_text, divides, first_match, sized_text
from splitjax.rules.pins import Pin, contradiction, is_own
from splitjax.rules.rule import Rule
from splitjax.rules.ruleset import RuleSet, available, load_rules
from splitjax.trace.graph import Graph, Leaf

# Replicated state of at least this size that follows no parameter is worth a note.
LARGE_BYTES: int = 1 << 20


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Holds the layouts that a rule set gives a step on a mesh.

    - `rules`: the name of the rule set.
    - `replicated_batch`: "all" or "data".
    - `batch_axes`: axes of size above 1 that split the batch.
    - `leaves`: every argument of the step, in flat order.
    - `layers`: in program order.
    - `notes`: lines for the plan.
    - `dead`: names of rules that are the first to match of no parameter.
    - `unfit`: the parameters that do not lie as their rules would have them first: path -> why.
    """

    rules: str  # name of the rule set
    replicated_batch: str  # "all" | "data"
    batch_axes: tuple[str, ...]  # axes of size above 1 that split the batch
    leaves: tuple[LeafPlan, ...]  # every argument of the step, in flat order
    layers: tuple[LayerPlan, ...]  # in program order
    notes: tuple[str, ...]
    dead: tuple[str, ...]  # names of rules that are the first to match of no parameter
    unfit: Mapping[str, str] = dataclasses.field(default_factory=dict)


def assign(
    graph: Graph, rules: RuleSet, mesh: MeshShape | Mapping[str, int], pins: Mapping[str, Pin] | None = None
) -> Assignment:
    """Lays out every argument of a traced step by a rule set.

    **Arguments:**

    - `graph`: the traced step.
    - `rules`: the rule set.
    - `mesh`: the mesh's shape, or a mapping from axis to size.
    - `pins`: by path, where users pinned parameters. A pin comes before a shipped rule, with a note.

    The result is legal: every split divides, an array uses a mesh axis at most once, and parameters that share
    storage agree (see `decide`). Batches are split over the axes that
    `rules.replicated_batch` says.

    Raises `MeshError` for a rule that names an axis the mesh cannot have, and for an axis without a role that no rule
    names; `UnavailableError` for axes that this version lays nothing out over; `RuleError` where an axis of another
    role than data (or one of `rules.axes`) shards no parameter and the set does not allow that; `BatchError` where the
    batch does not divide.
    """
    mesh = MeshShape.of(mesh)
    for rule, refusal in unknown_axes(rules, mesh):
        place = f"rule set {rules.name!r}" + (f", rule {rule.name!r}" if rule else ", key 'axes'")
        raise MeshError(
            refusal.message,
            value=dict(mesh.axes),
            place=place,
            remedy=f"add the axis to the mesh, or let the rule name one of {', '.join(mesh.names)}",
        )
    refused = refused_roles(rules, mesh)
    if refused is not None:
        raise refused.error()
    decisions, heeded = _decided(graph, rules, mesh, pins or {})
    outvoted = _outvoted(graph, rules, mesh, decisions, heeded) if heeded else []
    for axis in idle_axes(graph, rules, mesh, decisions):
        raise _idle(graph, rules, mesh, decisions, axis)
    wanted = rules.batch_axes(mesh)
    batch_axes, batch_notes = _batch_axes(graph, mesh, wanted)
    leaves = tuple(_leaf(graph, mesh, decisions, wanted, leaf) for leaf in graph.leaves)
    specs = {leaf.path: leaf.spec for leaf in leaves}
    layers = []
    for layer in graph.layers:
        weight = decisions.params.get(layer.params[0]) if layer.params else None
        layers.append(
            LayerPlan(
                layer.name,
                layer.kind,
                layer.params,
                tuple(specs[path] for path in layer.params),
                weight.rule if weight else "default",
                weight.note if weight else "",
            )
        )
    notes = outvoted + [
        f"{decision.path}: {decision.note}" for decision in decisions.params.values() if decision.problem
    ]
    notes += [
        f"{leaf.path}: {leaf.note}" for leaf in leaves if leaf.role not in ("param", "batch", "input") and leaf.note
    ]
    if not decisions.params:
        notes.append("the step has no parameters, so no rule applies")
    return Assignment(
        rules.name,
        rules.batch_mode,
        batch_axes,
        leaves,
        tuple(layers),
        (*notes, *batch_notes),
        dead_rules(rules, decisions),
        {path: decision.unfit for path, decision in decisions.params.items() if decision.unfit},
    )


def _decided(
    graph: Graph, rules: RuleSet, mesh: MeshShape, pins: Mapping[str, Pin]
) -> tuple[Decisions, Mapping[str, Pin]]:
    """Returns the decisions, and the pins that they heed: annotations, and of the arrays that lie somewhere those that
    lie where the decisions would not have them. A state that a step returned is where its rules put it."""
    heeded = {path: pin for path, pin in pins.items() if not pin.is_placed}
    while True:
        decisions = decide(graph, rules, mesh, heeded)
        apart = {
            path: pin
            for path, pin in pins.items()
            if path in decisions.params and path not in heeded and not _agrees(pin, decisions.params[path].axes)
        }
        if not apart:
            return decisions, heeded
        heeded |= apart


def _agrees(pin: Pin, axes: tuple[Axes, ...]) -> bool:
    return all(pin.axes(dim) in (None, own) for dim, own in enumerate(axes))


def _outvoted(
    graph: Graph, rules: RuleSet, mesh: MeshShape, decisions: Decisions, pins: Mapping[str, Pin]
) -> list[str]:
    """Says which rules a pin outvotes, a line each for the plan. Raises `PinError` where these are the user's own."""
    by_rules, own, lines = decide(graph, rules, mesh), is_own(rules), []
    for path, pin in pins.items():
        if path not in decisions.params or decisions.params[path].axes == by_rules.params[path].axes:
            continue
        ruled = by_rules.params[path]
        spec = tuple(map(spec_entry, ruled.axes))
        if own and ruled.matched is not None and ruled.problem != "misfit":
            raise contradiction(path, pin, rules, ruled.matched, spec)
        by_rule = f"rule {ruled.matched!r} of {rules.name!r}" if ruled.matched else f"rule set {rules.name!r}"
        lines.append(
            f"{path}: {pin.reason} to {spec_text(tuple(map(spec_entry, decisions.params[path].axes)))}; {by_rule} would"
            f" put it to {spec_text(spec)}"
        )
    return lines


def unknown_axes(rules: RuleSet, mesh: MeshShape) -> list[tuple[Rule | None, Refusal]]:
    """Finds the rules in `rules` that name an axis that `mesh` lacks and that is none of the known ones.

    Returns each with the refusal of the axis; None stands for the set's own `axes`.
    """
    refused = ((rule, mesh.roles.unknown(rule.axes if rule else rules.axes)) for rule in (*rules.rules, None))
    return [(rule, refusal) for rule, refusal in refused if refusal is not None]


def refused_roles(rules: RuleSet, mesh: MeshShape) -> Refusal | None:
    """Returns the refusal of an axis of `mesh`, of a size above 1, that means nothing to the set `rules`; None without.

    No rule names it, and its role is not known (`MeshError`) or belongs to a later version (`UnavailableError`); or a
    rule stores weights over it, over which the batch does not lie (`RuleError`), or within a group alone
    (`MeshError`)."""
    named = mesh.roles.resolve((*rules.axes, *(axis for rule in rules.rules for axis in rule.axes)))
    for axis in mesh.present(mesh.names):
        role = mesh.roles.role(axis)
        if axis in named:
            continue
        if role in LATER:
            return Refusal(
                f"the axis {axis!r} has the role {str(role)!r}, over which this version lays nothing out",
                value=dict(mesh.axes),
                place="mesh",
                remedy=f"give its devices to another axis, or say what the axis is for: roles={{{axis!r}: 'tensor'}}",
                kind=UnavailableError,
            )
        if role is None and not (rules.allow_replicated and rules.replicated_batch == "all"):
            return Refusal(
                f"nobody knows what the mesh axis {axis!r} is for: its name tells no role, and the rule set"
                f" {rules.name!r} does not name it",
                value=dict(mesh.axes),
                place="mesh",
                remedy=f"say its role, roles={{{axis!r}: 'tensor'}} ({', '.join(ROLE_NAMES)}), or call it by a name"
                f" that tells it ({', '.join(ROLE_BY_NAME)})",
                kind=MeshError,
            )
    batch_axes = rules.batch_axes(mesh)
    for rule in rules.rules:
        apart = [axis for axis in mesh.meant(rule.store) if axis not in batch_axes] if rule.store else []
        if apart:
            return Refusal(
                f"the rule stores weights over {' and '.join(apart)}, and the batch does not lie over it: its devices"
                " would gather what they share",
                value=rule.store,
                place=f"rule set {rules.name!r}, rule {rule.name!r}, key 'store'",
                remedy=f"take {' and '.join(apart)} out of store, compute over it (shard), or put it into"
                " replicated_batch",
                kind=RuleError,
            )
        stored = mesh.present(mesh.meant(rule.store)) if rule.store and rules.replicated_batch == "all" else ()
        if stored and mesh.storing.isdisjoint(stored):
            return Refusal(
                f"the rule stores weights over {' and '.join(stored)} alone, whose devices are one group: what lies in"
                " parts within a group is computed in parts there, and not gathered",
                value=dict(mesh.axes),
                place=f"mesh, with rule {rule.name!r} of rule set {rules.name!r}",
                remedy="give an axis of the role data or storage more than one device,"
                " such as {'data': 2, 'model': 4} for eight",
                kind=MeshError,
            )
    return None


def idle_axes(graph: Graph, rules: RuleSet, mesh: MeshShape, decisions: Decisions) -> tuple[str, ...]:
    """Finds the axes over which the set has to shard something, and over which every parameter stays whole.

    **Arguments:**

    - `graph`: the traced step.
    - `rules`: the rule set.
    - `mesh`: the mesh's shape.
    - `decisions`: what `decide` made of them.
    """
    if rules.allow_replicated or not graph.params:
        return ()
    used = {axis for decision in decisions.params.values() for axes in decision.axes for axis in axes}
    named = mesh.roles.resolve(rules.axes)
    wanted = [axis for axis in mesh.names if mesh.roles.role(axis) is not Role.DATA or axis in named]
    return tuple(axis for axis in mesh.present(wanted) if axis not in used)


def dead_rules(rules: RuleSet, decisions: Decisions) -> tuple[str, ...]:
    """Returns the names of the rules in `rules` that are, by `decisions`, the first to match of no parameter."""
    fired = {decision.matched for decision in decisions.params.values()}
    return tuple(rule.name for rule in rules.rules if rule.name not in fired)


def _idle(graph: Graph, rules: RuleSet, mesh: MeshShape, decisions: Decisions, axis: str) -> RuleError:
    """Makes the error for an axis that shards nothing: what the step has, and why no rule did anything with it."""
    leaves = {leaf.path: leaf for leaf in graph.params}
    shown = [f"{it.path} {leaves[it.path].shape} ({it.kind})" for it in decisions.params.values()]
    lines = [f"rule set {rules.name!r} leaves every parameter whole on each of the {axes_text(mesh, (axis,))} devices"]
    lines.append(f"  parameters: {', '.join(shown[:8])}{f', and {len(shown) - 8} more' if len(shown) > 8 else ''}")
    for rule in rules.rules:
        lines.append(f"  rule {rule.name!r} ({rule.matchers}): {_why_idle(rule, axis, mesh, decisions)}")
    if not rules.rules:
        lines.append("  the set has no rules")
    kinds = {it.path: it.kind for it in decisions.params.values()}
    others = [name for name in _users_of(graph, mesh.roles.role(axis), kinds) if name != rules.name]
    remedy = (
        f"add a rule that shards one of these over {axis!r}, take {axis!r} out of the mesh, or say allow_replicated ="
        " true" + (f"; of the shipped rule sets {', '.join(map(repr, others))} would use {axis!r}" if others else "")
    )
    return RuleError("\n".join(lines), value=dict(mesh.axes), place=f"rule set {rules.name!r}", remedy=remedy)


def _users_of(graph: Graph, role: Role | None, kinds: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the names of the shipped rule sets with a rule that decides a parameter of this step and names an axis of
    this role. `kinds`: of the layers, by the path of the parameter."""
    sets = (load_rules(name) for name in available())
    return tuple(
        rules.name
        for rules in sets
        if any(
            (rule := first_match(rules.rules, leaf, kinds[leaf.path])) is not None and role in rule.axes
            for leaf in graph.params
            if leaf.path in kinds
        )
    )


def _why_idle(rule: Rule, axis: str, mesh: MeshShape, decisions: Decisions) -> str:
    """Says why a rule shards nothing over an axis."""
    mine = [decision for decision in decisions.params.values() if decision.matched == rule.name]
    if not mine:
        return "matches none of them first"
    count = f"{len(mine)} parameter{'s' if len(mine) > 1 else ''}"
    if rule.replicates and not rule.store:
        return f"replicates {count} on purpose"
    if axis not in mesh.meant(rule.axes):
        return f"matches {count}, and does not name {axis!r}"
    noted = next((decision for decision in mine if decision.note), mine[0])
    return f"matches {count}, and none of them can be split" + (f"; {noted.path}: {noted.note}" if noted.note else "")


def _batch_axes(graph: Graph, mesh: MeshShape, wanted: Axes) -> tuple[Axes, tuple[str, ...]]:
    """Returns the axes over which all batches lie, of those that are `wanted`, and lines for the plan: each batch lies
    over the axes whose devices divide it, the most devices that do. What only some of them lie over is left to XLA: a
    constraint that does not divide is one that XLA's partitioner gives wrong numbers for."""
    used = set(wanted)
    groups: dict[tuple[int, Axes], list[str]] = {}
    for leaf in graph.leaves:
        if leaf.role == "batch" and leaf.shape:
            size = leaf.shape[leaf.example_dim]
            axes = mesh.dividing(wanted, size)
            used.intersection_update(axes)
            if axes != wanted:
                groups.setdefault((size, axes), []).append(leaf.path)
    if not groups:
        return wanted, ()
    notes = [
        f"{', '.join(paths[:4])}{f' and {len(paths) - 4} more' if len(paths) > 4 else ''}: {size} examples do not"
        f" divide by {axes_text(mesh, wanted)}, so they lie over {axes_text(mesh, axes) if axes else 'no axis'}"
        for (size, axes), paths in groups.items()
    ]
    return tuple(axis for axis in wanted if axis in used), tuple(notes)


def _leaf(graph: Graph, mesh: MeshShape, decisions: Decisions, wanted: tuple[str, ...], leaf: Leaf) -> LeafPlan:
    note = ""
    if leaf.role == "param":
        decision = decisions.params[leaf.path]
        spec, rule, note = tuple(spec_entry(axes) for axes in decision.axes), decision.rule, decision.note
    elif leaf.role == "batch":
        axes = mesh.dividing(wanted, leaf.shape[leaf.example_dim]) if leaf.shape else ()
        spec = tuple(spec_entry(axes) if dim == leaf.example_dim else None for dim in range(len(leaf.shape)))
        rule = "batch"
    elif leaf.role == "input":
        spec, rule = (None,) * len(leaf.shape), "input"
    else:
        spec, rule, note = _follow(graph, mesh, decisions, leaf)
    ordered = tuple(spec_entry(mesh.in_order(entry)) if isinstance(entry, tuple) else entry for entry in spec)
    if ordered != spec:
        note = "; ".join(
            filter(None, (note, "several axes along one dim are in the mesh's order (axes-out-of-mesh-order)"))
        )
    return LeafPlan(
        leaf.path,
        leaf.shape,
        leaf.dtype,
        leaf.role,
        leaf.is_state,
        ordered,
        rule,
        note,
        bytes_per_device(leaf, spec, mesh),
        example_dim=leaf.example_dim or None,
    )


def _follow(graph: Graph, mesh: MeshShape, decisions: Decisions, leaf: Leaf) -> tuple[Spec, str, str]:
    """Returns spec, rule and note of optimizer state or a statistic: every dim as the parameter dim with the same
    storage class."""
    axes: list[Axes] = []
    notes: list[str] = []
    path = leaf.follows
    for dim, atoms in enumerate(leaf.dims):
        mine: Axes = ()
        if atoms:
            label = graph.hard[atoms[0]]
            mine = decisions.classes.get(label, ())
            path = path or decisions.owners.get(label)
        if mine and not divides([graph.atom_sizes[atom] for atom in atoms], mesh.size(mine)):
            notes.append(f"{sized_text(graph, leaf, dim)} does not divide by {axes_text(mesh, mine)}")
            mine = ()
        if used := [axis for axis in mine if any(axis in earlier for earlier in axes)]:
            notes.append(f"{dim_text(leaf, dim)} stays whole: {used[0]} already splits another dim")
            mine = ()
        axes.append(mine)
    if path is not None and leaf.follows == path and (left := _left_whole(graph, mesh, decisions, leaf, axes)):
        notes.append(left)
    if path is None and mesh.num_devices > 1 and leaf.num_bytes >= LARGE_BYTES:
        notes.append("follows no parameter, so every device holds all of it")
    return tuple(map(spec_entry, axes)), f"follows {path}" if path else "default", "; ".join(notes)


def _left_whole(graph: Graph, mesh: MeshShape, decisions: Decisions, leaf: Leaf, axes: Sequence[Axes]) -> str:
    """Says over which axes state in blocks, with these `axes` per dim, stays whole while its parameter is split; "" for
    other state, and for none."""
    decision = decisions.params.get(leaf.follows or "")
    own = {axis for each in axes for axis in each}
    missed = [axis for each in decision.axes for axis in each if axis not in own] if decision is not None else []
    if decision is None or not mesh.present(missed) or leaf not in in_blocks(graph, graph.leaf(decision.path)):
        return ""
    return (
        f"stays whole over {axes_text(mesh, mesh.present(missed))}, over which {decision.path} is split: its blocks are"
        " no parts of that dim"
    )


def bytes_per_device(leaf: Leaf, spec: Spec, mesh: MeshShape) -> int:
    """Returns the bytes of one device's part of an array on `mesh` (parts rounded up); `leaf` is split as `spec`
    says."""
    return leaf.itemsize * math.prod(mesh.local_shape(leaf.shape, spec)) if any(spec) else leaf.num_bytes
