"""Finds recurrent weights: the same weight meets, in every step of a sequence, what it made in the step before.

A flat step and the positions of weights in it go in; the operations with a recurrent weight come out. Layers that
hold them get the kind "recurrent".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitjax.trace.flatten import BACKWARD, FlatStep
from splitjax.trace.flow import ValueFacts
from splitjax.trace.links import Linked
from splitjax.trace.stepping import around_gradients


def mark_recurrent(
    flat: FlatStep, linked: Linked, flow: ValueFacts, uses: Mapping[int, tuple[int, int]]
) -> frozenset[int]:
    """Finds the operations whose weight is recurrent.

    **Arguments:**

    - `flat`, `linked`, `flow`: the flat step, its links, and facts about its values.
    - `uses`: index of an operation with a weight -> operand positions of weight and data.

    **Returns** indices of operations among `uses`.

    In a loop that reads a sequence, the weight is the same in every iteration, and its result goes into what the loop
    carries, from where it comes back to its data in a later iteration. A stack of layers is none (its weight is a slice
    of a scanned operand), nor are a layer that is repeated without reading anything, an update loop (its weights are
    themselves carried), a head that only emits, one whose results are added up while its data come by a counter, and
    whatever a loop around the gradient reads turn by turn. The input projections of a cell, added to a recurrent one in
    the same step, count as recurrent too.
    """
    if not flat.carried:
        return frozenset()
    carried, feeding = _carry_dependence(flat), _feeds_carry(flat)
    sequences = _sequence_loops(flat, flow, carried) - around_gradients(flat)
    sliced = _sliced_in(flat, flow)
    recurrent: set[int] = set()
    for index, (weight, data) in uses.items():
        op = flat.ops[index]
        if op.phase == BACKWARD:
            continue
        w, x = op.inputs[weight], op.inputs[data]
        if any(
            loop in sequences
            and x in carried[loop]
            and w not in carried[loop]
            and loop not in sliced.get(w, ())
            and _comes_back(op.outputs[0], x, carried[loop], feeding[loop])
            for loop in op.loops
            if loop in carried  # a map carries nothing, though a loop beside it may
        ):
            recurrent.add(index)
    return frozenset(recurrent | _cell_inputs(flat, linked, uses, recurrent)) if recurrent else frozenset()


def find_state_reads(flat: FlatStep, linked: Linked, uses: Mapping[int, tuple[int, int]]) -> frozenset[int]:
    """Finds the operations among `uses` that read a state which they made in the iteration before: nothing mixes it
    with a weight on the way out of the loop and in again. `flat`, `linked`, `uses`: as for `mark_recurrent`."""
    states: dict[int, frozenset[int]] = {value: frozenset((value,)) for _, value in flat.carried}
    makers: dict[int, frozenset[int]] = {}
    read: dict[int, frozenset[int]] = {}
    given: dict[int, set[int]] = {}
    for index, op in enumerate(flat.ops if states else ()):
        if op.primitive == "_carry_back":
            result, state = op.inputs
            for use in makers.get(result, ()):
                given.setdefault(use, set()).add(state)
            continue
        if index in uses:
            read[index] = states.get(op.inputs[uses[index][1]], frozenset())
        if linked.mixing[index]:
            makers.update(dict.fromkeys(op.outputs if index in uses else (), frozenset((index,))))
            continue
        for known in (states, makers):
            behind = frozenset[int]().union(*(known[value] for value in op.inputs if value in known))
            if behind:
                known.update((value, behind | known.get(value, frozenset())) for value in op.outputs)
    return frozenset(index for index, own in read.items() if own & given.get(index, set()))


# By value of a loop's body, some of the values that enter the body as carries.
Carries = Mapping[int, frozenset[int]]


def _carry_dependence(flat: FlatStep) -> dict[int, Carries]:
    """Finds, per loop, the values of its body that depend on what the loop carries, each with the carries that it
    depends on within an iteration."""
    inside: dict[int, dict[int, frozenset[int]]] = {}
    for loop, value in flat.carried:
        inside.setdefault(loop, {})[value] = frozenset((value,))
    for op in flat.ops:
        for loop in op.loops:
            if loop in inside:
                _spread(inside[loop], op.inputs, op.outputs)
    return dict(inside)


def _feeds_carry(flat: FlatStep) -> dict[int, Carries]:
    """Finds, per loop, the values of its body that go into what the next iteration gets, each with the carries that
    they are a part of there."""
    feeding: dict[int, dict[int, frozenset[int]]] = {loop: {} for loop, _ in flat.carried}
    for op in reversed(flat.ops):
        if op.primitive == "_carry_back":
            result, value = op.inputs
            known = feeding[op.loops[-1]]
            known[result] = known.get(result, frozenset()) | {value}
            continue
        for loop in op.loops:
            if loop in feeding:
                _spread(feeding[loop], op.outputs, op.inputs)
    return dict(feeding)


def _spread(known: dict[int, frozenset[int]], given: Sequence[int], to: Sequence[int]) -> None:
    """Adds what is `known` of the values `given` to what is known of the values `to`."""
    found = frozenset[int]().union(*(known[value] for value in given if value in known))
    if found:
        known.update((value, found | known.get(value, frozenset())) for value in to)


def _comes_back(result: int, data: int, carried: Carries, feeding: Carries) -> bool:
    """Tells whether `result` is, by what a loop carries, a part of `data` in a later iteration. `carried`, `feeding`:
    of the loop."""
    wanted, reached = carried.get(data, frozenset()), frozenset[int]()
    new = feeding.get(result, frozenset())
    while new and wanted.isdisjoint(new):
        reached |= new
        new = frozenset[int]().union(*(feeding[carry] for carry in new if carry in feeding)) - reached
    return not wanted.isdisjoint(new)


def _sequence_loops(flat: FlatStep, flow: ValueFacts, carried: Mapping[int, Carries]) -> set[int]:
    """Finds the loops that read data by steps: scanned, or picked from a whole sequence with a carried index."""
    loops: set[int] = set()
    for op in flat.ops:
        if not op.loops or not op.inputs or not flow.data[op.inputs[0]] or flow.weights[op.inputs[0]]:
            continue
        loop = op.loops[-1]
        if op.primitive == "_scan_in":
            loops.add(loop)
        elif op.primitive in ("dynamic_slice", "gather") and op.inputs[0] not in carried.get(loop, ()):
            if any(v in carried.get(loop, ()) for v in op.inputs[1:]):
                loops.add(loop)
    return loops


def _sliced_in(flat: FlatStep, flow: ValueFacts) -> dict[int, frozenset[int]]:
    """Finds, per weight, the loops of which it is one iteration's slice."""
    sliced: dict[int, frozenset[int]] = {}
    for op in flat.ops:
        if op.primitive == "_carry_back":
            continue
        own = frozenset().union(*(sliced[v] for v in op.inputs if v in sliced))
        if op.primitive == "_scan_in":
            own |= {op.loops[-1]}
        if own:
            sliced.update((v, own) for v in op.outputs if flow.weights[v])
    return sliced


def _cell_inputs(flat: FlatStep, linked: Linked, uses: Mapping[int, tuple[int, int]], recurrent: set[int]) -> set[int]:
    """Finds the uses in the same loop whose result meets a recurrent one's before anything mixes again."""
    tags: dict[int, frozenset[int]] = {}
    inputs: set[int] = set()
    for index, op in enumerate(flat.ops):
        if not op.loops:
            continue
        if linked.mixing[index]:
            own = frozenset({index}) if index in uses else frozenset()
        else:
            own = frozenset().union(*(tags[v] for v in op.inputs if v in tags))
            here = {tag for tag in own if flat.ops[tag].loops == op.loops}
            if linked.joins[index] and here & recurrent:
                inputs.update(here)
        if own:
            tags.update((v, own) for v in op.outputs)
    return inputs
