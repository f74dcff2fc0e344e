"""Decides the axes of every parameter dim: rules, dim classes and divisibility together.

A traced graph, a rule set and the mesh's shape go in; `Decisions` come out. What is decided is not one array's
dim but a *hard class* of dims (by leading atom): arrays that share storage agree because they have one entry
between them. `_Work.chosen` holds that entry; a class that is not in it is still open.

Layers decide in program order, each its weight first:

1. `_settle` takes the first alternative of the parameter's first matching rule that fits (`_fit`): every dim it names
   is there, divides by its axes, and no array linked by storage would be split twice over one axis (`_illegal`).
2. `_share` gives the other parameters of the layer the axes of the dims they have in common with it (same *local*
   class): the bias of a dense layer split by columns. Dims that the weight keeps whole they keep whole too: the bias
   of one split by rows.
3. `_spread`, for rules with `ties="local"`, gives the axis to open parameters of other layers in the same local
   class, so that the next dense layer is split by rows: column then row (Shoeybi et al., arXiv 1909.08053, section
   3).

What rules store over further axes is added last (`storing`). What users pin (`pins`) is chosen before all of it.

A local class is a default, so a rule that replicates, or has `ties="hard"`, takes no axis from other layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from splitjax.mesh import MeshShape
from splitjax.rules.decisions import Axes, Decisions, ParameterDecision
from splitjax.rules.heads import cut_through, heads_in_the_way
from splitjax.rules.match import (
    axes_text,
    candidates,
    dim_text,
    divides,
    first_match,
    sized_text,
)
from splitjax.rules.parameters import Parameters
from splitjax.rules.pins import Pin, clash
from splitjax.rules.rule import LARGEST, Alternative, DimRef, Rule
from splitjax.rules.ruleset import RuleSet
from splitjax.rules.storing import store
from splitjax.trace.graph import Graph, Leaf

# How tracing names the dim of a weight that holds experts. They are distributed as their own rule says, and not as the
# layer is split that deals tokens out to them.
EXPERT = "expert"


class _Choice(NamedTuple):
    """Records the axes of a hard class: `by` is the path of the parameter whose rule decided, `text` how the plan
    names the decision on the other parameters of the class."""

    axes: Axes
    by: str  # path of the parameter whose rule decided
    text: str  # how the plan names the decision on the other parameters of the class
    spreads: bool = True  # False for a pin to axes that store: what else reads the dim is not stored over them


@dataclasses.dataclass
class _Work:
    """Holds the state of one call of `decide`.

    - `known`: what no rule changes about the parameters. `params`: those by path.
    - `rules`: path -> the first rule that matches the parameter.
    - `pins`: path -> where the user pinned a parameter.
    - `chosen`: hard label -> choice; `done`: path -> decision.
    """

    graph: Graph
    mesh: MeshShape
    known: Parameters
    params: Mapping[str, Leaf]
    rules: dict[str, Rule | None]  # path -> its first matching rule
    pins: Mapping[str, Pin]
    chosen: dict[int, _Choice] = dataclasses.field(default_factory=dict)  # hard label -> choice
    done: dict[str, ParameterDecision] = dataclasses.field(default_factory=dict)

    def hard(self, leaf: Leaf) -> Mapping[int, int]:
        """Returns dim -> hard label of its leading atom, for the dims that have one."""
        return self.known.hard[leaf.path]

    def local(self, leaf: Leaf) -> Mapping[int, int]:
        """Returns dim -> local label of its leading atom, for the dims that have one."""
        return self.known.local[leaf.path]

    def given(self, leaf: Leaf) -> dict[int, _Choice]:
        """Returns the dims of a parameter whose class is chosen, each with the choice."""
        return {dim: self.chosen[label] for dim, label in self.hard(leaf).items() if label in self.chosen}

    def cut(self, leaf: Leaf, dim: int, axes: Axes) -> str:
        """Says which heads `axes` would cut through along a dim of a parameter; "" for none."""
        return cut_through(self.graph, self.mesh, leaf, dim, axes) if self.graph.inside_heads else ""


def decide(graph: Graph, rules: RuleSet, mesh: MeshShape, pins: Mapping[str, Pin] | None = None) -> Decisions:
    """Decides the axes of every parameter dim, and says which rule decided.

    **Arguments:**

    - `graph`: the traced step.
    - `rules`: the rule set.
    - `mesh`: the mesh's shape.
    - `pins`: by path, where users pinned parameters; other leaves' are left alone.

    Legal by construction: a mesh axis is on at most one dim of a parameter, every split divides, and parameters
    in one hard class agree. Axes that the mesh has with size 1 fit everywhere and leave the dim whole. Pure;
    raises nothing that depends on the outcome, but `PinError` for pins that contradict each other.
    """
    work = _start(graph, rules, mesh, pins or {})
    _pin(work)
    for layer in graph.layers:
        _decide_layer(work, [path for path in layer.params if path in work.params])
    for path, leaf in work.params.items():
        if path not in work.done:
            _settle(work, leaf, ())
    owners = {label: paths[0] for label, paths in work.known.by_hard.items()}
    classes = {label: choice.axes for label, choice in work.chosen.items()}
    computed = Decisions({path: work.done[path] for path in work.params}, classes, owners)
    pinned = {label for path in work.pins if path in work.params for label in _pinned_axes(work, path)}
    return store(work.known, work.rules, mesh, computed, frozenset(pinned))


def _pinned_axes(work: _Work, path: str) -> dict[int, Axes]:
    """Returns hard label -> axes, as the pin of a parameter says; without dims that it leaves open."""
    pinned = {label: work.pins[path].axes(dim) for dim, label in work.hard(work.params[path]).items()}
    return {label: axes for label, axes in pinned.items() if axes is not None}


def _pin(work: _Work) -> None:
    """Chooses what the pins say. Raises `PinError` where two of them contradict each other, or what shares storage with
    a pinned parameter cannot be split like it."""
    for path in (path for path in work.params if path in work.pins):
        pin, asked = work.pins[path], _pinned_axes(work, path)
        for label, axes in asked.items():
            earlier = work.chosen.get(label)
            if earlier is not None and earlier.axes != axes:
                raise clash(path, pin, earlier.by, work.pins[earlier.by].reason)
            if earlier is None:
                spreads = not work.mesh.roles.store(axes)
                work.chosen[label] = _Choice(axes, path, f"with {path}, {pin.reason}", spreads)
        if (problem := _illegal(work, {label: axes for label, axes in asked.items() if axes})) is not None:
            others = [by for label in asked for by in work.known.by_hard[label] if by != path]
            raise clash(path, pin, others[0] if others else path, f"not to be split so: {problem}")


def _start(graph: Graph, rules: RuleSet, mesh: MeshShape, pins: Mapping[str, Pin]) -> _Work:
    known = Parameters.of(graph)
    first = {path: first_match(rules.rules, leaf, known.kinds[path]) for path, leaf in known.leaves.items()}
    return _Work(graph, mesh, known, known.leaves, first, pins)


def _decide_layer(work: _Work, paths: Sequence[str]) -> None:
    """Decides the parameters of one layer, `paths`, the weight's first."""
    if not paths:
        return
    # Matrices before vectors: a bias follows its own matrix, also where the layer holds several (query, ..., output).
    order = [paths[0], *sorted(paths[1:], key=lambda path: -len(work.params[path].shape))]
    weight = work.rules[order[0]]
    for position, path in enumerate(order):
        if path in work.done:  # another layer uses it too and came first
            continue
        leaf, own, before = work.params[path], work.rules[path], [work.params[earlier] for earlier in order[:position]]
        if own is not None and (own.per_array or (own is not weight and (own.is_explicit or own.replicates))):
            _settle(work, leaf, ())
            continue
        for source in before:
            _share(work, source, leaf)
        _settle(work, leaf, [source for source in before if work.rules[source.path] is own])


