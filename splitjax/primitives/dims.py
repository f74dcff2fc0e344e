"""Defines dim rules: what an operation does to the dims of its operands, as labels, and the notation of these.

Shapes and parameters of an operation go in, a `DimMap` comes out: per operand and per result, one tuple of labels
per dim. Dims (or factors of dims) that carry the same label run along each other, as the letters of an einsum do; a
label that stands alone links nothing. The notation follows `jax.experimental.custom_partitioning`'s sharding rules:
`"b i, i o -> b o"`, with compound factors in brackets, `"b (h d) -> b h d"`, and `...` for leading dims that pair
up.

A primitive without a rule is never guessed at: see `UnknownPrimitiveError`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from splitjax.errors import TraceError

Shape = tuple[int, ...]
Shapes = Sequence[Shape]
Params = Mapping[str, Any]  # of an equation
Label = Hashable  # a name, a number, or a pair such as ("b", 0), so that labels of several kinds do not collide
Labels = tuple[tuple[Label, ...], ...]  # per dim, the labels of its factors, major first


@dataclasses.dataclass(frozen=True)
class DimMap:
    """Says how the dims of an operation's operands and results run along each other.

    - `inputs`, `outputs`: labels of every operand and every result.
    - `mixing`: whether results combine values across a dim (a contraction, a lookup), so that what comes out is a
      new representation: the residual cut and layer boundaries look at this.
    - `joins`: whether operands meet elementwise, so that an operand that is upstream of another is a skip
      connection.
    - `sizes`: the sizes of labels that occur in compound dims.
    """

    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    mixing: bool = False
    joins: bool = False
    sizes: Mapping[Label, int] = dataclasses.field(default_factory=dict)


class DimRule(Protocol):
    """Maps the shapes of an operation's operands and results, and the equation's parameters, to a `DimMap`."""

    def __call__(self, inputs: Shapes, outputs: Shapes, params: Params, /) -> DimMap: ...


_TOKEN = re.compile(r"\s*(\.\.\.|\(|\)|[A-Za-z_]\w*|\S)")


def parse_notation(text: str) -> tuple[list[list[Any]], list[list[Any]]]:
    """Parses a notation into operands and results.

    `text` is such as `"b (h d), h o -> b o"`. Returns two lists; an operand or a result is a list of labels, tuples
    of labels (factors) and `...`. Raises `TraceError` where the notation does not parse.
    """
    sides = text.split("->")
    if len(sides) != 2:
        raise TraceError("a dim notation has one ->", value=text, place="dim rule", remedy='write "b i, i o -> b o"')

    def tensor(part: str) -> list[Any]:
        dims: list[Any] = []
        group: list[str] | None = None
        for token in _TOKEN.findall(part):
            if token == "(" and group is None:
                group = []
            elif token == ")" and group is not None:
                dims.append(tuple(group))
                group = None
            elif token == "..." and group is None and Ellipsis not in dims:
                dims.append(Ellipsis)
            elif token.isidentifier():
                (dims if group is None else group).append(token)
            else:
                raise TraceError(
                    f"a dim notation cannot hold {token!r} here",
                    value=text,
                    place="dim rule",
                    remedy='use names, "(a b)" for factors, "..." once per tensor and "_" for a dim that links nothing',
                )
        if group is not None:
            raise TraceError("a bracket is not closed", value=text, place="dim rule", remedy='write "(h d)"')
        return dims

    return [tensor(part) for part in sides[0].split(",")], [tensor(part) for part in sides[1].split(",")]


def from_notation(text: str, inputs: Shapes, outputs: Shapes, mixing: bool = False) -> DimMap:
    """Fits a notation to the shapes of an operation.

    **Arguments:**

    - `text`: the notation, such as `"b i, i o -> b o"`.
    - `inputs`, `outputs`: the shapes of operands and results.
    - `mixing`: whether the operation mixes although every label of an operand stands among the results too.

    Raises `TraceError` when the notation does not parse, or when ranks, or the sizes of one label, disagree.
    """
    operands, results = parse_notation(text)
    if len(operands) != len(inputs) or len(results) != len(outputs):
        raise TraceError(
            f"the notation has {len(operands)} operands and {len(results)} results, the operation {len(inputs)} and"
            f" {len(outputs)}",
            value=text,
            place="dim rule",
            remedy="give one group of labels per operand and result",
        )
    blank = [0]
    sizes: dict[Label, int] = {}

    def labels(dims: list[Any], shape: Shape) -> Labels:
        rank = len(shape) - sum(dim is not Ellipsis for dim in dims)
        if rank < 0 or (rank and Ellipsis not in dims):
            raise TraceError(
                f"the notation does not fit a tensor of shape {shape}",
                value=text,
                place="dim rule",
                remedy="give one label per dim, or ... for the leading ones",
            )
        out: list[tuple[Label, ...]] = []
        for dim in dims:
            if dim is Ellipsis:
                # Leading dims pair up from the right, as in broadcasting.
                out.extend((f"...{rank - i}",) for i in range(rank))
            elif isinstance(dim, tuple):
                out.append(dim)
            elif dim == "_":
                blank[0] += 1
                out.append((f"_{blank[0]}",))
            else:
                out.append((dim,))
        for dim, size in zip(out, shape, strict=True):
            if len(dim) == 1 and size != 1 and sizes.setdefault(dim[0], size) != size:
                raise TraceError(
                    f"label {dim[0]!r} has sizes {sizes[dim[0]]} and {size}",
                    value=text,
                    place="dim rule",
                    remedy="give different dims different labels",
                )
        return tuple(out)

    ins = tuple(labels(d, s) for d, s in zip(operands, inputs, strict=True))
    outs = tuple(labels(d, s) for d, s in zip(results, outputs, strict=True))
    for tensor, shape in (*zip(ins, inputs, strict=True), *zip(outs, outputs, strict=True)):
        for dim, size in zip(tensor, shape, strict=True):
            _solve_factor_sizes(dim, size, sizes, text)
    # A size-1 dim pairs with anything (implicit broadcast) and links nothing.
    ins = tuple(_drop_units(t, s) for t, s in zip(ins, inputs, strict=True))
    outs = tuple(_drop_units(t, s) for t, s in zip(outs, outputs, strict=True))
    kept = {label for tensor in outs for dim in tensor for label in dim}
    gone = {label for tensor in ins for dim in tensor for label in dim} - kept
    contracted = any(not str(label).startswith("_") for label in gone)
    return DimMap(ins, outs, mixing=mixing or contracted, sizes=sizes)


def _drop_units(labels: Labels, shape: Shape) -> Labels:
    """Takes the labels from dims of size 1."""
    return tuple(() if size == 1 else dim for dim, size in zip(labels, shape, strict=True))


def _solve_factor_sizes(dim: tuple[Label, ...], size: int, sizes: dict[Label, int], text: str) -> None:
    """Puts the sizes of a compound dim's factors into `sizes`: the last one follows from the others."""
    if len(dim) < 2:
        return
    unknown = [label for label in dim if label not in sizes]
    known = 1
    for label in dim:
        known *= sizes.get(label, 1)
    if len(unknown) > 1 or (unknown and size % known) or (not unknown and known != size):
        raise TraceError(
            f"the factors of a dim of size {size} cannot be told",
            value=text,
            place="dim rule",
            remedy="let all factors but one stand alone in some other tensor",
        )
    if unknown:
        sizes[unknown[0]] = size // known
