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
class Place:
    """Names a factor of a dim: the `value`, its `dim`, and the `factor` among those that make up the dim, whose `sizes`
    are given, major first. Most dims are a single factor; a reshape joins dims to one, or cuts one."""

    value: int
    dim: int
    factor: int
    sizes: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Tie:
    """Names factors of dims that run along each other; `first`: whether the node counts before others; `manual`: axes
    over which its shapes are those of a part already."""

    places: tuple[Place, ...]
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
    if node.dims is None:
        return
    known, found = node.dims.sizes, {}
    sides = [*zip(node.inputs, node.dims.inputs, strict=False), *zip(node.outputs, node.dims.outputs, strict=False)]
    for value, labels in sides:
        for dim, factors in enumerate(labels):
            size = program.shapes[value][dim]
            if size == 1:
                continue
            sizes = (size,) if len(factors) == 1 else tuple(known.get(label, 1) for label in factors)
            for number, label in enumerate(factors):
                if sizes[number] > 1:
                    found.setdefault(label, []).append(Place(value, dim, number, sizes))
    for label, places in found.items():
        if len(places) > 1:
            yield Tie(tuple(places), first and label not in known, node.manual)


def _cut(program: Program, axes: Axes, sizes: tuple[int, ...]) -> list[Axes]:
    """Returns which of the `axes` that split a dim split each of its factors, whose `sizes` are given; axes from one on
    that does not divide a factor, or is of another mesh, are left out."""
    parts: list[Axes] = [()] * len(sizes)
    number, room = 0, sizes[0]
    for axis in axes:
        if axis in program.others:
            break
        size = program.sizes[axis]
        while room == 1 and number + 1 < len(sizes):
            number += 1
            room = sizes[number]
        if room % size:
            break
        parts[number] = (*parts[number], axis)
        room //= size
    return parts


def _settle(program: Program, tie: Tie) -> bool:
    """Splits the factors of a tie alike, as far as they are open; returns whether anything changed."""
    splits = program.splits
    axes: Axes = ()
    for place in tie.places:
        split = splits[place.value][place.dim]
        if split and (here := _cut(program, split, place.sizes)[place.factor]) and len(here) > len(axes):
            axes = here
    if not axes:
        return False
    changed = False
    for place in tie.places:
        value, dim = place.value, place.dim
        if (value, dim) in program.fixed:
            continue
        split = splits[value]
        parts = _cut(program, split[dim], place.sizes)
        here = parts[place.factor]
        if here != axes[: len(here)] or len(here) == len(axes) or any(parts[place.factor + 1 :]):
            continue
        # Only behind factors that are split whole a further one may be.
        before = zip(parts[: place.factor], place.sizes, strict=False)
        if any(program.num_parts(part) != size for part, size in before):
            continue
        taken = {axis for other in split for axis in other}
        free = here
        for axis in axes[len(here) :]:
            if axis in taken or axis in tie.manual:
                break
            free = (*free, axis)
        if len(free) > len(here) and place.sizes[place.factor] % program.num_parts(free) == 0:
            whole = tuple(axis for part in (*parts[: place.factor], free) for axis in part)
            splits[value] = (*split[:dim], whole, *split[dim + 1 :])
            changed = True
    return changed
