"""Says how a value of the loss relates to the examples of the batch, and defines the words of that relation.

`classify` gives every value of a loss that is evaluated in microbatches an `Info`; the evaluators read it. Its kind is

- `same`: the same in every microbatch: it does not depend on examples, or is known for the whole batch beforehand;
- `examples`: one of its dims holds examples, so that a microbatch has a slice of it (`ExampleDim` says which);
- `partial`: a sum over examples: a microbatch has its contribution, and contributions add up;
- `later`: known only from all microbatches together. Good enough for auxiliary results, not for the loss.

A value is `live` if it depends on a differentiated operand.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Sequence
from typing import Any

from splitjax.errors import MicrobatchError

SAME, EXAMPLES, PARTIAL, LATER = "same", "examples", "partial", "later"

# The abstract values of a value in the two traces: with the whole batch, with the examples of a microbatch.
Types = tuple[Any, Any]


@dataclasses.dataclass(frozen=True)
class ExampleDim:
    """Locates the examples in an array: dim `dim` is `major` x examples x `minor` entries, row-major.

    - `dim`: the dim that holds the examples, counted from 0.
    - `major`, `minor`: how many entries of that dim vary slower and faster than the example's number.
    - `uniform`: the array is equal for all examples, so that any other `major` and `minor` describe it as well.
    """

    dim: int
    major: int = 1
    minor: int = 1
    uniform: bool = False


class Fact(enum.Enum):
    """States what is known of every number of a value, however the value is laid out."""

    EXAMPLE_NUMBER = "each number is the number of the example that it belongs to"
    FALSE = "each number is False"
    ZERO = "each number is 0"


@dataclasses.dataclass(frozen=True)
class ExampleNumberColumn:
    """Says that entry `component` of the last dim is the number of the example: indexing picks its own entry."""

    component: int


@dataclasses.dataclass(frozen=True)
class Reason:
    """Explains why a value is `later`.

    - `primitive`: the operation that mixes examples, or a function of the user's that does; `source`: the user's line
      of it, "" where there is none.
    - `why`: what the operation does, as a clause.
    - `remedy`: what helps, where that is not what helps with operations.
    """

    primitive: str
    source: str
    why: str
    remedy: str = ""


@dataclasses.dataclass(frozen=True)
class Info:
    """Holds what is known of one value.

    - `live`: it depends on a differentiated operand. `kind`: `SAME`, `EXAMPLES`, `PARTIAL` or `LATER`.
    - `layout`: where it holds examples; None unless `kind` is `EXAMPLES`.
    - `local`: a microbatch can compute it from its own slices (else it is computed for the whole batch, then sliced).
    - `fact`: what is known of the numbers themselves, if anything.
    - `reason`: why `kind` is `LATER`; None for the other kinds.
    """

    live: bool
    kind: str = SAME
    layout: ExampleDim | None = None
    local: bool = True
    fact: Fact | ExampleNumberColumn | None = None
    reason: Reason | None = None

    @property
    def required_layout(self) -> ExampleDim:
        """The layout of a value that holds examples. Asserts that there is one: kind `EXAMPLES` always has it."""
        assert self.layout is not None, f"a value of kind {self.kind!r} is read as if it held examples"
        return self.layout


@dataclasses.dataclass(frozen=True)
class Mixed:
    """Answers, in place of a relation, that examples are combined in a way that slices cannot reproduce.

    - `why`: what the operation does, as a clause; the `Reason` of an operand for which that is known.
    """

    why: str | Reason


@dataclasses.dataclass(frozen=True)
class Batch:
    """Holds the number of examples in the `whole` batch, in the `part` trace, and in what is `run`.

    The last two differ for a single example, with which JAX may trace other operations than with several: then sizes
    are interpolated between the traces.
    """

    whole: int
    part: int
    run: int

    @functools.cached_property
    def is_exact(self) -> bool:
        """Tells whether the part trace has as many examples as are run, so that its equations hold as they are."""
        return self.part == self.run

    def resize(self, whole: int, part: int) -> int:
        """Returns a size at the number of examples that is run, from its values `whole` and `part` in the two traces.

        Raises `MicrobatchError` where that is no whole number."""
        steps, rest = divmod((part - whole) * (self.run - self.part), self.part - self.whole)
        if rest:
            raise MicrobatchError(
                f"a size is {whole} for the whole batch, {part} for {self.part} examples, and not whole for {self.run}",
                value=self.run,
                place="a microbatch",
                remedy="choose microbatches of two examples or more on every worker",
            )
        return part + steps

    def sliced_dims(self, types: Types) -> tuple[int, ...] | Mixed:
        """Returns the dims whose sizes differ between the two traces, `Mixed` where even the number of dims does;
        `types` are a value's types in them."""
        whole, part = (getattr(aval, "shape", ()) for aval in types)
        if len(whole) != len(part):
            return Mixed("the number of dims depends on the number of examples")
        return tuple(i for i, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b)

    def example_dim(self, types: Types) -> int | None | Mixed:
        """Returns the dim that holds examples, None without; `types` are the value's types in the two traces.

        `Mixed` for several such dims, or for a size that is no multiple of the number of examples."""
        dims = self.sliced_dims(types)
        if isinstance(dims, Mixed):
            return dims
        if len(dims) > 1:
            return Mixed("it pairs examples with other examples")
        if len(dims) == 0:
            return None
        dim = dims[0]
        whole, part = types[0].shape[dim], types[1].shape[dim]
        if whole % self.whole or whole * self.part != part * self.whole:
            return Mixed(f"a dim of size {whole} does not hold whole examples")
        return dim

    def layout(self, types: Types, carried: ExampleDim | None) -> ExampleDim | None | Mixed:
        """Returns where a result of `types` holds examples that come from an operand with the layout `carried`.

        Returns None for a result without examples; takes the result as example-major if `carried` is None; `Mixed`
        where an example has another number of values along its dim than in the operand."""
        dim = self.example_dim(types)
        if dim is None or isinstance(dim, Mixed):
            return dim
        if carried is None:
            return self.assumed(types, dim)
        if types[0].shape[dim] != carried.major * self.whole * carried.minor:
            return Mixed("it changes how many values an example has along its dim")
        return dataclasses.replace(carried, dim=dim)

    def assumed(self, types: Types, dim: int, uniform: bool = False) -> ExampleDim:
        """Returns the layout of a value of `types` that has none yet: example-major in `dim`, `uniform` as told."""
        return ExampleDim(dim, 1, types[0].shape[dim] // self.whole, uniform)


def merge_layouts(layouts: Sequence[ExampleDim]) -> ExampleDim | Mixed:
    """Returns the layout that the `layouts` of operands which correspond position by position have in common;
    `Mixed` if they disagree."""
    fixed = [layout for layout in layouts if not layout.uniform] or layouts[:1]
    first = fixed[0]
    if any(layout.dim != first.dim for layout in layouts):
        return Mixed("it pairs examples with other examples")
    if any((layout.major, layout.minor) != (first.major, first.minor) for layout in fixed):
        return Mixed("its operands order the examples differently")
    return first


def join(a: Info, b: Info) -> Info | Mixed:
    """Returns what holds of a value that `a` or `b` describes, it is not known which.

    Such are results of the branches of a conditional, and a carried value before and after a loop's body. `Mixed`
    where a microbatch could not treat both alike."""
    if LATER in (a.kind, b.kind):
        return a if a.kind == LATER else b
    live, local, fact = a.live or b.live, a.local and b.local, a.fact if a.fact == b.fact else None
    kinds = {a.kind, b.kind}
    if kinds == {EXAMPLES, PARTIAL}:
        return Mixed("a value is a sum over examples at one point and belongs to single examples at another")
    if PARTIAL in kinds:
        if not live:
            return Info(False, PARTIAL, None, False)
        return Info(live, PARTIAL, None, local)
    if EXAMPLES in kinds:
        layouts = [info.layout for info in (a, b) if info.layout is not None]
        merged = merge_layouts(layouts)
        return merged if isinstance(merged, Mixed) else Info(live, EXAMPLES, merged, local, fact)
    return Info(live, SAME, None, local, fact)


def mixed_later(infos: Sequence[Info]) -> Mixed | None:
    """Returns `Mixed` if the loss depends on one of `infos`, a value that is known later only; None if it does not."""
    for info in infos:
        if info.kind == LATER and info.live:
            assert info.reason is not None, "a value that is known later has a reason"
            return Mixed(info.reason)
    return None


def join_all(before: Sequence[Info], after: Sequence[Info]) -> tuple[Info, ...] | Mixed:
    """Returns what holds of values that `before` or `after` describes; `Mixed` where a microbatch could not treat both
    alike."""
    joined = []
    for a, b in zip(before, after, strict=True):
        info = join(a, b)
        if isinstance(info, Mixed):
            return info
        joined.append(info)
    return tuple(joined)


def shift_all(infos: Sequence[Info], by: int) -> tuple[Info, ...] | Mixed:
    """Returns the relations of scanned operands' slices (`by` -1) or of stacked results (+1).

    `Mixed` for the slice of an operand that is scanned along its examples."""
    shifted = []
    for info in infos:
        layout = info.layout
        if layout is not None and layout.dim + by < 0:
            return Mixed("it goes through the examples one after the other")
        moved = layout and dataclasses.replace(layout, dim=layout.dim + by)
        shifted.append(dataclasses.replace(info, layout=moved, fact=None))
    return tuple(shifted)
