"""States the choice of a layout for every layer as a network of costs, and reads the search's answer.

The cost of a value is the difference that it makes to the prediction of the step with every layer whole; the cost of
two values of layers that follow each other is what both make together beside what each makes alone. So the sum over the
network is the whole prediction wherever only neighbours meet, and an approximation of it elsewhere: what is chosen in
the end is compared by whole predictions (`choosing`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from splitjax.choosing.candidate import Answer, Candidate, Variable
from splitjax.choosing.domain import SEARCHED, Group, Mode, rule_set
from splitjax.choosing.prices import Prices
from splitjax.choosing.sums import StepSums
from splitjax.cost.prediction import LaidOutStep, Manner, Prediction, predict_step
from splitjax.cost.row_tables import RowTable
from splitjax.cost.structure import StepStructure
from splitjax.mesh import MeshShape
from splitjax.plan import BlockRemat, LeafPlan
from splitjax.rules.assign import Assignment, assign
from splitjax.rules.pins import Pin
from splitjax.rules.ruleset import RuleSet
from splitjax.rules.sharded_state import shard_state
from splitjax.search.effort import Effort
from splitjax.search.network import CostNetwork, Memory, MemoryUse, Pair
from splitjax.search.solving import solve
from splitjax.trace.graph import Graph

# How often a network is solved again with the budget lowered by what its answer is over it as a whole.
_ROUNDS = 4


class StepUnderRules(Protocol):
    """Says what rule sets make of a step otherwise than by its layout."""

    def graph(self, rules: RuleSet, remat: tuple[BlockRemat, ...]) -> Graph:
        """Returns the step with the padding that `rules` ask for, with blocks computed again as `remat` says. Under
        rules of the search tables are padded that may have owners: rules that do not split them leave them as they
        are when they are built."""
        ...

    def tables(
        self, rules: RuleSet, remat: tuple[BlockRemat, ...], leaves: Sequence[LeafPlan], batch_axes: Sequence[str]
    ) -> tuple[RowTable, ...]:
        """Returns the tables that go by rows where the `leaves` are laid out so, and the batch lies over
        `batch_axes`."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Pricing:
    """Says what rule sets cost a step on a mesh. `pins`: where users pinned arrays; `backward`: whether it takes a
    gradient; `shards_state`: whether optimizer state of whole parameters lies in parts; `microbatches`: in how many a
    device differentiates its examples; `remat`: which blocks the graph computes again; `under`: what rule sets make of
    the step beside; None where its leaves stay as they are, and no table goes by rows."""

    graph: Graph
    mesh: MeshShape
    prices: Prices
    pins: Mapping[str, Pin]
    backward: bool
    shards_state: bool = False
    microbatches: int = 1
    remat: tuple[BlockRemat, ...] = ()
    under: StepUnderRules | None = None

    def graph_under(self, rules: RuleSet = SEARCHED) -> Graph:
        """Returns the step as `rules` have it, with their padding; without rules as the search has it."""
        return self.graph if self.under is None else self.under.graph(rules, self.remat)

    def tables_under(
        self, rules: RuleSet, leaves: Sequence[LeafPlan], batch_axes: Sequence[str]
    ) -> tuple[RowTable, ...]:
        """Returns the tables that go by rows under `rules`, which lay out the `leaves` so."""
        return () if self.under is None else self.under.tables(rules, self.remat, leaves, batch_axes)

    def candidate(self, rules: RuleSet, prediction: Prediction) -> Candidate:
        """Returns `rules` with what the `prediction` of them takes."""
        memory, number = prediction.memory, self.microbatches
        tables = self.tables_under(rules, prediction.leaves, prediction.setting.batch_axes)
        seconds = self.prices.seconds(prediction, tables)
        peak_bytes = memory.peak_bytes
        if self.remat:
            seconds += self.prices.seconds_again(prediction)
        if number > 1:
            seconds += (number - 1) * self.prices.seconds_of_a_part(prediction)
            peak_bytes -= memory.activation_bytes - memory.activation_bytes // number
        return Candidate(
            rules, self.mesh, seconds, memory.state_bytes, peak_bytes, shards_state=self.shards_state,
            microbatches=number, remat=self.remat,
        )  # fmt: skip

    def parts(self, prediction: Prediction) -> tuple[int, ...]:
        """Returns the numbers of microbatches above 1 into which the examples of a device divide, ascending; none for a
        step without a batch."""
        examples = self.graph.num_examples or 0
        own, rest = divmod(examples, self.mesh.size(tuple(prediction.setting.batch_axes)))
        return () if rest else tuple(number for number in range(2, own + 1) if own % number == 0)

    def assigned(self, rules: RuleSet) -> Assignment:
        """Returns the layout by `rules`, with state in parts where that is asked for. Raises what `rules.assign` raises
        for rules that do not suit the step."""
        graph = self.graph_under(rules)
        found = assign(graph, rules, self.mesh, self.pins)
        if not self.shards_state:
            return found
        return dataclasses.replace(found, leaves=shard_state(graph, found.leaves, self.mesh, found.batch_axes)[0])


