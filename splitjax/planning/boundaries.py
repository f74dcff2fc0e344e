"""Decides how far back each worker differentiates, and how each gradient boundary of a step runs.

A draft comes in and goes out with the partial backpropagation that is asked for, or with the way of every boundary.
"""

from __future__ import annotations

import dataclasses

from splitjax.lower.partial.step import find_partial
from splitjax.lower.strategies import BoundaryChoices, choose_ways
from splitjax.planning.draft import Draft


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
    """Returns the draft with the way in which each of its gradient boundaries runs, prepared. Raises what `choose_ways`
    raises."""
    choices = BoundaryChoices(draft.in_turns, draft.tables, draft.partial)
    return dataclasses.replace(draft, ways=choose_ways(draft.lowered_step, draft.traced.jaxpr, choices))
