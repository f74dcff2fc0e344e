"""Says which donated arguments a compiler copies before it writes results over them, and what it puts in their places.

XLA's CPU compiler decides about copies before it orders the steps. Where a reader of an argument need not run before
the step that writes over it, as the product that passes a gradient on does not before the update of its weight, all
readers read a copy, which is made in front of the first of them (`copy` in the module). Until the result is written
nothing is stored in the argument's place, and temporaries that fit in there are (`BufferAssigner`, which tries the
smallest place first, for the largest arrays first). `tests/cost/memory/test_donating.py` compares small modules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from splitjax.cost.memory.orders import waits
from splitjax.cost.memory.program import Kind, Node, Program
from splitjax.cost.memory.schedule import Place, Schedule, Step


def copy_donated(
    schedule: Schedule, donated: Mapping[int, int], program: Program, sizes: dict[int, int], makers: dict[int, Node]
) -> None:
    """Adds the copies of donated arguments to a `schedule`, and the places that they leave.

    **Arguments:** `donated`: by argument the buffer of the result that is written over it. `program`, `sizes`,
    `makers`: have the shapes of values, their bytes and what makes them; they get those of the copies."""
    steps = schedule.steps
    writer = {buffer: number for number, step in enumerate(steps) for buffer in step.writes}
    readers: dict[int, list[int]] = {}
    for number, step in enumerate(steps):
        for buffer in dict.fromkeys(step.reads):
            # What reads some rows of a table, XLA leaves to its scatter in place.
            if step.read_bytes.get(buffer, sizes.get(buffer, 0)) >= sizes.get(buffer, 0):
                readers.setdefault(buffer, []).append(number)
    bits = {id(steps[number]): bit for bit, number in enumerate({n for each in donated for n in readers.get(each, ())})}
    needs = waits(steps, bits)
    places, copies = [], []
    for argument, result in donated.items():
        last = writer.get(result)
        if last is None:
            continue
        if all(number == last or needs[last] >> bits[id(steps[number])] & 1 for number in readers.get(argument, ())):
            continue
        # Some reader may run behind the step that writes the result.
        copy = program.new(program.shapes[argument], program.itemsizes[argument], program.splits[argument])
        sizes[copy] = sizes[argument]
        makers[copy] = Node("copy", Kind.KERNEL, [argument], [copy])
        _read_instead(schedule, argument, copy)
        copies.append(Step("copy", [argument], [copy]))
        places.append(Place(copy, result, sizes[copy]))
    schedule.steps[:0] = copies
    schedule.places = tuple(places)


def _read_instead(schedule: Schedule, buffer: int, copy: int) -> None:
    """Makes all that reads a `buffer` read its `copy`, in loops and branches too."""
    for step in schedule.steps:
        if buffer in step.reads:
            step.reads = [copy if each == buffer else each for each in step.reads]
            if buffer in step.read_bytes:
                step.read_bytes = {copy if each == buffer else each: size for each, size in step.read_bytes.items()}
        for inside in step.inside:
            _read_instead(inside, buffer, copy)
    schedule.outputs = [copy if each == buffer else each for each in schedule.outputs]


def in_places(
    places: Sequence[Place], steps: Sequence[Step], first: Mapping[int, int], last: Mapping[int, int],
    sizes: Mapping[int, int],
) -> set[int]:  # fmt: skip
    """Returns the buffers that are stored in `places`, and so need nothing of their own.

    **Arguments:** `steps`: in the order in which they run. `first`, `last`: by buffer the step that writes it and the
    last that reads it, by their number in this order. `sizes`: bytes by buffer."""
    found: set[int] = set()
    taken: dict[int, list[tuple[int, int]]] = {place.copy: [] for place in places}
    own = {place.result for place in places}
    by_size = sorted(places, key=lambda place: place.num_bytes)
    for buffer in sorted(first, key=lambda each: (-sizes[each], first[each])):
        if buffer in own:
            continue
        for place in by_size:
            begin, end = first[place.copy], first[place.result]
            fits = place.num_bytes >= sizes[buffer] and buffer != place.copy and first[buffer] > begin
            # The step that writes the result may write over what it reads.
            if not fits or last[buffer] > end - (not steps[end].shares):
                continue
            if all(stop < first[buffer] or start > last[buffer] for start, stop in taken[place.copy]):
                taken[place.copy].append((first[buffer], last[buffer]))
                found.add(buffer)
                break
    return found
