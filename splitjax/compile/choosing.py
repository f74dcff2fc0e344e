"""Decides the rules of a step that leaves them to be chosen (`rules="auto"`), when the first call is planned.

A recipe and the traced call come in; the recipe with the chosen rules comes out, and what the plan notes of the choice.
The choice depends on the trace, the mesh and the options alone and ends by a limit of work, so that processes that run
one program choose alike.
"""

from __future__ import annotations

import dataclasses

from jax.sharding import AbstractMesh, Mesh

from splitjax.choosing import Prices, choose_rules
from splitjax.compile.building import plan_request
from splitjax.compile.entry import Recipe
from splitjax.lower.strategies import CHOOSER
from splitjax.mesh import inside_mesh, platform_of
from splitjax.planning.draft import Draft
from splitjax.rules.ruleset import TO_BE_CHOSEN
from splitjax.step.traced import Traced


def with_rules(recipe: Recipe, mesh: Mesh | AbstractMesh, traced: Traced) -> tuple[Recipe, tuple[str, ...]]:
    """Returns the recipe of a training step with its rules decided, and lines for the plan; as it is where they are.

    **Arguments:** `recipe`: the step. `mesh`: its devices. `traced`: the call, traced.

    Raises `BudgetError` where no layout that was found fits into `memory_budget`."""
    if recipe.rules != TO_BE_CHOSEN or recipe.pinned is not None:
        return recipe, ()
    platform = platform_of(mesh)
    draft = Draft.of(traced, inside_mesh(mesh), plan_request(recipe, platform), CHOOSER)
    choice = choose_rules(
        traced.graph,
        draft.shape,
        Prices.of_platform(platform),
        budget_bytes=recipe.memory_budget_bytes,
        pins=draft.pins.by_path,
    )
    return dataclasses.replace(recipe, rules=choice.rules), tuple(choice.lines())
