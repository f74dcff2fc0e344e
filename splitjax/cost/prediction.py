"""Predicts the collectives and the memory of a laid-out step, and predicts them again after a change of its layout.

A step with the layout of its leaves comes in, a `Prediction` comes out, which keeps its collectives by use and by leaf,
and its memory as terms. `Prediction.changed` derives anew what a changed layout touches, and shares the rest. What
touches what is known exactly:

- The flow of a use depends on the layout of its weight, of the weights of earlier uses that read the same input, of
  those whose heads read the heads that it makes, and of the batches that it reads.
- What a use sends depends on its own flow, and on those of its producer and its consumer.
- What a parameter's gradient sends depends on its own layout, on that of its optimizer state, and on the flows of its
  uses; for a bias on the flows of its layer's uses, for a scale on those of all uses in whose columns it lies, and for
  both on the flows of the uses that read these columns.
- Which convolutions with groups and which Fourier transforms are evaluated device by device, and how, depends on all
  parameters: a step that has some derives them anew.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

from splitjax.cost.collectives import saved_events, sent_by, transform_events
from splitjax.cost.compute import total_compute
from splitjax.cost.flow import Axes, Setting, WeightFlow, flow_all
from splitjax.cost.gradients import Weight
from splitjax.cost.memory import LeafBytes, total_memory
from splitjax.cost.parts import Layout, Manner, Renewed, Sent, evaluated_locally, flows_at
from splitjax.cost.saved import SavedInput, saved_inputs
from splitjax.cost.structure import StepStructure
from splitjax.cost.transforms import LocalTransform
from splitjax.mesh import MeshShape
from splitjax.plan import Collective, Compute, LayerPlan, LeafPlan, Memory, Spec, spec_axes
from splitjax.trace.graph import Graph

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
    - `saving_axes`: axes over which inputs of rematerialised layers are kept in parts.
    """

    graph: Graph
    leaves: Sequence[LeafPlan]
    layers: Sequence[LayerPlan]
    mesh: MeshShape
    batch_axes: Sequence[str]
    replicated_batch: str
    saving_axes: Sequence[str] = ()


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
    - `saving_axes`: axes over which inputs of rematerialised layers are kept in parts, where they can be.
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
    saving_axes: Axes
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
        of_uses = self._activations() if self.transforms else itertools.chain.from_iterable(self.sent_by_use)
        return (*of_uses, *self._of_saved())

    @functools.cached_property
    def saved(self) -> tuple[SavedInput, ...]:
        """What is kept for the backward pass in parts."""
        return saved_inputs(self.structure.graph, self.leaves, self.setting, self.saving_axes)

    def _of_saved(self) -> Iterator[Collective]:
        """Yields the collectives of what is kept in parts."""
        for saved in self.saved:
            if saved.without_barriers or (saved.with_earlier and self.manner.drops_barriers):
                continue
            events = saved_events(saved, self.manner.widens)
            yield from sent_by(saved.layer, events, self.setting.mesh, self.manner.backward)

    @functools.cached_property
    def memory(self) -> Memory:
        """The bytes of a device, as `predict_memory` says."""
        return self.memory_of(self.bytes_by_leaf, self.bytes_by_use)

    def memory_of(self, leaves: Iterable[LeafBytes], uses: Iterable[int]) -> Memory:
        """Returns the bytes of a device where those by leaf and by use are these."""
        base_bytes, least_bytes = self._shares
        return total_memory(leaves, uses, base_bytes, least_bytes)

    def activation_bytes(self, used: int) -> int:
        """Returns the activations of a device in bytes where its uses have so many beyond an equal share of the
        batch."""
        base_bytes, least_bytes = self._shares
        return max(base_bytes + used, least_bytes)

    @functools.cached_property
    def _shares(self) -> tuple[int, int]:
        """The bytes of activations of an equal share of the batch, and those that a device has at least."""
        num_bytes, mesh = self.structure.graph.activation_bytes, self.setting.mesh
        return num_bytes // mesh.size(self.setting.batch_axes), num_bytes // mesh.num_devices

    @functools.cached_property
    def compute(self) -> Compute:
        """The flops of a device, as `cost.compute.total_compute` says."""
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
        found = self.difference(leaves, by_rows)
        renewed = found.renewed
        return Prediction(
            self.structure,
            self.setting,
            found.manner,
            replaced(self.leaves, found.leaves),
            self.saving_axes,
            replaced(self.flows, found.flows),
            found.transforms,
            found.parts,
            weights=replaced(self.weights, renewed.weights),
            sent_by_use=replaced(self.sent_by_use, renewed.sent_by_use),
            sent_by_leaf=replaced(self.sent_by_leaf, renewed.sent_by_leaf),
            bytes_by_use=replaced(self.bytes_by_use, renewed.bytes_by_use),
            bytes_by_leaf=replaced(self.bytes_by_leaf, renewed.bytes_by_leaf),
            split_by_use=replaced(self.split_by_use, renewed.split_by_use),
        )

    def difference(self, leaves: Iterable[LeafPlan], by_rows: Mapping[str, int] | None = None) -> Difference:
        """Derives what a change of the layout makes otherwise. The arguments are those of `changed`."""
        structure, setting, rows_before = self.structure, self.setting, self.manner.by_rows
        manner = self.manner if by_rows is None else dataclasses.replace(self.manner, by_rows=by_rows)
        new = {structure.position[leaf.path]: leaf for leaf in leaves}
        layout = replaced(self.leaves, new)
        paths = [leaf.path for leaf in new.values()]

        reached = {i for path in paths for i in structure.uses_of.get(path, ())}
        reached |= {later for i in reached for later in structure.read_alike.get(i, ())}
        reached |= {i for path in paths for i in structure.fed_from.get(path, ())}
        flows = flows_at(structure, setting, reached, layout)
        flows = {i: flow for i, flow in flows.items() if flow != self.flows[i]}
        touched = structure.around(flows)

        transforms, parts = evaluated_locally(structure, layout, setting)
        weights = {
            *paths,
            *(structure.mirrors[path] for path in paths if path in structure.mirrors),
            *structure.reweighed(flows, touched),
            *(path for path in {*parts, *self.parts} if parts.get(path) != self.parts.get(path)),
        }
        reweighed = frozenset(map(structure.position.__getitem__, weights))
        other_rows = {
            path for path in {*manner.by_rows, *rows_before} if manner.by_rows.get(path) != rows_before.get(path)
        }
        resized = {*new, *(structure.position[path] for path in other_rows)}
        changed = Layout(structure, setting, manner, layout, replaced(self.flows, flows), parts)
        renewed = changed.renewed(flows, touched, reweighed, resized, known=self.weights)
        return Difference(manner, new, frozenset(reached), flows, touched, reweighed, transforms, parts, renewed)


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """Holds what a change of its layout makes otherwise about a predicted step, by the position of a leaf or a use.

    **Attributes:**

    - `manner`, `transforms`, `parts`: of the changed step.
    - `leaves`: the changed layouts. `reached`: the uses whose flow depends on these; `flows`: those that are others.
    - `touched`: the uses that may send otherwise. `reweighed`: the leaves whose collectives may be others.
    - `renewed`: the parts that were derived anew.
    """

    manner: Manner
    leaves: Mapping[int, LeafPlan]
    reached: frozenset[int]
    flows: Mapping[int, WeightFlow]
    touched: frozenset[int]
    reweighed: frozenset[int]
    transforms: tuple[LocalTransform, ...]
    parts: Mapping[str, Axes]
    renewed: Renewed

    def meets(self, other: Difference) -> bool:
        """Whether there is anything that both reach: else they add up to what both make together, where parts of the
        step depend on leaves near them alone (`StepStructure.adds_up`)."""
        return not (
            self.reached.isdisjoint(other.reached)
            and self.touched.isdisjoint(other.touched)
            and self.reweighed.isdisjoint(other.reweighed)
            and self.leaves.keys().isdisjoint(other.leaves)
        )


