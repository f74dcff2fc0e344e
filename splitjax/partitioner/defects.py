"""Holds the table of operations that XLA's partitioner splits over devices and computes wrongly: a row for each defect.

An operation of a traced step goes in; the row that covers it comes out, with the dims that must not be split.

XLA decides how each operation of a program is split by the shardings of what it reads. For a few operations the split
program computes other numbers than the whole one, without a word, or the compiler ends the process. A row says which
operation, under which condition, in which versions, and what splitjax does instead. `trace` marks the operations of a
step that a row covers (`Graph.suspects`), `lower` applies the row's action to them, and the plan notes it.

What a row asks of an operation is a function of `touches.py`.

Rows are found by `python -m benchmarks partitioner`, which compares drawn programs with one device; each has a test
that passes with the remedy, and fails once XLA alone is right, so that the row can go.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable

from splitjax.partitioner.touches import (
    BITWISE,
    SCATTERS,
    WINDOWS,
    Operation,
    Touched,
    batched_indices,
    convolution,
    dilated_and_cut,
    grouped,
    indexed,
    no_operation,
    reduced,
    strided_to_one,
    transformed,
    unbounded_starts,
    upper_half,
)


class Action(enum.Enum):
    """Names what is done with an operation that XLA's partitioner cannot be trusted with.

    - `LOCAL`: every device evaluates its own part; the collectives are written out, and planned.
    - `REWRITE`: it is evaluated as another operation of the same meaning; nothing is sent.
    - `WHOLE`: the dims in question are gathered for it, and leave it whole.
    - `ORDER`: axes that split a dim together are listed in the order of the mesh; a pinned plan that does not is
      refused.
    - `PIN`: what it reads and gives is pinned, so that XLA does not choose the layout that it gets wrong.
    - `REFUSE`: the plan is refused: nothing else is known to give the right numbers.
    """

    LOCAL = "local"
    REWRITE = "rewrite"
    WHOLE = "whole"
    ORDER = "order"
    PIN = "pin"
    REFUSE = "refuse"


@dataclasses.dataclass(frozen=True)
class Defect:
    """Is a row of the table: a defect of the partitioner.

    - `name`: what plans, errors and tests call it.
    - `operation`, `condition`: what is computed wrongly, and under which layouts, in words.
    - `consequence`: what the split program does instead of computing the right numbers.
    - `versions`: of JAX, in which it was seen; `partitioners`: Shardy, GSPMD, or both.
    - `remedy`: what splitjax does, in words; `action` is the same for `lower`.
    - `touches(operation)`: which dims of an operation must not be split while XLA partitions it: operand position (-1
      for the first result) -> dims. Empty for an operation that the row does not cover.
    - `uneven`: whether these are dims that an axis of the mesh does not divide. No plan splits such a dim, but XLA may,
      where it carries the layout of another value on; so the row is applied to all of them, on meshes of two axes or
      more, unless others of these dims run along the examples.
    - `beside_examples`: whether a row with `uneven` dims is applied beside the examples, too, and on meshes of one
      axis.
    """

    name: str
    operation: str
    condition: str
    consequence: str
    versions: str
    partitioners: str
    remedy: str
    action: Action
    touches: Callable[[Operation], Touched]
    uneven: bool = False
    beside_examples: bool = False


_EVALUATED_LOCALLY = (
    "each device convolves its own examples and groups, and sums what it contributes by planned collectives"
)

DEFECTS: tuple[Defect, ...] = (
    Defect(
        name="grouped-convolution",
        operation=(
            "a convolution with feature groups or batch groups (grouped, depthwise, one kernel an example), and its"
            " gradients"
        ),
        condition=(
            "the examples are split over some axes of the mesh and whole over another, or the groups do not divide by"
            " the axes that split the features, or the groups run over examples"
        ),
        consequence=(
            "the weight's gradient is multiplied by the size of the axis over which the examples are whole; where the"
            " groups do not divide, the compiler ends the process; where the examples are split over all axes, every"
            " device gathers all of them"
        ),
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy=_EVALUATED_LOCALLY,
        action=Action.LOCAL,
        touches=grouped,
    ),
    Defect(
        name="convolution",
        operation=(
            "any other convolution, and its gradients: plain, strided, dilated, transposed, one whose window is a point"
            " or all there is"
        ),
        condition=(
            "the examples are whole over an axis of the mesh, or some convolution's weight is split or stored in parts"
        ),
        consequence=(
            "the gradient of weight or data is wrong, by up to several times itself, or the compiler ends the process;"
            " which sizes and layouts are hit follows no rule that could be relied on"
        ),
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy=_EVALUATED_LOCALLY,
        action=Action.LOCAL,
        touches=convolution,
    ),
    Defect(
        name="fourier-transform",
        operation="a Fourier transform (jax.numpy.fft), and its gradient",
        condition="some dim of its operand is split",
        consequence=(
            "the partitioner gathers the operand for it, also where only examples are split, or splits a transformed"
            " dim; the CPU backend's compiler fails with an internal error, or ends the process"
        ),
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy",
        remedy="each device transforms its own examples; a transformed dim that is split is brought together by planned"
        " collectives",
        action=Action.LOCAL,
        touches=transformed,
    ),
    Defect(
        name="axes-out-of-mesh-order",
        operation=(
            "a product whose result is split over several axes along one dim, in another order than the mesh lists them"
        ),
        condition=(
            "the mesh has three axes or more, and another dim of the result is split over an axis that splits the"
            " contracted dim; such a result is the gradient of a weight that a rule splits so"
        ),
        consequence="the parts of the result are wrong, by up to itself",
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy="axes that split one dim together are listed in the order of the mesh",
        action=Action.ORDER,
        touches=no_operation,
    ),
    Defect(
        name="contracted-axis-in-result",
        operation="a product whose contracted dim is split over an axis that splits a dim of its result, too",
        condition=(
            "another dim of the result is split over several axes, and the weight's free dim over one of them: weights"
            " that are split over tensor and stored over fsdp, with the batch over data and fsdp"
        ),
        consequence="the whole result is wrong, by up to itself",
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy="what such a product reads and gives lies as its weight does while it is used, forward and backward",
        action=Action.PIN,
        touches=no_operation,
    ),
    Defect(
        name="start-index-out-of-range",
        operation="a dynamic_update_slice of one element along a dim, and the gradient of such a dynamic_slice",
        condition="the dim is split, and the start index lies behind its end",
        consequence="the update is dropped, where one device moves it to the end",
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy="start indices are brought into their range before XLA sees them",
        action=Action.REWRITE,
        touches=unbounded_starts,
    ),
    Defect(
        name="dilated-pad-with-negative-edge",
        operation="a pad with interior padding and a negative low edge that is no multiple of the dilated step",
        condition="the padded dim is split",
        consequence="a check inside the partitioner fails, and the compiler ends the process",
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy="the edge is cut off in a step of its own",
        action=Action.REWRITE,
        touches=dilated_and_cut,
    ),
    Defect(
        name="strided-slice-of-one-element",
        operation="a slice with a stride of three or more that takes one element of a dim",
        condition="the dim is split",
        consequence="the element is another one, or the compiler fails with an internal error",
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy="the element is taken with stride 1",
        action=Action.REWRITE,
        touches=strided_to_one,
    ),
    Defect(
        name="reduction-without-collective",
        operation="a bitwise reduction of integers, or a reduction with a computation of its own",
        condition="a reduced dim is split",
        consequence="the compiler of the CPU backend has no such collective, and fails with an internal error",
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy="the reduced dims are gathered for it",
        action=Action.WHOLE,
        touches=reduced,
    ),
    Defect(
        name="unevenly-split-batched-indices",
        operation=(
            "a scatter whose indices are of each entry of a batch apart, and not of type int32; such is the gradient of"
            " a sort (a median, a quantile), and of jax.numpy.take_along_axis"
        ),
        condition="XLA splits a dim of the indices, other than the batch, which some axis does not divide",
        consequence=(
            "the compiler ends the process: it fills the last device's part of the indices up with a number of another"
            " type"
        ),
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy="dims of indices that some axis of the mesh does not divide are kept whole",
        action=Action.WHOLE,
        touches=batched_indices,
        uneven=True,
        beside_examples=True,
    ),
    Defect(
        name="unevenly-split-indices",
        operation="a scatter, and the gradient of a lookup",
        condition="XLA splits a dim of the indices, which some axis does not divide, and an axis of the mesh is unused",
        consequence="what fills the last device's part up is added at index 0",
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy and GSPMD",
        remedy="dims of indices that some axis of the mesh does not divide are kept whole",
        action=Action.WHOLE,
        touches=indexed,
        uneven=True,
    ),
    Defect(
        name="gspmd",
        operation="a step that GSPMD partitions, which JAX had before Shardy",
        condition="jax_use_shardy_partitioner is turned off",
        consequence=(
            "some gradients of products and of linear solves are wrong that are right with Shardy; and a check inside"
            " the partitioner (IsManualSubgroup) ends the process for some steps of which splitjax evaluates a part"
            " device by device"
        ),
        versions="0.10.2 to 0.12.0.1",
        partitioners="GSPMD",
        remedy="the plan is refused: Shardy, which JAX uses unless it is told otherwise, has to be on",
        action=Action.REFUSE,
        touches=no_operation,
    ),
    Defect(
        name="high-half-of-product",
        operation="jax.lax.mulhi, the upper half of a product of integers",
        condition="the program is compiled for several devices",
        consequence="the compiler fails with an internal error",
        versions="0.10.2 to 0.12.0.1",
        partitioners="Shardy",
        remedy="the plan is refused",
        action=Action.REFUSE,
        touches=upper_half,
    ),
)


def defect_of(operation: Operation) -> tuple[Defect, Touched] | None:
    """Returns the first row that covers `operation`, with the dims that it touches; None where no row does."""
    if operation.primitive not in COVERED:
        return None
    return next(((row, touched) for row in DEFECTS if (touched := row.touches(operation))), None)


# Most operations of a step are looked up here and no further.
COVERED: frozenset[str] = frozenset(
    {
        "conv_general_dilated",
        "fft",
        "mulhi",
        "pad",
        "reduce",
        "gather",
        "slice",
        "sort",
        *SCATTERS,
        *WINDOWS,
        *BITWISE,
    }
)


def defect_named(name: str) -> Defect:
    """Returns the row called `name`. Raises `KeyError` for a name that the table lacks."""
    return {row.name: row for row in DEFECTS}[name]
