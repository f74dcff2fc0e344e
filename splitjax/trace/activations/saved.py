"""Finds what rematerialisation keeps for the backward pass: the activations that rematerialised calls read.

A flat step and its dim classes come in, `Saved`s come out. They exist because these are most of what such a step stores
between its passes: the input of every layer, which each device of a group has whole where only the weights are split.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.primitives.walk import Site
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import FlatStep, Rematerialised
from splitjax.trace.stepping import around_gradients
from splitjax.trace.suspect_dims import Dim


@dataclasses.dataclass(frozen=True)
class Saved:
    """Describes an activation that a rematerialised call reads, and that is stored from its forward to its backward
    pass.

    - `site`, `operand`: of the call, and the position among its operands.
    - `layer`: the name of the first layer in the call; empty for none.
    - `shape`, `dims`, `dtype`: of the activation.
    - `trips`: how often the call runs per step; each run has an activation of its own.
    - `with_earlier`: whether a call before it reads the same activation, and the backward passes of both are in one
      program: not in loops of their own, which hand each call the activations of all their turns apart.
    - `without_barriers`: whether that is so of calls with `prevent_cse=False`, this one and one before it.
    """

    site: tuple[int, ...]
    operand: int
    layer: str
    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    dtype: str
    trips: int
    with_earlier: bool = False
    without_barriers: bool = False


def find_saved(
    flat: FlatStep,
    classes: Classes,
    examples: frozenset[int],
    layers: Sequence[tuple[Site, str]],
    learned: frozenset[int],
) -> Iterator[Saved]:
    """Yields the activations that rematerialised calls of gradient boundaries read and that every run of them has for
    itself, in program order.

    A call that keeps more than what it reads is left out, for what it keeps lies as its operations leave it, and so is
    one with side effects, which are not to happen otherwise. What a loop hands to all of its turns alike is kept once.

    **Arguments:** `classes`: the dim classes. `examples`: the atoms of the example dim. `layers`: of the uses of
    weights in program order, their sites and the names of their layers. `learned`: the values that parameters reach."""
    calls = [call for call in flat.rematerialised if _keeps_operands_alone(call)]
    if not calls:
        return
    made_in = {made: op.loops for op in flat.ops for made in op.outputs}
    around, read, read_freely = around_gradients(flat), set[int](), set[int]()
    for call in calls:
        layer = next((name for site, name in layers if site[: len(call.site)] == call.site), "")
        for operand, value in enumerate(call.operands):
            dims = classes.dims(value, len(flat.shapes[value]))
            if (
                value in learned
                and made_in.get(value) == call.loops
                and jnp.issubdtype(np.dtype(flat.dtypes[value]), np.inexact)
                and any(dim and dim[0] in examples for dim in dims)
                and call.operands.count(value) == 1  # else one of the two would be kept whole
            ):
                shape, dtype = flat.shapes[value], flat.dtypes[value]
                is_free = not call.eqn.params["prevent_cse"]
                with_earlier = value in read and around.issuperset(call.loops)
                without_barriers = with_earlier and is_free and value in read_freely
                yield Saved(call.site, operand, layer, shape, dims, dtype, call.trips, with_earlier, without_barriers)
                read.add(value)
                if is_free:
                    read_freely.add(value)


def _keeps_operands_alone(call: Rematerialised) -> bool:
    return call.eqn.params["policy"] in (None, jax.checkpoint_policies.nothing_saveable) and not call.eqn.effects
