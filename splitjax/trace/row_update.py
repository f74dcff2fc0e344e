"""Decides whether an update acts on a table row by row, and whether it leaves a row alone whose gradient is zero.

If both hold, running it on the rows that a step has touched gives the numbers of running it on all of them. The
question is answered from the update's own operations. Every value with the table's rows is followed from the
gradient and from the state, with its *rest*: what it is in a row whose gradient is zero: a number (the same in all
these rows, known or not), the old row of a leaf of the state, or something else. A leaf is left alone if the rest of
its new value is its own old row.

SGD and Adagrad pass; what decays (momentum, Adam's moments, weight decay) does not, and the operation that changes
resting rows is the reason. Zero times anything is taken as zero: an update that divides by zero in resting rows is
not told from one that does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from splitjax.primitives.operation import RowAction, RowFacts, Trait
from splitjax.primitives.rows import row_facts
from splitjax.trace.flatten import FlatStep, Op
from splitjax.trace.tables import RowUpdate


@dataclasses.dataclass(frozen=True)
class Number:
    """Stands for a number that is the same in all resting rows: `value`, or None where it is not known before the step
    runs."""

    value: float | None = None


@dataclasses.dataclass(frozen=True)
class OldRow:
    """Stands for the row that a leaf of the state came with; `leaf` is its flat argument."""

    leaf: int


@dataclasses.dataclass(frozen=True)
class Changed:
    """Stands for anything else, since operation `cause`."""

    cause: Op


Rest = Number | OldRow | Changed
ZERO: Number = Number(0.0)


@dataclasses.dataclass(frozen=True)
class WholeTableUpdate:
    """Tells why an update cannot run on touched rows alone.

    - `reason`: a sentence without its full stop.
    - `source`: the user's line; empty where there is none.
    - `lazy`: how it runs on them if rows without gradient are to be left alone all the same, which changes the
      numbers; None if it cannot.
    """

    reason: str
    source: str
    lazy: RowUpdate | None = None


def row_update(
    flat: FlatStep, gradient: int, table: int, state_results: Mapping[int, int], paths: Sequence[str]
) -> RowUpdate | WholeTableUpdate:
    """Decides whether the update of one table can run on touched rows alone, and how, or why not.

    **Arguments:**

    - `flat`: the flat step.
    - `gradient`: the value that is the table's gradient, `[rows, ...]`.
    - `table`: the table's flat argument.
    - `state_results`: flat argument of every state leaf -> flat result that is its new value.
    - `paths`: of the flat arguments, for the reasons.
    """
    walk = _Walk(flat, gradient, state_results)
    walk.run()
    if walk.refusal is not None:
        return walk.refusal
    refusal = None
    changed = {
        leaf: flat.outputs[result] for leaf, result in state_results.items() if flat.outputs[result] in walk.behind
    }
    # Behind a norm over all gradients lie other parameters' leaves too; what they are in rows is nothing to this table,
    # even if they are laid out along one (a bias of one number).
    changed = {leaf: value for leaf, value in changed.items() if flat.shapes[value][:1] == (walk.num_rows,)}
    for leaf, value in changed.items():
        rest = walk.rest.get(value)
        if refusal is None and rest is not None and rest != OldRow(leaf):
            what, line = _change(rest)
            refusal = WholeTableUpdate(f"{paths[leaf]} {what}, in rows without gradient too", line)
    if walk.rest.get(changed.get(table, -1)) is None:
        return WholeTableUpdate(f"{paths[table]} does not get a new value from its gradient row by row", "")
    results = set(state_results.values())
    if any(
        value in walk.behind and value in walk.rest for index, value in enumerate(flat.outputs) if index not in results
    ):
        return WholeTableUpdate("the step returns an array of the gradient's rows beside its state", "")
    written = [leaf for leaf, value in changed.items() if value in walk.rest]
    leaves = dict.fromkeys((table, *written, *sorted(walk.read)))
    update = RowUpdate(tuple(leaves), tuple(sorted(walk.totals)))
    return update if refusal is None else dataclasses.replace(refusal, lazy=update)


def _change(rest: Rest) -> tuple[str, str]:
    """Says what happens to a leaf's resting rows, and on which line."""
    if not isinstance(rest, Changed):
        return "is replaced", ""
    return f"changes, by {rest.cause.primitive}", rest.cause.source


