"""Finds the classes of dims of a traced step that must be of equal size, and those that change together.

A closed jaxpr goes in, an `Analysis` comes out: the flat operations, with the class of every factor of every dim. The
classes are those of the trace (`trace.classes`), united by every link there is, and by links that only sizes need: dims
that are cut into equal parts, or read in windows that tile them. `verify.sizes` chooses new sizes by them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from splitjax.primitives.operation import Trait
from splitjax.primitives.walk import Site
from splitjax.trace.classes import Atoms, refine, unite
from splitjax.trace.flatten import FlatStep, Op, flatten
from splitjax.trace.links import Linked, RawLink, link, tie
from splitjax.verify.parameters import Shape


class Misfit(Exception):
    """Reports that an operation does not take the sizes that were chosen.

    `site`: of the operation, or of the call that it stands in; `why`: the reason in words.
    """

    def __init__(self, site: Site, why: str) -> None:
        super().__init__(why)
        self.site = site


@dataclasses.dataclass(frozen=True)
class Sized:
    """Holds new shapes of everything in a jaxpr.

    - `inputs`, `constants`: of the outermost jaxpr, in order.
    - `results`: of every operation, by site.
    - `stacked`: of what scans stack, by their site.
    """

    inputs: tuple[Shape, ...]
    constants: tuple[Shape, ...]
    results: Mapping[Site, tuple[Shape, ...]]
    stacked: Mapping[Site, tuple[Shape, ...]]


@dataclasses.dataclass(frozen=True, eq=False)
class Analysis:
    """Holds a flat jaxpr with the classes of its dims.

    - `flat`, `linked`: the jaxpr, and the links between its dims.
    - `atoms`: the factors of its dims.
    - `labels`: the class of each atom, by its number.
    """

    flat: FlatStep
    linked: Linked
    atoms: Atoms
    labels: tuple[int, ...]

    @functools.cached_property
    def sizes(self) -> dict[int, int]:
        """Maps each class to the size of its atoms."""
        return {self.labels[a]: size for a, size in enumerate(self.atoms.sizes)}

    @functools.cached_property
    def dims(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The classes of the atoms of every dim of every value, major first."""
        return tuple(
            tuple(tuple(self.labels[a] for a in self.atoms.dim(value, d)) for d in range(len(shape)))
            for value, shape in enumerate(self.flat.shapes)
        )

    def shape(self, value: int, new: Mapping[int, int]) -> Shape:
        """Returns the shape of the value of number `value` once the classes in `new` have these sizes."""
        return tuple(math.prod(new.get(label, self.sizes[label]) for label in dim) for dim in self.dims[value])

    def sized(self, new: Mapping[int, int], num_constants: int) -> Sized:
        """Returns all shapes once the classes in `new` have these sizes; `num_constants` of the outermost jaxpr."""
        results = {op.site: tuple(self.shape(v, new) for v in op.outputs) for op in self.flat.ops if op.eqn is not None}
        stacked: dict[Site, tuple[Shape, ...]] = {}
        for op in self.flat.ops:
            if op.primitive == "_scan_out":
                stacked[op.site] = (*stacked.get(op.site, ()), self.shape(op.outputs[0], new))
        constants = tuple(self.shape(v, new) for v in self.flat.constants[:num_constants])
        return Sized(tuple(self.shape(v, new) for v in self.flat.inputs), constants, results, stacked)


def analyse(jaxpr: Any, state_results: Mapping[int, int] | None = None) -> Analysis:
    """Finds the classes of the dims of a closed `jaxpr`.

    `state_results` maps the flat argument of each state leaf to its flat result: they are of equal shape.
    """
    flat = flatten(jaxpr)
    linked = link(flat)
    shapes = list(linked.shapes)
    ties = tie([(flat.inputs[i], flat.outputs[o]) for i, o in (state_results or {}).items()], flat.shapes)
    atoms, pairs = refine(shapes, [*linked.links, *ties, *part_links(flat, shapes)])
    return Analysis(flat, linked, atoms, unite(atoms, pairs))


