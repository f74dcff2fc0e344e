"""Finds the planned sums of gradients that XLA compiled into a single collective.

What is known of compiled collectives and the planned sums that are still without one go in; which of them a compiled
one realises comes out. Where this happens:

- A plan sums a gradient onto parts of it over some axes, and each part over the rest. XLA sums over all axes at once.
- A recurrent cell computes its gates as one product, whose gradient holds those of all of them side by side,
  perhaps split over axes that split none of them.
- Biases that are added to the same value get the same gradient, and XLA computes and sums it once.

Nor need the sum of a table's gradient be a sum: where examples are few, XLA brings their ids and cotangents together
and adds up all of them on every device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from splitjax.cost.ring import carried_bytes
from splitjax.mesh import MeshShape
from splitjax.plan import Collective
from splitjax.report.evidence import Evidence
from splitjax.report.subject import GRADIENT, is_part_of

# By number of a planned collective: the parameter whose gradient it sums, and the collective.
Sums = Mapping[int, tuple[str, Collective]]


def further_axes(
    evidence: Sequence[Evidence], realised: Mapping[int, Sequence[Collective]], sums: Sums
) -> dict[int, int]:
    """Finds the sums of a gradient over further axes of a collective that already realises its sum over some.

    **Arguments:**

    - `evidence`: what is known of each compiled collective.
    - `realised`: the planned collectives that each realises, by its position.
    - `sums`: the planned sums of gradients that none realises.

    Returns for the numbers of the sums the position of the compiled collective.
    """
    places: dict[int, int] = {}
    taken = {position: {axis for planned in here for axis in _axes(planned)} for position, here in realised.items()}
    for number, (param, planned) in sums.items():
        for position, compiled in enumerate(evidence):
            own = set(compiled.collective.axis.split("+"))
            free = own - taken.get(position, own)
            if (compiled.about, compiled.leaf) == (GRADIENT, param) and set(_axes(planned)) <= free:
                places[number] = position
                taken[position] |= set(_axes(planned))
                break
    return places


def summed_together(
    evidence: Sequence[Evidence], free: Iterable[int], sums: Sums, mesh: MeshShape
) -> dict[int, tuple[int, ...]]:
    """Finds compiled collectives that hold the gradients of several parameters, side by side or as one that all of them
    get.

    **Arguments:**

    - `evidence`: what is known of each compiled collective.
    - `free`: the positions of those that may realise some: none that has a planned one of its own, but for a sum over
      workers of which only one parameter is in its name.
    - `sums`: the planned sums of gradients that none realises.
    - `mesh`: of the step.

    Returns by position the numbers of the planned sums, in the plan's order. Their arrays are as large as the compiled
    one, all together (or in parts, over axes that are not summed over) or each of them: nothing else is taken for a sum
    of theirs.
    """
    left = dict(sums)
    together: dict[int, tuple[int, ...]] = {}
    for position in free:
        compiled = evidence[position]
        axes = set(compiled.collective.axis.split("+"))
        numbers = [
            number
            for number, (param, planned) in left.items()
            if param in compiled.shared_by and set(_axes(planned)) <= axes
        ]
        arrays: dict[str, float] = {}  # by parameter; the first of its sums takes the whole gradient
        for number in numbers:
            param, planned = left[number]
            arrays[param] = max(
                arrays.get(param, 0.0), carried_bytes(planned.op, mesh.size(_axes(planned)), planned.bytes)
            )
        own = compiled.collective.local_bytes
        alike = all(math.isclose(own, array, rel_tol=0.01) for array in arrays.values())
        if numbers and (alike or is_part_of(own, sum(arrays.values()), compiled.collective.axis, mesh)):
            together[position] = tuple(numbers)
            for number in numbers:
                del left[number]
    return together


def gathered_examples(evidence: Sequence[Evidence], free: Iterable[int], sums: Sums) -> dict[int, tuple[int, ...]]:
    """Finds gathers of ids and cotangents that take the place of a sum of a table's gradient.

    **Arguments:**

    - `evidence`: what is known of each compiled collective.
    - `free`: the positions of those that realise no planned one.
    - `sums`: the planned sums of gradients that none realises.

    Returns by the number of a sum the positions of the gathers, whose values are added as rows to the gradient
    (`Evidence.rows_of`).
    """
    places: dict[int, tuple[int, ...]] = {}
    left = list(free)
    for number, (param, planned) in sums.items():
        here = [
            position
            for position in left
            if (evidence[position].rows_of, evidence[position].collective.axis) == (param, planned.axis)
        ]
        if here:
            places[number] = tuple(here)
            left = [position for position in left if position not in here]
    return places


def _axes(planned: Collective) -> tuple[str, ...]:
    return tuple(planned.axis.split("+"))