def laid_out(pricing: Pricing, rules: RuleSet) -> Prediction:
    """Predicts the step under `rules`. Raises what `rules.assign` raises for rules that do not suit it."""
    found = pricing.assigned(rules)
    step = LaidOutStep(
        pricing.graph_under(rules),
        found.leaves,
        found.layers,
        pricing.mesh,
        found.batch_axes,
        found.replicated_batch,
        rules.saving_axes(pricing.mesh) if pricing.backward else (),
    )
    tables = pricing.tables_under(rules, found.leaves, found.batch_axes)
    return predict_step(step, Manner(pricing.backward, by_rows={table.param: table.gradient_bytes for table in tables}))


def answers(pricing: Pricing, groups: Sequence[Group], mode: Mode, budget_bytes: float, effort: Effort) -> list[Answer]:
    """Returns the best assignment of `groups` within a budget, with the best of those that store least: what fits by
    the sum may not by the lifetimes of arrays, and then the least is what is left. Where none fits, the best without a
    budget in its place: lifetimes may show that it does after all. Nothing where there is nothing to decide.

    **Arguments:** `mode`: how the batch of whole layers lies. `budget_bytes`: of a device; infinity without one.
    `effort`: of each search."""
    if not groups:
        return []
    base = laid_out(pricing, rule_set(groups, [0] * len(groups), mode))
    problem = network_of(pricing, groups, mode, base, changes(pricing, groups, mode, base))
    found = problem.solved(budget_bytes, effort)
    if math.isinf(budget_bytes):
        return [] if found is None else [found]
    best, least = found or problem.solved(math.inf, effort), problem.least(effort)
    if best is not None and least is not None and best.candidate.rules == least.candidate.rules:
        return [best]
    return [each for each in (best, least) if each is not None]


@dataclasses.dataclass(frozen=True, eq=False)
class _Problem:
    """Is the choice of a value for every group, as a network of costs.

    **Attributes:** `network`: its costs are seconds beyond `base_seconds`; its memory has no limit yet: an entry is
    what a value needs beyond the least of its variable. `least_bytes`: what is needed where every variable has its
    least.
    """

    pricing: Pricing
    groups: Sequence[Group]
    mode: Mode
    network: CostNetwork
    base_seconds: float
    least_bytes: float

    def solved(self, budget_bytes: float, effort: Effort) -> Answer | None:
        """Returns the best assignment within a budget, predicted as a whole; None where none is found."""
        first = found = self._within(budget_bytes, effort)
        slack = 0.0
        for _ in range(_ROUNDS - 1):
            over = 0.0 if found is None else found.candidate.peak_bytes - budget_bytes
            if over <= 0:
                break
            slack += over
            found = self._within(budget_bytes - slack, effort)
        if first is None or found is None:
            return None
        # What is proven is proven under the budget itself; a lowered one forbids more.
        bound = min(first.bound_seconds, found.network_seconds)
        return dataclasses.replace(found, bound_seconds=bound, within_bytes=budget_bytes)

    def least(self, effort: Effort) -> Answer | None:
        """Returns the best assignment of those that store least, as a sum; None where the search ends before."""
        return self._within(self.least_bytes, effort)

    def _within(self, sum_bytes: float, effort: Effort) -> Answer | None:
        """Returns the best assignment that stores at most `sum_bytes`, as a sum; None where none is found."""
        limited = _within(self.network, self.least_bytes, sum_bytes)
        found = None if limited is None else solve(limited, effort=effort)
        if found is None or not found.feasible or found.values is None:
            return None
        values = [int(value) for value in found.values]
        rules = rule_set(self.groups, values, self.mode)
        variables = tuple(
            Variable(
                group.name,
                tuple(layer.name for layer in group.layers),
                tuple(way.name for way in group.ways),
                group.ways[value].name,
            )
            for group, value in zip(self.groups, values, strict=True)
        )
        candidate = self.pricing.candidate(rules, laid_out(self.pricing, rules))
        seconds, bound = self.base_seconds + found.cost, self.base_seconds + found.bound
        return Answer(candidate, variables, seconds, min(bound, seconds), found.solver, found.clock_struck, sum_bytes)


