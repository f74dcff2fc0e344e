"""Decides what a step leaves to be chosen, its rules, its mesh or both, when the first call is planned.

A recipe, what is asked for as a mesh, and a call come in; the recipe with the chosen rules, the mesh and what was built
by them come out. The choice depends on the call, the number of devices and the options alone and ends by a limit of
work, so that processes that run one program choose alike.

With a budget the search goes by a sum of all that a step stores, which is quick. What is taken must fit by the
lifetimes of the lowered step, as its plan shows them: the candidates are lowered, the fastest first, until the upper
bound of one is within the budget.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from jax.sharding import AbstractMesh, Mesh

from splitjax.choosing import AutoMesh, Candidate, Choice, Pricing, Refused, over_budget, rank
from splitjax.compile.devices import mesh_for, num_devices_for, prices_for
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.errors import MeshError, PinError, SplitjaxError
from splitjax.mesh import MeshShape, abstract_mesh
from splitjax.rules.pins import resolve
from splitjax.rules.ruleset import TO_BE_CHOSEN
from splitjax.step.arguments import Bound
from splitjax.step.traced import Traced, trace_anywhere, trace_step

T = TypeVar("T")
# Makes the draft and the entry of a recipe on a mesh from a traced call, with lines for the notes of the plan.
Build = Callable[[Recipe, "Mesh | AbstractMesh", Traced, tuple[str, ...]], tuple[T, CompiledEntry]]


@dataclasses.dataclass(frozen=True, eq=False)
class Decided(Generic[T]):
    """Is a step with nothing left to be chosen.

    **Attributes:** `recipe`: with its rules. `mesh`: its devices, or an abstract mesh. `made`, `entry`: what was built
    by them. `choice`: how they were chosen.
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

    **Arguments:** `recipe`: the step; its rules are chosen where they are `TO_BE_CHOSEN`. `asked`: its mesh, or what is
    asked for in its place. `bound`: the call that is planned, taken apart. `build`: builds the step.

    Raises `BudgetError` where no layout that was found fits into `memory_budget`, and what `build` raises."""
    places = _Places(recipe, asked, bound)
    budget, rules = recipe.memory_budget_bytes, None if recipe.rules == TO_BE_CHOSEN else recipe.rules
    pricings, refused = places.priced()
    choice = rank(pricings, rules=rules, refused=refused, budget_bytes=budget)
    if math.isinf(budget):
        return places.built(choice, build)
    lowered: list[Candidate] = []
    for candidate in _in_turn(choice, lowered):
        try:
            decided = places.built(choice.taking(candidate, lowered), build)
        except SplitjaxError:
            continue  # the options of the step and these rules do not go together
        needed = dataclasses.replace(candidate, bound_bytes=_most_bytes(decided.entry))
        lowered.append(needed)
        if needed.fits(budget):
            return dataclasses.replace(decided, choice=choice.taking(needed, lowered))
    smallest = min(lowered, key=lambda each: each.needed_bytes, default=choice.best)
    raise over_budget(budget, smallest, places.graph.num_examples)


def _in_turn(choice: Choice, lowered: list[Candidate]) -> Iterator[Candidate]:
    """Yields the candidates in the order in which they are lowered: the fastest first. Those whose states alone are
    over the budget come last, to tell which of all needs least; what cannot be that any more is left out."""
    hopeless = [each for each in choice.candidates if each.state_bytes > choice.budget_bytes]
    yield from (each for each in choice.candidates if each.state_bytes <= choice.budget_bytes)
    for candidate in sorted(hopeless, key=lambda each: each.state_bytes):
        least = min((each.needed_bytes for each in lowered), default=math.inf)
        if candidate.state_bytes < least:
            yield candidate


def _most_bytes(entry: CompiledEntry) -> int:
    """Returns what a device needs at most by the plan of an `entry`; as expected, where its step is not simulated."""
    memory = entry.plan.memory
    return memory.peak_bytes if memory.bound_bytes is None else memory.bound_bytes


class _Places:
    """The meshes on which a call can be laid out, with the call traced for each.

    **Arguments:** `recipe`, `asked`, `bound`: as for `build_chosen`.
    """

    def __init__(self, recipe: Recipe, asked: Mesh | AbstractMesh | AutoMesh, bound: Bound) -> None:
        self._recipe, self._bound = recipe, bound
        self._meshes: dict[MeshShape, Mesh | AbstractMesh] = {}
        self._fixed = None if isinstance(asked, AutoMesh) else asked
        if isinstance(asked, AutoMesh):
            self._traced, self._names_axes = trace_anywhere(recipe, bound, nameable_mesh(asked))
            shapes = asked.shapes(num_devices_for(asked, recipe.target))
        else:
            self._traced, self._names_axes = trace_step(recipe, bound, mesh=asked), False
            shapes = (MeshShape.of(asked),)
        self._shapes = [shape.with_roles(recipe.roles) for shape in shapes]
        self.graph = self._traced.graph

    def priced(self) -> tuple[list[Pricing], list[Refused]]:
        """Returns the step on each mesh with the prices of its machine, and the meshes on which it cannot be what the
        user pinned."""
        pricings: list[Pricing] = []
        errors: list[tuple[MeshShape, PinError]] = []
        for shape in self._shapes:
            try:
                pins = resolve(self._traced_on(shape).said, self.graph, shape).by_path
            except PinError as error:
                errors.append((shape, error))
            else:
                prices = prices_for(self._fixed, shape, self._recipe.target)
                pricings.append(Pricing(self.graph, shape, prices, pins, self._recipe.returns_state))
        if not pricings:
            raise errors[0][1]
        return pricings, [Refused("any", shape, str(error).splitlines()[0]) for shape, error in errors]

    def built(self, choice: Choice, build: Build[T]) -> Decided[T]:
        """Builds the step as it was chosen."""
        mesh = self._mesh(choice.mesh)
        traced = trace_step(self._recipe, self._bound, mesh=mesh) if self._names_axes else self._traced_on(choice.mesh)
        decided = dataclasses.replace(self._recipe, rules=choice.rules)
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
