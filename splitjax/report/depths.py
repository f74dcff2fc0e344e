"""The depths of a step that is differentiated partially: what the plan says of each, beside the branch that XLA
compiled for it."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence

from splitjax.plan import Plan
from splitjax.report.evidence import primitive
from splitjax.report.loops import num_turns
from splitjax.report.parts import Part
from splitjax.report.wire import Computation, Module

_DEPTHS = re.compile(r"splitjax:depths:([\d.]+)/cond$")  # how many workers take each branch
_PRODUCTS = ("dot", "convolution")
_PRODUCT_PRIMITIVES = ("dot_general", "conv_general_dilated")  # of a call into a library


@dataclasses.dataclass(frozen=True)
class ReportedDepth:
    """How far back a worker differentiates.

    **Attributes:**

    - `slot`: worker i is in slot i in the first step, and moves on by one each step where depths rotate.
    - `layer`: the layer nearest to the input that it differentiates.
    - `backward`: the share of the time of the full backward pass that this takes by the plan.
    - `num_products`: products and convolutions, forward and backward, in the branch, or the program, that XLA compiled
      for it, those in loops as often as they run; None for a temporal assignment, which has no depths by worker.
    """

    slot: int
    layer: str
    backward: float
    num_products: int | None


def read_depths(parts: Sequence[Part], plan: Plan) -> tuple[ReportedDepth, ...]:
    """By slot; none for a step that is not differentiated partially."""
    if plan.partial is None:
        return ()
    first = plan.partial.first
    shallowest = sorted(range(len(first)), key=first.__getitem__, reverse=True)  # as the branches stand
    found: dict[int, int] = collections.Counter()  # by slot
    for part, module in [(one, module) for one in parts for module in one.modules]:
        if part.worker is not None:  # a program of its own; in the first turn worker i is in slot i
            found[part.worker] += _products(module, module.computations[module.entry])
        for computation in module.computations.values():
            for one in computation.instructions.values():
                scope = _DEPTHS.search(one.op_name) if one.opcode == "conditional" else None
                if scope:
                    slots = iter(shallowest)
                    for called, count in zip(one.called, scope.group(1).split("."), strict=False):
                        products = _products(module, module.computations[called])
                        found.update(dict.fromkeys(itertools.islice(slots, int(count)), products))
    depths = []
    for slot, number in enumerate(first):
        segments = plan.partial.segments[number:]
        depths.append(
            ReportedDepth(slot, segments[0].layers[0], sum(one.backward for one in segments), found.get(slot))
        )
    return tuple(depths)


def _products(module: Module, computation: Computation) -> int:
    total = 0
    for one in computation.instructions.values():
        by_library = one.opcode == "custom-call" and primitive(one.op_name) in _PRODUCT_PRIMITIVES
        if one.opcode in _PRODUCTS or by_library:
            total += 1
        times = (num_turns(module, computation, one) or 1) if one.opcode == "while" else 1
        total += times * sum(
            _products(module, module.computations[called]) for called in one.called if called in module.computations
        )
    return total
