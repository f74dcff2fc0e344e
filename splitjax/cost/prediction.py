"""Predicts the collectives and the memory of a laid-out step, and predicts them again after a change of its layout.

A step with the layout of its leaves comes in, a `Prediction` comes out, which keeps its collectives by use and by leaf,
and its memory as terms. `Prediction.changed` derives anew what a changed layout touches, and shares the rest. What
touches what is known exactly:

- The flow of a use depends on the layout of its weight, of the weights of earlier uses that read the same input, and of
  the batches that it reads.
- What a use sends depends on its own flow, and on those of its producer and its consumer.
- What a parameter's gradient sends depends on its own layout, on that of its optimizer state, and on the flows of its
  uses; for a bias on the flows of its layer's uses.
- Which convolutions with groups and which Fourier transforms are evaluated device by device, and how, depends on all
  parameters: a step that has some derives them anew.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from splitjax.cost.collectives import (
    Weight,
    gradient_events,
    sent_by,
    stays_in_group,
    transform_events,
    use_events,
)
from splitjax.cost.compute import total_compute, use_split
from splitjax.cost.convolutions import derive_convolutions
from splitjax.cost.dealing import deal_axes, moves_of, sent_by_deal
from splitjax.cost.flow import Axes, Setting, WeightFlow, flow_all, flow_of, split_of
from splitjax.cost.memory import LeafBytes, bytes_by_leaf, leaf_bytes, total_memory, use_bytes
from splitjax.cost.structure import StepStructure
from splitjax.cost.transforms import LocalTransform, derive_transforms
from splitjax.mesh import MeshShape
from splitjax.plan import Collective, Compute, LayerPlan, LeafPlan, Memory, Spec, spec_axes
from splitjax.trace.graph import Graph

Sent = tuple[Collective, ...]
Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True, eq=False)
class LaidOutStep:
    """Holds a traced step with the layout of its leaves, from which its collectives and its memory follow.

    - `graph`: the traced step: shapes of activations (`Graph.uses`, for the whole batch), dim classes.
    - `leaves`, `layers`: the layout, leaves in flat order; `bytes_per_device` must be set.
    - `mesh`: the shape of the mesh.
    - `batch_axes`: its axes over which batch arguments are split.
    - `replicated_batch`: `"all"` where the batch of replicated layers is split over every axis, `"data"` where split
      and replicated layers see the same batch.
    """

    graph: Graph
    leaves: Sequence[LeafPlan]
    layers: Sequence[LayerPlan]
    mesh: MeshShape
    batch_axes: Sequence[str]
    replicated_batch: str


@dataclasses.dataclass(frozen=True)
class Manner:
    """Says how a step is run, as far as its cost depends on it.

    - `backward`: False for a step that takes no gradient (evaluation).
    - `group_comm`: `gather` and `modulo` send the same bytes, the latter a part in each turn; `turns` all-reduces them
      instead.
    - `by_rows`: for tables whose gradients are rows, path -> the bytes that a device has of these rows. The memory
      counts them; the collectives are those of dense gradients, which whoever synchronises rows replaces.
    - `sums_apart`: whether the compiler sums the cotangents of what several column-split layers read (query, key and
      value) one by one, as that for CPUs does; those for TPUs and GPUs sum their sum.
    - `widens`: whether the compiler sends bfloat16 as float32, as that for CPUs does.
    """

    backward: bool = True
    group_comm: str = "gather"
    by_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sums_apart: bool = False
    widens: bool = False


def predict_collectives(
    step: LaidOutStep, *, backward: bool = True, group_comm: str = "gather"
) -> tuple[Collective, ...]:
    """Predicts the collectives that a step of this layout needs: those of activations in program order, then those of
    gradients in leaf order.

    **Arguments:** `step`: the traced step and its layout. `backward`, `group_comm`: as for `Manner`.

    **Returns:** `Collective`s with `bytes` sent per device and step, by ring algorithms (`cost.ring`); those of 0 bytes
    left out.
    """
    return predict_step(step, Manner(backward, group_comm)).collectives


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction:
    """Holds what a laid-out step costs, in the parts that a change of its layout leaves alone or not.

    **Attributes:**

    - `structure`: what no layout changes. `setting`: the mesh, and how examples lie. `manner`: how the step is run.
    - `leaves`: the layout, in flat order.
    - `flows`: of every use. `transforms`: what is evaluated device by device of Fourier transforms. `parts`: by
      convolution weight, the axes over which each device has the gradient of its own groups alone.
    - `weights`: what a parameter's gradient depends on; None for leaves that are no parameters.
    - `sent_by_use`, `sent_by_leaf`: the collectives. `bytes_by_use`, `bytes_by_leaf`: the terms of the memory.
    - `split_by_use`: among how many devices each product is shared.
    """

    structure: StepStructure
    setting: Setting
    manner: Manner
    leaves: tuple[LeafPlan, ...]
    flows: tuple[WeightFlow, ...]
    transforms: tuple[LocalTransform, ...]
    parts: Mapping[str, Axes]
    weights: tuple[Weight | None, ...]
    sent_by_use: tuple[Sent, ...]
    sent_by_leaf: tuple[Sent, ...]
    bytes_by_use: tuple[int, ...]
    bytes_by_leaf: tuple[LeafBytes, ...]
    split_by_use: tuple[int, ...]

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives: those of activations in program order, then those of gradients in leaf order."""
        return (*self.activations, *itertools.chain.from_iterable(self.sent_by_leaf))

    @functools.cached_property
    def activations(self) -> tuple[Collective, ...]:
        """The collectives of activations alone, in program order."""
        return tuple(self._activations() if self.transforms else itertools.chain.from_iterable(self.sent_by_use))

    @functools.cached_property
    def memory(self) -> Memory:
        """The bytes of a device, as `predict_memory` says."""
        num_bytes, mesh = self.structure.graph.activation_bytes, self.setting.mesh
        return total_memory(
            self.bytes_by_leaf,
            self.bytes_by_use,
            base_bytes=num_bytes // mesh.size(self.setting.batch_axes),
            least_bytes=num_bytes // mesh.num_devices,
        )

    @functools.cached_property
    def compute(self) -> Compute:
        """The flops of a device, as `cost.compute.predict_compute` says."""
        return total_compute(self.flows, self.split_by_use, self.setting.mesh, self.manner.backward)

    def _activations(self) -> Iterator[Collective]:
        """Yields the collectives of uses and of Fourier transforms, in program order."""
        mesh, transforms = self.setting.mesh, list(reversed(self.transforms))
        for flow, sent in zip(self.flows, self.sent_by_use, strict=True):
            while transforms and transforms[-1].site < flow.use.site:
                yield from self._sent_by_transform(transforms.pop(), mesh)
            yield from sent
        for transform in reversed(transforms):
            yield from self._sent_by_transform(transform, mesh)

    def _sent_by_transform(self, transform: LocalTransform, mesh: MeshShape) -> Sent:
        return sent_by(transform.layer, transform_events(transform, mesh), mesh, self.manner.backward)

    def laid_out(self, specs: Mapping[str, Spec]) -> tuple[LeafPlan, ...]:
        """Returns the layouts of the leaves at the paths of `specs`, split by these. The optimizer state that mirrors a
        parameter goes along, unless `specs` names it. Raises `KeyError` for a path that the step does not have."""
        structure, mesh = self.structure, self.setting.mesh
        along = {self.leaves[i].path: spec for path, spec in specs.items() for i in structure.states_of.get(path, ())}
        changed = []
        for path, spec in (along | dict(specs)).items():
            leaf = self.leaves[structure.position[path]]
            held = leaf.whole_bytes(mesh) // mesh.size(spec_axes(spec))
            changed.append(dataclasses.replace(leaf, spec=spec, bytes_per_device=held))
        return tuple(changed)

    def changed(self, leaves: Iterable[LeafPlan], by_rows: Mapping[str, int] | None = None) -> Prediction:
        """Predicts the step again after a change of its layout; equal in every field to the prediction of the changed
        step, and derived anew only where the change reaches.

        **Arguments:** `leaves`: the new layouts of some leaves, such as `laid_out` returns. `by_rows`: what becomes of
        `Manner.by_rows` with it; None where that stays what it is."""
        structure, setting, rows_before = self.structure, self.setting, self.manner.by_rows
        manner = self.manner if by_rows is None else dataclasses.replace(self.manner, by_rows=by_rows)
        mesh, links = setting.mesh, structure.links
        new = {structure.position[leaf.path]: leaf for leaf in leaves}
        layout = replaced(self.leaves, new)
        paths = [leaf.path for leaf in new.values()]

        moved = {i for path in paths for i in structure.uses_of.get(path, ())}
        moved |= {later for i in moved for later in structure.read_alike.get(i, ())}
        moved |= {i for path in paths for i in structure.fed_from.get(path, ())}
        flows = replaced(self.flows, self._flows_at(moved, layout))
        moved = {i for i in moved if flows[i] != self.flows[i]}
        touched = moved | {beside for i in moved for beside in structure.beside.get(i, ())}

        transforms, parts = _evaluated_locally(structure, layout, setting)
        weights = {
            *paths,
            *(structure.mirrors[path] for path in paths if path in structure.mirrors),
            *(links[i].use.param for i in moved),
            *(path for i in touched for path in structure.added_by.get(i, ())),
            *(path for path in {*parts, *self.parts} if parts.get(path) != self.parts.get(path)),
        }
        positions = map(structure.position.__getitem__, weights)
        renewed = {i: _weight(structure, i, layout, flows, parts, mesh, manner) for i in positions}
        renewed = {i: weight for i, weight in renewed.items() if weight != self.weights[i]}
        other_rows = {
            path for path in {*manner.by_rows, *rows_before} if manner.by_rows.get(path) != rows_before.get(path)
        }
        of_bytes = {*new, *(structure.position[path] for path in other_rows)}
        return Prediction(
            structure,
            setting,
            manner,
            layout,
            flows,
            transforms,
            parts,
            weights=replaced(self.weights, renewed),
            sent_by_use=replaced(
                self.sent_by_use, {i: _sent_by_use(structure, i, flows, mesh, manner) for i in touched}
            ),
            sent_by_leaf=replaced(
                self.sent_by_leaf,
                {i: _sent_by_leaf(structure, weight, setting, manner) for i, weight in renewed.items()},
            ),
            bytes_by_use=replaced(self.bytes_by_use, {i: use_bytes(flows[i], mesh, manner.group_comm) for i in moved}),
            bytes_by_leaf=replaced(
                self.bytes_by_leaf,
                {i: leaf_bytes(layout[i], mesh, manner.group_comm, manner.by_rows) for i in of_bytes},
            ),
            split_by_use=replaced(self.split_by_use, {i: _split(structure, flows[i], setting) for i in moved}),
        )

    def _flows_at(self, uses: Iterable[int], layout: Sequence[LeafPlan]) -> dict[int, WeightFlow]:
        """Returns the flows of the uses at these positions under a `layout`."""
        structure, setting = self.structure, self.setting
        links, weight_of = structure.links, lambda i: layout[structure.position[structure.links[i].use.param]]
        split_at = lambda i: split_of(links[i], weight_of(i), setting)
        flows = {}
        for i in uses:
            planned = {path: layout[structure.position[path]] for path in links[i].use.fed_by}
            flows[i] = flow_of(links[i], split_at(i), split_at, planned, setting)
        return flows


