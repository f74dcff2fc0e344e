"""Finds the values of a step that parameters reach: those that a gradient can be asked for; and of these the ones that
have a part in a loss."""

from __future__ import annotations

from collections.abc import Iterable

from splitjax.trace.flatten import FlatStep
from splitjax.trace.flow import is_floating


def learned_values(flat: FlatStep, params: Iterable[int]) -> frozenset[int]:
    """Returns the floating-point values that the values `params` reach through operations, those from a turn of a loop
    to the next one, too."""
    found = set(params)
    while True:
        before = len(found)
        for op in flat.ops:
            if not found.isdisjoint(op.inputs):
                found.update(value for value in op.outputs if is_floating(flat.dtypes[value]))
                if op.primitive == "_carry_back" and op.inputs[0] in found:
                    found.add(op.inputs[1])
        if len(found) == before:
            return frozenset(found)


def values_with_cotangents(flat: FlatStep, learned: frozenset[int]) -> frozenset[int]:
    """Returns those of the `learned` values (`learned_values`) whose cotangents gradient boundaries ask for: they reach
    the loss, and not through `stop_gradient` alone. Metrics have none."""
    found = {op.inputs[1] for op in flat.ops if op.primitive == "_gradient"}
    while True:
        before = len(found)
        for op in reversed(flat.ops):
            if op.primitive not in ("_gradient", "stop_gradient") and not found.isdisjoint(op.outputs):
                found.update(op.inputs)
            if op.primitive == "_carry_back" and op.inputs[1] in found:
                found.add(op.inputs[0])
        if len(found) == before:
            return learned & found
