"""Says what the gradient of a parameter sends, and what brings together a weight that is stored in parts.

The layout of a parameter and what is known of its uses come in (`Weight`), `Event`s come out, as
`cost.collectives` describes them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from fractions import Fraction

from splitjax.cost.collectives import Event, again, on_backward, on_forward
from splitjax.cost.flow import Axes, Setting, used_axes
from splitjax.plan import LeafPlan, Phase, Purpose
from splitjax.plan import PurposeKind as Kind


@dataclasses.dataclass(frozen=True)
class Weight:
    """Holds what the collectives of a parameter depend on.

    **Attributes:**

    - `leaf`: its layout. `states`: the optimizer state that mirrors it.
    - `experts`: the axes over which it stays split as the weight of experts.
    - `read_back`: whether the backward pass reads it.
    - `parts`: the axes over which each device has a part of the gradient of a whole weight: of its own groups of a
      convolution, or of the columns that it has of what a scale is multiplied with.
    - `in_group`: the axes over whose devices all see the same examples where it is used, so that its gradient is not
      summed over them: it is added to one and the same value, or to the columns of each device.
    - `narrowed`: how many times fewer bytes it has in the dtype in which it travels (`StepStructure.narrowed`).
      `widened`: how many times more, where the compiler sends it in a wider one than its own.
    - `times_forward`, `times_back`: how often it is gathered in each pass. `times`: how many gradients of it are summed
      over devices, but over the axes `within` alone their sum is. `sums_apart`: whether these gradients are all-reduced
      one by one.
    - `gathering`: the axes along which workers have it whole all the time, if it is stored over them.
    - `loop_sums`: how often XLA sums its gradient over devices, whole, in a loop that is left to it.
    - `dealt`: the axes over which its columns are dealt out, in rounds, each with the bytes that a device sends, how
      often rematerialisation repeats it, and how often its gradient comes back: once for every microbatch.
    - `copied`: the axes over which columns of it are copied to all devices, each time with the bytes that a device has
      of these, and how often rematerialisation repeats it. `pieces`: what a device has of it then, part by part, of
      which each has a product and a gradient of its own: shares of what the device stores of it.
    """

    leaf: LeafPlan
    states: Sequence[LeafPlan]
    experts: Axes
    read_back: bool
    parts: Axes
    in_group: Axes
    narrowed: int = 1
    widened: int = 1
    times: int = 1
    times_forward: int = 1
    times_back: int = 1
    within: Axes = ()
    gathering: Axes = ()
    sums_apart: bool = False
    loop_sums: int = 1
    dealt: tuple[tuple[Axes, int, int, int], ...] = ()
    copied: tuple[tuple[Axes, int, int], ...] = ()
    pieces: tuple[Fraction, ...] = (Fraction(1),)


def gradient_events(weight: Weight, setting: Setting) -> Iterator[Event]:
    """Yields the weight gathers and gradient sums of one parameter.

    Over batch axes that split it for storage alone, the weight is gathered for the forward and again for the backward
    pass, and its gradient is reduce-scattered (Rajbhandari et al., "ZeRO", arXiv 1910.02054, stage 3): each by one
    collective for every dim that is split so, in their order. Over batch axes that do not split it, the device's shard
    of the gradient is all-reduced; where the gradient or the optimizer state is split over them, the gradient is
    reduce-scattered and the new values are gathered instead (stages 1 and 2), which is as many bytes. Where devices
    have parts of the gradient of a whole weight, an all-gather puts these together, unless its state lies in parts,
    too. Workers that take all gradients in one loop gather a stored weight before it, once. In a loop that is left to
    XLA a gradient is all-reduced in every iteration, over the devices that store parts of it, too. Weights are
    gathered, and gradients summed, in the dtype in which the weight is used; new values have that of the parameter.
    """
    leaf, parts, mesh, batch_axes = weight.leaf, weight.parts, setting.mesh, setting.batch_axes
    split = tuple(axis for axis in leaf.axes if axis in mesh.wide)
    used = used_axes(leaf, mesh, batch_axes, setting.replicated_batch) if split else ()
    stored = tuple(axis for axis in split if axis not in used and axis not in weight.experts)
    own = leaf.bytes_per_device * weight.widened
    shard = own // weight.narrowed
    pieces = [shard * piece.numerator // piece.denominator for piece in weight.pieces]
    of_dims = tuple(over for axes in leaf.axes_by_dim if (over := tuple(axis for axis in axes if axis in stored)))
    at_once = bool(stored) and set(stored) <= set(weight.gathering)
    in_pieces = [shard] if at_once else pieces
    passes = [(on_forward, 1 if at_once else weight.times_forward)]
    if weight.read_back and not at_once:  # a batch has no cotangent to be multiplied out
        passes.append((on_backward, weight.times_back))
    for (of_pass, times), held in itertools.product(passes, in_pieces):
        for axes in of_dims:
            held *= mesh.size(axes)
            yield from [("all_gather", axes, held, of_pass(Kind.STORED_WEIGHT, leaf.path))] * times
    lefts = [piece * mesh.size(stored) for piece in in_pieces]
    taken = {*split, *weight.in_group}
    summed = tuple(axis for axis in batch_axes if axis in mesh.wide and axis not in taken)
    in_loop = weight.loop_sums > 1
    if in_loop and (over := tuple(axis for axis in mesh.names if axis in (*stored, *summed))):
        yield "all_reduce", over, weight.loop_sums * sum(lefts), on_backward(Kind.GRADIENT, leaf.path)
    times = 1 if at_once else weight.times
    for left in () if in_loop else lefts:
        for axes in of_dims:
            yield from [("reduce_scatter", axes, left, on_backward(Kind.GRADIENT, leaf.path))] * times
            left //= mesh.size(axes)
    split_state = {axis for state in weight.states for axis in state.axes} | set(leaf.gradient_axes)
    zero = tuple(axis for axis in summed if axis in split_state)
    rest = tuple(axis for axis in summed if axis not in split_state)
    # A group's parts of a gradient stay parts where the state is split over the group, too.
    onto = tuple(axis for axis in parts if axis in weight.in_group and axis in split_state)
    in_sum = set(summed) <= set(weight.within)
    times = 1 if in_sum else weight.times
    in_pieces = [] if in_loop else [shard] if in_sum else pieces
    for piece in in_pieces if zero else ():
        gradient = "reduce_scatter", zero, piece // mesh.size(onto), on_backward(Kind.GRADIENT_ONTO_STATE, leaf.path)
        yield from [gradient] * times
    if over := tuple(axis for axis in mesh.names if axis in (*zero, *onto)):
        # A device's part of the state is none of its part of the gradient where other axes come before the group's.
        if onto and over[: len(onto)] != onto:
            yield "collective_permute", over, shard // mesh.size(over), on_backward(Kind.GRADIENT_GROUPS, leaf.path)
        yield "all_gather", over, own, Purpose(Kind.NEW_VALUE, Phase.UPDATE, leaf.path)
    for piece in in_pieces if rest else ():
        part = piece // mesh.size((*zero, *parts)) if zero or parts else piece
        gradient = "all_reduce", rest, part, on_backward(Kind.GRADIENT, leaf.path)
        yield from [gradient] * (times if weight.sums_apart else 1)
    if parts and not onto:
        yield "all_gather", parts, shard, on_backward(Kind.GRADIENT_GROUPS, leaf.path)
    for axes, sent, times, times_back in weight.dealt:
        dealt = "collective_permute", axes, sent, on_forward(Kind.DEALT_COLUMNS, leaf.path)
        yield from (dealt, *again([dealt], times))
        yield "collective_permute", axes, times_back * sent, on_backward(Kind.DEALT_GRADIENT, leaf.path)
    for axes, whole, times in weight.copied:
        copied = "all_gather", axes, whole, on_forward(Kind.COPIED_COLUMNS, leaf.path)
        yield from (copied, *again([copied], times))
