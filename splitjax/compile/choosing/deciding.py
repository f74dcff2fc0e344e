"""Decides what a step leaves to be chosen, its rules, its mesh, whether its state is sharded, in how many microbatches
its gradients are taken, what its blocks keep, when the first call is planned.

A recipe, what is asked for as a mesh, and a call come in; the recipe with what was chosen, the mesh and what was built
by them come out. The choice depends on the call, the number of devices and the options alone and ends by a limit of
work, so that processes that run one program choose alike; in a run of several, process 0 chooses for all.

The search goes by sums, of seconds and of all that a step stores, which are quick. What is taken is compared by its
lowered step. With a budget that must fit by the lifetimes of its arrays, as its plan shows them: candidates are
lowered, the fastest first, until the upper bound of one is within the budget. Where microbatches or what blocks keep
are chosen, a layout that needs more is tried in more and more of them, with blocks computed again, and both, as long as
that could do, in the order of all their seconds. Where the machine is known, by a target's published figures or a
calibration, the best few that fit are lowered, with the best of every shipped rule set, and the fastest program is
taken, as `step.time` predicts it: with what is sent while the devices compute, and with what is computed again. With
`compile_best` the machine's own compiler confirms that program first, or has the next one tried.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jax.sharding import AbstractMesh, Mesh

from splitjax.choosing import MICROBATCHES, AutoMesh, Candidate, Choice, Refused, in_turn, may_fit, over_budget, rank
from splitjax.compile.choosing.places import Build, Decided, Places
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.observed_entry import observed_entry
from splitjax.compile.time import program_time
from splitjax.compile.topologies import compiler_version
from splitjax.errors import CompilerError, MeshError, SplitjaxError
from splitjax.rules.ruleset import TO_BE_CHOSEN
from splitjax.step.arguments import Bound

# So many candidates are lowered for the time of their programs at most, those that do not fit among them.
_MOST = 16
# So many of the layouts that need least are tried with other options, where nothing fits.
_CHANGED = 3
# Of steps with more uses of weights than so many, each program of which takes seconds to predict, so many at most.
_LARGE_USES, _MOST_OF_LARGE = 200, 5


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

    Raises `BudgetError` where no layout that was found fits into `memory_budget`, `CompilerError` where layouts are to
    be compiled and the compiler of the target is not installed, `ProcessError` where process 0 of the run, which
    chooses for all, does not come, and what `build` raises."""
    places = Places(recipe, asked, bound)
    shared = places.shared()
    if shared is None:
        return _kept_or_decided(places, recipe, build)
    if not shared.is_ours:
        told = shared.read()
        return _kept_or_decided(places, recipe, build) if told is None else places.built(told, build)
    choice: Choice | None = None
    try:
        decided = _kept_or_decided(places, recipe, build)
        choice = decided.choice
    finally:  # the others wait; where nothing was chosen, they find out for themselves what is wrong
        shared.leave(choice)
    return decided


def _kept_or_decided(places: Places, recipe: Recipe, build: Build) -> Decided:
    """Builds what was chosen by an earlier process, or chooses. Raises what `build_chosen` raises."""
    kept = places.kept()
    known = None if kept is None else kept.read()
    if known is not None:
        return places.built(known, build)
    decided = _decided(places, recipe, build)
    if kept is not None:
        kept.write(decided.choice)
    return decided


def _decided(places: Places, recipe: Recipe, build: Build) -> Decided:
    """Chooses, and builds what was chosen. Raises what `build_chosen` raises."""
    if recipe.compile_best and recipe.target is not None:
        compiler_version(recipe.target)  # told before anything is searched
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
    if math.isinf(budget) and not is_timed and not recipe.compile_best:
        return places.built(choice, build)
    lowered: list[Candidate] = []
    refusals: list[Refused] = []
    best: tuple[Candidate, Decided] | None = None
    most = _MOST if len(places.graph.uses) <= _LARGE_USES else _MOST_OF_LARGE
    for candidate in in_turn(choice, lowered, most if is_timed or recipe.compile_best else None, places.otherwise):
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
    if recipe.compile_best and best is not None:
        return _as_compiled(places, recipe, choice, lowered, build)
    if best is None:
        smallest = min(lowered, key=lambda each: each.needed_bytes, default=choice.best)
        changes = _cheapest_changes(places, recipe, choice, lowered, build)
        raise over_budget(budget, smallest, places.graph.num_examples, changes, _about_parts(choice), choice.also)
    choice = choice.taking(best[0], lowered)
    # Again, with notes that have what was found out of all.
    return places.built(choice, build) if is_timed or choice.also else dataclasses.replace(best[1], choice=choice)


def _as_compiled(places: Places, recipe: Recipe, choice: Choice, lowered: Sequence[Candidate], build: Build) -> Decided:
    """Compiles the best few of the candidates that were `lowered`, and builds the one that is taken then. Raises
    `BudgetError` where none of them fits as compiled."""
    from splitjax.compile.choosing.compiled import best_compiled, compiled_for  # loads what reads compiled programs

    budget, target = choice.budget_bytes, recipe.target
    assert target is not None, "`compile_best` is asked for beside a target"
    refused: list[Refused] = []

    def compiled(candidate: Candidate) -> Candidate | None:
        try:
            return compiled_for(target, places.built(choice.taking(candidate, lowered), build), candidate)
        except CompilerError as error:
            refused.append(Refused(candidate.name, candidate.mesh, str(error).splitlines()[0]))
            return None

    fitting = [each for each in lowered if each.fits(budget)]
    best, tried = best_compiled(fitting, recipe.compile_best, budget, compiled)
    choice = dataclasses.replace(choice, refused=(*choice.refused, *refused))
    if best is None:
        smallest = min(tried or fitting, key=lambda each: each.needed_bytes)
        raise over_budget(budget, smallest, places.graph.num_examples, chosen=choice.also)
    found = [next((other for other in tried if other.is_as(each)), each) for each in lowered]
    return places.built(choice.taking(best, found), build)


def _cheapest_changes(
    places: Places, recipe: Recipe, choice: Choice, lowered: Sequence[Candidate], build: Build
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
