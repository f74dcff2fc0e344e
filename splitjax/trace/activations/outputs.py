"""Finds the biases that stand behind products: what belongs to a layer's output where they are split as its columns
are.

A flat step comes in, `Output`s come out. They exist because columns that leave their devices do so behind these: before
them, each device would need all of a bias that is stored in parts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from splitjax.trace.activations.added import MOVES, SUMS
from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FlatStep

Dims = tuple[tuple[int, ...], ...]
Site = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Output:
    """Says what the output of a use of a weight goes through before anything else is done with it.

    - `use`: the site of the use. `dims`: of its result.
    - `behind`: the additions of vectors that parameters are, in program order: of each its site, the dims of its
      result, and the path of the parameter.
    """

    use: Site
    dims: Dims
    behind: tuple[tuple[Site, Dims, str], ...]


def find_outputs(
    flat: FlatStep,
    classes: Classes,
    weights: frozenset[int],
    sources: Sequence[frozenset[int]],
    params: Mapping[int, str],
) -> Iterator[Output]:
    """Yields the output of every use in a gradient boundary, in program order.

    **Arguments:** `weights`: the positions of operations that use a parameter. `sources`: by value, the positions of
    the arguments that it is made of alone. `params`: by position of an argument, the path of a parameter that is a
    vector."""
    readers: dict[int, list[int]] = {}
    for number, op in enumerate(flat.ops):
        if op.inside and op.phase != BACKWARD:
            for value in dict.fromkeys(op.inputs):
                readers.setdefault(value, []).append(number)
    dims = lambda value: classes.dims(value, len(flat.shapes[value]))
    for number in sorted(weights):
        op = flat.ops[number]
        if not op.inside or op.phase == BACKWARD or len(op.outputs) != 1:
            continue
        behind, at = [], op
        while len(reading := readers.get(at.outputs[0], ())) == 1:
            (value,), at = at.outputs, flat.ops[reading[0]]
            others = [other for other in at.inputs if other != value]
            if len(at.outputs) != 1 or at.trips != op.trips or not at.editable:
                break
            if at.primitive in SUMS and len(others) == 1:
                paths = [params.get(source, "") for source in sources[others[0]]]
                if len(paths) != 1 or not paths[0]:
                    break
                behind.append((at.site, dims(at.outputs[0]), paths[0]))
            elif at.primitive not in MOVES or others:
                break
        yield Output(op.site, dims(op.outputs[0]), tuple(behind))
