"""Follows what depends on what: example-carrying values, roles of leaves, the update region.

A flat step (see `flatten`) and what the caller knows of its arguments go in; facts per value come out, from which
`tracer` tells parameters from optimizer state and forward computation from update. Operations stand in the order of
dependence but for loops, whose `_carry_back` hands a value to the next iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from splitjax.primitives.operation import Trait
from splitjax.trace.classes import Atoms
from splitjax.trace.flatten import BACKWARD, FORWARD, FlatStep, Op
from splitjax.trace.stepping import find_stepping


@dataclasses.dataclass(frozen=True)
class Argument:
    """Says what the caller knows of one flat argument of the step.

    - `path`: its path, such as "params/Dense_0/kernel".
    - `is_state`: whether it belongs to one of the state arguments.
    - `is_batch`: whether it belongs to one of the batch arguments, whose leading dim is the example dim.
    """

    path: str
    is_state: bool
    is_batch: bool


@dataclasses.dataclass(frozen=True)
class ValueFacts:
    """Holds facts per value of a flat step, and per leaf whether it is a parameter.

    - `carrying`: whether some dim of the value holds examples (all of them, or a part).
    - `data`: whether it depends on the batch.
    - `updated`: whether it depends on a gradient, without carrying examples: gradients, updates, new parameters.
    - `update`: whether it depends on optimizer state, without carrying examples.
    - `effect`: the first operation that it influences and whose result is about examples, or None.
    - `weights`: whether it is made of state alone (updated in this step or not).
    - `effective`: whether it carries examples, or influences a value that does other than through an update.
    - `is_param`: per leaf, whether it is a parameter.
    - `examples`: soft labels of the example dim.
    - `has_examples`: whether some batch argument has an example dim.
    """

    carrying: tuple[bool, ...]
    data: tuple[bool, ...]
    updated: tuple[bool, ...]
    update: tuple[bool, ...]
    effect: tuple[int | None, ...]
    weights: tuple[bool, ...]
    effective: tuple[bool, ...]
    is_param: tuple[bool, ...]
    examples: frozenset[int]
    has_examples: bool


def batch_values(flat: FlatStep, arguments: Sequence[Argument]) -> list[int]:
    """Returns the values of the batch `arguments` of `flat` that have dims."""
    return [v for v, a in zip(flat.inputs, arguments, strict=True) if a.is_batch and flat.shapes[v]]


def example_labels(
    flat: FlatStep, arguments: Sequence[Argument], atoms: Atoms, soft: Sequence[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Finds the soft classes of dims of examples.

    **Arguments:**

    - `flat`: the flat step.
    - `arguments`: one per flat argument.
    - `atoms`: the atoms of all dims.
    - `soft`: per atom the label of its soft class.

    **Returns** the labels of whole batches (the leading dims of batch arguments, without what loops around the gradient
    count, and what whole batches are joined to), and those of parts of a batch.
    """
    batch = batch_values(flat, arguments)
    stepping = find_stepping(flat, batch, atoms, soft)
    places = list(zip(batch, stepping.example_dims, strict=True))
    whole = {soft[a] for v, dim in places for a in atoms.dim(v, dim)} - stepping.turns
    num = flat.shapes[batch[0]][stepping.example_dims[0]] if batch else 0
    if num < 2:
        return frozenset(whole), frozenset()
    parts: set[int] = set()
    # A dim of examples that is cut, joined or padded becomes another dim of examples, of another size.
    resizes = [op for op in flat.ops if Trait.RESIZES in op.facts.traits or Trait.LOOKUP in op.facts.traits]
    changed = bool(resizes)
    while changed:
        changed = False
        for op in resizes:
            for value in op.outputs:
                for position, size in enumerate(flat.shapes[value]):
                    mine = {soft[a] for a in atoms.dim(value, position)}
                    if (
                        not mine
                        or mine & whole
                        or mine & parts
                        or not _comes_from(op, flat, atoms, soft, position, whole | parts)
                    ):
                        continue
                    (parts if size % num else whole).update(mine)
                    changed = True
    return frozenset(whole), frozenset(parts)


def _comes_from(op: Op, flat: FlatStep, atoms: Atoms, soft: Sequence[int], position: int, labels: set[int]) -> bool:
    """Tells whether a dim of the result is cut from, or picked from, a dim with one of these labels."""
    if op.primitive == "gather":
        numbers = op.params["dimension_numbers"]
        dims = () if position in numbers.offset_dims else numbers.collapsed_slice_dims
        return any(soft[a] in labels for d in dims for a in atoms.dim(op.inputs[0], d))
    rank = len(flat.shapes[op.outputs[0]])
    return any(soft[a] in labels for v in op.inputs if len(flat.shapes[v]) == rank for a in atoms.dim(v, position))


def forward(
    flat: FlatStep, seeds: Iterable[int], stop: Callable[[int], bool] = lambda v: False, loops: bool = True
) -> list[bool]:
    """Tells, per value of `flat`, whether it depends on one of the values `seeds`.

    A value for which `stop` holds does not pass the dependence on. With `loops`, dependence also goes by what an
    iteration hands to the next.
    """
    reached = [False] * len(flat.shapes)
    for value in seeds:
        reached[value] = True
    changed = True
    while changed:
        changed = False
        for op in flat.ops:
            if op.primitive == "_carry_back":
                source, target = op.inputs
                if loops and reached[source] and not reached[target] and not stop(target):
                    reached[target] = changed = True
                continue
            for v in op.inputs:
                if reached[v]:
                    break
            else:
                continue
            for v in op.outputs:
                if not reached[v] and not stop(v):
                    reached[v] = True
    return reached


