"""Finds what rematerialisation computes again: `jax.checkpoint` runs a forward computation once more for the backward
pass, and XLA leaves out what that does not read.

A flat step comes in; how often each of its operations runs again comes out. It exists because what an operation sends
is sent again with it. A derivative reads values: the operands of a product, operands and results of what is not linear,
indices and predicates. These, and all that they are made of within the rematerialised call, are computed again, but for
what its policy saves. Of a call within another, the outer one's repetition is only counted up to the inner one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from splitjax.primitives.calls import CallKind, kind_of
from splitjax.primitives.operation import Linearity
from splitjax.primitives.walk import Site
from splitjax.trace.flatten import FlatStep, Op
from splitjax.trace.flow import forward, is_floating


def count_repetitions(flat: FlatStep) -> list[int]:
    """Returns for each operation of `flat` how many rematerialised calls around it compute it again, in the forward
    computation of gradient boundaries. In what plain JAX differentiated before, repetitions are operations of the
    step's own."""
    counts = [0] * len(flat.ops)
    inside = [index for index, op in enumerate(flat.ops) if op.remats and op.inside and not op.phase]
    if not inside:
        return counts
    live = forward(flat, flat.differentiated)
    for remat in dict.fromkeys(site for index in inside for site in flat.ops[index].remats):
        own = [index for index in inside if remat in flat.ops[index].remats]
        read = {value for index in own for value in _residuals(flat, flat.ops[index], remat, live)}
        for index in _until_nothing_more(flat, own, read):
            counts[index] += 1
    return counts


def _until_nothing_more(flat: FlatStep, own: Sequence[int], read: set[int]) -> list[int]:
    """Returns those of the operations at the positions `own` that make what is `read`, or what that is made of; adds
    the latter to `read`. Loops hand values back, so that one walk may not do."""
    while True:
        before = len(read)
        again = [
            index
            for index in reversed(own)
            if not read.isdisjoint(flat.ops[index].outputs)
            and not _is_saved(flat.ops[index])
            # what an operation reads is noted at once: those that make it come later in this order
            and (read.update(flat.ops[index].inputs) or True)
        ]
        if len(read) == before:
            return again


def _residuals(flat: FlatStep, op: Op, remat: Site, live: Sequence[bool]) -> Iterator[int]:
    """Yields the values that the derivative of an operation reads. `remat`: the call that is rematerialised: an
    operation of another call within it reads what that reads, its operands."""
    is_live = [live[value] for value in op.inputs]
    if not any(is_live):
        return
    if op.remats[-1] != remat:
        yield from op.inputs
        return
    linear = op.facts.linear
    if op.primitive.startswith("_") or not any(is_floating(flat.dtypes[value]) for value in op.outputs):
        return
    if linear is None:
        yield from op.inputs
        yield from op.outputs
        return
    positions = linear.positions(len(op.inputs))
    others = linear.how is Linearity.EACH
    for position, value in enumerate(op.inputs):
        if position not in positions or (others and any(is_live[:position] + is_live[position + 1 :])):
            yield value


def _is_saved(op: Op) -> bool:
    """Tells whether the policy of a call around an operation saves what it makes."""
    calls = (call for call in op.calls if kind_of(call) is CallKind.REMAT)
    policies = (policy for call in calls if (policy := call.params.get("policy")) is not None)
    return op.eqn is not None and any(_saves(policy, op.eqn) for policy in policies)


def _saves(policy: Any, eqn: Any) -> bool:
    """Tells whether `policy` keeps the results of `eqn`, on the device or off it; it says so by a truth value, or by an
    object that stands for one."""
    said = policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
    return said if isinstance(said, bool) else type(said).__name__ != "RecomputeType"
