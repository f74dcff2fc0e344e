"""Predicts what a step does whose every decision is taken: the `Plan` of a `Draft`.

The memory of a device and the collectives are functions of the traced step and its layout; partial backpropagation and
tables by rows are told the dense collectives that they replace. Nothing that is returned is edited afterwards.
"""

from __future__ import annotations

import dataclasses

from splitjax.cost import LaidOutStep, Manner, Prediction, predict_step
from splitjax.plan import Memory, Plan
from splitjax.planning.draft import Draft
from splitjax.planning.observing import predict_tables, row_bytes
from splitjax.planning.partial_plan import predict_partial
from splitjax.planning.ways import planned_boundaries


def predict(draft: Draft) -> Plan:
    """Returns the plan of a `draft` that went through all passes: its decisions, and what they cost."""
    decided, dense = draft.decided, dense_prediction(draft)
    collectives = dense.collectives
    partial, syncs = None, ()
    if draft.partial is not None:
        pinned = None if draft.request.pinned is None else draft.request.pinned.partial
        within = {} if draft.ways is None else draft.ways.sums_within
        partial, collectives = predict_partial(
            decided, collectives, draft.partial, draft.request.platform, pinned, within
        )
    if draft.tables is not None:
        syncs, collectives = predict_tables(decided, collectives, draft.tables, draft.decision)
    boundaries = () if draft.ways is None else planned_boundaries(draft.ways.planned, draft.traced.jaxpr)
    return dataclasses.replace(
        decided,
        memory=dense.memory,
        collectives=collectives,
        syncs=syncs,
        partial=partial,
        boundaries=boundaries,
    )


def dense_prediction(draft: Draft) -> Prediction:
    """Returns what the layout of a `draft` costs under its decisions so far: its memory, and its collectives with each
    gradient summed whole over all of its workers. `Prediction.changed` predicts other layouts of the step from it."""
    layout = draft.layout
    step = LaidOutStep(
        draft.graph, layout.leaves, layout.layers, draft.shape, layout.batch_axes, layout.replicated_batch
    )
    by_rows = {} if draft.tables is None else row_bytes(draft.tables)
    return predict_step(step, Manner(draft.takes_gradient, draft.group_comm, by_rows))


def memory_of(draft: Draft) -> Memory:
    """Returns the memory that the step takes under the decisions of a `draft` so far."""
    return dense_prediction(draft).memory