def predict_step(step: LaidOutStep, manner: Manner) -> Prediction:
    """Predicts what a step costs. `step`: the traced step and its layout. `manner`: how it is run."""
    structure = StepStructure.of(step.graph, step.layers)
    setting = Setting(step.mesh, tuple(step.batch_axes), step.replicated_batch)
    leaves, mesh = tuple(step.leaves), step.mesh
    flows = flow_all(structure.links, leaves, setting)
    transforms, parts = _evaluated_locally(structure, leaves, setting)
    weights = tuple(_weight(structure, i, leaves, flows, parts, mesh, manner) for i in range(len(leaves)))
    return Prediction(
        structure,
        setting,
        manner,
        leaves,
        flows,
        transforms,
        parts,
        weights,
        sent_by_use=tuple(_sent_by_use(structure, i, flows, mesh, manner) for i in range(len(flows))),
        sent_by_leaf=tuple(_sent_by_leaf(structure, weight, setting, manner) for weight in weights),
        bytes_by_use=tuple(use_bytes(flow, mesh, manner.group_comm) for flow in flows),
        bytes_by_leaf=bytes_by_leaf(leaves, mesh, manner.group_comm, manner.by_rows),
        split_by_use=tuple(_split(structure, flow, setting) for flow in flows),
    )


