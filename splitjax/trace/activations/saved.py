"""Finds what rematerialisation keeps for the backward pass: the activations that rematerialised calls read.

A flat step and its dim classes come in, `Saved`s come out. They exist because these are most of what such a step stores
between its passes: the input of every layer, which each device of a group has whole where only the weights are split.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from splitjax.primitives.walk import Site
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import FlatStep, Rematerialised
from splitjax.trace.graph import Saved


def find_saved(
    flat: FlatStep, classes: Classes, examples: frozenset[int], layers: Sequence[tuple[Site, str]]
) -> Iterator[Saved]:
    """Yields the activations that rematerialised calls of gradient boundaries read and that every run of them has for
    itself, in program order.

    A call that keeps more than what it reads is left out, for what it keeps lies as its operations leave it, and so is
    one with side effects, which are not to happen otherwise. What a loop hands to all of its turns alike is kept once.

    **Arguments:** `classes`: the dim classes. `examples`: the atoms of the example dim. `layers`: of the uses of
    weights in program order, their sites and the names of their layers."""
    calls = [call for call in flat.rematerialised if _keeps_operands_alone(call)]
    if not calls:
        return
    made_in = {made: op.loops for op in flat.ops for made in op.outputs}
    trained = _made_of_parameters(flat)
    for call in calls:
        layer = next((name for site, name in layers if site[: len(call.site)] == call.site), "")
        for operand, value in enumerate(call.operands):
            dims = classes.dims(value, len(flat.shapes[value]))
            if (
                value in trained
                and made_in.get(value) == call.loops
                and jnp.issubdtype(np.dtype(flat.dtypes[value]), np.inexact)
                and any(dim and dim[0] in examples for dim in dims)
                and call.operands.count(value) == 1  # else one of the two would be kept whole
            ):
                yield Saved(call.site, operand, layer, flat.shapes[value], dims, flat.dtypes[value], call.trips)


def _keeps_operands_alone(call: Rematerialised) -> bool:
    return call.eqn.params["policy"] in (None, jax.checkpoint_policies.nothing_saveable) and not call.eqn.effects


def _made_of_parameters(flat: FlatStep) -> set[int]:
    """Returns the values that what is differentiated reaches, through loops, too."""
    found = set(flat.differentiated)
    while True:
        before = len(found)
        for op in flat.ops:
            if op.inside and not found.isdisjoint(op.inputs):
                found.update(op.outputs)
                if op.primitive == "_carry_back" and op.inputs[0] in found:
                    found.add(op.inputs[1])
        if len(found) == before:
            return found
