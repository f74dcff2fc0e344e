"""What depends on what: example-carrying values, roles of leaves, the update region.

Everything here is about values of a flat step (see `flatten`). Operations stand in the order of dependence but for
loops, whose `_carry_back` hands a value to the next iteration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from splitjax.trace.classes import Atoms
from splitjax.trace.flatten import BACKWARD, FORWARD, Flat, Op


@dataclasses.dataclass(frozen=True)
class Argument:
    """What the caller knows of one flat argument of the step."""

    path: str
    is_state: bool
    is_batch: bool


@dataclasses.dataclass(frozen=True)
class Flow:
    """Facts per value, and per leaf whether it is a parameter."""

    carrying: tuple[bool, ...]  # some dim holds examples (all of them, or a part)
    data: tuple[bool, ...]  # it depends on the batch
    updated: tuple[bool, ...]  # it depends on a gradient, without carrying examples: gradients, updates, new parameters
    update: tuple[bool, ...]  # it depends on optimizer state, without carrying examples
    effect: tuple[int | None, ...]  # the first operation that the value influences and whose result is about examples
    is_param: tuple[bool, ...]  # per leaf
    examples: frozenset[int]  # soft labels of the example dim
    has_examples: bool  # some batch argument has an example dim

    def is_weight(self, value: int) -> bool:
        """Whether a value is made of state alone (updated in this step or not)."""
        return not self.carrying[value] and (not self.data[value] or self.updated[value])

    def has_effect(self, value: int) -> bool:
        """Whether a value carries examples, or influences one that does other than through an update."""
        return self.carrying[value] or self.effect[value] is not None


# These cut, join or pad a dim: a dim of examples becomes another dim of examples, of another size.
_RESIZES = frozenset({"concatenate", "slice", "dynamic_slice", "pad", "split"})
_PRODUCTS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})


def example_labels(
    flat: Flat, arguments: Sequence[Argument], atoms: Atoms, soft: Sequence[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Soft classes of dims of examples: those of whole batches (the leading dims of batch arguments, and what whole
    batches are joined to), and those of parts of a batch."""
    batch = [v for v, a in zip(flat.inputs, arguments, strict=True) if a.is_batch and flat.shapes[v]]
    whole = {soft[a] for v in batch for a in atoms.dim(v, 0)}
    num = flat.shapes[batch[0]][0] if batch else 0
    if num < 2:
        return frozenset(whole), frozenset()
    parts: set[int] = set()
    resizes = [op for op in flat.ops if op.primitive in _RESIZES or op.primitive == "gather"]
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


def _comes_from(op: Op, flat: Flat, atoms: Atoms, soft: Sequence[int], position: int, labels: set[int]) -> bool:
    """Whether a dim of the result is cut from, or picked from, a dim with one of these labels."""
    if op.primitive == "gather":
        numbers = op.params["dimension_numbers"]
        dims = () if position in numbers.offset_dims else numbers.collapsed_slice_dims
        return any(soft[a] in labels for d in dims for a in atoms.dim(op.inputs[0], d))
    rank = len(flat.shapes[op.outputs[0]])
    return any(soft[a] in labels for v in op.inputs if len(flat.shapes[v]) == rank for a in atoms.dim(v, position))


def forward(
    flat: Flat, seeds: Iterable[int], stop: Callable[[int], bool] = lambda v: False, loops: bool = True
) -> list[bool]:
    """The values that depend on the seeds; a value for which `stop` holds does not pass the dependence on. With
    `loops`, also by what an iteration hands to the next."""
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


def first_effect(flat: Flat, goal: Sequence[bool], blocked: Sequence[bool]) -> list[int | None]:
    """Per value the index of the first operation whose result is a goal value and that the value influences, within one
    iteration of a loop and not by way of a blocked value."""
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


def analyse(flat: Flat, arguments: Sequence[Argument], atoms: Atoms, soft: Sequence[int]) -> Flow:
    """Finds example-carrying values and parameters.

    A parameter is a floating-point state array that influences some example-carrying value (or a product with the
    batch) other than through an update (optimizer state only does so through one), or that a gradient boundary
    differentiates. In a step whose batch has no dims, what the differentiated computation reads stands for the
    examples.
    """
    whole, parts = example_labels(flat, arguments, atoms, soft)
    has_examples = bool(whole)
    carrying = _with_labels(flat, atoms, soft, whole | parts)
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
    return Flow(
        carrying=tuple(carrying),
        data=tuple(data),
        updated=tuple(forward(flat, gradients, stop=carrying.__getitem__)),
        update=tuple(forward(flat, seeds, stop=carrying.__getitem__)),
        effect=tuple(effect),
        is_param=tuple(is_param),
        examples=whole,
        has_examples=has_examples,
    )


def is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def _with_labels(flat: Flat, atoms: Atoms, soft: Sequence[int], labels: frozenset[int]) -> list[bool]:
    found = []
    for value, shape in enumerate(flat.shapes):
        found.append(any(soft[a] in labels for d in range(len(shape)) for a in atoms.dim(value, d)) if shape else False)
    return found


def _data_seeds(flat: Flat, arguments: Sequence[Argument], has_examples: bool) -> list[int]:
    """The batch; where it has no dims, everything that is not state: other arguments, constants, numbers made on the
    spot."""
    if has_examples:
        return [v for v, a in zip(flat.inputs, arguments, strict=True) if a.is_batch]
    made = [v for op in flat.ops if not op.inputs for v in op.outputs]
    return [v for v, a in zip(flat.inputs, arguments, strict=True) if not a.is_state] + [*flat.constants, *made]


def _with_products(flat: Flat, carrying: Sequence[bool], data: Sequence[bool]) -> list[bool]:
    """Example-carrying values, and what differentiated products make of the batch when no example is left in it (nodes
    pooled to graphs, say)."""
    goal = list(carrying)
    for op in flat.ops:
        if op.primitive in _PRODUCTS and (op.inside or op.phase == FORWARD):
            for v in op.outputs:
                goal[v] = goal[v] or data[v]
    return goal


def _differentiated_results(flat: Flat) -> list[bool]:
    goal = [False] * len(flat.shapes)
    for op in flat.ops:
        if op.inside or op.phase:
            for v in op.outputs:
                goal[v] = True
    return goal


def _upstream(flat: Flat, data: Sequence[bool]) -> set[int]:
    found = set(flat.differentiated)
    for op in reversed(flat.ops):
        if op.primitive != "_gradient" and any(v in found and not data[v] for v in op.outputs):
            found.update(op.inputs)
    return found