def first_effect(flat: FlatStep, goal: Sequence[bool], blocked: Sequence[bool]) -> list[int | None]:
    """Returns, per value of `flat`, the index of the first operation that it influences and whose result is a goal
    value.

    `goal` and `blocked` have an entry per value; influence counts within one iteration of a loop, and not by way of
    a blocked value. None where there is no such operation.
    """
    first: list[int | None] = [None] * len(flat.shapes)
    for index in range(len(flat.ops) - 1, -1, -1):
        op = flat.ops[index]
        soonest: int | None = None
        for v in op.outputs:
            if goal[v]:
                soonest = index
                break
            later = first[v]
            if later is not None and not blocked[v] and (soonest is None or later < soonest):
                soonest = later
        if soonest is None:
            continue
        for v in op.inputs:
            known = first[v]
            if known is None or soonest < known:
                first[v] = soonest
    return first


def analyse(flat: FlatStep, arguments: Sequence[Argument], atoms: Atoms, soft: Sequence[int]) -> ValueFacts:
    """Finds example-carrying values and parameters.

    **Arguments:**

    - `flat`: the flat step.
    - `arguments`: one per flat argument.
    - `atoms`: the atoms of all dims.
    - `soft`: per atom the label of its soft class, all links together.

    A parameter is a floating-point state array that influences some example-carrying value (or a product with the
    batch) other than through an update (optimizer state only does so through one), or that a gradient boundary
    differentiates. In a step whose batch has no dims, what the differentiated computation reads stands for the
    examples.
    """
    whole, parts = example_labels(flat, arguments, atoms, soft)
    has_examples = bool(whole)
    carrying = atoms.have_labels(soft, whole | parts)[: len(flat.shapes)]  # without the virtual values of links
    data = forward(flat, _data_seeds(flat, arguments, has_examples))
    gradients = [
        v
        for op in flat.ops
        if op.primitive == "_gradient" or (op.phase == BACKWARD and not op.inside)
        for v in op.outputs
        if not carrying[v]
    ]
    blocked = forward(flat, gradients, stop=carrying.__getitem__, loops=False)
    goal = _with_products(flat, carrying, data) if has_examples else _differentiated_results(flat)
    effect = first_effect(flat, goal, blocked)
    differentiated = _upstream(flat, data)
    is_param = []
    for value, argument in zip(flat.inputs, arguments, strict=True):
        reaches = effect[value] is not None and bool(flat.shapes[value])
        state = argument.is_state and is_floating(flat.dtypes[value]) and not carrying[value]
        is_param.append(state and (reaches or value in differentiated))
    seeds = [
        v
        for v, a, param in zip(flat.inputs, arguments, is_param, strict=True)
        if a.is_state and not param and flat.shapes[v] and is_floating(flat.dtypes[v])
    ]
    updated = forward(flat, gradients, stop=carrying.__getitem__)
    return ValueFacts(
        carrying=tuple(carrying),
        data=tuple(data),
        updated=tuple(updated),
        update=tuple(forward(flat, seeds, stop=carrying.__getitem__)),
        effect=tuple(effect),
        weights=tuple([not c and (u or not d) for c, d, u in zip(carrying, data, updated, strict=True)]),
        effective=tuple([c or first is not None for c, first in zip(carrying, effect, strict=True)]),
        is_param=tuple(is_param),
        examples=whole,
        has_examples=has_examples,
    )


def is_floating(dtype: str) -> bool:
    """Tells whether `dtype`, the name of a dtype, is floating point or complex."""
    return dtype.startswith(("float", "bfloat", "complex"))


def _data_seeds(flat: FlatStep, arguments: Sequence[Argument], has_examples: bool) -> list[int]:
    """Returns the batch; where it has no dims, everything that is not state: other arguments, constants, numbers made
    on the spot."""
    if has_examples:
        return [v for v, a in zip(flat.inputs, arguments, strict=True) if a.is_batch]
    made = [v for op in flat.ops if not op.inputs for v in op.outputs]
    return [v for v, a in zip(flat.inputs, arguments, strict=True) if not a.is_state] + [*flat.constants, *made]


def _with_products(flat: FlatStep, carrying: Sequence[bool], data: Sequence[bool]) -> list[bool]:
    """Adds to the example-carrying values what differentiated products make of the batch when no example is left in it
    (nodes pooled to graphs, say)."""
    goal = list(carrying)
    for op in flat.ops:
        if Trait.PRODUCT in op.facts.traits and (op.inside or op.phase == FORWARD):
            for v in op.outputs:
                goal[v] = goal[v] or data[v]
    return goal


def _differentiated_results(flat: FlatStep) -> list[bool]:
    """Tells, per value, whether a differentiated computation makes it."""
    goal = [False] * len(flat.shapes)
    for op in flat.ops:
        if op.inside or op.phase:
            for v in op.outputs:
                goal[v] = True
    return goal


def _upstream(flat: FlatStep, data: Sequence[bool]) -> set[int]:
    """Finds the values that differentiated ones are made of, other than from the batch."""
    upstream = set(flat.differentiated)
    for op in reversed(flat.ops):
        if op.primitive != "_gradient" and any(v in upstream and not data[v] for v in op.outputs):
            upstream.update(op.inputs)
    return upstream
