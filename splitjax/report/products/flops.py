"""Counts the flops of the products that XLA compiled for a step, on one device.

The step's compiled programs go in, a number comes out. XLA's own cost analysis counts the body of a loop once, however
often it runs, so that it says too little of layers or microbatches in a loop; here loops count as often as they run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from splitjax.report.loops import num_trips
from splitjax.report.op_names import is_product
from splitjax.report.parts import StepPart
from splitjax.report.wire import Computation, Instruction, Module


def read_flops(parts: Sequence[StepPart]) -> int | None:
    """Returns the flops of the products of a step, per device; a multiply-add is two. Of a convolution every position
    of its window counts, those that read padding too; of branches the one with most.

    None for a step of several programs, which devices share, and where a product is a call into a library.

    **Arguments:** `parts`: the step's programs (`report.parts.read_parts`)."""
    if len(parts) != 1:
        return None
    total = 0
    for module in parts[0].modules:
        entry = module.computations.get(module.entry)
        flops = _flops(module, entry) if entry is not None else 0
        if flops is None:
            return None
        total += flops
    return total


def _flops(module: Module, computation: Computation) -> int | None:
    """Counts the flops of a computation and of what it calls."""
    total = 0
    for instruction in computation.instructions.values():
        if instruction.opcode == "custom-call" and is_product(instruction.op_name):
            return None  # its shapes alone do not say how many flops it has
        if instruction.opcode in ("async-update", "async-done"):
            continue  # they name the computation of their start once more
        total += _product(computation, instruction)
        inner = [_flops(module, module.computations[n]) for n in instruction.called if n in module.computations]
        known = [flops for flops in inner if flops is not None]
        if len(known) < len(inner):
            return None
        times = (num_trips(module, computation, instruction) or 1) if instruction.opcode == "while" else 1
        total += max(known, default=0) if instruction.opcode == "conditional" else times * sum(known)
    return total


def _product(computation: Computation, instruction: Instruction) -> int:
    """Counts the flops of an instruction that is a product or a convolution; 0 for others."""
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    operands = [computation.instructions.get(number) for number in instruction.operands]
    if len(operands) < 2 or operands[0] is None or operands[1] is None:
        return 0
    out, left, right = math.prod(instruction.shape.dims), operands[0].shape.dims, operands[1].shape.dims
    if instruction.opcode == "dot":
        return 2 * out * math.prod(left[dim] for dim in instruction.contracted if dim < len(left))
    kept = right[instruction.features] if instruction.features < len(right) else 1
    return 2 * out * math.prod(right) // max(kept, 1)
