"""Checks that functions with their own derivative rule (`custom_vjp`, `custom_jvp`) can run in microbatches.

Such a rule is fixed for the function as a whole, and may use what the function itself does not: the batch size, a total
over the batch, a non-linear function of the cotangent. So it is traced at both batch sizes as well, and has to give
each example its own gradient, and shared operands a sum over examples.

The function's node comes in with the relations of its operands and results; `Mixed` comes out where its rule mixes
examples.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

from splitjax import _compat
from splitjax.errors import Refusal
from splitjax.lower.microbatch.pairing import Const, Node, PairedProgram, pair
from splitjax.primitives.example_relation import EXAMPLES, PARTIAL, SAME, Fact, Info, Mixed

WHY: str = "its own derivative rule depends on the number of examples, or combines them"


class AnalysedRule(Protocol):
    """Describes what `check_rule` reads of a classified derivative rule (`classify.BodyAnalysis`).

    - `outputs`: the relations of its results. `plain`: the part trace's equations give a microbatch the right results.
    """

    @property
    def outputs(self) -> Sequence[Info]:
        """The relations of the results: gradients of the function's operands."""
        ...

    @property
    def plain(self) -> bool:
        """Tells whether the part trace's own equations give a microbatch the right results."""
        ...


def check_rule(
    node: Node,
    operands: Sequence[Info],
    results: Sequence[Info],
    analyse: Callable[[PairedProgram, list[Info]], AnalysedRule],
) -> Mixed | None:
    """Returns `Mixed` unless a function's derivative rule works in microbatches, else None.

    **Arguments:**

    - `node`: the call of the function in both traces.
    - `operands`, `results`: the relations of the function's operands and results.
    - `analyse(program, inputs)`: classifies the values of a program whose inputs have the given relations.
    """
    whole, positions, with_cotangent = _compat.pullback(node.whole)
    part, _, _ = _compat.pullback(node.part)
    program = pair(whole, part, node.source)
    if isinstance(program, Refusal):
        return Mixed(WHY)
    known = [
        dataclasses.replace(info, fact=None)
        for ref, info in zip(node.inputs, operands, strict=True)
        if not isinstance(ref, Const)
    ]
    # A shared result has a different cotangent in every microbatch, and they add up; a sum's is the same in all.
    opposite = {SAME: Info(True, PARTIAL), PARTIAL: Info(True, SAME)}
    cotangents = [opposite.get(results[k].kind) or dataclasses.replace(results[k], live=True) for k in with_cotangent]
    analysis = analyse(program, [*known, *cotangents])
    if not analysis.plain:
        return Mixed(WHY)
    for position, gradient in zip(positions, analysis.outputs, strict=True):
        operand = operands[position]
        if not operand.live or gradient.fact is Fact.ZERO:
            continue
        if operand.kind == EXAMPLES:
            own = (
                gradient.layout is not None and operand.layout is not None and gradient.layout.dim == operand.layout.dim
            )
            if gradient.kind != EXAMPLES or not own:
                return Mixed(WHY)
        elif gradient.kind != PARTIAL:
            return Mixed(WHY)
    return None