def changes(
    pricing: Pricing, groups: Sequence[Group], mode: Mode, base: Prediction
) -> list[list[tuple[LeafPlan, ...]]]:
    """Returns, for every value of every group, the leaves that it alone lays out otherwise than `base`, which keeps all
    groups whole.

    Groups that have no storage in common are laid out together, each with its value of the same number: what one has
    then is what it would have alone."""
    graph = pricing.graph_under()
    found: list[list[tuple[LeafPlan, ...]]] = [[()] * len(group.ways) for group in groups]
    owners = _owners(graph, groups)
    linked = {number for numbers in owners.values() if len(numbers) > 1 for number in numbers}
    turns = [{i: value} for i in sorted(linked) for value in range(1, len(groups[i].ways))]
    for value in range(1, max(len(group.ways) for group in groups)):
        turns.append({i: value for i, group in enumerate(groups) if i not in linked and value < len(group.ways)})
    for turn in turns:
        values = [turn.get(i, 0) for i in range(len(groups))]
        leaves = pricing.assigned(rule_set(groups, values, mode)).leaves
        changed: dict[int, list[LeafPlan]] = {i: [] for i in turn}
        for new, old in zip(leaves, base.leaves, strict=True):
            if new != old:
                (number,) = turn if len(turn) == 1 else owners[new.path]
                changed[number].append(new)
        for i, value in turn.items():
            found[i][value] = tuple(changed[i])
    return found


def _owners(graph: Graph, groups: Sequence[Group]) -> dict[str, set[int]]:
    """Returns, by path of a leaf, the groups with which its layout can change: whose parameter it is or follows, or
    with one of whose parameters it shares storage."""
    of_path: dict[str, set[int]] = {}
    for number, group in enumerate(groups):
        for path in (path for layer in group.layers for path in layer.params):
            of_path.setdefault(path, set()).add(number)
    labels_of = {leaf.path: {graph.hard[atoms[0]] for atoms in leaf.dims if atoms} for leaf in graph.leaves}
    of_label: dict[int, set[int]] = {}
    for path, numbers in of_path.items():
        for label in labels_of[path]:
            of_label.setdefault(label, set()).update(numbers)
    owners = {}
    for leaf in graph.leaves:
        numbers = set(of_path.get(leaf.path, ())) | of_path.get(leaf.follows or "", set())
        for label in labels_of[leaf.path]:
            numbers |= of_label.get(label, set())
        owners[leaf.path] = numbers
    return owners


def network_of(
    pricing: Pricing,
    groups: Sequence[Group],
    mode: Mode,
    base: Prediction,
    changed: Sequence[Sequence[tuple[LeafPlan, ...]]],
) -> _Problem:
    """Returns the problem of a choice among what is `changed` by each value of each group."""
    priced, by_rows = StepSums(base, pricing.prices), _SearchedTables(pricing, base)
    least_bytes = float(base.memory.peak_bytes)
    costs, uses, alone = [], [], []
    for number, values in enumerate(changed):
        alone.append([priced.change(base.difference(leaves)) for leaves in values])
        has_tables = by_rows.are_in(groups[number])
        costs.append(
            np.array([by_rows.seconds(leaves) for leaves in values])
            if has_tables
            else np.array([priced.seconds(each.sums) for each in alone[number]])
        )
        extra = np.array([float(priced.peak_bytes(each)) for each in alone[number]])
        least_bytes += float(extra.min())
        uses.append(MemoryUse(number, 0, 1, extra - extra.min()))
    pairs, joined = [], by_rows.joined(groups, changed)
    for first, second in sorted({*_neighbours(base.structure, groups), *joined}):
        table = np.zeros((costs[first].size, costs[second].size))
        for i, j in itertools.product(range(1, table.shape[0]), range(1, table.shape[1])):
            if (first, second) in joined:
                both = by_rows.seconds((*changed[first][i], *changed[second][j]))
                table[i, j] = both - costs[first][i] - costs[second][j]
            else:
                table[i, j] = priced.meeting_seconds(alone[first][i], alone[second][j])
        if table.any():
            pairs.append(Pair(first, second, table))
    names = tuple(group.name for group in groups)
    network = CostNetwork(tuple(costs), tuple(pairs), (Memory("device", 0.0, tuple(uses)),), names)
    return _Problem(pricing, groups, mode, network, by_rows.base_seconds, least_bytes)


