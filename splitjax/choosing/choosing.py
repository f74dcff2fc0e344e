"""Chooses the rule set, and the mesh, that take the fewest predicted seconds within a budget of memory.

A traced graph, meshes and the prices of a machine come in as a `Pricing` each, a `Choice` comes out. Every answer of a
search and every shipped rule set is predicted as a whole, and the best of them is taken: a choice is never worse than a
shipped rule set, by the prediction. Meshes whose lower bound is above the best so far are dropped. Meshes with a third
axis, for storage or for experts, come behind those of which they divide an axis, the most promising first, and so many
at most. Where slow links join hosts, meshes are compared with their axes in other orders, too (`axis_orders`): of two
axes with a search of their own, of three by the rules of the best few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from splitjax.auto_mesh import AutoMesh
from splitjax.choosing.axis_orders import crossing, other_orders
from splitjax.choosing.candidate import Answer, Candidate, Refused
from splitjax.choosing.choice import MICROBATCHES, REMAT, STATE, Choice
from splitjax.choosing.domain import batch_modes, groups_of, num_experts, speaks_of
from splitjax.choosing.layering import Pricing, answers, laid_out
from splitjax.choosing.prices import Prices
from splitjax.display.figures import bytes_text
from splitjax.errors import BudgetError, SplitjaxError
from splitjax.mesh import MeshShape
from splitjax.plan import BlockRemat
from splitjax.roles import Role
from splitjax.rules.pins import Pin
from splitjax.rules.ruleset import AUTO, RuleSet, available, load_rules
from splitjax.search.effort import Effort
from splitjax.trace.graph import Graph

# So many meshes with a third axis are searched, of each kind of axis.
_FURTHER = 4
# What is known of a mesh on which there is no candidate: that nothing fits, and how long it takes.
_NONE = (True, math.inf)


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
    asked, priced = AutoMesh(), lambda mesh: Pricing(graph, mesh, prices(mesh), {}, backward)
    shapes, further = asked.shapes(num_devices), asked.further(num_devices, num_experts(graph))
    choice = rank(
        list(map(priced, (*shapes, *other_orders(asked, shapes, prices)))),
        further=list(map(priced, further)),
        reordered=list(map(priced, other_orders(asked, further, prices))),
        budget_bytes=budget_bytes,
        effort=effort,
    )
    return _fitting(choice, graph.num_examples)


def rank(
    pricings: Sequence[Pricing],
    *,
    further: Sequence[Pricing] = (),
    reordered: Sequence[Pricing] = (),
    rules: RuleSet | None = None,
    refused: Sequence[Refused] = (),
    budget_bytes: float = math.inf,
    effort: Effort | None = None,
) -> Choice:
    """Compares layouts of a step on meshes, and raises nothing where nothing fits the budget: for who has better
    figures of what each candidate needs.

    **Arguments:** `pricings`: of the step on each mesh; those with sharded state behind those without, where both are
    compared. `further`: of those with a third axis; `reordered`: of these with their axes in other orders. `rules`:
    those that were given, which are compared on every mesh; None to choose them too. `refused`: what was no candidate
    before anything was priced. `budget_bytes`: of a device, which the search holds by a sum; infinity without one.
    `effort`: as for `choose_rules`.

    Raises what `rules.assign` raises where there is no candidate at all."""
    candidates: list[Candidate] = []
    not_taken: list[tuple[Refused, SplitjaxError]] = []
    sets, effort = tuple(map(load_rules, available())) if rules is None else (rules,), effort or Effort()
    for pricing in (*pricings, *further):
        for found in _given(pricing, sets if pricing in pricings else _apart(pricing, sets)):
            if isinstance(found, Candidate):
                candidates.append(found)
            else:
                not_taken.append((Refused(found[0], pricing.mesh, str(found[1]).splitlines()[0]), found[1]))
    searched: list[Answer] = []
    dropped: tuple[MeshShape, ...] = ()
    promising: list[Pricing] = []
    if rules is None:
        searched, dropped = _searched(pricings, candidates, budget_bytes, effort)
        candidates += [each.candidate for each in searched]
        promising = _promising(pricings, further, candidates, budget_bytes)
        more, also_dropped = _searched(promising, candidates, budget_bytes, effort)
        candidates += [each.candidate for each in more]
        searched, dropped = [*searched, *more], (*dropped, *also_dropped)
        candidates += _other_ways((*pricings, *promising), candidates)
    candidates += _in_other_orders(reordered, candidates, budget_bytes)
    if rules is None and (best := _best(candidates, budget_bytes)) is not None:
        there, _ = _searched([each for each in reordered if each.mesh == best.mesh], candidates, budget_bytes, effort)
        candidates, searched = [*candidates, *(each.candidate for each in there)], [*searched, *there]
    if not candidates:
        raise not_taken[0][1]
    candidates = list(_telling(candidates))
    best = _best(candidates, budget_bytes)
    assert best is not None, "there are candidates"
    tried = [each for each in reordered if any(each.mesh == other.mesh for other in candidates)]
    compared = (*pricings, *further, *tried)
    return Choice(
        best,
        tuple(sorted(candidates, key=lambda each: each.seconds)),
        tuple(searched),
        tuple(dict.fromkeys((*refused, *(each for each, _ in not_taken)))),
        tuple(dict.fromkeys((*(each.mesh for each in compared), *(each.mesh for each in refused)))),
        dropped,
        tuple(dict.fromkeys(each.mesh for each in further if each not in promising)) if rules is None else (),
        budget_bytes,
        given="" if rules is None else rules.name,
        also=(STATE,) if len({each.shards_state for each in pricings}) > 1 else (),
        crossings=tuple(dict.fromkeys(crossing(each.mesh, each.prices) for each in compared if each.prices.slow_axes)),
    )


def _best(candidates: Sequence[Candidate], budget_bytes: float) -> Candidate | None:
    """Returns the fastest of the candidates that fit; where none does, the one that needs least. None for none."""
    fitting = [each for each in candidates if each.fits(budget_bytes)]
    fastest = min(fitting, key=lambda each: each.seconds, default=None)
    return fastest or min(candidates, key=lambda each: each.peak_bytes, default=None)


def _in_other_orders(
    reordered: Sequence[Pricing], candidates: Sequence[Candidate], budget_bytes: float
) -> list[Candidate]:
    """Returns the best few candidates on meshes that are `reordered` with their axes in the other orders, those that
    fit before others."""
    sizes = {_wide(each.mesh) for each in reordered}
    there = [each for each in candidates if _wide(each.mesh) in sizes]
    return [
        pricing.candidate(each.rules, laid_out(pricing, each.rules))
        for each in sorted(there, key=lambda each: (not each.fits(budget_bytes), each.seconds))[:_FURTHER]
        for pricing in reordered
        if _wide(pricing.mesh) == _wide(each.mesh) and pricing.shards_state == each.shards_state
    ]


def _searched(
    pricings: Sequence[Pricing], known: Sequence[Candidate], budget_bytes: float, effort: Effort
) -> tuple[list[Answer], tuple[MeshShape, ...]]:
    """Returns what the search says on each mesh, and the meshes that it left out: on which nothing can be as fast as
    the best of the `known` candidates and the answers so far."""
    found: list[Answer] = []
    there: set[MeshShape] = set()
    # The most promising meshes first, so that their answers drop the others.
    fastest = lambda mesh: min((each.seconds for each in known if each.mesh == mesh), default=math.inf)
    for pricing in sorted(pricings, key=lambda pricing: fastest(pricing.mesh)):
        graph, mesh = pricing.graph_under(), pricing.mesh
        pairs = zip(graph.leaves, pricing.graph.leaves, strict=True)
        padded = frozenset(leaf.path for leaf, known in pairs if leaf.shape != known.shape)
        for mode in batch_modes(mesh):
            candidates = (*known, *(each.candidate for each in found))
            best = min((each.seconds for each in candidates if each.fits(budget_bytes)), default=math.inf)
            # The gradients of weights alone repeat the forward pass's flops; those of activations come on top.
            flops = graph.flops * (2 if pricing.backward else 1)
            if pricing.prices.least_seconds(flops, mesh.num_devices) > best:
                continue
            there.add(mesh)
            found += answers(pricing, groups_of(graph, mesh, mode, padded), mode, budget_bytes, effort)
    return found, tuple(dict.fromkeys(each.mesh for each in pricings if each.mesh not in there))


def _other_ways(pricings: Sequence[Pricing], candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yields the answers of the search that were found with sharded state without it, and the other way round, where
    both are compared."""
    for each in candidates:
        for pricing in pricings:
            if each.rules.name == AUTO and each.mesh == pricing.mesh and each.shards_state != pricing.shards_state:
                if not any(other.lies_as(each) and not other.is_as(each) for other in candidates):
                    yield pricing.candidate(each.rules, laid_out(pricing, each.rules))


