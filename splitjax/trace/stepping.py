"""Finds the loops around the gradient: loops over microbatches that a step writes by hand, and several steps in one.

A flat step and the classes of its dims go in; out comes which dims of the batch count such a loop's turns, and where
the examples lie then. It exists because these dims look like examples: they are the leading dims of the batch, and of
what is made of it. Split over devices they would be useless, since a loop's turns run one after the other on all of
them.

A batch that is reshaped from [examples] to [turns, examples / turns] is found, too: consecutive examples lie on one
device, and consecutive examples are one turn's, so devices that share the examples of every turn exchange them there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from splitjax.trace.classes import Atoms, Classes, Strength
from splitjax.trace.flatten import BACKWARD, FORWARD, FlatStep, Op


@dataclasses.dataclass(frozen=True)
class Stepping:
    """Says how the loops around the gradient read the batch.

    - `turns`: soft labels of the dims that count turns of these loops.
    - `example_dims`: of each batch value, the dim that holds its examples: the first one that is not counted away.
    """

    turns: frozenset[int]
    example_dims: tuple[int, ...]


def find_stepping(flat: FlatStep, batch: Sequence[int], atoms: Atoms, soft: Sequence[int]) -> Stepping:
    """Finds the dims of the batch that loops around the gradient count.

    **Arguments:** `flat`: the flat step. `batch`: its batch values that have dims. `atoms`: the atoms of all dims.
    `soft`: per atom the label of its soft class.

    A loop is around the gradient if its body takes one: it holds a gradient boundary, or a forward and a backward pass;
    a loop that is differentiated as a whole has its passes in two loops. Where no examples would be left in some batch
    value (a loop over single examples), or values would disagree on their number behind a dim that is all turns,
    nothing is counted away: what the loop reads are examples then.
    """
    nothing = Stepping(frozenset(), (0,) * len(batch))
    loops = around_gradients(flat)
    if not loops:
        return nothing
    turned = [op for op in flat.ops if reads_a_turn(op, flat) and not loops.isdisjoint(op.loops[-1:])]
    turns: set[int] = set()
    dims = [0] * len(batch)
    while True:
        examples = {soft[a] for value, dim in zip(batch, dims, strict=True) for a in atoms.dim(value, dim)} - turns
        counted = {soft[a] for op in turned for a in atoms.dim(op.inputs[0], 0)} & examples
        if not counted:
            break
        turns |= counted
        for number, value in enumerate(batch):
            # A dim that turns leave nothing of hands its role to the next one.
            if turns.issuperset(soft[a] for a in atoms.dim(value, dims[number])):
                dims[number] += 1
                if dims[number] == len(flat.shapes[value]):
                    return nothing
    moved = {flat.shapes[value][dim] for value, dim in zip(batch, dims, strict=True) if dim}
    return Stepping(frozenset(turns), tuple(dims)) if turns and len(moved) < 2 else nothing


def reads_a_turn(op: Op, flat: FlatStep) -> bool:
    """Tells whether an operation reads, of its first operand, what stands at a single position of the first dim: a
    scan its slice, `batches[i]` what belongs to turn `i`."""
    if op.primitive == "_scan_in":
        return True
    shape = flat.shapes[op.inputs[0]] if op.inputs else ()
    if op.primitive == "dynamic_slice":
        sizes = op.params["slice_sizes"]
        return len(shape) > 1 and sizes[0] == 1 < shape[0] and tuple(sizes[1:]) == shape[1:]
    if op.primitive == "gather":
        numbers = op.params["dimension_numbers"]
        return (*numbers.start_index_map, *numbers.collapsed_slice_dims) == (0, 0) and flat.shapes[op.inputs[1]] == (1,)
    return False


def count_turns(flat: FlatStep, sources: Sequence[frozenset[int]]) -> dict[int, int]:
    """Returns how often per step the gradient of a parameter is taken, by leaf index, where a loop around the gradient
    takes it more than once. `sources`: per value the parameters (leaf indices) that it is made of."""
    loops = around_gradients(flat)
    trips = {op.loops[-1]: op.trips for op in flat.ops if op.loops and op.loops[-1] in loops}
    turns: dict[int, int] = {}
    for op in flat.ops if loops else ():
        times = max((trips.get(loop, 1) for loop in op.loops), default=1)
        if times > 1:
            for leaf in {leaf for value in op.inputs for leaf in sources[value]}:
                turns[leaf] = max(times, turns.get(leaf, 1))
    return turns


@dataclasses.dataclass(frozen=True)
class TurnedBatch:
    """Describes a reshape that cuts the examples of a batch value into turns.

    - `site`: of the reshape. `leaf`: the path of the batch leaf whose examples these are.
    - `shape`, `dtype`: of its operand. `dim`: the position of the dim that holds the examples.
    - `turns`: how many turns it is cut into.
    - `leaf_dims`: by dim of the operand, the position of the dim of the batch leaf that it is, or that begins with the
      same index; None for none. They differ where a step transposes the batch, or adds and drops dims, before the cut.
    """

    site: tuple[int, ...]
    leaf: str
    shape: tuple[int, ...]
    dtype: str
    dim: int
    turns: int
    leaf_dims: tuple[int | None, ...]


def find_turned(
    flat: FlatStep,
    classes: Classes,
    stepping: Stepping,
    feeds: Sequence[frozenset[str]],
    examples: frozenset[int],
    batch: Mapping[str, int],
) -> Iterator[TurnedBatch]:
    """Yields the reshapes of `flat` that cut examples of one batch leaf into turns, in program order: those outside of
    loops and gradient boundaries, where the whole batch is there.

    **Arguments:** `classes`: the dim classes. `stepping`: which dims count turns. `feeds`: per value the batch leaves
    that it is made of. `examples`: the atoms of the example dim. `batch`: the values of the batch leaves, by path."""
    soft = classes.labels[Strength.SOFT]
    for op in flat.ops if stepping.turns else ():
        dim = _cut_dim(op, flat)
        if dim is None or op.loops or op.inside or op.phase == BACKWARD or not op.editable:
            continue
        value, (result,) = op.inputs[0], op.outputs
        turns, kept = classes.dims(result, len(flat.shapes[result]))[dim : dim + 2]
        is_turned = turns and stepping.turns.issuperset(soft[atom] for atom in turns)
        if is_turned and kept and kept[0] in examples and len(feeds[value]) == 1:
            (leaf,) = feeds[value]
            leaf_dims = _leaf_dims(flat, classes, value, batch[leaf], dim)
            shape, dtype = flat.shapes[value], flat.dtypes[value]
            yield TurnedBatch(op.site, leaf, shape, dtype, dim, flat.shapes[result][dim], leaf_dims)


def _leaf_dims(flat: FlatStep, classes: Classes, value: int, leaf: int, first: int) -> tuple[int | None, ...]:
    """Returns by dim of `value` the position of the dim of `leaf` that begins with the same index. The dim at `first`
    has the choice where several do; each dim of the leaf is given once."""
    labels = lambda of: [[classes.local(a) for a in dim] for dim in classes.dims(of, len(flat.shapes[of]))]
    own, given = labels(value), labels(leaf)
    found: dict[int, int] = {}
    for dim in sorted(range(len(own)), key=lambda dim: dim != first):
        alike = [d for d, other in enumerate(given) if other and own[dim] and _is_prefix(own[dim], other)]
        left = [d for d in alike if d not in found.values()]
        if left:
            found[dim] = dim if dim in left else left[0]
    return tuple(found.get(dim) for dim in range(len(own)))


def _is_prefix(one: Sequence[int], other: Sequence[int]) -> bool:
    """Tells whether the shorter of two runs of labels is how the longer one begins."""
    return all(a == b for a, b in zip(one, other, strict=False))


def _cut_dim(op: Op, flat: FlatStep) -> int | None:
    """Returns the position of the dim that a reshape cuts in two, where it does nothing else; else None."""
    if op.primitive != "reshape":
        return None
    before, after = flat.shapes[op.inputs[0]], flat.shapes[op.outputs[0]]
    if len(after) != len(before) + 1:
        return None
    dim = next((d for d, size in enumerate(before) if size != after[d]), len(before))
    is_cut = dim < len(before) and before[dim] == after[dim] * after[dim + 1] and before[dim + 1 :] == after[dim + 2 :]
    return dim if is_cut else None


def around_gradients(flat: FlatStep) -> frozenset[int]:
    """Returns the loops in whose body a gradient is taken."""
    phases: dict[int, set[str]] = {}
    for op in flat.ops:
        if op.loops and not op.inside:
            found = (FORWARD, BACKWARD) if op.primitive == "_gradient" else (op.phase,)
            for loop in op.loops:
                phases.setdefault(loop, set()).update(found)
    return frozenset(loop for loop, found in phases.items() if {FORWARD, BACKWARD} <= found)
