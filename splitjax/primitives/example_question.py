"""Defines what a rule about the dim of examples is asked, and what it answers.

A `Question` is one operation, traced with two numbers of examples, with what is known of its operands; a `RuleOutcome`
is the relation of its results to the examples, and what a microbatch does with its operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from splitjax import _compat
from splitjax.primitives.example_relation import (
    EXAMPLES,
    Batch,
    ExampleDim,
    ExampleNumberColumn,
    Fact,
    Info,
    Mixed,
    Types,
    merge_layouts,
)


class PairedEquation(Protocol):
    """Describes one operation of two traces of the same function."""

    @property
    def whole(self) -> Any:
        """The equation in the trace of the whole batch."""
        ...

    @property
    def part(self) -> Any:
        """The equation in the trace of a part of the batch."""
        ...

    @property
    def name(self) -> str:
        """The name of the primitive."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class Question:
    """Describes one operation to a rule, with what is known of its operands.

    - `node`: the operation in both traces. `infos`: the relations of its operands.
    - `types_in`, `types_out`: the types of its operands and results in both traces.
    - `batch`: the numbers of examples.
    """

    node: PairedEquation
    infos: tuple[Info, ...]
    types_in: tuple[Types, ...]
    types_out: tuple[Types, ...]
    batch: Batch

    @property
    def params(self) -> dict[str, Any]:
        """The equation's parameters in the trace with the whole batch."""
        return self.node.whole.params

    def layout(self, position: int) -> ExampleDim | None:
        """Returns where the operand at `position` holds examples, None where it holds none."""
        return self.infos[position].layout

    def required_layout(self, position: int) -> ExampleDim:
        """Returns where the operand at `position` holds examples, which is known to hold some."""
        return self.infos[position].required_layout

    def shape(self, position: int) -> tuple[int, ...]:
        """Returns the shape of the operand at `position` for the whole batch."""
        return tuple(self.types_in[position][0].shape)

    def carried(self, *positions: int) -> ExampleDim | Mixed:
        """Returns the common layout of the operands at `positions`, of all by default; `Mixed` without such."""
        chosen = positions or range(len(self.infos))
        return merge_layouts([layout for i in chosen if (layout := self.infos[i].layout) is not None])

    def spread(self, layout: ExampleDim | Mixed, fact: Fact | ExampleNumberColumn | None = None) -> RuleOutcome | Mixed:
        """Answers that every result holds examples as an operand with `layout` does, in the dim where traces differ.

        `fact`: what is known of the results' numbers. `Mixed` where `layout` is, and where a result has no such dim."""
        if isinstance(layout, Mixed):
            return layout
        infos = []
        for types in self.types_out:
            result = self.batch.layout(types, layout)
            if isinstance(result, Mixed):
                return result
            if result is None:
                return Mixed("it loses the dim that holds the examples")
            infos.append(Info(False, EXAMPLES, result, fact=fact))
        return RuleOutcome(tuple(infos))

    def choosing_examples(self, *positions: int) -> Mixed | None:
        """Returns `Mixed` if an operand at one of the `positions`, which choose entries, holds examples, else None."""
        if any(self.infos[i].layout is not None for i in positions):
            return Mixed("which entries it takes depends on the example")
        return None


@dataclasses.dataclass(frozen=True, eq=False)
class RuleOutcome:
    """Holds a rule's answer: the results' relations, and what a microbatch does with the operands.

    - `infos`: the relation of every result.
    - `shares`: operands that are not sums over examples but are added to such a sum: each microbatch adds its share.
    - `rows`: (operand, component) of indices that count examples; None where there are none.
    - `draws`: the operation draws random bits by position, of which a microbatch draws its own.
    - `averaged`: its results are means over microbatches: each adds its share of what it computes.
    """

    infos: tuple[Info, ...]
    shares: frozenset[int] = frozenset()
    rows: tuple[int, int] | None = None
    draws: bool = False
    averaged: bool = False


# Says what an operation does with the dim that holds examples; `Mixed` where it combines them.
ExampleRule = Callable[[Question], RuleOutcome | Mixed]


def is_same_constant(a: Any, b: Any) -> bool:
    """Tells whether two constants are equal in shape and in every number; NaN, which `jnp.var` writes down, is NaN."""
    if a is b:
        return True
    try:
        x, y = np.asarray(a), np.asarray(b)
        return x.shape == y.shape and bool(np.all((x == y) | ((x != x) & (y != y))))
    except (TypeError, ValueError):
        return False


def differing_params(node: PairedEquation, allowed: frozenset[str]) -> list[str]:
    """Returns the parameters of `node` whose values the two traces disagree on.

    Left out are jaxprs, functions, and the parameters named in `allowed`."""
    keys = []
    for key, whole in node.whole.params.items():
        part = node.part.params.get(key)
        if key in allowed or whole is part or isinstance(whole, _compat.JAXPR_TYPES) or callable(whole):
            continue
        parts = whole if isinstance(whole, tuple) else ()
        if any(isinstance(entry, _compat.JAXPR_TYPES) or callable(entry) for entry in parts):
            continue
        try:
            same = bool(whole == part)
        except (TypeError, ValueError):
            same = is_same_constant(whole, part)
        if not same:
            keys.append(key)
    return keys


# Parameters that hold sizes: a part of the batch has its own.
SIZES: frozenset[str] = frozenset(
    {
        "shape",
        "new_sizes",
        "sharding",
        "out_sharding",
        "sizes",
        "limit_indices",
        "start_indices",
        "slice_sizes",
        "length",
        "dimensions",
    }
)


def mixed_params(node: PairedEquation, allowed: frozenset[str] = SIZES) -> Mixed | None:
    """Returns `Mixed` if a parameter of `node` differs between the two traces, but for those named in `allowed`; None
    if none does."""
    names = differing_params(node, allowed)
    return Mixed(f"its parameter {names[0]!r} depends on the number of examples") if names else None
