"""Writes the line that keeps a call whole that cannot run on the parts that a plan has, for errors to show.

A Pallas call or a foreign call of a step comes in; a line with `splitjax.kernel` comes out, which names the user's
function and the dims of its arrays, and along which of these nobody knows the call to run on parts.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

from splitjax import _compat
from splitjax.primitives.calls import call_body
from splitjax.primitives.foreign.grids import PALLAS, bound_dims, followed, split_dims
from splitjax.trace.graph import Dim, ForeignCall, Graph


def kernel_line(call: ForeignCall, graph: Graph) -> str:
    """Returns the line that keeps the kernel of a Pallas call, or a foreign call, whole, with the shapes of its arrays.

    The user's function that makes the call is named. Where it stands in a function with a derivative rule, that one is;
    its arrays have the labels of the call's arrays of the same shape."""
    letters = _Letters(graph)
    known: dict[tuple[int, ...], list[list[str]]] = collections.defaultdict(list)
    grids = _grids(call)
    may_split, bound = set(), set()
    for variables, tensors, of_side in (
        (call.eqn.invars, call.operand_dims, grids.operands),
        (call.eqn.outvars, call.result_dims, grids.results),
    ):
        for variable, dims, follows in zip(variables, tensors, of_side, strict=True):
            shape = tuple(variable.aval.shape)
            written = letters.tensor(dims, shape)
            # operands without blocks follow nothing
            may_split |= {text for text, grid_dim in zip(written, follows, strict=False) if grid_dim in grids.split}
            bound |= {text for text, grid_dim in zip(written, follows, strict=False) if grid_dim in grids.bound}
            known[shape].append(written)
    outer, name = call.eqn, _caller(call)
    if call.rule is not None:
        outer, body = call.rule, call_body(call.rule)
        name = name if body is None else _compat.function_name(body)
    sides = []
    for variables in (outer.invars, outer.outvars):
        written = []
        for variable in variables:
            shape = tuple(variable.aval.shape)
            alike = known[shape]
            # an array of a shape that was there before is likely one of the same kind: results come back so
            again = len(alike) > 1 and variables is not outer.outvars
            written.append((alike.pop(0) if again else alike[0]) if alike else letters.tensor([()] * len(shape), shape))
        sides.append(written)
    sides[1] = [
        _like_an_operand(tensor, v.aval.shape, sides[0], outer)
        for tensor, v in zip(sides[1], outer.outvars, strict=True)
    ]
    results = [set(tensor) for tensor in sides[1]]
    in_all = set.intersection(*results) if results else set()
    whole = sorted((in_all - may_split - {"b", "_"}) | (in_all & bound - {"_"}))
    text = " -> ".join(", ".join(" ".join(tensor) for tensor in side) for side in sides)
    shapes = " -> ".join(
        ", ".join(f"{v.aval.dtype}[{','.join(map(str, v.aval.shape))}]" for v in side)
        for side in (outer.invars, outer.outvars)
    )
    said = f', whole="{" ".join(whole)}"' if whole else ""
    return f'{name} = splitjax.kernel({name}, dims="{text}"{said}) for {shapes}'


@dataclasses.dataclass(frozen=True)
class _Grids:
    """Describes what dims of a call have to do with its grid.

    - `operands`, `results`: for their dims the grid dim that each follows.
    - `split`, `bound`: grid dims along which the call may run on parts, and along which its steps depend on each other.
    """

    operands: Sequence[Sequence[int | None]]
    results: Sequence[Sequence[int | None]]
    split: frozenset[int]
    bound: frozenset[int]


def _grids(call: ForeignCall) -> _Grids:
    """Returns what the dims of a call have to do with its grid; nothing where it has none."""
    eqn = call.eqn
    if eqn.primitive.name != PALLAS:
        return _Grids([()] * len(eqn.invars), [()] * len(eqn.outvars), frozenset(), frozenset())
    return _Grids(*followed(eqn.params), frozenset(split_dims(eqn.params)), bound_dims(eqn.params))


def _caller(call: ForeignCall) -> str:
    """Returns the name of the user's function that makes a call; where it has none, the kernel's own."""
    name = call.source.rpartition("(")[2].removesuffix(")").rpartition(".")[2]
    own = call.eqn.params.get("name") or "kernel"
    return name if name.isidentifier() and not name.startswith("__") else own


def _like_an_operand(tensor: list[str], shape: Sequence[int], operands: Sequence[list[str]], outer: Any) -> list[str]:
    """Returns the letters of a result, with those of the first operand of its shape in place of letters that no operand
    has: kernels mostly keep the order of dims. Where no operand has its shape, a leading dim of as many entries as that
    of the examples is theirs."""
    shapes = [tuple(v.aval.shape) for v in outer.invars]
    alike = [each for each, of in zip(operands, shapes, strict=True) if of == tuple(shape)]
    known = {letter for each in operands for letter in each}
    if alike:
        return [
            letter if letter in known or other in tensor else other
            for letter, other in zip(tensor, alike[0], strict=True)
        ]
    examples = [of[0] for each, of in zip(operands, shapes, strict=True) if each[:1] == ["b"]]
    if tensor and tensor[0] not in known and "b" not in tensor and shape[0] in examples:
        return ["b", *tensor[1:]]
    return tensor


class _Letters:
    """Gives letters to dims: one to each dim class, `b` to the examples, `_` to dims of size 1. Lives for one error."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._of_class: dict[tuple[int | str, int], str] = {("b", 0): "b"}
        self._left = iter([*"acdefghijkmnpqrstuvwxyz", *(f"d{number}" for number in range(100))])

    def tensor(self, dims: Sequence[Dim], shape: Sequence[int]) -> list[str]:
        """Returns the letters of an array's dims, by their atoms. A dim without atoms has another one each time, and so
        have two dims of one class: a label stands once in an array."""
        times: collections.Counter[int | str] = collections.Counter()
        written = []
        for dim, size in zip(dims, shape, strict=True):
            if size == 1 or not dim:
                written.append("_" if size == 1 else next(self._left))
                continue
            label = "b" if self._graph.is_example(dim) else self._graph.local[dim[0]]
            key = label, times[label]
            times[label] += 1
            if key not in self._of_class:
                self._of_class[key] = next(self._left)
            written.append(self._of_class[key])
        return written