def replaced(values: tuple[Value, ...], new: Mapping[int, Value]) -> tuple[Value, ...]:
    """Returns `values` with those at the positions of `new` replaced by these."""
    if not new:
        return values
    changed = list(values)
    for i, value in new.items():
        changed[i] = value
    return tuple(changed)


def _evaluated_locally(
    structure: StepStructure, leaves: Sequence[LeafPlan], setting: Setting
) -> tuple[tuple[LocalTransform, ...], Mapping[str, Axes]]:
    """Returns the Fourier transforms that are evaluated device by device; and by convolution weight, the axes over
    which each device has the gradient of its own groups alone."""
    arguments = structure.graph, leaves, setting.mesh, setting.batch_axes, setting.replicated_batch
    transforms = derive_transforms(*arguments) if structure.has_transforms else ()
    convolutions = derive_convolutions(*arguments) if structure.has_groups else ()
    return transforms, {each.param: each.gathered for each in convolutions if each.gathered and each.param is not None}


def _split(structure: StepStructure, flow: WeightFlow, setting: Setting) -> int:
    return use_split(structure.graph, flow, setting.mesh, setting.batch_axes)


def _sent_by_use(
    structure: StepStructure, i: int, flows: Sequence[WeightFlow], mesh: MeshShape, manner: Manner
) -> Sent:
    """Returns what moves activations around the use at position `i`."""
    use = flows[i].use
    layer = structure.names.get(use.param, use.layer)
    events = use_events(i, flows, mesh, manner.group_comm, manner.sums_apart, manner.widens)
    return sent_by(layer, events, mesh, manner.backward)


