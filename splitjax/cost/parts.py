"""Derives the parts of a prediction: what one use, or one leaf, of a step under a layout sends and stores.

What no layout changes about a step (`StepStructure`), its layout and the flows of its uses come in; the collectives and
the figures of single parts come out, from which `cost.prediction` puts a step together, and `cost.interplay` what two
changes make of each other.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction

from splitjax.cost.collectives import (
    sent_by,
    statistic_events,
    use_events,
)
from splitjax.cost.compute import ByNumber, apart_axes, use_split
from splitjax.cost.convolutions import derive_convolutions
from splitjax.cost.dealing import copied_bytes, deal_axes, moves_of, sent_by_deal
from splitjax.cost.flow import Axes, Setting, Split, WeightFlow, flow_of, leaves_group, split_of
from splitjax.cost.gradients import Weight, gradient_events
from splitjax.cost.memory import LeafBytes, leaf_bytes, use_bytes
from splitjax.cost.structure import StepStructure
from splitjax.cost.transforms import LocalTransform, derive_transforms
from splitjax.cost.turning import sent_for_turns
from splitjax.plan import Collective, LeafPlan, Phase, Purpose, PurposeKind
from splitjax.primitives.walk import Site

Sent = tuple[Collective, ...]


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
    - `maxima_apart`: whether the compiler reduces a maximum by itself where its place is asked for, too; that for TPUs
      takes it from what is gathered for the place.
    - `drops_barriers`: whether the compiler drops the barriers of rematerialised calls before it merges equal
      operations, as that for CPUs of JAX before 0.11 does: it gathers once what several calls keep of one activation
      (`cost.saved`), and a weight once for both passes.
    - `within`: the mesh axes along which workers lie that add up what all uses of a weight give to its gradient before
      they send it: where gradients are taken in microbatches. `gathering`: the mesh axes along which workers gather a
      weight that is stored over these, once, before they take gradients; none where they have no such weights.
      `gathered`: the same by the path of a weight, of those that workers have whole in a loop alone.
    - `loop_sums`: by path, how often a gradient is summed over devices, of those that XLA sums in every iteration of a
      loop (`cost.loop_sums`).
    - `sums_statistics`: whether statistics of the batch are those of all examples; else each worker has those of its
      own.
    - `microbatches`: in how many each gradient boundary runs, by its site, where that is more than one. What is dealt
      out of a weight is there before the loop over them, and what comes back of its gradient is sent in each of them.
    """

    backward: bool = True
    group_comm: str = "gather"
    by_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sums_apart: bool = False
    widens: bool = False
    maxima_apart: bool = True
    drops_barriers: bool = False
    within: Axes = ()
    gathering: Axes = ()
    gathered: Mapping[str, Axes] = dataclasses.field(default_factory=dict)
    loop_sums: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sums_statistics: bool = True
    microbatches: Mapping[Site, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, eq=False)
