"""Makes the variables of a step and the rules that say each of their values.

A traced graph and the shape of a mesh come in. A variable is a layer, or all layers that repeat it: those whose
parameters are alike and whose names differ in the numbers of blocks alone; layers whose weights one product reads
together, as the gates of a cell, are one variable, too. A value is a rule for these layers, so that every assignment is
a rule set: it is laid out by the room `rules`, legal by construction, and can be written to a file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from splitjax.mesh import MeshShape
from splitjax.roles import ROLE_BY_NAME, Role
from splitjax.rules.rule import Rule
from splitjax.rules.ruleset import AUTO, RuleSet
from splitjax.trace.graph import Graph, Layer, Leaf

# Dims of weights that a rule can split over the devices of a group, by the names that tracing gives them.
_EXPERT, _ROWS = "expert", "vocab"
_SPLIT = ("out", "in", _EXPERT, _ROWS, "features")
# The batch of whole layers over all axes but those over which layers are computed in parts, as the shipped set
# `transformer` has it.
_WITH_EXPERTS = ("data", "storage", "expert")
Mode = str | tuple[str, ...]
# Stands for any rules that the search makes, where it does not matter what they say.
SEARCHED: RuleSet = RuleSet(AUTO, (), allow_replicated=True)
# What is stored in parts has at least this many elements, as in the shipped set `fsdp`.
_LEAST_ELEMENTS = 1024


@dataclasses.dataclass(frozen=True)
class Way:
    """Is one way to lay out a layer: its name, and what its rule says."""

    name: str
    shard: Mapping[str, tuple[str, ...]]
    store: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Group:
    """Holds layers that are laid out alike, and the ways in which they can be; the first keeps them whole."""

    layers: tuple[Layer, ...]
    ways: tuple[Way, ...]

    @property
    def name(self) -> str:
        """The name of the first layer."""
        return self.layers[0].name


def batch_modes(mesh: MeshShape) -> tuple[Mode, ...]:
    """Returns how the batch of whole layers can lie on `mesh`, as `RuleSet.replicated_batch` says it."""
    experts = (_WITH_EXPERTS,) if mesh.meant((Role.EXPERT,)) else ()
    return ("all", "data", *experts) if mesh.meant((Role.TENSOR,)) else ("all", *experts)


def num_experts(graph: Graph) -> tuple[int, ...]:
    """Returns the number of experts of every layer that has some."""
    found = {}
    for layer in graph.layers:
        for path in layer.params:
            leaf = graph.leaf(path)
            for name, size in zip(leaf.dim_names, leaf.shape, strict=False):
                if name == _EXPERT:
                    found[size] = None
    return tuple(found)


def speaks_of(rules: RuleSet, roles: Iterable[Role]) -> bool:
    """Whether a rule set says something of axes of some of these `roles` that it does not say of axes for data, too.
    One that does not lays out a mesh with such an axis as it does one with that axis for data."""
    groups = [axes for rule in rules.rules for alternative in rule.shard for _, axes in alternative]
    groups += [rule.store for rule in rules.rules]
    for names in groups:
        meant = {ROLE_BY_NAME.get(name, name) for name in names}
        if Role.DATA not in meant and meant & set(roles):
            return True
    return False


def groups_of(graph: Graph, mesh: MeshShape, mode: Mode, padded: Collection[str] = ()) -> tuple[Group, ...]:
    """Returns the variables of a step.

    **Arguments:** `graph`: the step. `mesh`: the mesh. `mode`: how the batch of whole layers lies, as
    `RuleSet.replicated_batch`. `padded`: the paths of tables that the step has in the sizes that they are stored in
    where their rows are split."""
    alike: dict[object, list[Layer]] = {}
    for layer in graph.layers:
        if layer.params:
            alike.setdefault(_likeness(graph, layer), []).append(layer)
    groups = _joined(alike.values(), read_together(graph))
    return tuple(Group(tuple(layers), tuple(_ways(graph, layers[0], mesh, mode, padded))) for layers in groups)


def read_together(graph: Graph) -> dict[str, frozenset[str]]:
    """Returns, by the name of a layer, those whose weights a product reads together with its weight as one operand, the
    layer among them: the gates of a cell, which are concatenated. A device has the same part of each, or else none of
    the operand."""
    owner = {path: layer.name for layer in graph.layers for path in layer.params}
    found = {layer.name: frozenset((layer.name,)) for layer in graph.layers}
    for use in graph.uses:
        names = [owner[path] for path in (use.param, *use.beside) if path in owner]
        joined = frozenset().union(*(found[name] for name in names))
        found |= dict.fromkeys(joined, joined)
    return found


def _joined(groups: Iterable[list[Layer]], together: Mapping[str, frozenset[str]]) -> list[list[Layer]]:
    """Returns `groups` of layers, those with layers that are read `together` as one."""
    found: list[list[Layer]] = []
    for layers in groups:
        wanted = frozenset().union(*(together[layer.name] for layer in layers))
        meets = [other for other in found if wanted & {layer.name for layer in other}]
        found = [other for other in found if other not in meets]
        found.append([*(layer for other in meets for layer in other), *layers])
    return found


def rule_set(groups: Sequence[Group], values: Sequence[int], mode: Mode) -> RuleSet:
    """Returns the rule set that gives each of `groups` the way of its number in `values`; groups that stay whole need
    no rule."""
    rules = tuple(
        _rule(group, group.ways[value]) for group, value in zip(groups, values, strict=True) if value or len(groups) < 2
    )
    return RuleSet(
        AUTO, rules, replicated_batch=mode, description="Chosen by predicted seconds.", allow_replicated=True
    )


def _likeness(graph: Graph, layer: Layer) -> object:
    """Returns what is equal for layers that repeat each other: the numbers of blocks are left out of their names, the
    number of a layer within its block is not."""
    block, slash, last = layer.name.rpartition("/")
    shapes = tuple((graph.leaf(path).shape, graph.leaf(path).dtype) for path in layer.params)
    return re.sub(r"\d+", "#", block) + slash + last, layer.kind, shapes, layer.flops


def _ways(graph: Graph, layer: Layer, mesh: MeshShape, mode: Mode, padded: Collection[str]) -> Iterator[Way]:
    """Yields the ways in which the weight of a layer divides, without those that split nothing. `padded`: as for
    `groups_of`."""
    weight = graph.leaf(layer.params[0])
    tensor, data = mesh.meant((Role.TENSOR, Role.EXPERT)), mesh.meant((Role.DATA, Role.STORAGE))
    # Over the axis for storage alone, groups of devices have whole copies each: less is sent between the groups.
    stores = tuple(dict.fromkeys(axes for axes in (data, mesh.meant((Role.STORAGE,))) if axes))
    stores = stores if weight.size >= _LEAST_ELEMENTS else ()
    divides = lambda axes: any(size % mesh.size(axes) == 0 for size in weight.shape)
    yield Way("whole", {})
    if mode != "all":
        for axes in filter(divides, stores):
            yield Way(f"stored in parts over {_over(axes, data)}", {}, axes)
    for split in _splits(weight, mesh):
        name = ", ".join(f"{dim} split over {'+'.join(axes)}" for dim, axes in split.items())
        yield Way(name, split)
        for axes in stores if mode != "all" else ():
            yield Way(f"{name}, stored in parts over {_over(axes, data)}", split, axes)
    if mode == "all" and stores:
        for axes in dict.fromkeys(((*data, *tensor), *stores)):
            if axes and layer.params[0] in padded:
                yield Way(f"rows split over {'+'.join(axes)}", {_ROWS: axes})
            elif axes and divides(axes):
                yield Way(f"each array's largest dim split over {'+'.join(axes)}", {"largest": axes})


def _splits(weight: Leaf, mesh: MeshShape) -> Iterator[dict[str, tuple[str, ...]]]:
    """Yields how the dims of a weight can be split over the axes over which layers are computed in parts: one over all
    of these axes; where there are some for experts and others, one dim over each kind alone, or both."""
    sizes = {name: size for name, size in zip(weight.dim_names, weight.shape, strict=False) if name in _SPLIT}
    tensor, experts = mesh.meant((Role.TENSOR,)), mesh.meant((Role.EXPERT,))
    divides = lambda name, axes: name in sizes and bool(axes) and sizes[name] % mesh.size(axes) == 0
    together = mesh.meant((Role.TENSOR, Role.EXPERT))
    yield from ({name: together} for name in _SPLIT if divides(name, together))
    if not tensor or not experts:
        return
    yield from ({name: tensor} for name in _SPLIT if divides(name, tensor))
    if divides(_EXPERT, experts):
        yield {_EXPERT: experts}
        yield from ({_EXPERT: experts, name: tensor} for name in _SPLIT if name != _EXPERT and divides(name, tensor))


def _over(axes: tuple[str, ...], data: tuple[str, ...]) -> str:
    """Returns what a way says of the `axes` that it stores over: `data` for all that split examples."""
    return "data" if axes == data else "+".join(axes)


def _rule(group: Group, way: Way) -> Rule:
    """Returns the rule that lays out a group so. Its layers' smaller arrays follow the weight, or are stored likewise
    where they are large enough."""
    paths = "|".join(sorted(re.escape(path) for layer in group.layers for path in layer.params))
    per_array = "largest" in way.shard
    return Rule(
        group.name,
        regex=f"^(?:{paths})$",
        min_size=_LEAST_ELEMENTS if per_array or way.store else None,
        shard=[dict(way.shard)] if way.shard else [],
        store=way.store,
        ties="hard",
    )
