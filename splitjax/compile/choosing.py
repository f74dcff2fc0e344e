"""Decides the rules of a step that leaves them to be chosen (`rules="auto"`), when the first call is planned.

A recipe and the traced call come in; the recipe with the chosen rules comes out, with what was built by them. The
choice depends on the trace, the mesh and the options alone and ends by a limit of work, so that processes that run one
program choose alike.

With a budget the search goes by a sum of all that a step stores, which is quick. What is taken must fit by the
lifetimes of the lowered step, as its plan shows them: the candidates are lowered, the fastest first, until the upper
bound of one is within the budget.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import TypeVar

from jax.sharding import AbstractMesh, Mesh

from splitjax.choosing import Candidate, Prices, over_budget, rank_rules
from splitjax.compile.building import plan_request
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.display.figures import bytes_text
from splitjax.errors import SplitjaxError
from splitjax.lower.strategies import CHOOSER
from splitjax.mesh import inside_mesh, platform_of
from splitjax.planning.draft import Draft
from splitjax.rules.ruleset import TO_BE_CHOSEN
from splitjax.step.traced import Traced

T = TypeVar("T")


def build_chosen(
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    traced: Traced,
    build: Callable[[Recipe, tuple[str, ...]], tuple[T, CompiledEntry]],
) -> tuple[Recipe, T, CompiledEntry]:
    """Returns the recipe of a training step with its rules decided, and what `build` makes of it.

    **Arguments:** `recipe`: the step. `mesh`: its devices. `traced`: the call, traced. `build`: makes the draft and the
    entry of a recipe, with lines for the notes of the plan.

    Raises `BudgetError` where no layout that was found fits into `memory_budget`, and what `build` raises."""
    if recipe.rules != TO_BE_CHOSEN or recipe.pinned is not None:
        return recipe, *build(recipe, ())
    platform, budget = platform_of(mesh), recipe.memory_budget_bytes
    draft = Draft.of(traced, inside_mesh(mesh), plan_request(recipe, platform), CHOOSER)
    choice = rank_rules(traced.graph, draft.shape, Prices.of_platform(platform), budget, draft.pins.by_path)
    if math.isinf(budget):
        decided = dataclasses.replace(recipe, rules=choice.rules)
        return decided, *build(decided, tuple(choice.lines()))
    too_large: list[tuple[int, Candidate]] = []
    # Those whose states alone are over the budget are built last, to tell which of all needs least.
    hopeless = [each for each in choice.candidates if each.state_bytes > budget]
    for candidate in (*(each for each in choice.candidates if each not in hopeless), *hopeless):
        decided = dataclasses.replace(recipe, rules=candidate.rules)
        try:
            made, entry = build(decided, (*choice.lines(candidate), *_larger(too_large, budget)))
        except SplitjaxError:
            continue  # the options of the step and these rules do not go together
        needed = _most_bytes(entry)
        if needed <= budget:
            return decided, made, entry
        too_large.append((needed, candidate))
    least, by = min(too_large, key=lambda each: each[0], default=(choice.best.peak_bytes, choice.best))
    raise over_budget(budget, least, f"{by.name} on {by.mesh}", traced.graph.num_examples)


def _most_bytes(entry: CompiledEntry) -> int:
    """Returns what a device needs at most by the plan of an `entry`; as expected, where its step is not simulated."""
    memory = entry.plan.memory
    return memory.peak_bytes if memory.bound_bytes is None else memory.bound_bytes


def _larger(too_large: list[tuple[int, Candidate]], budget_bytes: float) -> tuple[str, ...]:
    """Returns a line for the plan on candidates that are faster and do not fit."""
    if not too_large:
        return ()
    named = ", ".join(f"{each.name} at most {bytes_text(needed)}" for needed, each in too_large)
    return (f"faster, and not within {bytes_text(int(budget_bytes))}: {named}",)
