"""Decides what a step leaves to be chosen, its rules, its mesh, whether its state is sharded, when the first call is
planned.

A recipe, what is asked for as a mesh, and a call come in; the recipe with what was chosen, the mesh and what was built
by them come out. The choice depends on the call, the number of devices and the options alone and ends by a limit of
work, so that processes that run one program choose alike.

The search goes by sums, of seconds and of all that a step stores, which are quick. What is taken is compared by its
lowered step. With a budget that must fit by the lifetimes of its arrays, as its plan shows them: candidates are
lowered, the fastest first, until the upper bound of one is within the budget. Where the machine is known, by a target's
published figures or a calibration, the best few that fit are lowered, with the best of every shipped rule set, and the
fastest program is taken, as `step.time` predicts it: with what is sent while the devices compute, and with what is
computed again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from splitjax.choosing import AutoMesh, Candidate, Choice, Pricing, Refused, num_experts, over_budget, rank
from splitjax.compile.devices import mesh_for, num_devices_for, prices_for
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.kept_choice import KeptChoice
from splitjax.compile.time import program_time
from splitjax.errors import MeshError, PinError, SplitjaxError
from splitjax.mesh import MeshShape, abstract_mesh
from splitjax.rules.pins import resolve
from splitjax.rules.ruleset import TO_BE_CHOSEN
from splitjax.step.arguments import Bound
from splitjax.step.traced import Traced, trace_anywhere, trace_step

T = TypeVar("T")
# Makes the draft and the entry of a recipe on a mesh from a traced call, with lines for the notes of the plan.
Build = Callable[[Recipe, "Mesh | AbstractMesh", Traced, tuple[str, ...]], tuple[T, CompiledEntry]]
# So many candidates are lowered for the time of their programs, the best as a sum first, of meshes of two axes and of
# each kind of third axis; so many at most, with those that do not fit, the best of every shipped rule set, and what
# comes after the fastest.
_FEW, _FEW_OF_THREE_AXES, _MOST = 4, 2, 16
# Of steps with more uses of weights than so many, each program of which takes seconds to predict, so many at most.
_LARGE_USES, _MOST_OF_LARGE = 200, 5


@dataclasses.dataclass(frozen=True, eq=False)
class Decided(Generic[T]):
    """Is a step with nothing left to be chosen.

    **Attributes:** `recipe`: with what was chosen. `mesh`: its devices, or an abstract mesh. `made`, `entry`: what was
    built by them. `choice`: how they were chosen.
    """

    recipe: Recipe
    mesh: Mesh | AbstractMesh
    made: T
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


def build_chosen(recipe: Recipe, asked: Mesh | AbstractMesh | AutoMesh, bound: Bound, build: Build[T]) -> Decided[T]:
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


def _decided(places: _Places, recipe: Recipe, build: Build[T]) -> Decided[T]:
    """Chooses, and builds what was chosen. Raises what `build_chosen` raises."""
    budget, rules = recipe.memory_budget_bytes, None if recipe.rules == TO_BE_CHOSEN else recipe.rules
    pricings, further, refused = places.priced()
    choice = rank(pricings, further=further, rules=rules, refused=refused, budget_bytes=budget)
    is_timed = recipe.calibration is not None or (recipe.target is not None and bool(recipe.target.kind.peak_flops))
    if math.isinf(budget) and not is_timed:
        return places.built(choice, build)
    lowered: list[Candidate] = []
    best: tuple[Candidate, Decided[T]] | None = None
    most = _MOST if len(places.graph.uses) <= _LARGE_USES else _MOST_OF_LARGE
    for candidate in _in_turn(choice, lowered, most if is_timed else None):
        try:
            decided = places.built(choice.taking(candidate, lowered), build)
            found = _lowered(candidate, decided, budget, is_timed)
        except SplitjaxError:
            continue  # the options of the step and these rules do not go together, or its program cannot be predicted
        lowered.append(found)
        if found.fits(budget) and (best is None or _seconds(found) < _seconds(best[0])):
            best = found, decided
    if best is None:
        smallest = min(lowered, key=lambda each: each.needed_bytes, default=choice.best)
        raise over_budget(budget, smallest, places.graph.num_examples)
    choice = choice.taking(best[0], lowered)
    return places.built(choice, build) if is_timed else dataclasses.replace(best[1], choice=choice)


def _in_turn(choice: Choice, lowered: list[Candidate], most: int | None) -> Iterator[Candidate]:
    """Yields the candidates in the order in which they are lowered, the fastest as a sum first, until enough of those
    that were `lowered` fit: one, or where they are timed, the best few and the best of every rule set, `most` in all.
    Where none fits, those whose states alone are over the budget come last, to tell which of all needs least; what
    cannot be that any more is left out."""
    budget = choice.budget_bytes
    for candidate in choice.candidates if most is None else _distinct(choice.candidates):
        fitting = [each for each in lowered if each.fits(budget)]
        if fitting and (most is None or len(lowered) >= most):
            return
        is_first_of_its_name = candidate.rules.name not in {each.rules.name for each in fitting}
        alike = sum(each.mesh.names == candidate.mesh.names for each in fitting)
        is_among_few = alike < (_FEW if len(candidate.mesh.names) < 3 else _FEW_OF_THREE_AXES)
        if candidate.state_bytes <= budget and (is_among_few or is_first_of_its_name):
            yield candidate
    if any(each.fits(budget) for each in lowered):
        yield from _following(choice, lowered, most or 0)
        return
    hopeless = [each for each in choice.candidates if each.state_bytes > budget]
    for candidate in sorted(hopeless, key=lambda each: each.state_bytes):
        least = min((each.needed_bytes for each in lowered), default=math.inf)
        if candidate.state_bytes < least:
            yield candidate


def _following(choice: Choice, lowered: list[Candidate], most: int) -> Iterator[Candidate]:
    """Yields, on further meshes of the same axes, what those rules are that the fastest program so far has, until one
    is not faster."""
    seconds = lambda: min(_seconds(each) for each in lowered if each.fits(choice.budget_bytes))
    found, before = True, math.inf
    while found and seconds() < before and len(lowered) < most:
        found, before = False, seconds()
        fastest = next(each for each in lowered if each.fits(choice.budget_bytes) and _seconds(each) == before)
        for candidate in _distinct(choice.candidates):
            known = any(candidate.is_as(each) for each in lowered)
            alike = candidate.name == fastest.name and candidate.mesh.names == fastest.mesh.names
            if alike and not known and candidate.state_bytes <= choice.budget_bytes:
                found = True
                yield candidate
                break


def _distinct(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yields the first of candidates that are one layout under several names: equal in all that is predicted."""
    seen: set[tuple[float, int, int]] = set()
    for each in candidates:
        predicted = each.seconds, each.state_bytes, each.peak_bytes
        if predicted not in seen:
            seen.add(predicted)
            yield each


