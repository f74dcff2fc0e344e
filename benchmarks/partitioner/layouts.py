"""Meshes, and the layouts that rule sets can give to a batch and to weights on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.partitioner.draw import Case, Dice, Draw, Input, Layout, Mesh

MESHES: tuple[Mesh, ...] = (
    (("data", 2), ("model", 4)),
    (("data", 4), ("model", 2)),
    (("data", 2), ("model", 2), ("expert", 2)),
    (("data", 2), ("model", 4)),
    (("data", 2), ("model", 2), ("expert", 2)),
    (("data", 1), ("model", 8)),
    (("data", 2), ("model", 2)),
    (("data", 8), ("model", 1)),
)
# So many numbers in a row share a mesh, and so may share a compile.
RUN = 32


def mesh_of(number: int) -> Mesh:
    """The mesh of the program of this number."""
    return MESHES[number // RUN % len(MESHES)]


def draw_layouts(dice: Dice, mesh: Mesh, case: Case) -> tuple[Layout, ...]:
    """A layout for every input. In most draws at least one axis splits nothing, so that what is computed is the same
    along it."""
    axes = [axis for axis, size in mesh if size > 1]
    if len(axes) > 1 and dice.chance(0.65):
        keep = dice.randint(1, len(axes) - 1)
        axes = sorted(dice.sample(axes, keep), key=axes.index)
    if dice.chance(0.5):
        batch = tuple(axes)
    elif "data" in axes and dice.chance(0.7):
        batch = ("data",)
    else:
        batch = tuple(dice.sample(axes, dice.randint(0, len(axes))))
    sizes = dict(mesh)
    return tuple(_layout(dice, one, batch, axes, sizes) for one in case.inputs)


def _layout(dice: Dice, one: Input, batch: tuple[str, ...], axes: Sequence[str], sizes: dict[str, int]) -> Layout:
    dims: list[tuple[str, ...]] = [() for _ in one.shape]
    if one.role == "other" or not one.shape:
        return tuple(dims)
    if one.role == "data":
        dims[0] = batch
        while one.shape[0] % math.prod(sizes[axis] for axis in dims[0]):
            dims[0] = dims[0][:-1]
        if one.values == "key" or not dice.chance(0.25):
            return tuple(dims)
    elif dice.chance(0.35):
        return tuple(dims)
    free = [axis for axis in axes if axis not in dims[0]]
    places = [d for d in range(len(dims)) if not dims[d]]
    dice.shuffle(free)
    dice.shuffle(places)
    for place in places:
        taken: tuple[str, ...] = ()
        for axis in free:
            if one.shape[place] % math.prod(sizes[a] for a in (*taken, axis)) == 0 and (not taken or dice.chance(0.5)):
                taken = (*taken, axis)
        dims[place] = taken
        free = [axis for axis in free if axis not in taken]
        if not free or dice.chance(0.3):
            break
    return tuple(dims)


def fits(draw: Draw, case: Case) -> bool:
    """Whether every split dim divides, and every layout has the rank of its input."""
    sizes = dict(draw.mesh)
    if len(draw.layouts) != len(case.inputs):
        return False
    for one, layout in zip(case.inputs, draw.layouts, strict=True):
        if len(layout) != len(one.shape):
            return False
        if any(size % math.prod(sizes[axis] for axis in axes) for size, axes in zip(one.shape, layout, strict=True)):
            return False
    return True
