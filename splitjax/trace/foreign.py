"""Finds the operations of a flat step whose code is not partitioned like the rest of it, with the dims
that planning asks about."""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.primitives.calls import CallKind, kind_of
from splitjax.primitives.operation import Trait
from splitjax.primitives.table import qualified_name
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import FlatStep
from splitjax.trace.graph import Dim, ForeignCall


def find_foreign(flat: FlatStep, classes: Classes) -> tuple[ForeignCall, ...]:
    """Returns the kernels, callbacks and `shard_map`s of `flat` in program order, with dims of `classes`."""

    def dims(values: Sequence[int]) -> tuple[tuple[Dim, ...], ...]:
        return tuple(classes.dims(v, len(flat.shapes[v])) for v in values)

    return tuple(
        ForeignCall(
            qualified_name(op.primitive, op.params),
            op.site,
            op.source,
            op.eqn,
            dims(op.inputs),
            dims(op.outputs),
            op.editable,
            next((call for call in op.calls if kind_of(call) is CallKind.RULE), None),
        )
        for op in flat.ops
        if op.eqn is not None and Trait.FOREIGN in op.facts.traits
    )
