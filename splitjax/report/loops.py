"""How often a loop runs whose number of turns XLA does not write down (a TPU's compiler): read off a counter that its
condition compares with a constant, as JAX's `scan` and `fori_loop` have it."""

from __future__ import annotations

from splitjax.report.wire import Computation, Instruction, Module

_HANDS_ON = frozenset({"copy", "bitcast", "convert", "reshape"})


def num_turns(module: Module, around: Computation, loop: Instruction) -> int | None:
    """The turns of a `while` instruction of the computation `around`; None where its condition is another one."""
    if loop.trip_count is not None:
        return loop.trip_count
    for number in loop.called:
        condition = module.computations.get(number)
        root = condition.instructions.get(condition.root) if condition is not None else None
        if (
            condition is None
            or root is None
            or root.opcode != "compare"
            or root.direction != "LT"
            or len(root.operands) != 2
        ):
            continue
        counter, limit = (_behind(condition, operand) for operand in root.operands)
        if counter is None or limit is None or counter.opcode != "get-tuple-element" or limit.literal is None:
            return None
        start = _start(around, loop, counter.tuple_index)
        counts = any(
            _counts(module.computations[body], counter.tuple_index)
            for body in loop.called
            if body in module.computations
        )
        return max(limit.literal - start, 0) if counts and start is not None else None
    return None


def _counts(body: Computation, index: int) -> bool:
    """Whether a loop's body adds one to a value that it carries."""
    values = _behind(body, body.root)
    if values is None or values.opcode != "tuple" or index >= len(values.operands):
        return False
    new = _behind(body, values.operands[index])
    if new is None or new.opcode != "add":
        return False
    parts = [_behind(body, operand) for operand in new.operands]
    return any(one is not None and one.literal == 1 for one in parts) and any(
        one is not None and one.tuple_index == index for one in parts
    )


def _start(around: Computation, loop: Instruction, index: int) -> int | None:
    """The number with which a loop's counter begins."""
    values = _behind(around, loop.operands[0]) if loop.operands else None
    if values is None or values.opcode != "tuple" or index >= len(values.operands):
        return None
    first = _behind(around, values.operands[index])
    return None if first is None else first.literal


def _behind(computation: Computation, number: int) -> Instruction | None:
    """The instruction that makes a value, behind those that hand it on."""
    one = computation.instructions.get(number)
    while one is not None and one.opcode in _HANDS_ON and one.operands:
        one = computation.instructions.get(one.operands[0])
    return one