def _share(work: _Work, source: Leaf, target: Leaf) -> None:
    """Gives a parameter the axes of another one of its layer, on the dims that they have in common."""
    rule = work.rules[source.path]
    for dim, choice in work.given(source).items():
        own = choice.by == source.path and rule is not None
        text = f"{rule.name} (with {source.path})" if own and rule else choice.text
        _tie(work, source, dim, target, choice._replace(text=text), by_name=True)


def _spread(work: _Work, source: Leaf, dims: Iterable[int]) -> None:
    """Gives the axes of a parameter's dims to open parameters of other layers in the same local class."""
    given, homes = work.given(source), work.known.homes
    for dim in dims:
        for path in work.known.by_local[work.local(source)[dim]]:
            rule = work.rules[path]
            takes = rule is None or (rule.ties == "local" and not rule.replicates)
            if takes and path not in work.done and homes.get(path, path) != homes.get(source.path, source.path):
                _tie(work, source, dim, work.params[path], given[dim], by_name=False)


def _tie(work: _Work, source: Leaf, source_dim: int, target: Leaf, choice: _Choice, by_name: bool) -> None:
    """Chooses the axes for the one dim of `target` in the local class of a dim of `source`, where that is legal."""
    if not choice.axes or not choice.spreads:
        return
    label, hard = work.local(source)[source_dim], work.hard(target)
    dims = [dim for dim, own in work.local(target).items() if own == label and hard[dim] not in work.chosen]
    if by_name:  # a square recurrent kernel may have both dims in the class: its columns go with the columns
        dims.sort(key=lambda dim: dim_text(target, dim) != dim_text(source, source_dim))
    elif dim_text(source, source_dim) != EXPERT:  # the columns of a router, which are one for each expert
        dims = [dim for dim in dims if dim_text(target, dim) != EXPERT]
    for dim in dims:
        if not work.cut(target, dim, choice.axes) and _illegal(work, {hard[dim]: choice.axes}) is None:
            work.chosen[hard[dim]] = choice
            return


