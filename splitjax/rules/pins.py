"""Reads what users say of where arrays live (annotations of their model, shardings of their arrays) as pins.

`Said`s, names per dim as they were written, and the mesh's shape come in; `Pin`s, specs over axes of the mesh, come
out. A pin decides before any rule does. What it says is complete: a dim without a name is whole. Names are axes of the
mesh, roles of axes, or logical names, which the logical axis rules that go with them turn into either.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from splitjax.errors import PinError
from splitjax.mesh import MeshShape
from splitjax.plan import Spec, SpecEntry, spec_entry, spec_text
from splitjax.roles import ROLE_NAMES, Role
from splitjax.rules.decisions import Axes
from splitjax.rules.ruleset import AUTO, RuleSet, available, load_rules
from splitjax.trace.graph import Graph

OPEN = "?"  # an entry of a spec: nothing is said of the dim


@dataclasses.dataclass(frozen=True)
class Said:
    """Says where an array is to live, as a user wrote it.

    - `path`: of the leaf. `how`: who says so, for people, such as `nnx.with_partitioning of layers.0.kernel`.
    - `names`: per dim None for a whole one, a name, several names, or `OPEN`.
    - `logical`: pairs of a logical name and what it means, in order of precedence; None where none are in force.
    - `is_placed`: whether it is the sharding of the array itself, which pins only where it splits something.
    """

    path: str
    how: str
    names: tuple[SpecEntry, ...]
    logical: tuple[tuple[str, Any], ...] | None = None
    is_placed: bool = False


@dataclasses.dataclass(frozen=True)
class Pin:
    """Pins an array to a layout. `spec`: per dim, with `OPEN` where it says nothing. `how`, `is_placed`: as of `Said`.
    Where two said the same, an annotation is who said it."""

    spec: Spec
    how: str
    is_placed: bool = False

    @property
    def reason(self) -> str:
        """What a plan shows in place of a rule."""
        return f"pinned by {self.how}"

    def axes(self, dim: int) -> Axes | None:
        """Returns the axes that split a dim; None where the pin leaves that open."""
        entry = self.spec[dim]
        return None if entry == OPEN else (entry,) if isinstance(entry, str) else entry or ()


@dataclasses.dataclass(frozen=True)
class Pins:
    """Holds the pins of a step by path, and `notes` on what was said and pins nothing."""

    by_path: Mapping[str, Pin] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()


def resolve(said: Iterable[Said], graph: Graph, mesh: MeshShape, *, must_divide: bool = True) -> Pins:
    """Makes pins of what was said.

    **Arguments:** `said`: in any order, several of one leaf perhaps. `graph`: the traced step. `mesh`: the mesh's
    shape, with the roles of its axes. `must_divide`: False while it is open whether leaves are padded.

    Raises `PinError` where an array cannot be laid out as it says (more names than dims, a size that does not divide,
    an axis twice), naming the parameter where its moments say the same, and where two of one leaf contradict each
    other, naming both."""
    leaves = {leaf.path: leaf for leaf in graph.leaves}
    pins: dict[str, Pin] = {}
    unknown: dict[tuple[str, ...], list[str]] = {}
    # Parameters come first: moments have copies of the annotation that stands there.
    for each in sorted(said, key=lambda each: leaves[each.path].role != "param"):
        shape = leaves[each.path].shape
        entries, names = _entries(each, shape, mesh)
        if names:
            unknown.setdefault(names, []).append(each.how)
        num_split = sum(entry not in (None, OPEN) for entry in entries)
        if not num_split and (each.is_placed or names):
            continue
        dividing = shape if must_divide else (0,) * len(shape)  # zero divides by everything
        # Sharded state lies so (`rules.sharded_state`): XLA gets an array right that one dim alone splits.
        keeps_order = each.is_placed and leaves[each.path].role != "param" and num_split == 1
        pin = Pin(_checked(each, entries, dividing, mesh, keeps_order), each.how, each.is_placed)
        earlier = pins.get(each.path)
        pins[each.path] = pin if earlier is None else _joined(each.path, earlier, pin)
    notes = []
    for names, places in unknown.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        notes.append(
            f"names without meaning on this mesh, so that rules decide: {', '.join(map(repr, names))} ({places[0]}"
            f"{more}): no axes, no roles, and no logical axis rules were in force for them"
        )
    return Pins(pins, tuple(notes))


def is_own(rules: RuleSet) -> bool:
    """Tells whether a rule set is a user's own, which a pin may not contradict, and none of the shipped ones."""
    return rules.name != AUTO and (rules.name not in available() or load_rules(rules.name) != rules)


def contradiction(path: str, pin: Pin, rules: RuleSet, rule: str, spec: Spec) -> PinError:
    """Returns the error for a pin against a rule of the user's own. `spec`: where the `rule` of `rules` would put the
    parameter at `path`."""
    return PinError(
        f"{path} is {pin.reason} to {spec_text(pin.spec)}, and rule {rule!r} of your rule set {rules.name!r} puts it to"
        f" {spec_text(spec)}",
        value={"pin": pin.spec, "rule": spec},
        place=path,
        remedy="say it once: take the annotation out, or let the rule say the same or leave this parameter to an"
        " earlier rule",
    )