def _sent_by_leaf(structure: StepStructure, weight: Weight | None, setting: Setting, manner: Manner) -> Sent:
    """Returns what gathers a weight and sums its gradient; nothing for leaves that are no parameters."""
    if weight is None:
        return ()
    layer = structure.names.get(weight.leaf.path, weight.leaf.path)
    # In a loop around the gradient all of it is sent in every turn.
    turns = structure.graph.leaves[structure.position[weight.leaf.path]].turns
    events = gradient_events(weight, setting)
    if turns > 1:
        events = ((op, axes, turns * size, purpose) for op, axes, size, purpose in events)
    return sent_by(layer, events, setting.mesh, manner.backward)


def _weight(
    structure: StepStructure,
    i: int,
    leaves: Sequence[LeafPlan],
    flows: Sequence[WeightFlow],
    parts: Mapping[str, Axes],
    mesh: MeshShape,
    manner: Manner,
) -> Weight | None:
    """Returns what the collectives of the leaf at position `i` depend on; None where it is no parameter."""
    leaf = leaves[i]
    if leaf.role != "param":
        return None
    path, uses = leaf.path, structure.uses_of.get(leaf.path, ())
    narrowed, widened = structure.narrowed.get(path, 1), 1
    if manner.widens and path in structure.as_bfloat16:
        narrowed, widened = (narrowed // 2, 1) if narrowed > 1 else (1, 2)
    return Weight(
        leaf,
        tuple(leaves[state] for state in structure.states_of.get(path, ())),
        experts=flows[uses[-1]].stacked if uses else (),
        read_back=path in structure.read_back,
        parts=parts.get(path, ()),
        in_group=_added_in_group(structure.added_to.get(path, ()), flows),
        narrowed=narrowed,
        widened=widened,
        times=structure.times.get(path, 1),
        times_back=structure.times_back.get(path, 1),
        sums_apart=manner.sums_apart,
        dealt=tuple(_dealt(structure, leaf, mesh, manner.widens)),
    )


def _dealt(structure: StepStructure, leaf: LeafPlan, mesh: MeshShape, widens: bool) -> Iterator[tuple[Axes, int, int]]:
    """Yields, for each round in which columns of a parameter are dealt out, the axes, the bytes that a device sends,
    and how often rematerialisation repeats it."""
    for each in structure.dealt.get(leaf.path, ()):
        axes = deal_axes(structure.graph, each, leaf, mesh)
        rounds = moves_of(each).num_rounds
        for _ in range(rounds if axes else 0):
            sent = each.trips * sent_by_deal(each, leaf, mesh, axes) // rounds
            yield axes, 2 * sent if widens and each.dtype == "bfloat16" else sent, each.repeated


def _added_in_group(uses: Sequence[int], flows: Sequence[WeightFlow]) -> Axes:
    """Returns the axes over which the layer of a bias is split by rows, where its output is all-reduced: to the sum,
    which is the same on all devices of a group, each of them adds the bias for all of the group's examples.

    `uses`: the positions of the uses to whose output the bias may be added."""
    for i in reversed(uses):
        flow = flows[i]
        if flow.contracted and flow.crossing and stays_in_group(flow, flows):
            return flow.contracted
    return ()
