"""Defines what splitjax knows of an operation: one `OperationFacts`, of which every analysis reads its part."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from splitjax.primitives.dims import DimRule, Params, Shapes
from splitjax.primitives.example_question import ExampleRule


class Trait(enum.Enum):
    """States one thing that holds of an operation, whatever its operands."""

    ELEMENTWISE = "each number of a result depends only on the numbers at its own place"
    IDENTITY = "its result is its operand: at most where it lies, or what its gradient is, changes"
    RESIZES = "it cuts, joins or pads a dim, which stays a dim of the same things"
    ARRANGES = "it puts several arrays side by side in one, or takes such an array apart"
    PRODUCT = "it adds up products of two operands over a dim"
    LOOKUP = "it takes rows of an operand, which another operand numbers"
    TAKES = "it takes entries of an operand, at places that other operands give"
    WRITES = "it writes entries of an operand, or adds to them, at places that other operands give"
    REDUCES = "it makes one entry of all those along a dim"
    SCANS = "it keeps a dim, and each entry depends on others along it"
    BITWISE = "it reduces truth values or bits"
    WINDOWS = "it combines the entries in windows that move over an operand"
    BITS = "it looks at the bits of numbers, which are others in another dtype"
    SIZED = "its parameters hold programs or buffers, of the sizes and dtypes of its operands"
    ADDS_ROWS = "it adds rows to an operand, at places that another operand numbers"
    COUNTED = "its operands count among what a backward pass keeps, although it is linear: an upper bound of memory"
    DRAWS = "it makes random numbers, the same on every device for the same key"
    COLLECTIVE = "it exchanges values between the devices of a `shard_map`"
    FOREIGN = "it runs code that is not partitioned like the rest of the step: a kernel, a callback, a `shard_map`"

    # There is one object of each: by its name, as Python hashes it, sets of traits take more than twice as long.
    if TYPE_CHECKING:

        def __hash__(self) -> int: ...

    else:
        __hash__ = object.__hash__


class Examples(enum.Enum):
    """Says what an operation does with the dim that holds examples, where no function does."""

    BY_DIMS = "the dim rule tells: a dim of examples that it keeps is acted on example by example"
    MIXED = "it combines examples, or depends on their number: it runs on the whole batch"


class Linearity(enum.Enum):
    """Says in what sense an operation is linear in the operands that `Linear` names."""

    TOGETHER = "in all of them together, as a sum is: results for summands of all of them add up"
    EACH = "in each of them while the others are fixed, as a product is"
    PAIRED = "each result in the operand at its position, and in no other"


@dataclasses.dataclass(frozen=True)
class Linear:
    """Says in which operands an operation is linear.

    - `how`: together, each by itself, or in pairs of operand and result.
    - `operands`: positions of the linear operands; None: all that are not in `fixed`.
    - `fixed`: positions of operands that choose entries or branches, such as the predicate of a selection.
    - `holds(params, dtype_in, dtype_out)`: whether it holds of an equation with these parameters and with these dtypes
      of its first operand and result; None: it always does. It returns a clause that says why not, or None.
    """

    how: Linearity
    operands: tuple[int, ...] | None = None
    fixed: tuple[int, ...] = ()
    holds: Callable[[Mapping[str, Any], Any, Any], str | None] | None = None

    def positions(self, num_operands: int) -> frozenset[int]:
        """Returns the positions of the linear operands among `num_operands`."""
        chosen = range(num_operands) if self.operands is None else self.operands
        return frozenset(chosen) - set(self.fixed)


class RowAction(enum.Enum):
    """Says how an operation acts on values whose leading dim counts a table's rows."""

    APART = "each row of its result is made of the same row of its operands"
    ARRANGES = "it changes shapes, and leaves rows where they are if `RowFacts.keeps` says so"
    WHOLE = "it takes its operands whole, or moves or mixes their rows"
    REDUCES = "it reduces dims: rows apart where it keeps the leading one, a total over the rows where it does not"


# Parameters, shape before, shape after -> whether rows stay where they are.
KeepsRows = Callable[[Mapping[str, Any], tuple[int, ...], tuple[int, ...]], bool]


@dataclasses.dataclass(frozen=True)
class RowFacts:
    """Says what an operation does with the rows of a table.

    - `action`: how it acts on them.
    - `keeps(params, before, after)`: for `ARRANGES`, whether rows stay where they are, by the shapes of its operand and
      of its result.
    - `neutral`: for `REDUCES`, the number of which a reduction takes any number of rows in without a change; None:
      there is no such number.
    - `value(params, *numbers)`: evaluates the operation on known numbers; None: it is not known.
    """

    action: RowAction
    keeps: KeepsRows | None = None
    neutral: float | None = None
    value: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True)
class Domain:
    """Says where an operation is not defined, or its derivative, or grows beyond all numbers.

    - `operands`: positions of the operands on which that depends.
    - `holds(position, number)`: tells whether it is defined where an entry of the operand at this position is a finite
      `number`, whatever the other operands are; its derivative need not be. It may say so of too few numbers. None: of
      no number is that known.
    """

    operands: tuple[int, ...]
    holds: Callable[[int, float], bool] | None = None


DimNames = tuple[str | None, ...]  # of a weight: "in", "out", "expert", "vocab", ..., or None


@dataclasses.dataclass(frozen=True)
class Weights:
    """Says what an operation does with a parameter that it reads beside activations, which makes it a layer.

    - `names(params, inputs, outputs, weight)`: what the dims of operand number `weight` are called, by the shapes of
      operands and results.
    - `flops(params, inputs, outputs)`: how many operations one run takes; a multiply-add is two.
    - `by_labels`: whether the labels of its dims say how it is split: each device evaluates it on its parts of both
      operands. What the parts of a contracted dim give adds up if the operation is linear in each operand.
    - `follows`: the dim rule that all of this follows from, for what users teach; None: it is stated.
    """

    names: Callable[[Params, Shapes, Shapes, int], DimNames]
    flops: Callable[[Params, Shapes, Shapes], int]
    by_labels: bool = False
    follows: DimRule | None = None


@dataclasses.dataclass(frozen=True)
class OperationFacts:
    """Holds all that splitjax knows of one operation; every analysis asks for it here.

    - `name`: the primitive's name; `primitive:name` for one of many that a primitive stands for, such as
      "pallas_call:my_kernel".
    - `dims`: what it does to the dims of its operands; None without a rule: see `no_dims`.
    - `no_dims`: why there is no dim rule; "" where there is one.
    - `examples`: what it does with the dim that holds examples: a function for the cases that the dim rule does not
      tell, or an `Examples`.
    - `along`: labels of dims whose entries it combines although its results have these dims, as a normalisation does.
    - `linear`: in which operands it is linear; None: in none.
    - `rows`: what it does with the rows of a table; None: nothing is known but what the dim rule tells.
    - `weights`: what it does with a parameter that it multiplies, or looks rows up in; None: it makes no layer.
    - `domain`: where it is not defined; None: it is everywhere, or nothing is known of it.
    - `traits`: what else holds of it.
    - `size_params`: parameters that hold sizes, of which a part of the batch has its own.
    """

    name: str
    dims: DimRule | None = None
    no_dims: str = ""
    examples: ExampleRule | Examples = Examples.MIXED
    along: frozenset[str] = frozenset()
    linear: Linear | None = None
    rows: RowFacts | None = None
    weights: Weights | None = None
    domain: Domain | None = None
    traits: frozenset[Trait] = frozenset()
    size_params: frozenset[str] = frozenset()

    def has(self, trait: Trait) -> bool:
        """Tells whether `trait` holds of the operation."""
        return trait in self.traits
