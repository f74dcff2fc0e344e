"""Decides which activations that rematerialised calls keep for the backward pass are kept in parts, and says what is
sent for it.

A step's graph, the layout of its leaves and the axes of the rule set come in; `SavedInput`s come out, for predictions
(`cost.collectives`) and for lowering (`lower.products.saved_inputs`) alike. After Rajbhandari et al., "ZeRO" (arXiv
1910.02054, section 6.1: partitioned activation checkpointing). Where devices along an axis split weights alone, each of
them has the input of every layer whole (Shoeybi et al., "Megatron-LM", arXiv 1909.08053, section 3). For the backward
pass each keeps its part of one dim, and all gather the parts before a layer is computed again: one all-gather for each
activation that is kept.

An activation that several calls read (layers side by side, each rematerialised for itself) is gathered once for each
of them: their backward passes stand apart, and what was gathered for the first would have to be stored whole until the
last has run, which is what keeping it in parts saves. Barriers keep a call's second computation from the first, and so
such gathers from each other; of calls without them (`prevent_cse=False`) XLA makes one gather all the same, and of any
calls where the compiler drops barriers before it merges equal operations (`Manner.drops_barriers`). In a loop over
layers it cannot: the loop hands each call's parts to its backward pass apart.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from splitjax.cost.flow import Axes, Setting
from splitjax.plan import LeafPlan
from splitjax.trace.graph import Graph, itemsize


@dataclasses.dataclass(frozen=True)
class SavedInput:
    """Describes an activation that is kept in parts from the forward to the backward pass.

    - `site`, `operand`: of the rematerialised call that reads it.
    - `layer`: the name of the first layer in that call.
    - `dim`, `axes`: the dim that is split, and over which axes.
    - `example_dim`, `batch_axes`: the dim of examples, and the axes over which these lie anyway.
    - `whole_bytes`: of what a group of devices has together of it, in all runs of the call.
    - `dtype`: of the activation. `with_earlier`, `without_barriers`: as of `Saved`.
    """

    site: tuple[int, ...]
    operand: int
    layer: str
    dim: int
    axes: Axes
    example_dim: int
    batch_axes: Axes
    whole_bytes: int
    dtype: str
    with_earlier: bool = False
    without_barriers: bool = False


def saved_inputs(
    graph: Graph, leaves: Sequence[LeafPlan], setting: Setting, over: Sequence[str]
) -> tuple[SavedInput, ...]:
    """Returns what a step keeps in parts, in program order.

    **Arguments:** `graph`: of the step. `leaves`: its layout, in flat order. `setting`: the mesh, and how examples lie.
    `over`: the axes over which it is to be kept in parts; those that have examples of their own are left out, and so is
    an activation of which some dim is split over an axis that has none."""
    axes = tuple(axis for axis in over if axis in setting.mesh.wide and axis not in setting.batch_axes)
    if not axes or not graph.saved:
        return ()
    return tuple(_in_parts(graph, _split_labels(graph, leaves, setting.batch_axes), setting, axes))


def _in_parts(graph: Graph, split: frozenset[int], setting: Setting, axes: Axes) -> Iterator[SavedInput]:
    num_parts, batch_parts = setting.mesh.size(axes), setting.mesh.size(setting.batch_axes)
    for saved in graph.saved:
        examples = [at for at, dim in enumerate(saved.dims) if graph.is_example(dim)]
        is_split = any(dim and graph.local[dim[0]] in split for dim in saved.dims)
        if is_split or len(examples) != 1 or saved.shape[examples[0]] % batch_parts:
            continue
        # The last dim that divides: compilers lay it along a vector's lanes, so that parts stay dense.
        free = [at for at, size in enumerate(saved.shape) if at not in examples and size and size % num_parts == 0]
        if free:
            whole_bytes = math.prod(saved.shape) * itemsize(saved.dtype) * saved.trips // batch_parts
            yield SavedInput(
                saved.site, saved.operand, saved.layer, free[-1], axes, examples[0], setting.batch_axes, whole_bytes,
                saved.dtype, saved.with_earlier, saved.without_barriers,
            )  # fmt: skip


def _split_labels(graph: Graph, leaves: Sequence[LeafPlan], batch_axes: Axes) -> frozenset[int]:
    """Returns the local labels of the dims of what is computed with that are split over an axis without examples of its
    own."""
    return frozenset(
        graph.local[dim[0]]
        for leaf, planned in zip(graph.leaves, leaves, strict=True)
        if planned.role != "optimizer"
        for dim, over in zip(leaf.dims, planned.axes_by_dim, strict=False)
        if dim and not set(over) <= set(batch_axes)
    )
