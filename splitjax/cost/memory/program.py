"""Holds the program that a device runs as values and nodes, in nested regions: what memory is predicted of.

`cost.memory.reading` makes a `Program` of a jaxpr; `spreading` says how each value is split; `buffers` which of them
are stored, `timeline` how long.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Sequence
from typing import Any

from splitjax import _compat
from splitjax.cost.memory.other_meshes import Axes, OtherAxis
from splitjax.primitives.dims import DimMap

Split = tuple[Axes, ...]  # per dim, the mesh axes that it is split over
_RARE = re.compile(r"splitjax:(?:fallback|again)\b")


class Kind(enum.Enum):
    """Names what a node does, as far as memory is concerned.

    - `LOOP`: a loop over its elements, which compilers fuse with its neighbours.
    - `MADE`: made of nothing or of scalars (an iota, a constant that is broadcast): made anew wherever it is read by a
      loop over elements.
    - `VIEW`: another look at its first operand's bytes.
    - `KERNEL`: a kernel of its own (a product, a convolution, a sort): reads and writes stored arrays.
    - `COLLECTIVE`: between devices.
    - `PART`: reads a part of its first operand (a scan's slice), fused where it is read.
    - `FILL`: writes into its first operand in place (a scan's results).
    - `REGIONS`: a loop or a branch.
    """

    LOOP = "loop"
    MADE = "made"
    VIEW = "view"
    KERNEL = "kernel"
    COLLECTIVE = "collective"
    PART = "part"
    FILL = "fill"
    REGIONS = "regions"


@dataclasses.dataclass(eq=False, slots=True)
class Node:
    """Describes an operation.

    **Attributes:**

    - `name`: of its primitive. `kind`: what it does. `params`: of its equation.
    - `inputs`, `outputs`: numbers of values.
    - `dims`: how dims of these run along each other; None where that is not known.
    - `regions`: what it runs, for a loop or a branch. `num_carry`: of a loop, how many values it hands on.
    - `manual`: mesh axes over which its shapes are those of a part already.
    - `origin`: the equation that it was read of, behind those around it; empty for what compilers add.
    """

    name: str
    kind: Kind
    inputs: list[int]
    outputs: list[int]
    dims: DimMap | None = None
    params: Any = None
    regions: tuple[Region, ...] = ()
    num_carry: int = 0
    manual: frozenset[str] = frozenset()
    origin: tuple[Any, ...] = ()

    @property
    def is_rare(self) -> bool:
        """Whether it hardly ever runs, by the scope around it: for all rows of a table, or for the rest of them, where
        there was no room for those that a step read."""
        return any(_RARE.search(name) for name in _compat.name_stacks(self.origin))


def views_of(node: Node, value: int) -> list[int]:
    """Returns the results of a view that look at a `value`: each at its own operand where there are as many, else all
    at the first."""
    if len(node.inputs) == len(node.outputs):
        return [view for read, view in zip(node.inputs, node.outputs, strict=True) if read == value]
    return node.outputs if value == node.inputs[0] else []


def look_through(program: Program, node: Node, seen: dict[int, int]) -> None:
    """Adds to `seen` the results of a view of the same shape, each with the value behind all such views."""
    if node.kind is Kind.VIEW and len(node.inputs) == 1:
        (value,) = node.inputs
        for view in node.outputs:
            if program.shapes[value] == program.shapes[view]:
                seen[view] = seen.get(value, value)


@dataclasses.dataclass(eq=False, slots=True)
class Region:
    """Holds nodes in program order.

    **Attributes:** `nodes`: the nodes. `inputs`: values that come in beside those of the regions around it: a loop's
    carry. `outputs`: what it hands on."""

    nodes: list[Node]
    inputs: list[int]
    outputs: list[int]


@dataclasses.dataclass(eq=False)
class Program:
    """Holds a step.

    **Attributes:**

    - `body`: its region, whose inputs are the arguments. `constants`: values that are part of the program.
    - `shapes`, `itemsizes`: by value, its dims as the traced step has them, and the bytes of an element.
    - `splits`: by value, how it is split. `fixed`: (value, dim) whose split is decided.
    - `sizes`: of the mesh axes. `others`: by name, axes of other meshes that are none of these; what is split over them
      is so by the user's word, and they are not spread. `zeros`: values that are zeros and nothing else.
    """

    body: Region
    constants: set[int]
    shapes: list[tuple[int, ...]]
    itemsizes: list[int]
    splits: list[Split]
    fixed: set[tuple[int, int]]
    sizes: dict[str, int]
    zeros: set[int] = dataclasses.field(default_factory=set)
    others: dict[str, OtherAxis] = dataclasses.field(default_factory=dict)

    def new(self, shape: Sequence[int], itemsize: int, split: Split | None = None) -> int:
        """Adds a value of this `shape`, `itemsize` and `split`, and returns its number."""
        self.shapes.append(tuple(shape))
        self.itemsizes.append(itemsize)
        self.splits.append(((),) * len(shape) if split is None else split)
        return len(self.shapes) - 1

    def fix(self, value: int, split: Sequence[Axes | None]) -> None:
        """Decides how a value is split, but for dims where `split` has None, which stay open."""
        for dim, axes in enumerate(split):
            if axes is not None:
                self.fixed.add((value, dim))
        self.splits[value] = tuple(axes or () for axes in split)

    def num_parts(self, axes: Axes) -> int:
        """Returns into how many parts a dim is split over `axes`."""
        count = 1
        for axis in axes:
            count *= self.others[axis].size if axis in self.others else self.sizes[axis]
        return count

    def crossed(self, axes: Axes) -> Axes:
        """Returns `axes` with the mesh axes that it crosses for each of another mesh."""
        mesh_axes = [each for axis in axes for each in (self.others[axis].crosses if axis in self.others else (axis,))]
        return tuple(dict.fromkeys(mesh_axes))

    def part_of(self, value: int) -> tuple[int, ...]:
        """Returns the shape of what a device has of a value."""
        return tuple(
            -(-size // self.num_parts(axes)) if axes else size
            for size, axes in zip(self.shapes[value], self.splits[value], strict=True)
        )

    def bytes_of(self, value: int) -> int:
        """Returns the bytes that a device has of a value."""
        return self.itemsizes[value] * math.prod(self.part_of(value))
