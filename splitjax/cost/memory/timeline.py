"""Simulates what is alive: the most bytes that are stored at a time, for an order of the steps.

A buffer lives from the step that writes it to the last that reads it. Steps run in the order of one of XLA's
schedulers (`orders`): the depth-first one is what the CPU's compiler means by memory-optimised. The modules that it
dumps (`--xla_dump_to`) show the order, and which all-reduces it made one.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from splitjax.cost.memory.donating import in_places
from splitjax.cost.memory.orders import depth_first, frees_soon, greedy, made_late, post_order, waits
from splitjax.cost.memory.schedule import Schedule, Step

# For how many steps what frees memory waits on a TPU: of 4, 8, 12, 20 and 40 the one that is nearest to the cells that
# are not held out, within the bound. Its compiler hides latencies by moving steps apart, within such bounds.
_PATIENCE = 12

Kind = tuple[Any, ...]  # what all-reduces are put together by


def combine(
    schedule: Schedule,
    sizes: Mapping[int, int],
    limit: int,
    kind_of: Callable[[Step], Kind] = lambda step: step.combines,
) -> Schedule:
    """Puts all-reduces of one kind together, up to `limit` bytes, as XLA's `CollectiveCombiner` does: it goes through
    the steps from the last to the first of a plain post-order, and closes a group at the first all-reduce of its kind
    that a member waits for. What the members read stays in the order of the steps. `kind_of`: of what kind a step is,
    empty for one that stays as it is."""
    steps = list(schedule.steps)
    bits = {id(step): bit for bit, step in enumerate(step for step in steps if kind_of(step))}
    left = set(bits)
    if len(left) < 2:
        return schedule
    steps = [steps[i] for i in post_order(steps, schedule.outputs)]
    needs = waits(steps, bits)
    while left:
        members: list[int] = []
        needed = held = 0
        for i in range(len(steps) - 1, -1, -1):
            step = steps[i]
            if id(step) not in left or members and kind_of(step) != kind_of(steps[members[0]]):
                continue
            size = sum(sizes[b] for b in step.writes)
            if members and (needed >> bits[id(step)] & 1 or held + size > limit):
                break
            members.append(i)
            needed |= needs[i]
            held += size
        left -= {id(steps[i]) for i in members}
        if len(members) > 1:
            together = [steps[i] for i in reversed(members)]
            reads = [b for step in together for b in step.reads]
            writes = [b for step in together for b in step.writes]
            name = "all_reduces" if together[0].combines else together[0].name
            one = Step(
                name, reads, writes, together[0].shares, combines=together[0].combines, gathers=together[0].gathers
            )
            steps = [step for i, step in enumerate(steps) if i not in set(members)] + [one]
            steps = [steps[i] for i in post_order(steps, schedule.outputs)]
            needs = waits(steps, bits)
    return Schedule(steps, schedule.outputs, schedule.carry, schedule.places)


@dataclasses.dataclass(frozen=True)
class Peak:
    """Holds the most bytes that are stored at a time, and the buffers that are stored then, the largest first."""

    num_bytes: int
    alive: tuple[int, ...]


def combined(schedule: Schedule, sizes: Mapping[int, int], limit: int, gathers: bool = False) -> Schedule:
    """Returns `schedule` with its all-reduces put together, in what it runs inside too. `gathers`: all-gathers and
    reduce-scatters too. The other arguments are those of `combine`."""
    for step in schedule.steps:
        step.inside = tuple(combined(inside, sizes, limit, gathers) for inside in step.inside)
    if gathers:
        schedule = combine(schedule, sizes, limit, lambda step: step.gathers)
    return combine(schedule, sizes, limit)


class Order(enum.Enum):
    """Says what order of the steps a peak is of.

    - `DEPTH_FIRST`: that of XLA's depth-first scheduler.
    - `LEAST`: of the orders of XLA's three schedulers, what needs no input as late as can be, the one that needs least:
      what a compiler takes that is not told which (`DefaultMemoryScheduler`).
    - `MOST`: of the same three orders, the one that needs most.
    - `SOON`: plain post-order, with what needs no input as late as can be, and what frees memory soon
      (`orders.frees_soon`).
    - `CAREFUL`: the worse of depth-first and program order, with nothing written in place.
    """

    DEPTH_FIRST = "depth first"
    LEAST = "least"
    MOST = "most"
    SOON = "soon"
    CAREFUL = "careful"


def peak_of(schedule: Schedule, sizes: Mapping[int, int], free: set[int], order: Order = Order.DEPTH_FIRST) -> Peak:
    """Returns the peak of a schedule.

    **Arguments:** `sizes`: bytes by buffer. `free`: buffers that are counted elsewhere, such as arguments. `order`: in
    what order the steps run."""
    return _settled(schedule, sizes, free, order)[1]


def _settled(schedule: Schedule, sizes: Mapping[int, int], free: set[int], order: Order) -> tuple[_Run, Peak]:
    """Returns the run that an `order` settles on, and its peak; the arguments are those of `peak_of`."""
    steps, outputs = schedule.steps, schedule.outputs
    inner = [_inside(step, sizes, order) for step in steps]
    orders: list[Sequence[int]]
    if order is Order.SOON:
        orders = [frees_soon(steps, post_order(steps, outputs), sizes, outputs, free, _PATIENCE)]
    else:
        orders = [depth_first(steps, sizes, outputs)]
    if order in (Order.LEAST, Order.MOST):
        orders.append(post_order(steps, outputs))
        orders.append(greedy(steps, sizes, outputs, free, [peak.num_bytes for peak in inner]))
    if order in (Order.LEAST, Order.SOON):
        orders = [made_late(steps, each) for each in orders]
    if order is Order.CAREFUL:
        orders.append(range(len(steps)))
    runs = [_Run(schedule, each, sizes, free, order is Order.CAREFUL) for each in orders]
    found = [(run, _peak_in_order(run, inner)) for run in runs]
    return (min if order is Order.LEAST else max)(found, key=lambda one: one[1].num_bytes)


def _inside(step: Step, sizes: Mapping[int, int], order: Order) -> Peak:
    """Returns what the loop or the branches of a step store besides what is stored outside."""
    peaks = [peak_of(inside, sizes, counted_outside(step, inside), order) for inside in step.inside]
    return max(peaks, key=lambda peak: peak.num_bytes, default=Peak(0, ()))


def counted_outside(step: Step, inside: Schedule) -> set[int]:
    """Returns the buffers of a schedule `inside` a loop or branch, `step`, that are counted where that stands."""
    written = {b for each in inside.steps for b in each.writes}
    outside = {b for each in inside.steps for b in each.reads if b not in written}
    return outside | {before for before, _ in inside.carry} | set(step.writes)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Holds a schedule whose steps run in this `order`; the others as for `peak_of`."""

    schedule: Schedule
    order: Sequence[int]
    sizes: Mapping[int, int]
    free: set[int]
    careful: bool = False

    def moments(self) -> Iterator[tuple[int, set[int], int, set[int]]]:
        """Yields for every step in turn (its number, the buffers that are stored while it runs, their bytes, those
        among them that it writes over, which are not counted in these). The first set changes with the next moment."""
        schedule, sizes = self.schedule, self.sizes
        steps, last = schedule.steps, dict[int, int]()
        first: dict[int, int] = {}
        for place, i in enumerate(self.order):
            last.update(dict.fromkeys(steps[i].reads, place))
            for b in steps[i].writes:
                first[b] = place
                last.setdefault(b, place)
        last.update(dict.fromkeys(schedule.outputs, len(self.order)))
        free = self.free
        if schedule.places:
            free = free | in_places(schedule.places, [steps[i] for i in self.order], first, last, sizes)
        ends: dict[int, list[int]] = {}
        for b, place in last.items():
            ends.setdefault(place, []).append(b)
        over = {after: before for before, after in schedule.carry}
        stored = 0
        live: set[int] = set()
        for place, i in enumerate(self.order):
            step = steps[i]
            dying = [b for b in ends.get(place, ()) if b in live and b not in step.writes]
            before = stored
            for b in step.writes:
                # What a loop hands on takes the place of what came in, where nothing reads that any more.
                if b in free or b in live or last.get(over.get(b, -1), len(self.order) + 1) <= place:
                    continue
                live.add(b)
                stored += sizes[b]
            shared = set[int]()
            if step.shares and not self.careful and stored > before:
                shared = {b for b in dying if sizes[b] == sizes[step.writes[0]]}
                shared = {min(shared, key=dying.index)} if shared else shared
            if step.takes and not self.careful:
                shared |= {
                    begun for begun, ended in step.takes if begun in dying and ended in live and ended not in free
                }
            yield i, live, stored - sum(sizes[b] for b in shared), shared
            for b in ends.get(place, ()):
                if b in live:
                    live.discard(b)
                    stored -= sizes[b]