def _settle(work: _Work, leaf: Leaf, near: Sequence[Leaf]) -> None:
    """Decides a parameter for good: its open dims get the first alternative that fits, or stay whole. `near` are the
    settled parameters of its layer that the same rule decided."""
    rule, given, hard = work.rules[leaf.path], work.given(leaf), work.hard(leaf)
    refusals: list[str] = []
    picked: dict[int, Axes] | None = None
    # Another dim would take the axis where a head is in its way, and every device's part of a sum with it.
    whole = ""
    if rule is not None and work.graph.inside_heads:
        whole = heads_in_the_way(work.graph, work.mesh, leaf, rule, given)
    refusals += [whole] if whole else []
    for alternative in rule.shard if rule and not whole else ():
        fit = _fit(work, leaf, alternative, near)
        if not isinstance(fit, str):
            picked = fit
            break
        refusals.append(fit)
    new = {dim: axes for dim, axes in (picked or {}).items() if axes and dim not in given}
    # A bias whose dim the weight keeps whole is no misfit.
    follows = next(
        (source.path for source in near for label in work.local(leaf).values() if _keeps_whole(work, source, label)),
        None,
    )
    shown, note, problem = _explain(rule, given, new, picked, refusals, follows)
    pin = work.pins.get(leaf.path)
    if pin is not None:
        shown, note, problem = pin.reason, "", ""
    if problem == "misfit" and near and len(hard) <= 1 and not any(leaf.dim_names):
        problem = ""  # a vector beside a weight, with no dim in common that tracing saw: its note is enough
    for dim, label in hard.items():
        if label not in work.chosen:
            work.chosen[label] = _Choice(new.get(dim, ()), leaf.path, f"ties with {leaf.path}")
    axes = tuple(work.chosen[hard[dim]].axes if dim in hard else () for dim in range(len(leaf.shape)))
    name = rule.name if rule else None
    unfit = note if problem == "misfit" else "" if pin is not None else _uneven(work, leaf, rule)
    work.done[leaf.path] = ParameterDecision(
        leaf.path, work.known.kinds[leaf.path], axes, shown, note, name, problem, unfit
    )
    if rule.ties == "local" if rule is not None else pin is not None:
        # The axes of a pin go on to the layers that compute with it, as those of a rule do.
        _spread(work, leaf, new if pin is None else {dim: choice.axes for dim, choice in work.given(leaf).items()})


def _uneven(work: _Work, leaf: Leaf, rule: Rule | None) -> str:
    """Says which size keeps a parameter from the first alternative of its rule, where a size does; else ""."""
    for ref, names in rule.shard[0] if rule is not None and rule.shard else ():
        axes = work.mesh.meant(names)
        sizes = {dim: [work.graph.atom_sizes[atom] for atom in leaf.dims[dim]] for dim in candidates(leaf, ref)}
        if axes and sizes and not any(divides(atoms, work.mesh.size(axes)) for atoms in sizes.values()):
            return f"{sized_text(work.graph, leaf, next(iter(sizes)))} does not divide by {axes_text(work.mesh, axes)}"
    return ""


def _explain(
    rule: Rule | None,
    given: dict[int, _Choice],
    new: dict[int, Axes],
    picked: dict[int, Axes] | None,
    refusals: list[str],
    follows: str | None,
) -> tuple[str, str, str]:
    """Returns what the plan shows as the rule, the note, and the kind of problem, if any."""
    tie = next((choice.text for choice in given.values() if choice.axes), None)
    reasons = "; ".join(dict.fromkeys(refusals))
    if rule is None:
        return tie or "default", "", ""
    if tie is not None:
        if new:
            return f"{rule.name} ({tie})", "", ""
        # An explicit rule, or one that replicates, that a tie outvotes is worth a word; a kind's rule expects it.
        outvoted = rule.replicates or (rule.is_explicit and picked is None)
        return (
            tie,
            f"rule {rule.name!r} gives way: {reasons or 'it replicates'}" if outvoted else "",
            "conflict" if outvoted else "",
        )
    if picked is not None or rule.replicates:
        return rule.name, "", ""
    if follows is not None:
        return f"{rule.name} (with {follows})", "", ""
    return rule.name, reasons, "misfit"


