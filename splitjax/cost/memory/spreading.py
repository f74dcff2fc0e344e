"""Spreads how values are split over a `Program`, from its arguments and constraints, as XLA's partitioner does.

Dims that run along each other (`DimMap`) are split alike where nothing forbids it: first through operations that only
rearrange or meet elementwise, in both directions, then through all. What is decided stays, and no axis splits two dims
of a value. Source of the order: Shardy's priorities (openxla.org/shardy/propagation).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from splitjax.cost.memory.program import Axes, Kind, Node, Program, Region
from splitjax.primitives.dims import Label

_ROUNDS = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Tie:
    """Names dims that run along each other: (value, dim) pairs; `first`: whether the node counts before others."""

    dims: tuple[tuple[int, int], ...]
    first: bool
    manual: frozenset[str]


def spread(program: Program) -> None:
    """Splits every value of `program` that is not decided."""
    ties = [tie for node in nodes_of(program.body) for tie in _ties(program, node)]
    firsts = [tie for tie in ties if tie.first]
    for group in (firsts, ties):
        for _ in range(_ROUNDS):
            forward = any([_settle(program, tie) for tie in group])
            backward = any([_settle(program, tie) for tie in reversed(group)])
            if not forward and not backward:
                break


def nodes_of(region: Region) -> Iterator[Node]:
    """Yields all nodes of a region and of those in it, with those that tie a loop's values, in program order."""
    for node in region.nodes:
        for inner in node.regions:
            yield from nodes_of(inner)
        if node.kind is Kind.REGIONS:
            yield from node.params or ()
        yield node


def label_dims(node: Node) -> dict[Label, list[tuple[int, int, int]]]:
    """Returns the dims of a node by their leading label: (operand, or -1 and below for results; value; dim)."""
    found: dict[Label, list[tuple[int, int, int]]] = {}
    if node.dims is None:
        return found
    sides = [*zip(range(len(node.inputs)), node.inputs, node.dims.inputs, strict=False)]
    sides += [*zip(range(-1, -1 - len(node.outputs), -1), node.outputs, node.dims.outputs, strict=False)]
    for position, value, labels in sides:
        for dim, factors in enumerate(labels):
            if factors:
                found.setdefault(factors[0], []).append((position, value, dim))
    return found


def _ties(program: Program, node: Node) -> Iterator[Tie]:
    first = node.kind in (Kind.LOOP, Kind.VIEW, Kind.PART, Kind.FILL)
    for label, places in label_dims(node).items():
        sizes = node.dims.sizes if node.dims is not None else {}
        dims = tuple((value, dim) for _, value, dim in places if program.shapes[value][dim] > 1)
        if len(dims) > 1:
            yield Tie(dims, first and label not in sizes, node.manual)


def _settle(program: Program, tie: Tie) -> bool:
    """Splits the dims of a tie alike, as far as they are open; returns whether anything changed."""
    splits = program.splits
    axes: Axes = ()
    for value, dim in tie.dims:
        here = splits[value][dim]
        if len(here) > len(axes):
            axes = here
    if not axes:
        return False
    changed = False
    for value, dim in tie.dims:
        split = splits[value]
        if split[dim] or value in program.fixed:
            continue
        taken = {axis for other in split for axis in other}
        free: Axes = ()
        for axis in axes:
            if axis in taken or axis in tie.manual:
                break
            free = (*free, axis)
        if free and program.shapes[value][dim] % program.num_parts(free) == 0:
            splits[value] = (*split[:dim], free, *split[dim + 1 :])
            changed = True
    return changed
