"""Holds the meshes on which a call can be laid out, with the call traced and priced for each, and builds it there as it
was chosen."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

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
    laid_out,
    num_experts,
    other_orders,
)
from splitjax.compile.choosing.asked import Asked
from splitjax.compile.choosing.kept import KeptChoice
from splitjax.compile.choosing.priced_step import PricedStep
from splitjax.compile.choosing.shared import SharedChoice
from splitjax.compile.devices import mesh_for, num_devices_for, prices_for
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.errors import PinError
from splitjax.mesh import MeshShape, abstract_mesh
from splitjax.planning.draft import Draft
from splitjax.rules.pins import resolve
from splitjax.step.arguments import Bound
from splitjax.step.microbatches import why_not_in_microbatches
from splitjax.step.remat.rematerialising import Remat, choices_of, repeated_blocks, why_not_again
from splitjax.step.traced import Traced, trace_anywhere, trace_step
from splitjax.trace.graph import Graph

# Makes the draft and the entry of a recipe on a mesh from a traced call, with lines for the notes of the plan.
Build = Callable[[Recipe, "Mesh | AbstractMesh", Traced, tuple[str, ...]], tuple[Draft, CompiledEntry]]


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


@dataclasses.dataclass(frozen=True)
class Priced:
    """Holds the step on every mesh with its prices.

    **Attributes:** `pricings`: on those of two axes. `further`: on those with a third axis; `reordered`: on these with
    their axes in other orders. `refused`: the meshes on which it cannot be what the user pinned.
    """

    pricings: list[Pricing]
    further: list[Pricing]
    reordered: list[Pricing]
    refused: list[Refused]


class Places:
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
        self.graph: Graph = self._traced.graph
        self._why_whole = why_not_in_microbatches(self._traced.jaxpr)
        self._pricings: list[Pricing] = []
        self._again: dict[Remat, Traced] = {}

    @functools.cached_property
    def _question(self) -> Asked:
        there = str([*self._shapes, *self._further, *self._reordered])
        if self._fixed is None:
            there += f" {jax.default_backend()} {len(jax.devices())}"
        return Asked(self._recipe, self._asked, self._traced, there)

    def kept(self) -> KeptChoice | None:
        """Returns where the choice is kept for later processes; None where it is not."""
        return KeptChoice.of(self._question)

    def shared(self) -> SharedChoice | None:
        """Returns where the choice is shared with the other processes of the run; None where it is not."""
        if jax.process_count() == 1:
            return None
        return SharedChoice.of(self._question, self._mesh(self._shapes[0]))

    def _prices(self, shape: MeshShape) -> Prices:
        return prices_for(self._fixed, shape, self._recipe.target, self._recipe.calibration)

    def priced(self) -> Priced:
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
        return Priced(of(self._shapes), of(self._further), of(self._reordered), refused)

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
