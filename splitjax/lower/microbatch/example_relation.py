"""How a value of the loss relates to the examples of the batch, and the words in which a refusal is told.

Every value of a loss that is evaluated in microbatches is one of

- `same`: the same in every microbatch: it does not depend on examples, or is known for the whole batch beforehand;
- `examples`: one of its dims holds examples, so that a microbatch has a slice of it (`Layout` says which);
- `partial`: a sum over examples: a microbatch has its contribution, and contributions add up;
- `later`: known only from all microbatches together. Good enough for auxiliary results, not for the loss.

A value is `live` if it depends on a differentiated operand.
"""

from __future__ import annotations

import dataclasses
from typing import Any

SAME, EXAMPLES, PARTIAL, LATER = "same", "examples", "partial", "later"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where examples sit: dim `dim` is `major` x examples x `minor`, row-major. `uniform`: equal for all examples, so
    that any other layout of that dim describes it as well."""

    dim: int
    major: int = 1
    minor: int = 1
    uniform: bool = False


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a value is `later`: the operation that mixes examples, and what it does."""

    primitive: str
    source: str
    why: str


@dataclasses.dataclass(frozen=True)
class Info:
    """What is known of one value.

    `local`: a microbatch can compute it from its own slices (else it is computed for the whole batch, then sliced).
    `fact`: what is known of the numbers themselves: `("row",)`, the example's own number; `("rows", c)`, component c of
    the last dim is (indexing with them picks each example's own entry); `("false",)` and `("zero",)`, so throughout.
    """

    live: bool
    kind: str = SAME
    layout: Layout | None = None
    local: bool = True
    fact: tuple[Any, ...] | None = None
    reason: Reason | None = None


class Mixed(Exception):
    """Raised by a rule: the operation combines examples in a way that slices cannot reproduce."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The number of examples in the whole batch, in the part trace, and in what is run. The last two differ for a
    single example, with which JAX may trace other operations than with several: then sizes are interpolated between the
    traces."""

    whole: int
    part: int
    run: int

    @property
    def is_exact(self) -> bool:
        return self.part == self.run

    def resize(self, whole: int, part: int) -> int:
        """A size at the number of examples that is run, from what it is in the two traces."""
        steps, rest = divmod((part - whole) * (self.run - self.part), self.part - self.whole)
        if rest:
            raise Mixed(f"a size is {whole} for the whole batch and {part} for {self.part} examples")
        return part + steps

    def sliced_dims(self, types: tuple[Any, Any]) -> tuple[int, ...]:
        """The dims whose sizes differ between the two traces."""
        whole, part = (getattr(one, "shape", ()) for one in types)
        if len(whole) != len(part):
            raise Mixed("the number of dims depends on the number of examples")
        return tuple(i for i, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b)

    def example_dim(self, types: tuple[Any, Any]) -> int | None:
        """The one dim that holds examples; None without. Raises `Mixed` for several or for a size that is no
        multiple."""
        dims = self.sliced_dims(types)
        if not dims:
            return None
        if len(dims) > 1:
            raise Mixed("it pairs examples with other examples")
        (dim,) = dims
        whole, part = types[0].shape[dim], types[1].shape[dim]
        if whole % self.whole or whole * self.part != part * self.whole:
            raise Mixed(f"a dim of size {whole} does not hold whole examples")
        return dim

    def layout(self, types: tuple[Any, Any], carried: Layout | None) -> Layout | None:
        """The layout of a result whose example dim comes from an operand with layout `carried`."""
        dim = self.example_dim(types)
        if dim is None:
            return None
        if carried is None:
            return self.assumed(types, dim)
        if types[0].shape[dim] != carried.major * self.whole * carried.minor:
            raise Mixed("it changes how many values an example has along its dim")
        return dataclasses.replace(carried, dim=dim)

    def assumed(self, types: tuple[Any, Any], dim: int, uniform: bool = False) -> Layout:
        """The layout of a value that has none yet: example-major."""
        return Layout(dim, 1, types[0].shape[dim] // self.whole, uniform)


def merge_layouts(layouts: list[Layout]) -> Layout:
    """The common layout of operands that correspond position by position. Raises `Mixed` if they disagree."""
    fixed = [one for one in layouts if not one.uniform] or layouts[:1]
    first = fixed[0]
    if any(one.dim != first.dim for one in layouts):
        raise Mixed("it pairs examples with other examples")
    if any((one.major, one.minor) != (first.major, first.minor) for one in fixed):
        raise Mixed("its operands order the examples differently")
    return first


def join(a: Info, b: Info) -> Info:
    """What holds of a value that is either of two: branches of a conditional, a carried value before and after a loop's
    body."""
    if LATER in (a.kind, b.kind):
        return a if a.kind == LATER else b
    live, local, fact = a.live or b.live, a.local and b.local, a.fact if a.fact == b.fact else None
    kinds = {a.kind, b.kind}
    if kinds == {EXAMPLES, PARTIAL}:
        raise Mixed("a value is a sum over examples at one point and belongs to single examples at another")
    if PARTIAL in kinds:
        if not live:
            return Info(False, PARTIAL, None, False)
        return Info(live, PARTIAL, None, local)
    if EXAMPLES in kinds:
        layouts = [one.layout for one in (a, b) if one.layout is not None]
        return Info(live, EXAMPLES, merge_layouts(layouts), local, fact)
    return Info(live, SAME, None, local, fact)