def part_links(flat: FlatStep, shapes: list[Shape]) -> Iterator[RawLink]:
    """Yields links for dims of `flat` that are cut into equal parts, laid end to end from them (a fused projection, the
    halves of a rotation), or read in windows that tile them: the whole is (parts, part).

    What computes with them does not need the links, but sizes do. Appends virtual values to `shapes`, as `link` does.
    """
    for index, op in enumerate(flat.ops):
        if Trait.WINDOWS in op.facts.traits:
            whole, number = op.inputs[0], op.outputs[0]
            for d, e, stride in _strides(op):
                size = flat.shapes[whole][d]
                if stride > 1 and flat.shapes[number][e] > 1 and size == flat.shapes[number][e] * stride:
                    shapes.append((flat.shapes[number][e], stride))
                    yield RawLink(((whole, d),), ((len(shapes) - 1, 0), (len(shapes) - 1, 1)), index, 0)
                    yield RawLink(((number, e),), ((len(shapes) - 1, 0),), index, 0)
            continue
        wholes, parts = _wholes_and_parts(op)
        for d, size in enumerate(flat.shapes[wholes[0]] if wholes else ()):
            sizes = {flat.shapes[part][d] for part in parts}
            part = min(sizes)
            if (
                len(sizes) > 1
                or part in (0, 1, size)
                or size % part
                or (op.primitive == "slice" and (op.params["start_indices"][d] % part or _step(op, d) != 1))
            ):
                continue
            shapes.append((size // part, part))
            virtual = len(shapes) - 1
            yield RawLink(((wholes[0], d),), ((virtual, 0), (virtual, 1)), index, 0)
            yield from (RawLink(((cut, d),), ((virtual, 1),), index, 0) for cut in parts)


def _strides(op: Op) -> list[tuple[int, int, int]]:
    """Lists (the operand's dim, the result's, the stride) of each window dim."""
    strides = op.params["window_strides"]
    if op.primitive != "conv_general_dilated":
        return [(d, d, stride) for d, stride in enumerate(strides)]
    numbers = op.params["dimension_numbers"]
    return list(zip(numbers.lhs_spec[2:], numbers.out_spec[2:], strides, strict=True))


def _wholes_and_parts(op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if op.primitive == "concatenate":
        return op.outputs, op.inputs
    return (op.inputs[:1], op.outputs) if op.primitive in ("split", "slice") else ((), ())


def _step(op: Op, d: int) -> int:
    return 1 if op.params["strides"] is None else op.params["strides"][d]


def offsets(analysis: Analysis) -> Iterator[tuple[int, int, int]]:
    """Yields classes of `analysis` that differ by a fixed number: (longer, shorter, number).

    What a slice leaves out at the ends, a padding or a concatenation adds.
    """
    shapes, dims = analysis.flat.shapes, analysis.dims
    for op in analysis.flat.ops:
        if op.primitive == "slice":
            pairs = [(op.inputs[0], op.outputs[0], d) for d in range(len(shapes[op.outputs[0]])) if _step(op, d) == 1]
        elif op.primitive == "pad":
            pairs = [
                (op.outputs[0], op.inputs[0], d)
                for d, (_, _, inner) in enumerate(op.params["padding_config"])
                if inner == 0
            ]
        elif op.primitive == "concatenate":
            d = op.params["dimension"]
            long = [v for v in op.inputs if shapes[v][d] != 1]
            pairs = [(op.outputs[0], long[0], d)] if len(long) == 1 else []
        else:
            continue
        for longer, shorter, d in pairs:
            if shapes[longer][d] < shapes[shorter][d]:
                longer, shorter = shorter, longer
            if len(dims[longer][d]) == len(dims[shorter][d]) == 1 and shapes[longer][d] != shapes[shorter][d]:
                yield dims[longer][d][0], dims[shorter][d][0], shapes[longer][d] - shapes[shorter][d]


def grouped(analysis: Analysis) -> list[dict[int, int]]:
    """Groups classes of `analysis` that change together: {class: how much it is larger than the smallest}."""
    groups: dict[int, dict[int, int]] = {}
    for longer, shorter, number in offsets(analysis):
        left, right = groups.setdefault(longer, {longer: 0}), groups.setdefault(shorter, {shorter: 0})
        if left is right:
            continue
        shift = left[longer] - number - right[shorter]
        left |= {member: offset + shift for member, offset in right.items()}
        groups |= dict.fromkeys(right, left)
    unique = {id(group): group for group in groups.values()}.values()
    return [{member: offset - min(group.values()) for member, offset in group.items()} for group in unique]
