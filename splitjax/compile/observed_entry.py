"""Builds the program that a step will run once its tables were observed, before any step was.

The draft and the entry of a step come in whose tables go by rows. Its first steps gather all rows, which says little of
what later ones take; so the time of a candidate is that of the program for tables in which every lookup finds another
row, evenly over the workers that own them.
"""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh

from splitjax.compile.building import compile_draft
from splitjax.compile.devices import prices_for
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.machines.links import Link
from splitjax.planning.draft import Draft, KnownTables
from splitjax.planning.observing import axes_to_measure, suppose
from splitjax.planning.passes import with_tables


def observed_entry(recipe: Recipe, mesh: Mesh | AbstractMesh, draft: Draft, entry: CompiledEntry) -> CompiledEntry:
    """Returns the entry of a step as it is once its tables were observed, if all their rows were read; `entry` itself
    where no table goes by rows, or what they do is decided.

    **Arguments:** `recipe`: the step. `mesh`: its devices, or an abstract mesh. `draft`: the step before anything is
    known of its tables. `entry`: what was built of it."""
    step, request = entry.sparse, draft.request.sync
    if step is None or not step.tables or entry.is_decided:
        return entry
    prices = prices_for(mesh, draft.shape, recipe.target, recipe.calibration)
    rings = {axes: prices.ring("all_gather", "+".join(axes), draft.shape) for axes in axes_to_measure(step, request)}
    links = {axes: Link(seconds / max(draft.shape.size(axes) - 1, 1), rate) for axes, (seconds, rate) in rings.items()}
    known = KnownTables(decision=suppose(step, request, links))
    return compile_draft(recipe, mesh, with_tables(draft, known))