def clash(path: str, pin: Pin, other_path: str, other: str) -> PinError:
    """Returns the error for a pin of `path` that cannot stand beside what `other` says of `other_path`, which shares
    its storage."""
    return PinError(
        f"{path} is {pin.reason} to {spec_text(pin.spec)}, and {other_path}, which shares dims with it, is {other}",
        value=pin.spec,
        place=path,
        remedy="give both the same layout along the dims that they share, or pin one of them alone",
    )


def _joined(path: str, first: Pin, second: Pin) -> Pin:
    """Returns what two pins of one leaf say together."""
    spec = []
    for one, other in zip(first.spec, second.spec, strict=True):
        if OPEN not in (one, other) and one != other:
            raise PinError(
                f"{path} is pinned twice: to {spec_text(first.spec)} by {first.how}, and to {spec_text(second.spec)} by"
                f" {second.how}",
                value=(first.spec, second.spec),
                place=path,
                remedy="say it once, or the same both times; jax.device_put and step.place move an array",
            )
        spec.append(other if one == OPEN else one)
    return Pin(tuple(spec), first.how, first.is_placed and second.is_placed)


def _entries(said: Said, shape: Sequence[int], mesh: MeshShape) -> tuple[tuple[SpecEntry, ...], tuple[str, ...]]:
    """Returns what was said as entries over axes of a size above 1, and the names that mean nothing."""
    if len(said.names) > len(shape):
        raise PinError(
            f"an annotation has {len(said.names)} names, and the array {len(shape)} dims",
            value=said.names,
            place=said.how,
            remedy="name each dim of the array once",
        )
    meant = said.names if said.logical is None else _by_rules(said.names, said.logical)
    entries: list[SpecEntry] = []
    unknown: list[str] = []
    for entry in meant:
        axes: list[str] = []
        lost = False
        for name in () if entry is None or entry == OPEN else (entry,) if isinstance(entry, str) else entry:
            known = _meaning(name, mesh)
            if known is None and said.logical is None:  # with rules, a name without one is whole, as Flax has it
                unknown.append(name)
                lost = True
            axes += known or ()
        kept = mesh.present(axes)
        entries.append(OPEN if entry == OPEN or (lost and not kept) else spec_entry(kept))
    entries += [None] * (len(shape) - len(entries))
    return tuple(entries), tuple(sorted(set(unknown)))


def _meaning(name: str, mesh: MeshShape) -> tuple[str, ...] | None:
    """Returns the axes that a name means: an axis of the mesh, or a role; None for any other name."""
    if name in mesh.names:
        return (name,)
    return mesh.roles.having(Role(name)) if name in ROLE_NAMES else None


def _by_rules(names: Sequence[SpecEntry], logical: Sequence[tuple[str, Any]]) -> tuple[SpecEntry, ...]:
    """Returns `names` with what logical axis rules make of them: rules in order of precedence, an axis once, and the
    next rule of a name where an axis is taken already (`flax.linen.logical_to_mesh_axes`)."""
    out: list[Any] = list(names)
    done = [not isinstance(name, str) or name == OPEN for name in names]
    taken: set[str] = {axis for name in names if isinstance(name, tuple) for axis in name}
    for name, meant in logical:
        axes = (meant,) if isinstance(meant, str) else tuple(meant or ())
        for dim, own in enumerate(names):
            if own == name and not done[dim] and not taken & set(axes):
                out[dim], done[dim] = spec_entry(axes), True
                taken |= set(axes)
    return tuple(out)


def _checked(
    said: Said, entries: tuple[SpecEntry, ...], shape: Sequence[int], mesh: MeshShape, keeps_order: bool
) -> Spec:
    """Returns `entries` as a spec that the mesh can have. `keeps_order`: whether axes may stand in another order than
    the mesh's."""
    used: set[str] = set()
    spec: list[SpecEntry] = []
    for dim, entry in enumerate(entries):
        axes = () if entry is None or entry == OPEN else (entry,) if isinstance(entry, str) else entry
        problem = ""
        if twice := [axis for at, axis in enumerate(axes) if axis in used or axis in axes[:at]]:
            problem = f"the mesh axis {twice[0]!r} would split it twice"
        elif shape[dim] % mesh.size(axes):
            problem = f"dim {dim} of size {shape[dim]} does not divide by {mesh.size(axes)} ({' x '.join(axes)})"
        elif said.is_placed and not keeps_order and mesh.in_order(axes) != axes:
            problem = f"dim {dim} is split over {' and '.join(axes)}, which is not the mesh's order"
        if problem:
            raise PinError(
                f"an array of shape {tuple(shape)} cannot be pinned to {spec_text(entries)}: {problem}",
                value=said.names,
                place=said.how,
                remedy="choose sizes that divide, name other axes, or take the annotation out, so that rules decide; a"
                ' parameter can be stored padded, with uneven="pad"',
            )
        used |= set(axes)
        spec.append(entry if entry == OPEN else spec_entry(axes if keeps_order else mesh.in_order(axes)))
    return tuple(spec)
