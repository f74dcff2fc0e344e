"""Tells along which dims of its grid a Pallas kernel may hand on values in memory, from one step to the next.

A traced call goes in; the grid dims come out along which a step may read what another one has written: scratch, and
inputs that the kernel writes. Steps run in the order of their indices, the last dim's first. Memory carries nothing
along the first `n` dims if, at every place where it is read, all of it has been written since the first of the steps
that have the same indices along these: in each step, or under `pl.when(pl.program_id(dim) == 0)` with `dim` behind
them. All that cannot be seen to do so is taken to carry: a part of the steps would begin without what it needs.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from splitjax import _compat
from splitjax.primitives.calls import CallKind, call_body, kind_of, while_parts
from splitjax.primitives.dims import Params
from splitjax.primitives.interpreter import fold

# By memory: along how many of the first grid dims it is fresh.
Fresh = collections.defaultdict[int, int]
_RANDOM = -1  # stands for the state of the generator of random numbers, which is memory, too


@dataclasses.dataclass(frozen=True)
class _Memory:
    """Is an argument of the kernel that it reads and writes, by its `number`."""

    number: int


@dataclasses.dataclass(frozen=True)
class _Index:
    """Is the index of a step along the grid dim `dim`."""

    dim: int


@dataclasses.dataclass(frozen=True)
class _First:
    """Is true in steps whose indices along `dim` and all grid dims behind it are 0; elsewhere nobody knows."""

    dim: int


def carried_dims(params: Params) -> frozenset[int]:
    """Returns the grid dims along which the Pallas call with these parameters may carry values in memory."""
    grid = _compat.pallas_grid(params)
    body, _ = _compat.open_jaxpr(params["jaxpr"])
    walk = _Walk(grid.own, len(grid.sizes))
    fresh: Fresh = collections.defaultdict(int)
    walk.run(body, [_Memory(number) for number in range(len(body.invars))], fresh)
    operands = grid.operands[grid.sizes.count(None) :]
    inputs = dict(enumerate(operands))
    results = range(len(operands), len(operands) + len(grid.results))
    carried: set[int] = set()
    for number, bound in walk.read.items():
        if number in results or (number in inputs and number not in walk.written):
            continue  # results are another matter: all of them follow each dim that is split
        block = inputs.get(number)
        follows = block.follows if block is not None else ()
        carried.update(dim for dim in range(bound, len(grid.sizes)) if dim not in follows)
    return frozenset(carried)


class _Walk:
    """Runs through a kernel's body in program order. Lives for one call of `carried_dims`.

    - `read`: by memory that is read, along how many of the first grid dims it is fresh wherever that is done.
    - `written`: memory that may be written.
    """

    def __init__(self, own: Sequence[int], rank: int) -> None:
        self._own, self._rank = own, rank
        self.read: dict[int, int] = {}
        self.written: set[int] = set()

    def run(self, jaxpr: Any, operands: Sequence[Any], fresh: Fresh) -> list[Any]:
        """Runs through `jaxpr` on what is known of its `operands`, changes `fresh`, and returns what is known of its
        results."""
        inner, _ = _compat.open_jaxpr(jaxpr)
        variables = [*inner.outvars, *(v for eqn in inner.eqns for v in eqn.invars)]
        used = {v for v in variables if not isinstance(v, _compat.Literal)}
        literal = lambda atom: atom.val
        constants = [None] * len(inner.constvars)
        return fold(
            jaxpr, operands, lambda _, eqn, values: self._equation(eqn, values, fresh, used), literal, constants
        )

    def _equation(self, eqn: Any, values: list[Any], fresh: Fresh, used: set[Any]) -> list[Any]:
        kind, body = kind_of(eqn), call_body(eqn)
        if body is not None:
            return self.run(body, values, fresh)
        unknown: list[Any] = [None] * len(eqn.outvars)
        if kind is CallKind.COND:
            self._cond(eqn, values, fresh)
        elif kind is CallKind.SCAN:
            # what its first iteration reads is as fresh as before it
            self.run(eqn.params["jaxpr"], _only_memory(values), fresh if eqn.params["length"] else fresh.copy())
        elif kind is CallKind.WHILE:
            parts = while_parts(eqn, _only_memory(values))
            self.run(eqn.params["cond_jaxpr"], [*parts.cond_consts, *parts.carry], fresh)
            self.run(eqn.params["body_jaxpr"], [*parts.body_consts, *parts.carry], fresh.copy())
        elif eqn.primitive.name == "program_id":
            axis = eqn.params["axis"]
            return [_Index(self._own[axis]) if axis < len(self._own) else None]
        elif eqn.primitive.name in ("eq", "and", "convert_element_type"):
            return [_first(eqn.primitive.name, values)]
        else:
            self._memory(eqn, values, fresh, used)
        return unknown

    def _memory(self, eqn: Any, values: list[Any], fresh: Fresh, used: set[Any]) -> None:
        """Notes which memory an equation reads and writes that holds no jaxpr, or one that nobody knows."""
        name = eqn.primitive.name
        if name == "prng_seed":
            fresh[_RANDOM] = self._rank
        elif name == "prng_random_bits":
            self._reads(_RANDOM, fresh)
        for position, (variable, value) in enumerate(zip(eqn.invars, values, strict=True)):
            if not isinstance(value, _Memory):
                continue
            swaps = name == "swap" and position == 0
            if not swaps or eqn.outvars[0] in used:
                self._reads(value.number, fresh)
            if swaps and _writes_all(eqn):
                fresh[value.number] = self._rank
            if name != "get" and not _compat.only_reads(eqn, variable):
                self.written.add(value.number)

    def _reads(self, number: int, fresh: Fresh) -> None:
        self.read[number] = min(self.read.get(number, self._rank), fresh[number])

    def _cond(self, eqn: Any, values: list[Any], fresh: Fresh) -> None:
        """Runs through the branches. What both have written is fresh behind them; so is what the second has written,
        which runs if the condition holds, along the dims before the one at whose first index it does."""
        branches = eqn.params["branches"]
        ends = []
        for branch in branches:
            ends.append(fresh.copy())
            self.run(branch, values[1:], ends[-1])
        index = values[0]
        for number in {number for end in ends for number in end}:
            fresh[number] = min(end[number] for end in ends)
            if isinstance(index, _First) and len(branches) == 2:
                fresh[number] = max(fresh[number], min(ends[1][number], index.dim))


def _only_memory(values: Sequence[Any]) -> list[Any]:
    """Returns `values` without what is known of other things than memory: iterations of a loop change these."""
    return [value if isinstance(value, _Memory) else None for value in values]


def _first(name: str, values: Sequence[Any]) -> _First | None:
    """Returns in which steps a comparison with 0, a conjunction or a change of type is true; None where nobody
    knows."""
    if name == "eq":
        left, right = values if isinstance(values[0], _Index) else values[::-1]
        is_zero = right is not None and not isinstance(right, (_Index, _First, _Memory)) and right == 0
        return _First(left.dim) if isinstance(left, _Index) and is_zero else None
    firsts = [value for value in values if isinstance(value, _First)]
    return _First(min(value.dim for value in firsts)) if len(firsts) == len(values) else None


def _writes_all(eqn: Any) -> bool:
    """Returns whether a swap writes all entries of its memory: as many as it has, and no operand says where."""
    memory, value = eqn.invars[0].aval, eqn.invars[1].aval
    return len(eqn.invars) == 2 and (memory.shape, memory.dtype) == (value.shape, value.dtype)