def _fit(work: _Work, leaf: Leaf, alternative: Alternative, near: Sequence[Leaf]) -> dict[int, Axes] | str:
    """Returns the axes per dim that an alternative means for a parameter, or why it does not fit."""
    picked: dict[int, Axes] = {}
    for ref, names in sorted(alternative, key=lambda pair: pair[0] == LARGEST):  # the largest of what the others leave
        axes = work.mesh.meant(names)
        blocks = work.known.blocks[leaf.path] if ref == LARGEST else ()
        dims = [dim for dim in candidates(leaf, ref, blocks) if dim not in picked]
        refusals = []
        for dim in dims:
            refusal = _refuse(work, leaf, ref, dim, axes, picked, near)
            if refusal is None:
                picked[dim] = axes
                break
            refusals.append(refusal)
        else:
            if not dims:
                return f"no dim {ref}" if isinstance(ref, int) else f"no dim named {ref!r}"
            if ref == LARGEST:
                return f"no open dim of {leaf.shape} divides by {axes_text(work.mesh, axes)}"
            return refusals[0]
    return picked


def _refuse(
    work: _Work, leaf: Leaf, ref: DimRef, dim: int, axes: Axes, picked: dict[int, Axes], near: Sequence[Leaf]
) -> str | None:
    """Says why a dim cannot be split over the axes; None where it can."""
    if not axes:
        return None
    name, given, hard = dim_text(leaf, dim), work.given(leaf), work.hard(leaf)
    if dim not in given and dim in hard and not isinstance(ref, int) and ref != LARGEST:
        for follow in near:
            if _keeps_whole(work, follow, work.local(leaf)[dim]):
                return f"{name} stays whole, as in {follow.path}"
    if not divides([work.graph.atom_sizes[atom] for atom in leaf.dims[dim]], work.mesh.size(axes)):
        return f"{sized_text(work.graph, leaf, dim)} does not divide by {axes_text(work.mesh, axes)}"
    if ref != LARGEST and not isinstance(ref, int) and (cut := work.cut(leaf, dim, axes)):
        return cut
    if dim in given and given[dim].axes != axes:
        choice = given[dim]
        there = f"is split over {axes_text(work.mesh, choice.axes)}" if choice.axes else "stays whole"
        return f"{name} {there}, as in {choice.by}"
    if dim in given:
        return None
    for given_dim, choice in given.items():
        if used := [axis for axis in axes if axis in choice.axes]:
            return f"{used[0]} already splits {dim_text(leaf, given_dim)} ({choice.text})"
    return _illegal(work, {hard[earlier]: taken for earlier, taken in picked.items() if taken} | {hard[dim]: axes})


def _keeps_whole(work: _Work, leaf: Leaf, label: int) -> bool:
    """Tells whether a settled parameter has dims in a local class, and splits none of them while it is used."""
    hard = work.hard(leaf)
    dims = [dim for dim, own in work.local(leaf).items() if own == label]
    chosen = [work.chosen[hard[dim]] for dim in dims]
    return bool(dims) and not any(choice.axes and choice.spreads for choice in chosen)


def _illegal(work: _Work, extra: dict[int, Axes]) -> str | None:
    """Says why giving these axes to these hard classes would be illegal for some parameter that has a dim in one of
    them."""
    for path in dict.fromkeys(path for label in extra for path in work.known.by_hard[label]):
        leaf, used = work.params[path], {}
        for dim, label in work.hard(leaf).items():
            axes = extra.get(label) or (work.chosen[label].axes if label in work.chosen else ())
            if label in extra and not divides(
                [work.graph.atom_sizes[atom] for atom in leaf.dims[dim]], work.mesh.size(axes)
            ):
                return f"{sized_text(work.graph, leaf, dim)} of {path} does not divide by {axes_text(work.mesh, axes)}"
            for axis in axes:
                if axis in used:
                    return f"{axis} would split both {dim_text(leaf, used[axis])} and {dim_text(leaf, dim)} of {path}"
                used[axis] = dim
    return None
