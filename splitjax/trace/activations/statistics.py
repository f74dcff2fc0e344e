"""Finds the statistics of a batch: sums of activations over all examples that running averages are made of, as batch
normalisation has them (Ioffe and Szegedy, "Batch Normalization", arXiv 1502.03167).

A flat step and its state come in, `Statistic`s come out. They exist because such a sum is an all-reduce over the
devices that have the examples, and so is the sum of the cotangents of what is made of it and laid along the examples
again: the mean that is subtracted, the standard deviation that is divided by. What is multiplied with a parameter
before that needs no sum of its own: that parameter's gradient is made of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping

from splitjax.trace.classes import Classes
from splitjax.trace.flatten import BACKWARD, FORWARD, FlatStep

_SUMS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})


@dataclasses.dataclass(frozen=True)
class Statistic:
    """Describes the sums of a batch that the running average of a leaf is made of, without those of earlier leaves.

    - `leaf`: its path.
    - `sums`: the elements of each sum. `laid`: the elements of each value of them that is laid along the examples
      again, and whose cotangent is summed over these. `dtype`: of all of them.
    - `scales`: the paths of parameters that such a value was multiplied with before.
    - `trips`: how often the sums are taken per step.
    """

    leaf: str
    sums: tuple[int, ...]
    laid: tuple[int, ...]
    scales: tuple[str, ...]
    dtype: str
    trips: int


def find_statistics(
    flat: FlatStep, classes: Classes, examples: Collection[int], averages: Mapping[str, int], params: Mapping[int, str]
) -> tuple[Statistic, ...]:
    """Returns the statistics of `flat` by leaf, in the order of the leaves.

    **Arguments:** `classes`: the dim classes. `examples`: the atoms of the example dim. `averages`: by path of a state
    that is no parameter, the value that it has after the step. `params`: by the values of parameters, their paths."""
    makers = {value: number for number, op in enumerate(flat.ops) for value in op.outputs}

    def has_examples(value: int) -> bool:
        return any(atoms and atoms[0] in examples for atoms in classes.dims(value, len(flat.shapes[value])))

    sums: dict[int, str] = {}
    for path, value in averages.items():
        for number in () if has_examples(value) else _sums_behind(value, flat, makers, has_examples):
            sums.setdefault(number, path)
    laid, scales = _laid(flat, sums, has_examples, params)
    found = []
    for path in averages:
        ops = [flat.ops[number] for number in sorted(sums) if sums[number] == path]
        sizes = [math.prod(flat.shapes[op.outputs[0]]) for op in ops]
        if ops and min(sizes) > 1:
            found.append(
                Statistic(
                    path, tuple(sizes), tuple(laid.get(path, ())), tuple(sorted(scales.get(path, ()))),
                    flat.dtypes[ops[0].outputs[0]], ops[0].trips,
                )
            )  # fmt: skip
    return tuple(found)


def _sums_behind(
    value: int, flat: FlatStep, makers: Mapping[int, int], has_examples: Callable[[int], bool]
) -> Iterator[int]:
    """Yields the positions of the sums over examples that a `value` is made of, with nothing that has examples between
    them and it. `makers`: by value, the position of the operation that makes it."""
    seen, left = {value}, [value]
    while left:
        number = makers.get(left.pop())
        if number is None:
            continue
        op = flat.ops[number]
        if op.primitive in _SUMS and has_examples(op.inputs[0]):
            yield number
            continue
        for before in op.inputs:
            if before not in seen and not has_examples(before):
                seen.add(before)
                left.append(before)


def _laid(
    flat: FlatStep, sums: Mapping[int, str], has_examples: Callable[[int], bool], params: Mapping[int, str]
) -> tuple[dict[str, list[int]], dict[str, set[str]]]:
    """Returns, by path of a running average, the elements of each value that is made of its sums alone and laid along
    the examples in a computation that is differentiated; and the parameters that others of such values are made of,
    too."""
    owner = {flat.ops[number].outputs[0]: path for number, path in sums.items()}
    made_of: dict[int, frozenset[str]] = {value: frozenset({path}) for value, path in params.items()}
    laid: dict[str, list[int]] = {}
    scales: dict[str, set[str]] = {}
    for number, op in enumerate(flat.ops) if sums else ():
        if number in sums or op.phase == BACKWARD or not op.outputs:
            continue
        made = [value for value in op.inputs if value in owner]
        if made and has_examples(op.outputs[0]):
            for value in made:
                if value in made_of:
                    scales.setdefault(owner[value], set()).update(made_of[value])
                elif op.inside or op.phase == FORWARD:
                    laid.setdefault(owner[value], []).append(math.prod(flat.shapes[value]))
        elif not any(map(has_examples, op.outputs)):
            owner.update(dict.fromkeys(op.outputs, owner[made[0]]) if made else {})
            of_params = frozenset().union(*(made_of.get(value, ()) for value in op.inputs))
            made_of.update(dict.fromkeys(op.outputs, of_params) if of_params else {})
    return laid, scales