class _Walk:
    """Follows the table's rows through the operations outside the differentiated computation. Lives for one call of
    `row_update`.

    - `rest`: by value with the table's rows, what it is in rows whose gradient is zero.
    - `origin`: by such a value, the leaves it is made of.
    - `behind`: values that depend on the gradient.
    - `numbers`: values that are one number, the same for all rows.
    - `totals`, `read`: sums over rows, and leaves whose rows are read, both behind the gradient.
    - `refusal`: the first reason for which the update cannot run on rows.
    """

    def __init__(self, flat: FlatStep, gradient: int, state_results: Mapping[int, int]) -> None:
        self.flat, self.num_rows = flat, flat.shapes[gradient][0]
        rows = {
            flat.inputs[leaf]: leaf for leaf in state_results if flat.shapes[flat.inputs[leaf]][:1] == (self.num_rows,)
        }
        # Of values with the table's rows. Not all of the state's are the table's: some dims are only as long.
        self.rest: dict[int, Rest] = {value: OldRow(leaf) for value, leaf in rows.items()}
        self.rest[gradient] = ZERO
        # leaves it is made of
        self.origin: dict[int, frozenset[int]] = {value: frozenset((leaf,)) for value, leaf in rows.items()}
        self.behind = {gradient}  # values that depend on the gradient
        self.numbers: dict[int, Rest] = {
            value: number for value, literal in flat.literals.items() if (number := _number(literal)) is not None
        }
        self.totals: set[int] = set()
        self.read: set[int] = set()
        self.refusal: WholeTableUpdate | None = None

    def run(self) -> None:
        """Walks all operations, or up to the first refusal."""
        for op in self.flat.ops:
            if self.refusal is not None:
                return
            if op.inside or op.primitive == "_gradient":
                continue  # what the differentiated computation reads of the table is not the update's
            behind = not self.behind.isdisjoint(op.inputs)
            if behind:
                self.behind.update(op.outputs)
            if op.primitive == "broadcast_in_dim" and 0 not in op.params["broadcast_dimensions"]:
                # One number, or one row, laid out over rows; whether these are the table's shows where they meet it.
                if self.flat.shapes[op.outputs[0]][:1] != (self.num_rows,):
                    continue
                self.rest.setdefault(op.outputs[0], self.numbers.get(op.inputs[0], Number()))
                continue
            stated = op.facts.rows
            if stated is not None and stated.value is not None and len(op.outputs) == 1:
                numbers = [self.numbers.get(v) for v in op.inputs]
                known = [number for number in numbers if number is not None]
                if len(known) == len(numbers):
                    self.numbers[op.outputs[0]] = _combine(op, stated, known)
            if not self.rest.keys().isdisjoint(op.inputs):
                problem = self._step(op, behind)
                if problem is not None and behind and any(v in self.rest and v in self.behind for v in op.inputs):
                    self.refusal = WholeTableUpdate(problem, op.source)

    def _step(self, op: Op, behind: bool) -> str | None:
        """Finds the rest of an operation's results; a sentence where there is none."""
        name = op.primitive
        if op.eqn is None:
            return "the gradient goes through a loop or a condition of the update"
        if name == "optimization_barrier":
            for source, target in zip(op.inputs, op.outputs, strict=True):
                self._hand_on(source, target)
            return None
        facts = self._facts(op)
        if facts.keeps is not None:
            if not facts.keeps(op.params, self.flat.shapes[op.inputs[0]], self.flat.shapes[op.outputs[0]]):
                return f"{name} moves the rows of the gradient"
            self._hand_on(op.inputs[0], op.outputs[0])
            return None
        if facts.action is RowAction.REDUCES:
            return self._reduce(op, facts, behind)
        return self._apart(op, facts, behind)

    def _facts(self, op: Op) -> RowFacts:
        """Returns what an operation does with rows."""
        shapes = self.flat.shapes
        return row_facts(op.facts, op.params, [shapes[v] for v in op.inputs], [shapes[v] for v in op.outputs])

    def _hand_on(self, source: int, target: int) -> None:
        """Gives a value the rest and the origin of another."""
        if source in self.rest:
            self.rest[target] = self.rest[source]
            self.origin[target] = self.origin.get(source, frozenset())

    def _reduce(self, op: Op, facts: RowFacts, behind: bool) -> str | None:
        """Finds the rest of a reduction's result; a sentence where it takes resting rows in."""
        value, axes = op.inputs[0], op.params.get("axes", ())
        rest = self.rest[value]
        if 0 not in axes:
            self.rest[op.outputs[0]] = rest if rest == ZERO and op.primitive != "reduce_and" else _after(op, rest)
            self.origin[op.outputs[0]] = self.origin.get(value, frozenset())
            return None
        if facts.neutral is None or rest != Number(facts.neutral):
            return f"{op.primitive} takes rows without gradient in, where they count"
        if behind:
            self.totals.update(op.outputs)
        return None

    def _apart(self, op: Op, facts: RowFacts, behind: bool) -> str | None:
        """Finds the rest of the result of an operation that keeps rows apart; a sentence where there is none."""
        if len(op.outputs) != 1 or facts.action is not RowAction.APART:
            return f"{op.primitive} mixes rows of the gradient, or is not known to leave them apart"
        out, rests = op.outputs[0], []
        for value in op.inputs:
            rest = self.rest.get(value) or self._alike(value, len(self.flat.shapes[out]))
            if rest is None:
                return (
                    f"{op.primitive} joins rows of the gradient with an array of shape {self.flat.shapes[value]} that"
                    " is no state"
                )
            rests.append(rest)
        self.rest[out] = _combine(op, facts, rests)
        self.origin[out] = frozenset().union(*(self.origin.get(v, frozenset()) for v in op.inputs))
        if behind:
            self.read |= self.origin[out]
        return None

    def _alike(self, value: int, rank: int) -> Rest | None:
        """Returns what an operand without the table's rows is to each of them; None if it differs from row to row."""
        shape = self.flat.shapes[value]
        if not shape or len(shape) < rank or shape[0] == 1:
            return self.numbers.get(value, Number())
        return None


