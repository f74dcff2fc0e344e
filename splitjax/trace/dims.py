"""Registers dim rules: what a primitive does to the dims of its operands, as data that users extend.

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
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

from splitjax import _compat
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


class Registry:
    """Maps names of primitives to dim rules. `DIM_RULES` is the registry that splitjax fills and traces with; its own
    rules are loaded with `trace.tracer`, when a step is first traced."""

    def __init__(self) -> None:
        self._rules: dict[str, DimRule] = {}
        self._added: set[str] = set()

    def add(self, names: str | Sequence[str], rule: DimRule) -> None:
        """Registers `rule` for the primitive, or for each of the primitives, called `names`; it replaces an earlier
        rule."""
        for name in (names,) if isinstance(names, str) else names:
            self._rules[name] = rule
            self._added.add(name)

    def add_default(self, names: Sequence[str], rule: DimRule) -> None:
        """Registers `rule` for those of the primitives called `names` that nobody has added a rule for. The rules of
        splitjax are loaded late, and must not replace what a user has registered before."""
        self._rules.update({name: rule for name in names if name not in self._added})

    def get(self, name: str) -> DimRule | None:
        """Returns the rule of the primitive called `name`, or None where there is none."""
        return self._rules.get(name)

    def remove(self, name: str) -> None:
        """Takes out the rule of the primitive called `name`, if there is one."""
        self._rules.pop(name, None)
        self._added.discard(name)

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def names(self) -> tuple[str, ...]:
        """Returns the names of all primitives with a rule, sorted."""
        return tuple(sorted(self._rules))


DIM_RULES: Registry = Registry()


def rule_for(*names: str) -> Callable[[DimRule], DimRule]:
    """Returns a decorator that registers splitjax's own rule for primitives of these `names`."""

    def register(rule: DimRule) -> DimRule:
        DIM_RULES.add_default(names, rule)
        return rule

    return register


def register_dims(
    primitive: str | _compat.Primitive,
    rule: str | Callable[[Shapes, Shapes, Params], str | DimMap],
    *,
    mixing: bool = False,
) -> None:
    """Teaches splitjax what a primitive does to dims.

    **Arguments:**

    - `primitive`: the primitive's name, or the primitive itself.
    - `rule`: a notation such as `"b i, i o -> b o"` (operands separated by commas, `->`, results separated by commas;
      `(h d)` is a dim made of factors; `_` links nothing; `...` stands for leading dims that pair up), or a function
      `(input_shapes, output_shapes, params) -> notation | DimMap`.
    - `mixing`: for a notation, whether the operation combines values across a dim (a label that stands only among the
      operands implies it).

    Raises `TraceError` for a notation that does not parse. A later registration replaces an earlier one.
    """
    name = primitive if isinstance(primitive, str) else primitive.name
    if isinstance(rule, str):
        parse_notation(rule)  # fail here, not at the first trace
        notation = rule
        DIM_RULES.add(name, lambda inputs, outputs, _params: from_notation(notation, inputs, outputs, mixing))
    elif callable(rule):

        def call(inputs: Shapes, outputs: Shapes, params: Params, /) -> DimMap:
            answer = rule(inputs, outputs, params)
            return from_notation(answer, inputs, outputs, mixing) if isinstance(answer, str) else answer

        DIM_RULES.add(name, call)
    else:
        raise TraceError(
            "a dim rule is a notation or a function",
            value=rule,
            place=f"register_dims({name!r})",
            remedy='write register_dims("my_primitive", "b i, i o -> b o")',
        )


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
