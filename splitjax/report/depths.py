"""Sets the depths of a step that is differentiated partially beside the branches, or programs, that XLA compiled for
them.

A step's compiled programs and its plan go in; for each slot of the depth schedule comes out what the plan says of its
depth, and how many products were compiled for it. So a report shows that a shallow worker indeed computes less.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from collections.abc import Sequence

from splitjax.plan import Plan
from splitjax.report.loops import num_trips
from splitjax.report.op_names import is_product
from splitjax.report.parts import StepPart
from splitjax.report.wire import Computation, Module

_DEPTHS = re.compile(r"splitjax:depths:([\d.]+)/cond$")  # how many workers take each branch
_PRODUCTS = ("dot", "convolution")


@dataclasses.dataclass(frozen=True)
class ReportedDepth:
    """Describes how far back a worker differentiates.

    **Attributes:**

    - `slot`: worker i is in slot i in the first step, and moves on by one slot each step where depths rotate.
    - `layer`: the layer nearest to the input that it differentiates.
    - `backward`: the share of the time of the full backward pass that this takes by the plan.
    - `num_products`: products and convolutions, forward and backward, in the branch, or the program, that XLA compiled
      for it, those in loops as often as they run; None for a temporal assignment, which has no depths by worker.
    """

    slot: int
    layer: str
    backward: float
    num_products: int | None


def read_depths(parts: Sequence[StepPart], plan: Plan) -> tuple[ReportedDepth, ...]:
    """Returns the depths by slot; none for a step that is not differentiated partially.

    **Arguments:**

    - `parts`: the step's programs (`report.parts.read_parts`).
    - `plan`: of the step.
    """
    if plan.partial is None:
        return ()
    first = plan.partial.first
    shallowest = sorted(range(len(first)), key=first.__getitem__, reverse=True)  # as the branches stand
    num_products: dict[int, int] = collections.Counter()  # by slot
    modules = [(part.worker, module) for part in parts for module in part.modules]
    for worker, module in modules:
        if worker is not None:  # a program of its own; in the first step worker i is in slot i
            num_products[worker] += _products(module, module.computations[module.entry])
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                scope = _DEPTHS.search(instruction.op_name) if instruction.opcode == "conditional" else None
                if scope:
                    slots = iter(shallowest)
                    for called, count in zip(instruction.called, scope.group(1).split("."), strict=False):
                        products = _products(module, module.computations[called])
                        num_products.update(dict.fromkeys(itertools.islice(slots, int(count)), products))
    depths = []
    for slot, number in enumerate(first):
        segments = plan.partial.segments[number:]
        share = sum(segment.backward for segment in segments)
        depths.append(ReportedDepth(slot, segments[0].layers[0], share, num_products.get(slot)))
    return tuple(depths)


def _products(module: Module, computation: Computation) -> int:
    """Counts the products and convolutions of a computation and of what it calls, those in loops as often as they
    run."""
    total = 0
    for instruction in computation.instructions.values():
        by_library = instruction.opcode == "custom-call" and is_product(instruction.op_name)
        if instruction.opcode in _PRODUCTS or by_library:
            total += 1
        times = (num_trips(module, computation, instruction) or 1) if instruction.opcode == "while" else 1
        total += times * sum(
            _products(module, module.computations[called])
            for called in instruction.called
            if called in module.computations
        )
    return total
