"""Makes the variables of a step and the rules that say each of their values.

A traced graph and the shape of a mesh come in. A variable is a layer, or all layers that repeat it: those whose
parameters are alike and whose names differ in the numbers of blocks alone. A value is a rule for these layers, so that
every assignment is a rule set: it is laid out by the room `rules`, legal by construction, and can be written to a file.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence

from splitjax.mesh import MeshShape
from splitjax.roles import Role
from splitjax.rules.rule import Rule
from splitjax.rules.ruleset import AUTO, RuleSet
from splitjax.trace.graph import Graph, Layer

# Dims of weights that a rule can split over the devices of a group, by the names that tracing gives them.
_SPLIT = ("out", "in", "expert", "vocab", "features")
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


def batch_modes(mesh: MeshShape) -> tuple[str, ...]:
    """Returns how the batch of whole layers can lie on `mesh`, as `RuleSet.replicated_batch` says it."""
    tensor = mesh.meant((Role.TENSOR,))
    return ("all", "data") if tensor else ("all",)


def groups_of(graph: Graph, mesh: MeshShape, mode: str) -> tuple[Group, ...]:
    """Returns the variables of a step.

    **Arguments:** `graph`: the step. `mesh`: the mesh. `mode`: how the batch of whole layers lies, as
    `RuleSet.replicated_batch`."""
    alike: dict[object, list[Layer]] = {}
    for layer in graph.layers:
        if layer.params:
            alike.setdefault(_likeness(graph, layer), []).append(layer)
    return tuple(Group(tuple(layers), tuple(_ways(graph, layers[0], mesh, mode))) for layers in alike.values())


def rule_set(groups: Sequence[Group], values: Sequence[int], mode: str) -> RuleSet:
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


def _ways(graph: Graph, layer: Layer, mesh: MeshShape, mode: str) -> Iterator[Way]:
    """Yields the ways in which the weight of a layer divides, without those that split nothing."""
    weight = graph.leaf(layer.params[0])
    tensor, data = mesh.meant((Role.TENSOR, Role.EXPERT)), mesh.meant((Role.DATA, Role.STORAGE))
    stored = weight.size >= _LEAST_ELEMENTS
    divides = lambda axes: any(size % mesh.size(axes) == 0 for size in weight.shape)
    yield Way("whole", {})
    if mode == "data" and stored and data and divides(data):
        yield Way("stored in parts over data", {}, data)
    divided = {
        name
        for name, size in zip(weight.dim_names, weight.shape, strict=False)
        if tensor and size % mesh.size(tensor) == 0
    }
    for name in _SPLIT:
        if name not in divided:
            continue
        yield Way(f"{name} split over {'+'.join(tensor)}", {name: tensor})
        if mode == "data" and stored and data:
            yield Way(f"{name} split over {'+'.join(tensor)}, stored in parts over data", {name: tensor}, data)
    if mode == "all" and stored:
        for axes in dict.fromkeys(((*data, *tensor), data)):
            if axes and divides(axes):
                yield Way(f"each array's largest dim split over {'+'.join(axes)}", {"largest": axes})


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