class Renewed:
    """Holds parts of a step that were derived, by the position of their use or their leaf.

    **Attributes:** `weights`, `sent_by_leaf`, `bytes_by_leaf`: of leaves. `sent_by_use`, `bytes_by_use`,
    `split_by_use`: of uses. All as `Prediction` has them.
    """

    weights: Mapping[int, Weight | None]
    sent_by_use: Mapping[int, Sent]
    sent_by_leaf: Mapping[int, Sent]
    bytes_by_use: Mapping[int, int]
    bytes_by_leaf: Mapping[int, LeafBytes]
    split_by_use: Mapping[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Is a step under a layout, of which single parts are derived.

    **Attributes:** `structure`, `setting`, `manner`, `leaves`, `flows`, `parts`: as for `Prediction`.
    """

    structure: StepStructure
    setting: Setting
    manner: Manner
    leaves: Sequence[LeafPlan]
    flows: Sequence[WeightFlow]
    parts: Mapping[str, Axes]

    def renewed(
        self,
        moved: Iterable[int],
        touched: Iterable[int],
        reweighed: Iterable[int],
        resized: Iterable[int],
        known: Sequence[Weight | None] | None = None,
    ) -> Renewed:
        """Derives parts anew.

        **Arguments:** `moved`: the uses with another flow. `touched`: those that may send otherwise. `reweighed`: the
        leaves whose collectives may be others; without those that depend on the same as in `known`, where that is
        given. `resized`: the leaves of another size."""
        weights = {i: self.weight(i) for i in reweighed if known is None or not self.weighs_as(i, known[i])}
        mesh, group_comm, by_rows = self.setting.mesh, self.manner.group_comm, self.manner.by_rows
        return Renewed(
            weights,
            sent_by_use={i: self.sent_around(i) for i in touched},
            sent_by_leaf={i: self.sent_for(i, weight) for i, weight in weights.items()},
            bytes_by_use={i: use_bytes(self.flows[i], mesh, group_comm) for i in moved},
            bytes_by_leaf={i: leaf_bytes(self.leaves[i], mesh, group_comm, by_rows) for i in resized},
            split_by_use={i: self.product_split(i) for i in moved},
        )

    def product_split(self, i: int) -> int:
        """Returns among how many devices the product of the use at position `i` is shared."""
        mesh, batch_axes = self.setting.mesh, self.setting.batch_axes
        return use_split(self.structure.graph, self.flows[i], mesh, batch_axes, self._apart)

    @functools.cached_property
    def _apart(self) -> ByNumber:
        """Over which axes examples lie, where the arrays of the batch are laid out one by one."""
        return apart_axes(self.structure.graph, self.leaves, self.setting.mesh, self.setting.batch_axes)

    def sent_around(self, i: int) -> Sent:
        """Returns what moves activations around the use at position `i`."""
        flow, mesh, manner = self.flows[i], self.setting.mesh, self.manner
        use = flow.use
        if not flow.axes and flow.shared is None and not flow.sorting:
            return ()  # whatever is split around it, it reads and writes what is whole
        layer = self.structure.names.get(use.param, use.layer)
        events = use_events(
            i, self.flows, mesh, manner.group_comm, manner.sums_apart, manner.widens, manner.maxima_apart
        )
        return sent_by(layer, events, mesh, manner.backward)

    def sent_for(self, i: int, weight: Weight | None) -> Sent:
        """Returns what gathers the weight at position `i` and sums its gradient; of a batch, what gives devices their
        shares of every turn that it is cut into; of a running average, what sums the batch's; nothing for other
        leaves."""
        if weight is None:
            leaf = self.leaves[i]
            return self._sent_for_statistic(leaf) if leaf.role == "statistic" else self._sent_for_turns(leaf)
        structure, path = self.structure, weight.leaf.path
        # In a loop around the gradient all of it is sent in every turn.
        turns = structure.graph.leaves[structure.position[path]].turns
        events = gradient_events(weight, self.setting)
        if turns > 1:
            events = ((op, axes, turns * size, purpose) for op, axes, size, purpose in events)
        return sent_by(structure.names.get(path, path), events, self.setting.mesh, self.manner.backward)

    def weight(self, i: int) -> Weight | None:
        """Returns what the collectives of the leaf at position `i` depend on; None where it is no parameter."""
        structure, leaf, manner, flows = self.structure, self.leaves[i], self.manner, self.flows
        if leaf.role != "param":
            return None
        path, uses = leaf.path, structure.uses_of.get(leaf.path, ())
        narrowed, widened = structure.narrowed.get(path, 1), 1
        if manner.widens and path in structure.as_bfloat16:
            narrowed, widened = (narrowed // 2, 1) if narrowed > 1 else (1, 2)
        return Weight(
            leaf,
            tuple(self.leaves[state] for state in structure.states_of.get(path, ())),
            experts=flows[uses[-1]].stacked if uses else (),
            read_back=path in structure.read_back and not (manner.drops_barriers and path in structure.read_again),
            parts=self._parts_of(leaf),
            in_group=self._in_group(leaf),
            narrowed=narrowed,
            widened=widened,
            times=structure.times.get(path, 1),
            within=manner.within,
            gathering=manner.gathering or manner.gathered.get(path, ()),
            times_forward=structure.times_forward.get(path, 1),
            times_back=structure.times_back.get(path, 1),
            sums_apart=manner.sums_apart,
            loop_sums=manner.loop_sums.get(path, 1),
            dealt=tuple(self._dealt(leaf)),
            copied=tuple(self._copied(leaf)),
            pieces=self._pieces(leaf),
        )

    def weighs_as(self, i: int, known: Weight | None) -> bool:
        """Tells whether what `weight` says of the leaf at position `i` is `known`, which is what it says of that leaf
        under some layout of this step. What is sent for a running average, which has no weight, depends on its layout:
        nothing that is known of it says whether that changed."""
        if known is None:
            return self.leaves[i].role != "statistic"
        structure, path = self.structure, known.leaf.path
        states, uses = structure.states_of.get(path, ()), structure.uses_of.get(path, ())
        return (
            self.leaves[i] == known.leaf
            and all(self.leaves[at] == state for at, state in zip(states, known.states, strict=True))
            and (self.flows[uses[-1]].stacked if uses else ()) == known.experts
            and self._parts_of(known.leaf) == known.parts
            and self._in_group(known.leaf) == known.in_group
        )

    def _parts_of(self, leaf: LeafPlan) -> Axes:
        """Returns `Weight.parts` of a parameter: by its groups (`parts`), or by the columns that it meets."""
        return self.parts.get(leaf.path, ()) or self._beside_columns(leaf)

    def _in_group(self, leaf: LeafPlan) -> Axes:
        """Returns `Weight.in_group` of a parameter."""
        added = _added_in_group(self.structure.added_to.get(leaf.path, ()), self.flows)
        return added or self._beside_columns(leaf) or self._beside_sums(leaf)

    def _beside_columns(self, leaf: LeafPlan) -> Axes:
        """Returns the axes over which the columns are split that a whole parameter is multiplied with or added to (the
        scale of a normalisation, a bias): all devices of a group see the same examples, and each has the gradient of
        its own columns alone."""
        return self._at_all_beside(leaf, lambda flow: () if leaves_group(flow, self.flows) else flow.free)

    def _beside_sums(self, leaf: LeafPlan) -> Axes:
        """Returns the axes over which the layers are split by rows whose outputs a whole parameter meets, where these
        are all-reduced: all devices of a group have the same, and its whole gradient."""
        return self._at_all_beside(leaf, lambda flow: _summed_in_group(flow, self.flows))

    def _at_all_beside(self, leaf: LeafPlan, axes_at: Callable[[WeightFlow], Axes]) -> Axes:
        """Returns what `axes_at` says of all uses that a whole parameter stands beside; none where it says different
        things, or the parameter is split over some of these axes."""
        structure, path = self.structure, leaf.path
        beside = structure.beside_columns.get(path) or structure.added_to.get(path, ())
        axes = {axes_at(self.flows[i]) for i in beside}
        found = axes.pop() if len(axes) == 1 else ()
        return found if set(found).isdisjoint(leaf.axes) else ()

    def _sent_for_turns(self, leaf: LeafPlan) -> Sent:
        structure, mesh = self.structure, self.setting.mesh
        purpose = Purpose(PurposeKind.TURN_EXAMPLES, Phase.FORWARD, leaf.path)
        turned = (each for each in structure.graph.turned if each.leaf == leaf.path)
        events = ((*event, purpose) for each in turned for event in sent_for_turns(each, leaf, mesh))
        return sent_by(leaf.path, events, mesh, self.manner.backward)

    def _sent_for_statistic(self, leaf: LeafPlan) -> Sent:
        structure, mesh, manner = self.structure, self.setting.mesh, self.manner
        statistic = structure.statistics.get(leaf.path) if manner.sums_statistics else None
        if statistic is None:
            return ()
        events = statistic_events(statistic, leaf, self.setting)
        return sent_by(structure.names.get(leaf.path, leaf.path), events, mesh, manner.backward)

    def _dealt(self, leaf: LeafPlan) -> Iterator[tuple[Axes, int, int, int]]:
        """Yields, for each round in which columns of a parameter are dealt out, the axes, the bytes that a device
        sends, how often rematerialisation repeats it, and how often its gradient comes back."""
        structure, mesh, widens = self.structure, self.setting.mesh, self.manner.widens
        for each in structure.dealt.get(leaf.path, ()):
            axes = deal_axes(structure.graph, each, leaf, mesh)
            rounds = moves_of(each).num_rounds if axes and not each.copied else 0
            around = (number for site, number in self.manner.microbatches.items() if each.site[: len(site)] == site)
            times_back = next(around, 1)
            for _ in range(rounds):
                sent = each.trips * sent_by_deal(each, leaf, mesh, axes) // rounds
                yield axes, 2 * sent if widens and each.dtype == "bfloat16" else sent, each.repeated, times_back

    def _copied(self, leaf: LeafPlan) -> Iterator[tuple[Axes, int, int]]:
        """Yields, for each time that columns of a parameter are copied to all devices, the axes, the bytes that each
        has then, and how often rematerialisation repeats it."""
        structure, mesh, widens = self.structure, self.setting.mesh, self.manner.widens
        for each in structure.dealt.get(leaf.path, ()):
            axes = deal_axes(structure.graph, each, leaf, mesh) if each.copied else ()
            if axes:
                whole = each.trips * copied_bytes(each, leaf, mesh, axes)
                yield axes, 2 * whole if widens and each.dtype == "bfloat16" else whole, each.repeated

    def _pieces(self, leaf: LeafPlan) -> tuple[Fraction, ...]:
        """Returns `Weight.pieces` of a parameter."""
        structure, mesh = self.structure, self.setting.mesh
        in_parts = not leaf.axes and bool(self._parts_of(leaf))
        dealt = [
            each
            for each in structure.dealt.get(leaf.path, ())
            if in_parts or deal_axes(structure.graph, each, leaf, mesh)
        ]
        every = sum(each.num_elements for each in dealt if not each.copied)
        copied = [
            Fraction(each.num_elements * size, every * sum(each.sizes))
            for each in dealt
            for size in each.sizes
            if each.copied
        ]
        num = next((each.num for each in dealt), 1)
        return (1 - sum(copied, Fraction(0)), *(num * piece for piece in copied))


def flows_at(
    structure: StepStructure, setting: Setting, uses: Iterable[int], leaves: Sequence[LeafPlan]
) -> dict[int, WeightFlow]:
    """Returns the flows of the `uses` at these positions where the step is laid out as `leaves`."""
    links, position = structure.links, structure.position

    def split_at(i: int) -> Split:
        return split_of(links[i], leaves[position[links[i].use.param]], setting)

    flows = {}
    for i in uses:
        planned = {path: leaves[position[path]] for path in (*links[i].use.fed_by, links[i].use.param)}
        flows[i] = flow_of(links[i], split_at(i), split_at, planned, setting)
    return flows


def evaluated_locally(
    structure: StepStructure, leaves: Sequence[LeafPlan], setting: Setting
) -> tuple[tuple[LocalTransform, ...], Mapping[str, Axes]]:
    """Returns the Fourier transforms that are evaluated device by device; and by convolution weight, the axes over
    which each device has the gradient of its own groups alone."""
    arguments = structure.graph, leaves, setting.mesh, setting.batch_axes, setting.replicated_batch
    transforms = derive_transforms(*arguments) if structure.has_transforms else ()
    convolutions = derive_convolutions(*arguments) if structure.has_groups else ()
    return transforms, {each.param: each.gathered for each in convolutions if each.gathered and each.param is not None}


def _added_in_group(uses: Sequence[int], flows: Sequence[WeightFlow]) -> Axes:
    """Returns the axes over which the layer of a bias is split by rows, where its output is all-reduced: to the sum,
    which is the same on all devices of a group, each of them adds the bias for all of the group's examples.

    `uses`: the positions of the uses to whose output the bias may be added."""
    return next((axes for i in reversed(uses) if (axes := _summed_in_group(flows[i], flows))), ())


def _summed_in_group(flow: WeightFlow, flows: Sequence[WeightFlow]) -> Axes:
    """Returns the axes over which a use is split by rows, where its output is all-reduced within the group, and stays
    there."""
    return flow.contracted if flow.crossing and not leaves_group(flow, flows) else ()
