"""Chooses the rule set, and the mesh, that take the fewest predicted seconds within a budget of memory.

A traced graph, a mesh (or a number of devices) and the prices of a machine come in, a `Choice` comes out. Every answer
of a search and every shipped rule set is predicted as a whole, and the best of them is taken: a choice is never worse
than a shipped rule set, by the prediction. Meshes whose lower bound is above the best so far are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from splitjax.choosing.choice import NO_SOLVER, Candidate, Choice
from splitjax.choosing.domain import batch_modes, groups_of
from splitjax.choosing.layering import Answer, Pricing, answer, laid_out
from splitjax.choosing.prices import Prices
from splitjax.display.figures import bytes_text
from splitjax.errors import BudgetError, SplitjaxError
from splitjax.mesh import MeshShape
from splitjax.rules.pins import Pin
from splitjax.rules.ruleset import available, load_rules
from splitjax.search.effort import Effort
from splitjax.trace.graph import Graph

# Of meshes that are chosen: which axes there are.
_DATA, _TENSOR = "data", "model"


def mesh_shapes(num_devices: int) -> tuple[MeshShape, ...]:
    """Returns the meshes of `num_devices` devices that are searched: every split into the axes `data` and `model`; of
    an axis of one device the mesh says nothing."""
    found = []
    for tensor in range(1, num_devices + 1):
        if num_devices % tensor == 0:
            sizes = ((_DATA, num_devices // tensor), (_TENSOR, tensor))
            found.append(MeshShape(tuple(each for each in sizes if each[1] > 1) or ((_DATA, 1),)))
    return tuple(found)


def choose_rules(
    graph: Graph,
    mesh: MeshShape,
    prices: Prices,
    *,
    budget_bytes: float = math.inf,
    pins: Mapping[str, Pin] | None = None,
    backward: bool = True,
    effort: Effort | None = None,
) -> Choice:
    """Chooses the rules of a step on a `mesh`.

    **Arguments:** `graph`: the traced step. `prices`: of the machine. `budget_bytes`: what a device may need, as a sum
    of terms. `pins`: where users pinned arrays; they stay. `backward`: whether the step takes a gradient. `effort`: how
    much the search may spend; None: `Effort()`.

    Raises `BudgetError` where nothing that was found fits, with the smallest budget that does."""
    return _fitting(rank_rules(graph, mesh, prices, budget_bytes, pins, backward, effort), graph.num_examples)


def rank_rules(
    graph: Graph,
    mesh: MeshShape,
    prices: Prices,
    budget_bytes: float = math.inf,
    pins: Mapping[str, Pin] | None = None,
    backward: bool = True,
    effort: Effort | None = None,
) -> Choice:
    """Chooses as `choose_rules` does, and raises nothing where nothing fits: for who has better figures of what each
    candidate needs."""
    return _choose(graph, [mesh], lambda _: prices, budget_bytes, pins, backward, effort)


def choose_mesh(
    graph: Graph,
    num_devices: int,
    prices: Callable[[MeshShape], Prices],
    *,
    budget_bytes: float = math.inf,
    backward: bool = True,
    effort: Effort | None = None,
) -> Choice:
    """Chooses the mesh of `num_devices` devices and the rules of a step. `prices`: of the machine under a mesh. The
    others are those of `choose_rules`, as is what it raises."""
    choice = _choose(graph, mesh_shapes(num_devices), prices, budget_bytes, None, backward, effort)
    return _fitting(choice, graph.num_examples)


def _choose(
    graph: Graph,
    meshes: list[MeshShape] | tuple[MeshShape, ...],
    prices: Callable[[MeshShape], Prices],
    budget_bytes: float,
    pins: Mapping[str, Pin] | None,
    backward: bool,
    effort: Effort | None,
) -> Choice:
    pricings = {mesh: Pricing(graph, mesh, prices(mesh), pins or {}, backward) for mesh in meshes}
    candidates: list[Candidate] = []
    refused: dict[str, str] = {}
    for pricing in pricings.values():
        for found in _baselines(pricing):
            if isinstance(found, Candidate):
                candidates.append(found)
            else:
                refused.setdefault(*found)
    answers: list[tuple[Answer, Candidate]] = []
    dropped: list[MeshShape] = []
    # The most promising meshes first, so that their answers drop the others.
    order = sorted(meshes, key=lambda mesh: min((c.seconds for c in candidates if c.mesh == mesh), default=math.inf))
    for mesh in order:
        pricing, searched = pricings[mesh], False
        for mode in batch_modes(mesh):
            best = min((each.seconds for each in candidates if each.fits(budget_bytes)), default=math.inf)
            # The gradients of weights alone repeat the forward pass's flops; those of activations come on top.
            if pricing.prices.least_seconds(graph.flops * (2 if backward else 1), mesh.num_devices) > best:
                continue
            searched = True
            found = answer(pricing, groups_of(graph, mesh, mode), mode, budget_bytes, effort or Effort())
            if found is not None:
                answers.append((found, found.candidate))
                candidates.append(found.candidate)
        if not searched:
            dropped.append(mesh)
    return _best(candidates, answers, refused, dropped, budget_bytes)


def _baselines(pricing: Pricing) -> Iterator[Candidate | tuple[str, str]]:
    """Yields every shipped rule set with its prediction, or (its name, why the step or the mesh does not take it)."""
    for name in available():
        rules = load_rules(name)
        try:
            yield pricing.candidate(rules, laid_out(pricing, rules))
        except SplitjaxError as error:
            yield name, str(error).splitlines()[0]


def _best(
    candidates: list[Candidate],
    answers: list[tuple[Answer, Candidate]],
    refused: Mapping[str, str],
    dropped: list[MeshShape],
    budget_bytes: float,
) -> Choice:
    """Puts the choice together; where nothing fits, what needs least is its best."""
    fitting = [each for each in candidates if each.fits(budget_bytes)]
    best = min(fitting, key=lambda each: each.seconds, default=None)
    if best is None:
        best = min(candidates, key=lambda each: each.peak_bytes)
    proven = [found for found, made in answers if made.mesh == best.mesh]
    proof = min(proven, key=lambda found: found.candidate.seconds, default=None)
    return Choice(
        best,
        tuple(sorted(candidates, key=lambda each: each.seconds)),
        tuple(made for _, made in answers),
        tuple(refused.items()),
        () if proof is None else proof.variables,
        math.inf if proof is None else proof.network_seconds,
        -math.inf if proof is None else proof.bound_seconds,
        NO_SOLVER if proof is None else proof.solver,
        any(found.clock_struck for found, _ in answers),
        tuple(dropped),
        budget_bytes,
    )


def _fitting(choice: Choice, num_examples: int | None) -> Choice:
    """Returns a `choice` whose best fits into its budget. Raises `BudgetError` for any other."""
    best = choice.best
    if best.fits(choice.budget_bytes):
        return choice
    raise over_budget(choice.budget_bytes, best.peak_bytes, f"{best.name} on {best.mesh}", num_examples)


def over_budget(budget_bytes: float, least_bytes: int, by: str, num_examples: int | None) -> BudgetError:
    """Returns the error for a step of which every layout that was found needs more than a budget. `least_bytes`: what
    the smallest needs; `by`: which that is."""
    return BudgetError(
        f"no layout that was found fits: the least that a device needs is {bytes_text(least_bytes)}, by {by}",
        value=int(budget_bytes),
        place="memory_budget",
        remedy=f"allow {least_bytes} bytes a device, use more devices, or a smaller batch or microbatches"
        + (f" than {num_examples} examples at once" if num_examples else ""),
    )
