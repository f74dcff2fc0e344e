"""Plans a step: the order in which its decisions are taken. Each pass is a pure function `Draft -> Draft`.

A traced call, a mesh (abstract ones serve) and a `PlanRequest` come in, a `Draft` with every decision comes out, which
`planning.predict` makes a `Plan` of. A pinned plan goes through the same passes, with its decisions as the request.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from jax.sharding import AbstractMesh, Mesh

from splitjax.plan import Memory
from splitjax.planning.boundaries import choose_boundaries, differentiate
from splitjax.planning.constraining import constrain
from splitjax.planning.draft import Draft, KnownTables, PlanRequest
from splitjax.planning.group_comm import cross
from splitjax.planning.layouts import lay_out, pin_rest, place_examples, share_state
from splitjax.planning.pinning import synchronise
from splitjax.planning.ways import WayChooser
from splitjax.step.traced import Traced

Pass = Callable[[Draft], Draft]

# What the trace and the options decide.
LAYOUT: tuple[Pass, ...] = (
    lay_out,  # where every leaf lives
    place_examples,  # batches where their first layers want them
    share_state,  # optimizer state and gradients in parts
    pin_rest,  # what else users pinned
    constrain,  # what that means at each operation
    cross,  # how examples enter split layers
    differentiate,  # how far back each worker differentiates
)
# What depends on observed steps besides: taken again when these were seen, without the passes before.
TABLES: tuple[Pass, ...] = (
    synchronise,  # which tables go by rows, and how
    choose_boundaries,  # how each gradient boundary runs: whole, in microbatches, in turns, truncated, with rows
)


def draft_step(
    traced: Traced,
    mesh: Mesh | AbstractMesh,
    request: PlanRequest,
    chooser: WayChooser,
    simulator: Callable[[Draft], Memory] | None = None,
) -> Draft:
    """Decides everything about a step but how its tables are synchronised and its boundaries run.

    **Arguments:** `traced`: the call, traced. `mesh`: its mesh, with devices or abstract. `request`: what is asked for.
    `chooser`: chooses how gradient boundaries run, such as `lower.strategies.CHOOSER`. `simulator`: as in `Draft`; it
    is given drafts whose layout and crossing are decided.

    Raises what the passes raise: typed errors that name value, place and remedy."""
    return _through(LAYOUT, Draft.of(traced, mesh, request, chooser, simulator))


def completed(draft: Draft) -> Draft:
    """Decides about a `draft` whose crossing is decided what is left, with nothing known of its tables."""
    return with_tables(_through(LAYOUT[LAYOUT.index(cross) + 1 :], draft), KnownTables())


def with_tables(draft: Draft, known: KnownTables) -> Draft:
    """Decides how the tables of a step are synchronised, and with them how its gradient boundaries run.

    **Arguments:** `draft`: what `draft_step` returned. `known`: what is known of the tables.

    Raises `SyncError`, `PlanError` for a pinned plan whose tables are not those of the step, and what a boundary raises
    that cannot run as it is asked for."""
    return _through(TABLES, dataclasses.replace(draft, known=known))


def _through(passes: tuple[Pass, ...], draft: Draft) -> Draft:
    return functools.reduce(lambda so_far, decide: decide(so_far), passes, draft)
