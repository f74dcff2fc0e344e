"""Names parts of a mesh axis: some of the devices along it, at even distances.

Heads of which there are fewer than devices lie over a part of an axis, and are copied over the rest of it. A part is
named as Shardy names it (openxla.org/shardy, sub-axes): of an axis `tensor` of 4 devices, `tensor:(1)2` is the major
part, of 2 groups of neighbours, and `tensor:(2)2` the minor one, of the 2 neighbours in a group. The number in
parentheses is the product of the sizes of the parts before it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

_PART = re.compile(r"(?P<axis>.+):\((?P<before>[1-9][0-9]*)\)(?P<size>[1-9][0-9]*)")


@dataclasses.dataclass(frozen=True)
class AxisPart:
    """Names a part of a mesh axis.

    - `axis`: the axis. `before`: the product of the sizes of the parts that are major to this one.
    - `size`: how many devices along it differ in this part alone.
    """

    axis: str
    before: int
    size: int

    def __str__(self) -> str:
        return f"{self.axis}:({self.before}){self.size}"


def read_part(name: str) -> AxisPart | None:
    """Returns the part of an axis that `name` names; None where it names no part."""
    found = _PART.fullmatch(name)
    return None if found is None else AxisPart(found["axis"], int(found["before"]), int(found["size"]))


def whole_axis(name: str) -> str:
    """Returns the axis that `name` names, or names a part of."""
    part = read_part(name)
    return name if part is None else part.axis


def part_of_places(axis: str, places: Sequence[int], num_devices: int) -> str | None:
    """Returns the name of an axis of `num_devices`, or of a part of it, in which the devices at these `places` along it
    differ, in ascending order; None where they are not all of a part."""
    size = len(places)
    if size == num_devices:
        return axis
    step = places[1] - places[0] if size > 1 else 0
    if step < 1 or num_devices % (step * size) or list(places) != list(range(places[0], places[-1] + 1, step)):
        return None
    # The part's devices lie within one of the `before` blocks that are major to it.
    is_one_block = places[0] // (step * size) == places[-1] // (step * size)
    return str(AxisPart(axis, num_devices // (step * size), size)) if is_one_block else None