def _number(literal: Any) -> Number | None:
    """Reads a literal as a number; None where it is an array or of another kind."""
    value = np.asarray(literal)
    return Number(value.item()) if value.ndim == 0 and value.dtype.kind in "biuf" else None


def _after(op: Op, rest: Rest) -> Rest:
    """Returns the rest of what an operation makes of a value with the given rest, where nothing better is known."""
    return Number() if isinstance(rest, Number) else rest if isinstance(rest, Changed) else Changed(op)


def _combine(op: Op, facts: RowFacts, rests: Sequence[Rest]) -> Rest:
    """Returns the rest of the result of an operation that keeps rows apart, by its `facts` and the `rests` of its
    operands."""
    name = op.primitive
    if Trait.IDENTITY in op.facts.traits:
        return rests[0]
    numbers = [rest.value for rest in rests if isinstance(rest, Number)]
    if len(numbers) == len(rests):
        if None not in numbers and facts.value is not None:
            with np.errstate(all="ignore"):
                return Number(float(facts.value(op.params, *numbers)))
        if name in ("mul", "and") and 0.0 in numbers or name in ("div", "rem") and numbers[0] == 0:
            return ZERO
        if name not in ("select_n", "clamp"):
            return Number()
    if name == "select_n":
        chosen, *cases = rests
        if isinstance(chosen, Number) and chosen.value is not None:
            return cases[int(chosen.value)]
        return cases[0] if all(case == cases[0] for case in cases) else _unlike(op, rests)
    if len(rests) == 1:
        return rests[0] if name in ("convert_element_type", "reduce_precision") else _unlike(op, rests)
    if len(rests) == 2 and (rest := _combine_two(name, *rests)) is not None:
        return rest
    return _unlike(op, rests)


def _combine_two(name: str, left: Rest, right: Rest) -> Rest | None:
    """Finds the rest of an operation on two operands where it is that of an operand, or zero; None elsewhere."""
    if name in ("add", "add_any", "sub") and right == ZERO:
        return left
    if name in ("add", "add_any") and left == ZERO:
        return right
    if name == "mul" and ZERO in (left, right) or name in ("div", "rem") and left == ZERO:
        return ZERO
    if name == "mul" and Number(1.0) in (left, right):
        return right if left == Number(1.0) else left
    if name == "div" and right == Number(1.0):
        return left
    if name in ("max", "min") and left == right:
        return left
    return None


def _unlike(op: Op, rests: Sequence[Rest]) -> Changed:
    return next((rest for rest in rests if isinstance(rest, Changed)), Changed(op))