def predict_step(step: LaidOutStep, manner: Manner) -> Prediction:
    """Predicts what a step costs. `step`: the traced step and its layout. `manner`: how it is run."""
    structure = StepStructure.of(step.graph, step.layers)
    setting = Setting(step.mesh, tuple(step.batch_axes), step.replicated_batch)
    leaves = tuple(step.leaves)
    flows = flow_all(structure.links, leaves, setting)
    transforms, parts = evaluated_locally(structure, leaves, setting)
    every_use, every_leaf = range(len(flows)), range(len(leaves))
    layout = Layout(structure, setting, manner, leaves, flows, parts)
    found = layout.renewed(every_use, every_use, every_leaf, every_leaf)
    return Prediction(
        structure,
        setting,
        manner,
        leaves,
        tuple(step.saving_axes),
        flows,
        transforms,
        parts,
        weights=tuple(found.weights.values()),
        sent_by_use=tuple(found.sent_by_use.values()),
        sent_by_leaf=tuple(found.sent_by_leaf.values()),
        bytes_by_use=tuple(found.bytes_by_use.values()),
        bytes_by_leaf=tuple(found.bytes_by_leaf.values()),
        split_by_use=tuple(found.split_by_use.values()),
    )


def replaced(values: tuple[Value, ...], new: Mapping[int, Value]) -> tuple[Value, ...]:
    """Returns `values` with those at the positions of `new` replaced by these."""
    if not new:
        return values
    changed = list(values)
    for i, value in new.items():
        changed[i] = value
    return tuple(changed)