def _peak_in_order(run: _Run, inner: Sequence[Peak]) -> Peak:
    """Returns the peak of a run. `inner`: by step, what it stores inside."""
    most, alive = 0, tuple[int, ...]()
    for i, live, stored, _ in run.moments():
        if stored + inner[i].num_bytes > most:
            most = stored + inner[i].num_bytes
            alive = (*live, *inner[i].alive)
    return Peak(most, tuple(sorted(alive, key=run.sizes.__getitem__, reverse=True)))


@dataclasses.dataclass(frozen=True)
class Spans:
    """Holds what is stored when: the steps in the order in which they run, those of a loop's body once and of branches
    those that store most, and (buffer, first moment, moment behind the last) of every buffer."""

    steps: tuple[Step, ...]
    buffers: tuple[tuple[int, int, int], ...]


def spans_of(schedule: Schedule, sizes: Mapping[int, int], free: set[int], order: Order = Order.DEPTH_FIRST) -> Spans:
    """Returns from when to when each buffer is stored, in the order that `peak_of` takes: the most bytes at a moment
    are its peak. A buffer that a step writes over ends before it. The arguments are its, but for a careful order."""
    steps: list[Step] = []
    buffers: list[tuple[int, int, int]] = []
    _add_spans(_settled(schedule, sizes, free, order)[0], order, steps, buffers)
    return Spans(tuple(steps), tuple(buffers))


def _add_spans(run: _Run, order: Order, steps: list[Step], buffers: list[tuple[int, int, int]]) -> None:
    """Adds the steps and buffers of a run behind others."""
    begun: dict[int, int] = {}
    sizes = run.sizes
    for i, live, _, shared in run.moments():
        step, now = run.schedule.steps[i], len(steps)
        for b in [b for b in begun if b not in live or b in shared]:
            buffers.append((b, begun.pop(b), now))
        begun |= {b: now for b in live if b not in begun and b not in shared}
        if step.inside:
            found = [_settled(each, sizes, counted_outside(step, each), order) for each in step.inside]
            _add_spans(max(found, key=lambda one: one[1].num_bytes)[0], order, steps, buffers)
        if len(steps) == now:
            steps.append(step)
    buffers += [(b, start, len(steps)) for b, start in begun.items()]
