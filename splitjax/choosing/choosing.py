"""Chooses the rule set, and the mesh, that take the fewest predicted seconds within a budget of memory.

A traced graph, meshes and the prices of a machine come in as a `Pricing` each, a `Choice` comes out. Every answer of a
search and every shipped rule set is predicted as a whole, and the best of them is taken: a choice is never worse than a
shipped rule set, by the prediction. Meshes whose lower bound is above the best so far are dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from splitjax.auto_mesh import mesh_shapes
from splitjax.choosing.choice import Answer, Candidate, Choice, Refused
from splitjax.choosing.domain import batch_modes, groups_of
from splitjax.choosing.layering import Pricing, answers, laid_out
from splitjax.choosing.prices import Prices
from splitjax.display.figures import bytes_text
from splitjax.errors import BudgetError, SplitjaxError
from splitjax.mesh import MeshShape
from splitjax.rules.pins import Pin
from splitjax.rules.ruleset import RuleSet, available, load_rules
from splitjax.search.effort import Effort
from splitjax.trace.graph import Graph


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
    choice = rank([Pricing(graph, mesh, prices, pins or {}, backward)], budget_bytes=budget_bytes, effort=effort)
    return _fitting(choice, graph.num_examples)


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
    pricings = [Pricing(graph, mesh, prices(mesh), {}, backward) for mesh in mesh_shapes(num_devices)]
    return _fitting(rank(pricings, budget_bytes=budget_bytes, effort=effort), graph.num_examples)


def rank(
    pricings: Sequence[Pricing],
    *,
    rules: RuleSet | None = None,
    refused: Sequence[Refused] = (),
    budget_bytes: float = math.inf,
    effort: Effort | None = None,
) -> Choice:
    """Compares layouts of a step on meshes, and raises nothing where nothing fits the budget: for who has better
    figures of what each candidate needs.

    **Arguments:** `pricings`: of the step on each mesh. `rules`: those that were given, which are compared on every
    mesh; None to choose them too. `refused`: what was no candidate before anything was priced. `budget_bytes`: of a
    device, which the search holds by a sum; infinity without one. `effort`: as for `choose_rules`.

    Raises what `rules.assign` raises where there is no candidate at all."""
    candidates: list[Candidate] = []
    not_taken: list[tuple[Refused, SplitjaxError]] = []
    for pricing in pricings:
        for found in _given(pricing, _shipped() if rules is None else (rules,)):
            if isinstance(found, Candidate):
                candidates.append(found)
            else:
                not_taken.append((Refused(found[0], pricing.mesh, str(found[1]).splitlines()[0]), found[1]))
    searched: list[Answer] = []
    dropped: tuple[MeshShape, ...] = ()
    if rules is None:
        searched, dropped = _searched(pricings, candidates, budget_bytes, effort or Effort())
        candidates += [each.candidate for each in searched]
    if not candidates:
        raise not_taken[0][1]
    fitting = [each for each in candidates if each.fits(budget_bytes)]
    # Where nothing fits, what needs least is the best.
    best = min(fitting, key=lambda each: each.seconds, default=None) or min(candidates, key=lambda x: x.peak_bytes)
    return Choice(
        best,
        tuple(sorted(candidates, key=lambda each: each.seconds)),
        tuple(searched),
        (*refused, *(each for each, _ in not_taken)),
        tuple(dict.fromkeys((*(pricing.mesh for pricing in pricings), *(each.mesh for each in refused)))),
        dropped,
        budget_bytes,
        given="" if rules is None else rules.name,
    )


def _searched(
    pricings: Sequence[Pricing], known: Sequence[Candidate], budget_bytes: float, effort: Effort
) -> tuple[list[Answer], tuple[MeshShape, ...]]:
    """Returns what the search says on each mesh, and the meshes that it left out: on which nothing can be as fast as
    the best of the `known` candidates and the answers so far."""
    found: list[Answer] = []
    dropped: list[MeshShape] = []
    # The most promising meshes first, so that their answers drop the others.
    fastest = lambda mesh: min((each.seconds for each in known if each.mesh == mesh), default=math.inf)
    for pricing in sorted(pricings, key=lambda pricing: fastest(pricing.mesh)):
        graph, mesh, searched = pricing.graph, pricing.mesh, False
        for mode in batch_modes(mesh):
            candidates = (*known, *(each.candidate for each in found))
            best = min((each.seconds for each in candidates if each.fits(budget_bytes)), default=math.inf)
            # The gradients of weights alone repeat the forward pass's flops; those of activations come on top.
            flops = graph.flops * (2 if pricing.backward else 1)
            if pricing.prices.least_seconds(flops, mesh.num_devices) > best:
                continue
            searched = True
            found += answers(pricing, groups_of(graph, mesh, mode), mode, budget_bytes, effort)
        if not searched:
            dropped.append(mesh)
    return found, tuple(dropped)


def _shipped() -> Iterator[RuleSet]:
    yield from map(load_rules, available())


def _given(pricing: Pricing, sets: Iterable[RuleSet]) -> Iterator[Candidate | tuple[str, SplitjaxError]]:
    """Yields each of the rule `sets` with its prediction, or (its name, why the step or the mesh does not take it)."""
    for rules in sets:
        try:
            yield pricing.candidate(rules, laid_out(pricing, rules))
        except SplitjaxError as error:
            yield rules.name, error


def _fitting(choice: Choice, num_examples: int | None) -> Choice:
    """Returns a `choice` whose best fits into its budget. Raises `BudgetError` for any other."""
    best = choice.best
    if best.fits(choice.budget_bytes):
        return choice
    raise over_budget(choice.budget_bytes, best, num_examples)


def over_budget(budget_bytes: float, smallest: Candidate, num_examples: int | None) -> BudgetError:
    """Returns the error for a step of which every layout that was found needs more than a budget. `smallest`: the one
    that needs least."""
    least = smallest.needed_bytes
    return BudgetError(
        f"no layout that was found fits: the least that a device needs is {bytes_text(least)}, by {smallest.name} on"
        f" {smallest.mesh}",
        value=int(budget_bytes),
        place="memory_budget",
        remedy=f"allow {least} bytes a device, use more devices, or a smaller batch or microbatches"
        + (f" than {num_examples} examples at once" if num_examples else ""),
    )
