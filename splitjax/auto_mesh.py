"""Says which meshes are searched where a step leaves its mesh to be chosen (`mesh="auto"`).

What a user asks for and a number of devices come in, shapes of meshes come out. No device is looked at here.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar

from splitjax.errors import MeshError
from splitjax.mesh import MeshShape

T = TypeVar("T")
# As users write it: short for `AutoMesh()`.
AutoWord = Literal["auto"]
AUTO: AutoWord = "auto"
_AXES = ("data", "model")
# Axes that a mesh may have besides, with how many of all devices at least: data parallelism whose weights are stored in
# parts within groups alone, and experts with examples of their own.
_STORAGE, _EXPERT = "fsdp", "expert"


@dataclasses.dataclass(frozen=True)
class AutoMesh:
    """Asks for a mesh that is chosen when the first call of a step is planned.

    **Attributes:**

    - `num_devices`: how many devices it has; None for all that JAX sees. With more than these the step can be planned
      and lowered, and does not run.
    - `axes`: their names, the major one first. What is searched are all sizes whose product is the number of devices,
      1 included, so that a step may name each of these axes on whatever mesh is chosen. Meshes of `data` and `model`
      may have a third axis between these, `fsdp` or `expert`, and the order of their axes is chosen where slow links
      join hosts, which the major axes cross; those of axes that you name have these alone, in your order.

    Raises `MeshError` for other numbers and names."""

    num_devices: int | None = None
    axes: tuple[str, ...] = _AXES

    def __post_init__(self) -> None:
        count = self.num_devices
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise MeshError(
                "a mesh is chosen for a number of devices",
                value=count,
                place="AutoMesh, num_devices",
                remedy="give a whole number above 0, or None for all devices that JAX sees",
            )
        named = isinstance(self.axes, Sequence) and not isinstance(self.axes, str)
        if not named or not self.axes or not all(isinstance(axis, str) and axis for axis in self.axes):
            raise MeshError(
                "a mesh that is chosen has named axes",
                value=self.axes,
                place="AutoMesh, axes",
                remedy='give their names, such as ("data", "model")',
            )
        if len(set(self.axes)) < len(self.axes):
            raise MeshError(
                "two axes of a mesh have one name",
                value=self.axes,
                place="AutoMesh, axes",
                remedy="name every axis once",
            )
        object.__setattr__(self, "axes", tuple(self.axes))

    def __str__(self) -> str:
        return f"a mesh to be chosen over {', '.join(self.axes)}"

    def shapes(self, num_devices: int) -> tuple[MeshShape, ...]:
        """Returns the meshes that are searched, those with the most devices on the first axis first. `num_devices`: of
        each."""
        return tuple(_shapes(self.axes, num_devices))

    def further(self, num_devices: int, num_experts: Sequence[int] = ()) -> tuple[MeshShape, ...]:
        """Returns the meshes with a third axis that are searched besides: none where axes were named.

        **Arguments:** `num_devices`: of each. `num_experts`: of every layer that has some; an axis of experts divides
        them all."""
        if self.axes != _AXES:
            return ()
        data, model = _AXES
        stored = [shape for shape in _shapes((data, _STORAGE, model), num_devices) if shape.size((_STORAGE,)) > 1]
        experts = [shape for shape in _shapes((data, _EXPERT, model), num_devices) if shape.size((_EXPERT,)) > 1]
        divides = lambda shape: all(count % shape.size((_EXPERT,)) == 0 for count in num_experts)
        return (*stored, *(shape for shape in experts if num_experts and divides(shape)))

    def orders(self, shape: MeshShape) -> tuple[MeshShape, ...]:
        """Returns the meshes of the axes and sizes of a `shape` that stand in another order: none where axes were
        named. Axes of one device keep their places."""
        if self.axes != _AXES:
            return ()
        wide = [axis for axis, size in shape.axes if size > 1]
        found = []
        for order in itertools.permutations(wide):
            moved = iter(order)
            names = (next(moved) if size > 1 else axis for axis, size in shape.axes)
            found.append(dataclasses.replace(shape, axes=tuple((axis, shape.sizes[axis]) for axis in names)))
        return tuple(found[1:])


def mesh_asked_for(mesh: T | AutoWord) -> T | AutoMesh:
    """Returns what the option `mesh` asks for: `"auto"` as an `AutoMesh`, anything else as it is."""
    return AutoMesh() if isinstance(mesh, str) and mesh == AUTO else mesh


def mesh_shapes(num_devices: int) -> tuple[MeshShape, ...]:
    """Returns the meshes of `num_devices` devices that are searched where nothing is said of their axes."""
    return AutoMesh().shapes(num_devices)


def _shapes(axes: Sequence[str], num_devices: int) -> Iterator[MeshShape]:
    for sizes in _sizes(num_devices, len(axes)):
        yield MeshShape(tuple(zip(axes, sizes, strict=True)))


def _sizes(product: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yields all tuples of `count` sizes with this product, the largest first sizes first."""
    if count == 1:
        yield (product,)
        return
    for first in range(product, 0, -1):
        if product % first == 0:
            yield from ((first, *rest) for rest in _sizes(product // first, count - 1))
