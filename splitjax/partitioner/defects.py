"""The table of operations that XLA's partitioner splits over devices and computes wrongly: one row a defect.

XLA decides how each operation of a program is split by the shardings of what it reads. For a few operations the split
program computes other numbers than the whole one, without a word, or the compiler ends the process. A row says which
operation, under which condition, in which versions, and what splitjax does instead. `trace` marks the operations of a
step that a row covers (`Graph.suspects`), `lower` applies the row's action to them, and the plan notes it.

Rows are found by `python -m benchmarks partitioner`, which compares drawn programs with one device; each has a test that
passes with the remedy, and fails once XLA alone is right, so that the row can go.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any


class Action(enum.Enum):
    """What is done with an operation that XLA's partitioner cannot be trusted with."""

    LOCAL = "local"  # every device evaluates its own part; the collectives are written out, and planned
    WHOLE = "whole"  # its operands are gathered, and every device computes the whole result
    REFUSE = "refuse"  # the plan is refused: nothing else is known to give the right numbers


@dataclasses.dataclass(frozen=True)
class Defect:
    """One row of the table.

    - `name`: by which plans, errors and tests refer to it.
    - `operation`, `condition`: what is computed wrongly, and under which layouts, in words.
    - `consequence`: what the split program does instead of computing the right numbers.
    - `versions`: of JAX, in which it was seen; `partitioners`: Shardy, GSPMD, or both.
    - `remedy`: what splitjax does, in words; `action` is the same for `lower`.
    - `matches(primitive, params)`: whether an operation of a traced step may be affected, whatever its layout.
    """

    name: str
    operation: str
    condition: str
    consequence: str
    versions: str
    partitioners: str
    remedy: str
    action: Action
    matches: Callable[[str, Mapping[str, Any]], bool]


def _is_grouped(primitive: str, params: Mapping[str, Any]) -> bool:
    return primitive == "conv_general_dilated" and max(params["feature_group_count"], params["batch_group_count"]) > 1


def _is_transposed(primitive: str, params: Mapping[str, Any]) -> bool:
    return primitive == "conv_general_dilated" and any(step > 1 for step in params["lhs_dilation"])


_EVALUATED_LOCALLY = "each device convolves its own examples and groups, and sums what it contributes by planned collectives"

DEFECTS: tuple[Defect, ...] = (
    Defect(
        name="grouped-convolution",
        operation="a convolution with feature groups or batch groups (grouped, depthwise, one kernel an example), and its gradients",
        condition="the examples are split over some axes of the mesh and whole over another, or the groups do not divide by the axes that "
        "split the features, or the groups run over examples",
        consequence="the weight's gradient is multiplied by the size of the axis over which the examples are whole; where the groups do not "
        "divide, the compiler ends the process; where the examples are split over all axes, every device gathers all of them",
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy=_EVALUATED_LOCALLY,
        action=Action.LOCAL,
        matches=_is_grouped,
    ),
    Defect(
        name="transposed-convolution",
        operation="a transposed convolution (one whose input is dilated), and its gradients",
        condition="the weight, or its gradient, is split over an axis that splits the examples as well",
        consequence="the weight's gradient is wrong by one to two times itself",
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy=_EVALUATED_LOCALLY,
        action=Action.LOCAL,
        matches=_is_transposed,
    ),
)


def defect_of(primitive: str, params: Mapping[str, Any]) -> Defect | None:
    """The first row that covers an operation, by its primitive and the equation's parameters; None for all others."""
    return next((row for row in DEFECTS if row.matches(primitive, params)), None)


def defect_named(name: str) -> Defect:
    """The row of a name. Raises `KeyError` for a name that the table lacks."""
    return {row.name: row for row in DEFECTS}[name]
