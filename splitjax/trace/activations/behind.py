"""Follows columns of activations back to the uses of parameters that they come from."""

from __future__ import annotations

from collections.abc import Mapping

from splitjax.trace.classes import Classes
from splitjax.trace.flatten import FlatStep

Site = tuple[int, ...]
Column = tuple[int, int]  # a value, and the label of the dims of it that hold columns


def labels_of(value: int, flat: FlatStep, classes: Classes) -> set[int]:
    """Returns the local labels of the dims of a value."""
    return {classes.local(atom) for dim in classes.dims(value, len(flat.shapes[value])) for atom in dim}


def uses_behind(
    value: int, label: int, flat: FlatStep, classes: Classes, weights: frozenset[int], makers: Mapping[int, int]
) -> tuple[tuple[int, ...], ...]:
    """Returns the sites of the uses of parameters that the columns of a value come from, in program order: the nearest
    before it on every way back through values with these columns. `label`: theirs. `makers`: by value, the position of
    the operation that makes it."""
    found: set[int] = set()
    seen, left = {value}, [value]
    while left:
        number = makers.get(left.pop())
        if number is None:
            continue
        if number in weights:
            found.add(number)
            continue
        for before in flat.ops[number].inputs:
            if before not in seen and label in labels_of(before, flat, classes):
                seen.add(before)
                left.append(before)
    return tuple(flat.ops[number].site for number in sorted(found))