def _lowered(candidate: Candidate, decided: Decided[T], budget: float, is_timed: bool) -> Candidate:
    """Returns a candidate with what its lowered step needs at most, where there is a budget, and what it takes where it
    `is_timed` and fits."""
    recipe = decided.recipe
    if not math.isinf(budget):
        candidate = dataclasses.replace(candidate, bound_bytes=_most_bytes(decided.entry))
    machine = recipe.calibration or recipe.target
    if not is_timed or machine is None or not candidate.fits(budget):
        return candidate
    return dataclasses.replace(candidate, program_seconds=program_time(recipe, decided.entry, machine).seconds)


def _seconds(candidate: Candidate) -> float:
    """Returns what a candidate takes: by its program, where that is known."""
    return candidate.seconds if candidate.program_seconds is None else candidate.program_seconds


def _most_bytes(entry: CompiledEntry) -> int:
    """Returns what a device needs at most by the plan of an `entry`; as expected, where its step is not simulated."""
    memory = entry.plan.memory
    return memory.peak_bytes if memory.bound_bytes is None else memory.bound_bytes


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
        self._shapes = [shape.with_roles(recipe.roles) for shape in shapes]
        self._further = [shape.with_roles(recipe.roles) for shape in further]
        self.graph = self._traced.graph

    def kept(self) -> KeptChoice | None:
        """Returns where the choice is kept between processes; None where it is not."""
        there = str([*self._shapes, *self._further])
        if self._fixed is None:
            there += f" {jax.default_backend()} {len(jax.devices())}"
        return KeptChoice.of(self._recipe, self._asked, self._traced, there)

    def priced(self) -> tuple[list[Pricing], list[Pricing], list[Refused]]:
        """Returns the step on each mesh with the prices of its machine, with and without sharded state where that is
        chosen, those with a third axis apart, and the meshes on which it cannot be what the user pinned."""
        pricings: list[Pricing] = []
        errors: list[tuple[MeshShape, PinError]] = []
        for shape in (*self._shapes, *self._further):
            try:
                pins = resolve(self._traced_on(shape).said, self.graph, shape).by_path
            except PinError as error:
                errors.append((shape, error))
            else:
                prices = prices_for(self._fixed, shape, self._recipe.target, self._recipe.calibration)
                for shards in (False, True) if self._recipe.chooses_state else (self._recipe.shard_state,):
                    pricings.append(Pricing(self.graph, shape, prices, pins, self._recipe.returns_state, shards))
        if not pricings:
            raise errors[0][1]
        further = [each for each in pricings if each.mesh in self._further]
        refused = [Refused("any", shape, str(error).splitlines()[0]) for shape, error in errors]
        return [each for each in pricings if each not in further], further, refused

    def built(self, choice: Choice, build: Build[T]) -> Decided[T]:
        """Builds the step as it was chosen."""
        mesh = self._mesh(choice.mesh)
        traced = trace_step(self._recipe, self._bound, mesh=mesh) if self._names_axes else self._traced_on(choice.mesh)
        decided = dataclasses.replace(
            self._recipe, rules=choice.rules, shard_state=choice.best.shards_state, chooses_state=False
        )
        made, entry = build(decided, mesh, traced, tuple(choice.lines()))
        return Decided(decided, mesh, made, entry, choice)

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