class _SearchedTables:
    """Prices changes of tables that go by rows: what a change makes of their rows belongs to no sum of the step.

    **Arguments:** `pricing`: of the step. `base`: the prediction of which changes are differences.
    """

    def __init__(self, pricing: Pricing, base: Prediction) -> None:
        self._pricing, self._base = pricing, base
        self._params = frozenset(table.param for table in self._under(base))
        self.base_seconds = pricing.prices.seconds(base, self._under(base))

    def are_in(self, group: Group) -> bool:
        """Returns whether some of them are parameters of a `group`."""
        return any(path in self._params for layer in group.layers for path in layer.params)

    def joined(
        self, groups: Sequence[Group], changed: Sequence[Sequence[tuple[LeafPlan, ...]]]
    ) -> frozenset[tuple[int, int]]:
        """Returns the pairs of `groups` with tables whose rows travel together where workers own both. `changed`: what
        each value of each group lays out otherwise."""
        group_of = {path: k for k, group in enumerate(groups) for layer in group.layers for path in layer.params}
        owned: list[LeafPlan] = []
        for number in sorted({group_of[param] for param in self._params if param in group_of}):
            owns = lambda leaves: any(table.is_owned for table in self._under(self._base.changed(leaves)))
            owned += next((leaves for leaves in changed[number][1:] if leaves and owns(leaves)), ())
        tables = self._under(self._base.changed(owned)) if owned else ()
        numbers = {table.param: group_of[table.param] for table in tables if table.param in group_of}
        pairs = ((numbers[table.joins], numbers[table.param]) for table in tables if table.joins in numbers)
        return frozenset((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1])

    def seconds(self, leaves: Sequence[LeafPlan]) -> float:
        """Returns the seconds that the step takes longer where some `leaves` are laid out so."""
        if not leaves:
            return 0.0
        changed = self._base.changed(leaves)
        return self._pricing.prices.seconds(changed, self._under(changed)) - self.base_seconds

    def _under(self, prediction: Prediction) -> tuple[RowTable, ...]:
        return self._pricing.tables_under(SEARCHED, prediction.leaves, prediction.setting.batch_axes)


def _within(network: CostNetwork, least_bytes: float, budget_bytes: float) -> CostNetwork | None:
    """Returns the network under a budget; None where not even the least of every variable fits."""
    if math.isinf(budget_bytes):
        return dataclasses.replace(network, memories=())
    if budget_bytes < least_bytes:
        return None
    memory = dataclasses.replace(network.memories[0], limit_bytes=budget_bytes - least_bytes)
    return dataclasses.replace(network, memories=(memory,))


def _neighbours(structure: StepStructure, groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Returns the pairs of groups that meet: layers that follow each other, read the same value, or hand something to
    each other."""
    graph = structure.graph
    group_of = {layer.name: number for number, group in enumerate(groups) for layer in group.layers}
    uses = [use for use in graph.uses if use.layer in group_of and not use.backward]
    pairs = list(itertools.pairwise(uses))
    readers: dict[int, list[int]] = {}
    for number, use in enumerate(uses):
        if use.data_value is not None:
            readers.setdefault(use.data_value, []).append(number)
    for together in readers.values():
        # What follows the readers of one value meets each of them: query, key and value before the scores' output.
        after = together[-1] + 1
        pairs += [(uses[i], uses[j]) for i, j in itertools.combinations(together, 2)]
        pairs += [(uses[i], uses[after]) for i in together if after < len(uses)]
        pairs += [(uses[together[0] - 1], uses[i]) for i in together if together[0] > 0]
    for number, others in (*structure.beside.items(), *structure.read_alike.items()):
        pairs += [(structure.links[number].use, structure.links[other].use) for other in others]
    pairs = [(a, b) for a, b in pairs if a.layer in group_of and b.layer in group_of]
    met = {tuple(sorted((group_of[a.layer], group_of[b.layer]))) for a, b in pairs}
    return sorted((a, b) for a, b in met if a != b)