def _telling(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yields the candidates, without those with sharded state of which nothing is sharded."""
    for each in candidates:
        whole = next((other for other in candidates if other.lies_as(each) and not other.shards_state), None)
        known = lambda one: (one.seconds, one.state_bytes, one.peak_bytes)
        if not each.shards_state or whole is None or known(each) != known(whole):
            yield each


def _apart(pricing: Pricing, sets: Iterable[RuleSet]) -> Iterator[RuleSet]:
    """Yields those of the rule `sets` that lay out a mesh with a third axis otherwise than one without: the others are
    compared on that one. Annotations may name the axis whatever the rules say."""
    third = [role for role in (Role.STORAGE, Role.EXPERT) if pricing.mesh.meant((role,))]
    yield from (rules for rules in sets if pricing.pins or speaks_of(rules, third))


def _promising(
    pricings: Sequence[Pricing], further: Sequence[Pricing], known: Sequence[Candidate], budget_bytes: float
) -> list[Pricing]:
    """Returns which of the `further` meshes, with a third axis, are searched: for each kind of axis a few, by the
    fastest of the `known` candidates on the mesh itself and on the one of `pricings` that has the axis for data, those
    that fit before others."""
    best: dict[frozenset[tuple[str, int]], tuple[bool, float]] = {}
    for each in known:
        sizes = _wide(each.mesh)
        best[sizes] = min(best.get(sizes, _NONE), (not each.fits(budget_bytes), each.seconds))
    undivided = {_wide(each.mesh): each for each in reversed(pricings)}  # with the axis for data first
    found: list[Pricing] = []
    for role in (Role.STORAGE, Role.EXPERT):
        ranked = []
        for number, pricing in enumerate(further):
            mesh, data = pricing.mesh, pricing.mesh.names[0]
            third = mesh.meant((role,))
            own = dict(_wide(mesh))
            sizes = {axis: size for axis, size in own.items() if axis not in third}
            whole = frozenset((sizes | {data: mesh.size((data, *third))}).items())
            if third and (role is Role.EXPERT or _may_store_apart(pricing, undivided.get(whole), budget_bytes)):
                ranked.append((min(best.get(_wide(mesh), _NONE), best.get(whole, _NONE)), number))
        meshes = list(dict.fromkeys(further[number].mesh for _, number in sorted(ranked)))[:_FURTHER]
        found += [each for each in further if each.mesh in meshes and each not in found]
    return found


def _may_store_apart(pricing: Pricing, undivided: Pricing | None, budget_bytes: float) -> bool:
    """Whether it can pay to store weights over an axis of their own, on a mesh that divides the axis for data of
    another, `undivided`.

    A weight that D devices store in groups of b sends 3 - 1/b - 2/D times its bytes, and takes memory by 1/b: both
    are linear in 1/b, so that b = 1 or b = D is best, which the undivided mesh has, unless a budget or a faster link
    says otherwise."""
    mesh = pricing.mesh
    data, (third,) = mesh.names[0], mesh.meant((Role.STORAGE,))
    if mesh.size((data,)) == 1:
        return False  # what is stored over the third axis is stored over all that split examples
    if undivided is None or not math.isinf(budget_bytes):
        return True
    rate = lambda each, axis: each.prices.links.get(axis, each.prices.link).bytes_per_second
    return rate(pricing, third) > rate(undivided, data)


def _wide(mesh: MeshShape) -> frozenset[tuple[str, int]]:
    """Returns the axes of a mesh that have several devices, with their sizes."""
    return frozenset((axis, size) for axis, size in mesh.axes if size > 1)


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


def over_budget(
    budget_bytes: float,
    smallest: Candidate,
    num_examples: int | None,
    changes: Sequence[Candidate] = (),
    why_whole: str = "",
    chosen: Sequence[str] = (),
) -> BudgetError:
    """Returns the error for a step of which every layout that was found needs more than a budget.

    **Arguments:** `smallest`: the one that needs least. `num_examples`: of the batch. `changes`: what fits by options
    that were not asked for, the fastest first. `why_whole`: why microbatches that were asked for are no candidates.
    `chosen`: the options that are left to be chosen, which nobody has to say."""
    least = smallest.needed_bytes
    message = f"no layout that was found fits: the least that a device needs is {bytes_text(least)}, by {smallest.name}"
    if smallest.state_bytes > budget_bytes:
        conflict = f"; its states alone are {bytes_text(smallest.state_bytes)}"
    else:
        conflict = f"; {bytes_text(smallest.state_bytes)} of these are states, the rest lives during the step"
    remedies = [f"allow {least} bytes a device", "use more devices"]
    remedies += [_said(change, smallest, chosen) for change in changes]
    fewer = f" than {num_examples} examples at once" if num_examples else ""
    return BudgetError(
        f"{message} on {smallest.mesh}{conflict}" + (f" ({why_whole})" if why_whole else ""),
        value=int(budget_bytes),
        place="memory_budget",
        remedy=f"{', '.join(remedies)}, or a smaller batch or microbatches{fewer}",
    )


def _said(change: Candidate, smallest: Candidate, chosen: Sequence[str]) -> str:
    """Returns the options with which a `change` of the step fits, in words. `smallest`: what needs least without.
    `chosen`: the options that are left to be chosen."""
    shards = change.shards_state and not smallest.shards_state and STATE not in chosen
    options = [f"{STATE}=True"] if shards else []
    options += [f"{REMAT}={_as_option(change.remat)}"] if change.remat != smallest.remat else []
    options += [f"{MICROBATCHES}={change.microbatches}"] if change.microbatches > smallest.microbatches else []
    return (
        f"say {' and '.join(options)}, with which it fits in {bytes_text(change.needed_bytes)}"
        f" ({1e3 * change.seconds:.4g} ms a step by {change.name} on {change.mesh})"
    )


def _as_option(remat: tuple[BlockRemat, ...]) -> str:
    """Returns what a user writes for blocks that are computed again: a word where all keep alike."""
    keeps = {each.keeps for each in remat}
    return f'"{keeps.pop()}"' if len(keeps) == 1 else str({each.name: each.keeps for each in remat})
