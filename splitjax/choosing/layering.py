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

import numpy as np

from splitjax.choosing.choice import Answer, Candidate, Variable
from splitjax.choosing.domain import Group, rule_set
from splitjax.choosing.prices import Prices
from splitjax.cost.prediction import LaidOutStep, Manner, Prediction, predict_step
from splitjax.mesh import MeshShape
from splitjax.plan import LeafPlan
from splitjax.rules.assign import assign
from splitjax.rules.pins import Pin
from splitjax.rules.ruleset import RuleSet
from splitjax.search.effort import Effort
from splitjax.search.network import CostNetwork, Memory, MemoryUse, Pair
from splitjax.search.solving import solve
from splitjax.trace.graph import Graph

# How often a network is solved again with the budget lowered by what its answer is over it as a whole.
_ROUNDS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Pricing:
    """Says what rule sets cost a step on a mesh. `pins`: where users pinned arrays; `backward`: whether it takes a
    gradient."""

    graph: Graph
    mesh: MeshShape
    prices: Prices
    pins: Mapping[str, Pin]
    backward: bool

    def candidate(self, rules: RuleSet, prediction: Prediction) -> Candidate:
        """Returns `rules` with what the `prediction` of them takes."""
        memory = prediction.memory
        return Candidate(rules, self.mesh, self.prices.seconds(prediction), memory.state_bytes, memory.peak_bytes)


def laid_out(pricing: Pricing, rules: RuleSet) -> Prediction:
    """Predicts the step under `rules`. Raises what `rules.assign` raises for rules that do not suit it."""
    graph = pricing.graph
    found = assign(graph, rules, pricing.mesh, pricing.pins)
    step = LaidOutStep(graph, found.leaves, found.layers, pricing.mesh, found.batch_axes, found.replicated_batch)
    return predict_step(step, Manner(pricing.backward))


def answer(pricing: Pricing, groups: Sequence[Group], mode: str, budget_bytes: float, effort: Effort) -> Answer | None:
    """Returns the best assignment of `groups`, or None where there is nothing to decide or nothing fits.

    **Arguments:** `mode`: how the batch of whole layers lies. `budget_bytes`: of a device. `effort`: of a search."""
    if not groups:
        return None
    whole = [0] * len(groups)
    base = laid_out(pricing, rule_set(groups, whole, mode))
    changes = [_changes(pricing, groups, mode, base, i) for i in range(len(groups))]
    network, base_seconds, base_bytes = _network(pricing, groups, base, changes)
    slack, rounds, proven = 0.0, 0, -math.inf
    while True:
        limited = _within(network, base_bytes, budget_bytes - slack)
        if limited is None:
            return None
        found = solve(limited, effort=effort)
        if not found.feasible or found.values is None:
            return None
        values = [int(value) for value in found.values]
        rules = rule_set(groups, values, mode)
        candidate = pricing.candidate(rules, laid_out(pricing, rules))
        # What is proven under the budget itself; a lowered one forbids more.
        proven = found.bound if rounds == 0 else proven
        rounds, over = rounds + 1, candidate.peak_bytes - budget_bytes
        if over <= 0 or rounds == _ROUNDS:
            break
        slack += over
    variables = tuple(
        Variable(
            group.name,
            tuple(layer.name for layer in group.layers),
            tuple(way.name for way in group.ways),
            group.ways[value].name,
        )
        for group, value in zip(groups, values, strict=True)
    )
    seconds, bound = base_seconds + found.cost, base_seconds + proven
    return Answer(candidate, variables, seconds, min(bound, seconds), found.solver, found.clock_struck)


def _changes(
    pricing: Pricing, groups: Sequence[Group], mode: str, base: Prediction, number: int
) -> list[tuple[LeafPlan, ...]]:
    """Returns, for every value of a group, the leaves that it lays out otherwise than `base`."""
    found: list[tuple[LeafPlan, ...]] = [()]
    for value in range(1, len(groups[number].ways)):
        values = [value if i == number else 0 for i in range(len(groups))]
        leaves = assign(pricing.graph, rule_set(groups, values, mode), pricing.mesh, pricing.pins).leaves
        found.append(tuple(new for new, old in zip(leaves, base.leaves, strict=True) if new != old))
    return found


def _network(
    pricing: Pricing, groups: Sequence[Group], base: Prediction, changes: Sequence[Sequence[tuple[LeafPlan, ...]]]
) -> tuple[CostNetwork, float, float]:
    """Returns the network, whose costs are seconds beyond those of `base`; the seconds of `base`; and the bytes that
    are left where every variable has its least. The network's memory has no limit yet: an entry is what a value needs
    beyond that least."""
    seconds = pricing.prices.seconds
    before, peak_bytes = seconds(base), float(base.memory.peak_bytes)
    least_bytes = peak_bytes
    costs, uses = [], []
    for number, values in enumerate(changes):
        predictions = [base.changed(leaves) if leaves else base for leaves in values]
        costs.append(np.array([seconds(each) - before for each in predictions]))
        extra = np.array([each.memory.peak_bytes - peak_bytes for each in predictions])
        least_bytes += float(extra.min())
        uses.append(MemoryUse(number, 0, 1, extra - extra.min()))
    pairs = []
    for first, second in _neighbours(pricing.graph, groups):
        table = np.zeros((costs[first].size, costs[second].size))
        for i, j in itertools.product(range(1, table.shape[0]), range(1, table.shape[1])):
            both = {leaf.path: leaf for leaf in (*changes[first][i], *changes[second][j])}
            together = seconds(base.changed(both.values())) - before
            table[i, j] = together - costs[first][i] - costs[second][j]
        if table.any():
            pairs.append(Pair(first, second, table))
    names = tuple(group.name for group in groups)
    memory = Memory("device", 0.0, tuple(uses))
    return CostNetwork(tuple(costs), tuple(pairs), (memory,), names), before, least_bytes


def _within(network: CostNetwork, least_bytes: float, budget_bytes: float) -> CostNetwork | None:
    """Returns the network under a budget; None where not even the least of every variable fits."""
    if math.isinf(budget_bytes):
        return dataclasses.replace(network, memories=())
    if budget_bytes < least_bytes:
        return None
    memory = dataclasses.replace(network.memories[0], limit_bytes=budget_bytes - least_bytes)
    return dataclasses.replace(network, memories=(memory,))


def _neighbours(graph: Graph, groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Returns the pairs of groups that meet: layers that follow each other, or read the same value."""
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
    met = {tuple(sorted((group_of[a.layer], group_of[b.layer]))) for a, b in pairs}
    return sorted((a, b) for a, b in met if a != b)
