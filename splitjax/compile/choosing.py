"""Decides what a step leaves to be chosen, its rules, its mesh, whether its state is sharded, in how many microbatches
its gradients are taken, what its blocks keep, when the first call is planned.

A recipe, what is asked for as a mesh, and a call come in; the recipe with what was chosen, the mesh and what was built
by them come out. The choice depends on the call, the number of devices and the options alone and ends by a limit of
work, so that processes that run one program choose alike.

The search goes by sums, of seconds and of all that a step stores, which are quick. What is taken is compared by its
lowered step. With a budget that must fit by the lifetimes of its arrays, as its plan shows them: candidates are
lowered, the fastest first, until the upper bound of one is within the budget. Where microbatches or what blocks keep
are chosen, a layout that needs more is tried in more and more of them, with blocks computed again, and both, as long as
that could do, in the order of all their seconds. Where the machine is known, by a target's published figures or a
calibration, the best few that fit are lowered, with the best of every shipped rule set, and the fastest program is
taken, as `step.time` predicts it: with what is sent while the devices compute, and with what is computed again.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from splitjax.choosing import (
    MICROBATCHES,
    REMAT,
    AutoMesh,
    Candidate,
    Choice,
    Prices,
    Pricing,
    Refused,
    in_turn,
    laid_out,
    may_fit,
    num_experts,
    other_orders,
    over_budget,
    rank,
)
from splitjax.compile.devices import mesh_for, num_devices_for, prices_for
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.kept_choice import KeptChoice
from splitjax.compile.observed_entry import observed_entry
from splitjax.compile.priced_step import PricedStep
from splitjax.compile.time import program_time
from splitjax.errors import MeshError, PinError, SplitjaxError
from splitjax.mesh import MeshShape, abstract_mesh
from splitjax.planning.draft import Draft
from splitjax.rules.pins import resolve
from splitjax.rules.ruleset import TO_BE_CHOSEN
from splitjax.step.arguments import Bound
from splitjax.step.microbatches import why_not_in_microbatches
from splitjax.step.remat.rematerialising import Remat, choices_of, repeated_blocks, why_not_again
from splitjax.step.traced import Traced, trace_anywhere, trace_step

# Makes the draft and the entry of a recipe on a mesh from a traced call, with lines for the notes of the plan.
Build = Callable[[Recipe, "Mesh | AbstractMesh", Traced, tuple[str, ...]], tuple[Draft, CompiledEntry]]
# So many candidates are lowered for the time of their programs at most, those that do not fit among them.
_MOST = 16
# So many of the layouts that need least are tried with other options, where nothing fits.
_CHANGED = 3
# Of steps with more uses of weights than so many, each program of which takes seconds to predict, so many at most.
_LARGE_USES, _MOST_OF_LARGE = 200, 5


@dataclasses.dataclass(frozen=True, eq=False)
class Decided:
    """Is a step with nothing left to be chosen.

    **Attributes:** `recipe`: with what was chosen. `mesh`: its devices, or an abstract mesh. `draft`, `entry`: what was
    built by them. `choice`: how they were chosen.
    """

    recipe: Recipe
    mesh: Mesh | AbstractMesh
    draft: Draft
    entry: CompiledEntry
    choice: Choice


def nameable_mesh(asked: AutoMesh) -> AbstractMesh:
    """Returns a mesh of one device with the axes of the mesh that is to be chosen: for what may name them before it
    is."""
    return abstract_mesh(MeshShape(tuple((axis, 1) for axis in asked.axes)))


def mesh_not_chosen(name: str) -> MeshError:
    """Returns the error for a mesh that is needed before it is chosen. `name`: of the step."""
    return MeshError(
        "the mesh is chosen when the first call is planned, and none has been yet",
        value="auto",
        place=f"mesh of {name}",
        remedy="call step.init(init_fn, key, example=(batch,)), step.plan(state, batch) or the step before what needs"
        ' its mesh, or give sizes: mesh={"data": 2, "model": 4}',
    )


def build_chosen(recipe: Recipe, asked: Mesh | AbstractMesh | AutoMesh, bound: Bound, build: Build) -> Decided:
    """Chooses what a training step leaves open, and builds it.

    **Arguments:** `recipe`: the step; its rules are chosen where they are `TO_BE_CHOSEN`, and what else its flags say.
    `asked`: its mesh, or what is asked for in its place. `bound`: the call that is planned, taken apart. `build`:
    builds the step.

    Raises `BudgetError` where no layout that was found fits into `memory_budget`, and what `build` raises."""
    places = _Places(recipe, asked, bound)
    kept = places.kept()
    known = None if kept is None else kept.read()
    if known is not None:
        return places.built(known, build)
    decided = _decided(places, recipe, build)
    if kept is not None:
        kept.write(decided.choice)
    return decided


def _decided(places: _Places, recipe: Recipe, build: Build) -> Decided:
    """Chooses, and builds what was chosen. Raises what `build_chosen` raises."""
    budget, rules = recipe.memory_budget_bytes, None if recipe.rules == TO_BE_CHOSEN else recipe.rules
    priced = places.priced()
    choice = rank(
        priced.pricings, further=priced.further, reordered=priced.reordered, rules=rules, refused=priced.refused,
        budget_bytes=budget,
    )  # fmt: skip
    if recipe.chooses_remat:
        choice = places.with_remat(choice)
    if recipe.chooses_microbatches:
        choice = places.with_microbatches(choice)
    is_timed = recipe.calibration is not None or (recipe.target is not None and bool(recipe.target.kind.peak_flops))
    if math.isinf(budget) and not is_timed:
        return places.built(choice, build)
    lowered: list[Candidate] = []
    refusals: list[Refused] = []
    best: tuple[Candidate, Decided] | None = None
    most = _MOST if len(places.graph.uses) <= _LARGE_USES else _MOST_OF_LARGE
    for candidate in in_turn(choice, lowered, most if is_timed else None, places.otherwise):
        try:
            decided = places.built(choice.taking(candidate, lowered), build)
            found = _lowered(candidate, decided, budget, is_timed)
        except SplitjaxError as error:
            # The options of the step and these rules do not go together, or its program cannot be predicted.
            if candidate.microbatches > 1 or candidate.remat:
                refusals.append(Refused(candidate.name, candidate.mesh, str(error).splitlines()[0]))
            continue
        lowered.append(found)
        if found.fits(budget) and (best is None or found.best_known_seconds < best[0].best_known_seconds):
            best = found, decided
    choice = dataclasses.replace(choice, refused=(*choice.refused, *refusals))
    if best is None:
        smallest = min(lowered, key=lambda each: each.needed_bytes, default=choice.best)
        changes = _cheapest_changes(places, recipe, choice, lowered, build)
        raise over_budget(budget, smallest, places.graph.num_examples, changes, _about_parts(choice), choice.also)
    choice = choice.taking(best[0], lowered)
    # Again, with notes that have what was found out of all.
    return places.built(choice, build) if is_timed or choice.also else dataclasses.replace(best[1], choice=choice)


def _cheapest_changes(
    places: _Places, recipe: Recipe, choice: Choice, lowered: Sequence[Candidate], build: Build
) -> list[Candidate]:
    """Returns what fits where nothing does as the step was asked for, by options that it does not leave to be chosen:
    of the layouts that need least, with sharded state, with blocks computed again, and in microbatches, unless sharded
    state alone does; of each the fastest as a sum, the fastest first."""
    budget, number = choice.budget_bytes, recipe.microbatches or 1
    may_shard = not recipe.shard_state and not recipe.chooses_state
    may_divide = number == 1 and not recipe.chooses_microbatches and places.may_divide
    may_remat = not recipe.remat and not recipe.chooses_remat and places.may_remat
    tried: list[Candidate] = list(lowered)

    def fitting(candidate: Candidate) -> Candidate | None:
        """Lowers a candidate, and returns it where it fits."""
        try:
            found = _lowered(candidate, places.built(choice.taking(candidate, ()), build), budget, is_timed=False)
        except SplitjaxError:
            return None
        tried.append(found)
        return found if found.fits(budget) else None

    smallest = sorted(lowered, key=lambda each: each.needed_bytes)[:_CHANGED]
    bases, found = list(smallest), list[Candidate]()
    if may_shard:
        sharded = [places.sharded(each) for each in smallest]
        bases += sharded
        found = [each for each in map(fitting, sharded) if each is not None]
    divided = () if found or not may_divide else bases
    for way in (*(places.again_of(base) for base in smallest if may_remat), *map(places.parts_of, divided)):
        smaller = (fitting(each) for each in way if may_fit(each, tried, budget))
        found += filter(None, [next(filter(None, smaller), None)])
    fastest: dict[tuple[bool, bool], Candidate] = {}
    for each in sorted(found, key=lambda each: each.seconds):
        fastest.setdefault((bool(each.remat), each.microbatches > number), each)
    return list(fastest.values())


def _about_parts(choice: Choice) -> str:
    """Returns why microbatches are no candidates, in words; empty where they are, or were not asked for."""
    refused = next((each for each in choice.refused if each.rules.endswith(f" {MICROBATCHES}")), None)
    return "" if refused is None or MICROBATCHES not in choice.also else f"{refused.rules}: {refused.why}"


def _lowered(candidate: Candidate, decided: Decided, budget: float, is_timed: bool) -> Candidate:
    """Returns a candidate with what its lowered step needs at most, where there is a budget, and what it takes where it
    `is_timed` and fits."""
    recipe = decided.recipe
    if not math.isinf(budget):
        candidate = dataclasses.replace(candidate, bound_bytes=_most_bytes(decided.entry))
    machine = recipe.calibration or recipe.target
    if not is_timed or machine is None or not candidate.fits(budget):
        return candidate
    entry = observed_entry(recipe, decided.mesh, decided.draft, decided.entry)
    return dataclasses.replace(candidate, program_seconds=program_time(recipe, entry, machine).seconds)


def _most_bytes(entry: CompiledEntry) -> int:
    """Returns what a device needs at most by the plan of an `entry`; as expected, where its step is not simulated."""
    memory = entry.plan.memory
    return memory.peak_bytes if memory.bound_bytes is None else memory.bound_bytes


@dataclasses.dataclass(frozen=True)
class _Priced:
    """Holds the step on every mesh with its prices.

    **Attributes:** `pricings`: on those of two axes. `further`: on those with a third axis; `reordered`: on these with
    their axes in other orders. `refused`: the meshes on which it cannot be what the user pinned.
    """

    pricings: list[Pricing]
    further: list[Pricing]
    reordered: list[Pricing]
    refused: list[Refused]


class _Places:
    """The meshes on which a call can be laid out, with the call traced for each.

    **Arguments:** `recipe`, `asked`, `bound`: as for `build_chosen`.
    """

    def __init__(self, recipe: Recipe, asked: Mesh | AbstractMesh | AutoMesh, bound: Bound) -> None:
        self._recipe, self._asked, self._bound = recipe, asked, bound
        self._meshes: dict[MeshShape, Mesh | AbstractMesh] = {}
        self._fixed = None if isinstance(asked, AutoMesh) else asked
        if isinstance(asked, AutoMesh):
            self._traced, self._names_axes = trace_anywhere(recipe, bound, nameable_mesh(asked))
            num_devices = num_devices_for(asked, recipe.target)
            shapes, further = asked.shapes(num_devices), asked.further(num_devices, num_experts(self._traced.graph))
        else:
            self._traced, self._names_axes = trace_step(recipe, bound, mesh=asked), False
            shapes, further = (MeshShape.of(asked),), ()
        if isinstance(asked, AutoMesh):
            shapes = (*shapes, *other_orders(asked, shapes, self._prices))
        reordered = other_orders(asked, further, self._prices) if isinstance(asked, AutoMesh) else ()
        self._shapes = [shape.with_roles(recipe.roles) for shape in shapes]
        self._further = [shape.with_roles(recipe.roles) for shape in further]
        self._reordered = [shape.with_roles(recipe.roles) for shape in reordered]
        self.graph = self._traced.graph
        self._why_whole = why_not_in_microbatches(self._traced.jaxpr)
        self._pricings: list[Pricing] = []
        self._again: dict[Remat, Traced] = {}

    def kept(self) -> KeptChoice | None:
        """Returns where the choice is kept between processes; None where it is not."""
        there = str([*self._shapes, *self._further, *self._reordered])
        if self._fixed is None:
            there += f" {jax.default_backend()} {len(jax.devices())}"
        return KeptChoice.of(self._recipe, self._asked, self._traced, there)

    def _prices(self, shape: MeshShape) -> Prices:
        return prices_for(self._fixed, shape, self._recipe.target, self._recipe.calibration)

    def priced(self) -> _Priced:
        """Returns the step on each mesh with the prices of its machine, with and without sharded state where that is
        chosen."""
        pricings: list[Pricing] = []
        errors: list[tuple[MeshShape, PinError]] = []
        for shape in (*self._shapes, *self._further, *self._reordered):
            try:
                pins = resolve(self._traced_on(shape).said, self.graph, shape).by_path
            except PinError as error:
                errors.append((shape, error))
            else:
                prices = self._prices(shape)
                under = PricedStep(self._recipe, shape, functools.partial(self._traced_again, shape))
                for shards in (False, True) if self._recipe.chooses_state else (self._recipe.shard_state,):
                    backward, number = self._recipe.returns_state, self._recipe.microbatches or 1
                    pricings.append(Pricing(self.graph, shape, prices, pins, backward, shards, number, under=under))
        if not pricings:
            raise errors[0][1]
        self._pricings = pricings
        of = lambda shapes: [each for each in pricings if each.mesh in shapes]
        refused = [Refused("any", shape, str(error).splitlines()[0]) for shape, error in errors]
        return _Priced(of(self._shapes), of(self._further), of(self._reordered), refused)

    @property
    def may_divide(self) -> bool:
        """Whether the gradients of the step can be taken in microbatches, as far as no layout matters."""
        return not self._why_whole

    def with_microbatches(self, choice: Choice) -> Choice:
        """Returns a `choice` among microbatches, too, with the reason where there are none."""
        refused = (Refused(f"any in several {MICROBATCHES}", choice.mesh, self._why_whole),) if self._why_whole else ()
        return dataclasses.replace(choice, also=(*choice.also, MICROBATCHES), refused=(*choice.refused, *refused))

    @functools.cached_property
    def _remats(self) -> tuple[Remat, ...]:
        """What blocks can keep beside everything."""
        return choices_of(repeated_blocks(self._traced.jaxpr)) if self._recipe.returns_state else ()

    @property
    def may_remat(self) -> bool:
        """Whether the step has blocks that can be computed again."""
        return bool(self._remats)

    def with_remat(self, choice: Choice) -> Choice:
        """Returns a `choice` among what blocks keep, too, with the reason where there are none."""
        why = why_not_again(self._traced.jaxpr)
        refused = (Refused(f"any with {REMAT}", choice.mesh, why),) if why else ()
        return dataclasses.replace(choice, also=(*choice.also, REMAT), refused=(*choice.refused, *refused))

    def otherwise(self, candidate: Candidate) -> list[Candidate]:
        """Returns how else a candidate can run for less memory, by what the step leaves to be chosen: with blocks
        computed again, in microbatches, and both."""
        again = self.again_of(candidate) if self._recipe.chooses_remat else []
        divides = self._recipe.chooses_microbatches and self.may_divide
        return [*again, *(part for each in (candidate, *again) for part in (self.parts_of(each) if divides else ()))]

    def again_of(self, candidate: Candidate) -> list[Candidate]:
        """Returns a candidate with blocks computed again in each way, the fastest as a sum first."""
        base, found = self._priced_as(candidate, candidate.shards_state), []
        for remat in self._remats:
            pricing = dataclasses.replace(base, graph=self._traced_with(remat).graph, remat=remat)
            found.append(pricing.candidate(candidate.rules, laid_out(pricing, candidate.rules)))
        return sorted(found, key=lambda each: each.seconds)

    def parts_of(self, candidate: Candidate) -> list[Candidate]:
        """Returns a candidate in every number of microbatches above 1, the fewest first."""
        pricing = self._priced_as(candidate, candidate.shards_state)
        prediction = laid_out(pricing, candidate.rules)
        return [
            dataclasses.replace(pricing, microbatches=number).candidate(candidate.rules, prediction)
            for number in pricing.parts(prediction)
        ]

    def sharded(self, candidate: Candidate) -> Candidate:
        """Returns a candidate with sharded state."""
        pricing = self._priced_as(candidate, shards=True)
        return pricing.candidate(candidate.rules, laid_out(pricing, candidate.rules))

    def _priced_as(self, candidate: Candidate, shards: bool) -> Pricing:
        known = next(each for each in self._pricings if each.mesh == candidate.mesh)
        return dataclasses.replace(
            known, graph=self._traced_with(candidate.remat).graph if candidate.remat else known.graph,
            shards_state=shards, microbatches=candidate.microbatches, remat=candidate.remat,
        )  # fmt: skip

    def _traced_with(self, remat: Remat) -> Traced:
        """Returns the call with blocks computed again, for what it costs."""
        if remat not in self._again:
            self._again[remat] = self._traced.rematerialised(remat)
        return self._again[remat]

    def _traced_again(self, shape: MeshShape, remat: Remat) -> Traced:
        """Returns the call on a mesh with blocks computed again, for what rule sets make of it."""
        return self._traced_with(remat) if remat else self._traced_on(shape)

    def built(self, choice: Choice, build: Build) -> Decided:
        """Builds the step as it was chosen."""
        mesh = self._mesh(choice.mesh)
        traced = trace_step(self._recipe, self._bound, mesh=mesh) if self._names_axes else self._traced_on(choice.mesh)
        best, number = choice.best, choice.best.microbatches
        decided = dataclasses.replace(
            self._recipe, rules=choice.rules, shard_state=best.shards_state, chooses_state=False,
            microbatches=number if number > 1 else self._recipe.microbatches, chooses_microbatches=False,
            remat=best.remat or self._recipe.remat, chooses_remat=False,
        )  # fmt: skip
        traced = traced.rematerialised(best.remat).in_microbatches(number)
        draft, entry = build(decided, mesh, traced, tuple(choice.lines()))
        return Decided(decided, mesh, draft, entry, choice)

    def _mesh(self, shape: MeshShape) -> Mesh | AbstractMesh:
        if self._fixed is not None:
            return self._fixed
        if shape not in self._meshes:
            self._meshes[shape] = mesh_for(dict(shape.axes), self._recipe.target)
        return self._meshes[shape]

    def _traced_on(self, shape: MeshShape) -> Traced:
        if self._fixed is not None:
            return self._traced
        return self._traced.said_on(self._mesh(shape))
