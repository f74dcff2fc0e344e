"""Decides how far back each worker differentiates, and how each gradient boundary of a step runs.

A draft comes in and goes out with the partial backpropagation that is asked for, or with the way of every boundary.
"""

from __future__ import annotations

import dataclasses

from splitjax.planning.draft import Draft
from splitjax.planning.partial_step import find_partial
from splitjax.planning.ways import BoundaryChoices


def differentiate(draft: Draft) -> Draft:
    """Returns the draft with the depths of its workers, where partial backpropagation is asked for or pinned. Raises
    what `find_partial` raises."""
    if not draft.takes_gradient:
        return draft
    request, traced = draft.request, draft.traced
    pinned = None if request.pinned is None else request.pinned.partial
    place = f"parallelize({request.name}), backprop"
    partial = find_partial(request.backprop, pinned, traced.graph, traced.jaxpr, draft.decided, place)
    return dataclasses.replace(draft, partial=partial)


def choose_boundaries(draft: Draft) -> Draft:
    """Returns the draft with the way in which each of its gradient boundaries runs, prepared. Raises what
    `WayChooser.choose` raises."""
    choices = BoundaryChoices(draft.in_turns, draft.tables, draft.partial)
    return dataclasses.replace(draft, ways=draft.chooser.choose(draft.decided_step, draft.traced.jaxpr, choices))
