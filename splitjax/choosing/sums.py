"""Prices changes of a layout by what they make otherwise, as a search asks for thousands of them.

The prediction of a step, differences from it and the prices of a machine come in, seconds beyond the step's come out:
those of `Prices.seconds`, up to rounding. What a change makes of a part of the step is added to sums over it; what two
changes make of each other is added where they meet (`cost.interplay`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

from splitjax.choosing.prices import Prices
from splitjax.cost.compute import step_flops
from splitjax.cost.interplay import Meeting, ways
from splitjax.cost.memory import LeafBytes
from splitjax.cost.parts import Sent
from splitjax.cost.prediction import Difference, Prediction, replaced

Value = TypeVar("Value")
Number = TypeVar("Number", int, float)


@dataclasses.dataclass(frozen=True)
class Sums:
    """Is what a device has in a step, or what a change adds to that.

    **Attributes:** `flops`: that it computes. `stored`: bytes of its states. `used`: bytes of activations beyond an
    equal share of the batch. `sent`: seconds of what it sends.
    """

    flops: int
    stored: int
    used: int
    sent: float

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.flops + other.flops, self.stored + other.stored, self.used + other.used, self.sent + other.sent
        )

    def __sub__(self, other: Sums) -> Sums:
        return Sums(
            self.flops - other.flops, self.stored - other.stored, self.used - other.used, self.sent - other.sent
        )


_NOTHING = Sums(0, 0, 0, 0.0)


@dataclasses.dataclass(frozen=True, eq=False)
class Change:
    """Is a change with its price.

    **Attributes:** `difference`: what it makes otherwise. `sums`: what it adds to the step. `sent_by_use`,
    `sent_by_leaf`: the seconds of what is sent with it around the uses, and for the leaves, that it reaches, by their
    positions. `way`: a number for how it splits the uses of weights that it reaches (`cost.interplay.ways`). Changes
    with the same number may store weights otherwise, but what they and a third change make of each other at the uses is
    the same, and is worked out once. It is 0 for all changes of a step whose costs do not add up
    (`StepStructure.adds_up`), where it is not read.
    """

    difference: Difference
    sums: Sums
    sent_by_use: Mapping[int, float]
    sent_by_leaf: Mapping[int, float]
    way: int


class StepSums:
    """Prices changes of a predicted step.

    **Arguments:** `base`: the prediction. `prices`: of the machine.
    """

    def __init__(self, base: Prediction, prices: Prices) -> None:
        self._base, self._prices, self._seconds = base, prices, prices.sender(base.setting.mesh)
        self._sums, self._has_passing = self._whole(base), any(map(_passes, base.bytes_by_leaf))
        self._sent_by_use = [*map(self._seconds, base.sent_by_use)]
        self._sent_by_leaf = [*map(self._seconds, base.sent_by_leaf)]
        self._numbers: dict[Hashable, int] = {}  # of ways, which are longer and slower to look up
        self._meetings: dict[tuple[int, int], tuple[Meeting, Sums]] = {}

    def change(self, difference: Difference) -> Change:
        """Returns a change with its price. `difference`: what it makes otherwise about the step."""
        base, new = self._base, difference.renewed
        by_use, by_leaf = self._sent(new.sent_by_use), self._sent(new.sent_by_leaf)
        if not base.structure.adds_up:
            whole = self._whole(base.changed(difference.leaves.values()))
            return Change(difference, whole - self._sums, by_use, by_leaf, 0)
        sums = Sums(
            sum(self._flops(i, split) - self._flops(i, base.split_by_use[i]) for i, split in new.split_by_use.items()),
            sum(each.state - base.bytes_by_leaf[i].state for i, each in new.bytes_by_leaf.items()),
            sum(used - base.bytes_by_use[i] for i, used in new.bytes_by_use.items()),
            sum(sent - self._sent_by_use[i] for i, sent in by_use.items())
            + sum(sent - self._sent_by_leaf[i] for i, sent in by_leaf.items()),
        )
        way = self._numbers.setdefault(ways(base, difference), len(self._numbers))
        return Change(difference, sums, by_use, by_leaf, way)

    def seconds(self, sums: Sums) -> float:
        """Returns the seconds that `sums` of a change add to the step."""
        base = self._base
        used = base.activation_bytes(self._sums.used + sums.used) - base.activation_bytes(self._sums.used)
        return self._prices.of_sums(sums.flops, sums.stored + used, sums.sent)

    def peak_bytes(self, change: Change) -> int:
        """Returns the bytes that a `change` adds to what a device stores at most."""
        base, new = self._base, change.difference.renewed
        if not self._has_passing and not any(map(_passes, new.bytes_by_leaf.values())):
            # What is stored adds up; of what is there for a moment the largest counts.
            pairs = [(each, base.bytes_by_leaf[i]) for i, each in new.bytes_by_leaf.items()]
            kept = sum(each.state - old.state + each.gradient - old.gradient for each, old in pairs)
            used = self._sums.used
            more = sum(each - base.bytes_by_use[i] for i, each in new.bytes_by_use.items())
            return kept + base.activation_bytes(used + more) - base.activation_bytes(used)
        leaves, uses = replaced(base.bytes_by_leaf, new.bytes_by_leaf), replaced(base.bytes_by_use, new.bytes_by_use)
        return base.memory_of(leaves, uses).peak_bytes - base.memory.peak_bytes

    def meeting_seconds(self, first: Change, second: Change) -> float:
        """Returns the seconds that two changes add to the step beyond what each of them adds; where both change a leaf,
        it is as the `second` has it."""
        one, two, met = first.sums, second.sums, self._met(first, second)
        used = self._sums.used
        activations = self._base.activation_bytes
        each = activations(used + one.used) + activations(used + two.used) - activations(used)
        more = activations(used + one.used + two.used + met.used) - each
        return self._prices.of_sums(met.flops, met.stored + more, met.sent)

    def _met(self, first: Change, second: Change) -> Sums:
        """Returns what two changes add to the step beyond the sums of both."""
        base = self._base
        if not base.structure.adds_up:
            leaves = {**first.difference.leaves, **second.difference.leaves}
            return self._whole(base.changed(leaves.values())) - self._sums - first.sums - second.sums
        if not first.difference.meets(second.difference):
            return _NOTHING
        key = first.way, second.way
        if key not in self._meetings:
            meeting = Meeting.of(base, first.difference, second.difference)
            self._meetings[key] = meeting, self._at_uses(meeting, first, second)
        meeting, at_uses = self._meetings[key]
        return at_uses + self._at_leaves(meeting, first, second)

    def _at_uses(self, meeting: Meeting, first: Change, second: Change) -> Sums:
        base, found = self._base, meeting.at_uses
        a, b = first.difference.renewed, second.difference.renewed
        splits = _meeting(found.split_by_use, a.split_by_use, b.split_by_use, base.split_by_use)
        used = _meeting(found.bytes_by_use, a.bytes_by_use, b.bytes_by_use, base.bytes_by_use)
        by_use = self._sent(found.sent_by_use)
        sent = _meeting(by_use, first.sent_by_use, second.sent_by_use, self._sent_by_use)
        return Sums(
            sum(_beyond(*(self._flops(i, split) for split in four)) for i, four in splits),
            0,
            sum(_beyond(*four) for _, four in used),
            sum(_beyond(*four) for _, four in sent),
        )

    def _at_leaves(self, meeting: Meeting, first: Change, second: Change) -> Sums:
        base, found = self._base, meeting.at_leaves(first.difference, second.difference)
        a, b = first.difference.renewed, second.difference.renewed
        stored = _meeting(found.bytes_by_leaf, a.bytes_by_leaf, b.bytes_by_leaf, base.bytes_by_leaf)
        by_leaf = self._sent(found.sent_by_leaf)
        sent = _meeting(by_leaf, first.sent_by_leaf, second.sent_by_leaf, self._sent_by_leaf)
        return Sums(
            0,
            sum(_beyond(*(each.state for each in four)) for _, four in stored),
            0,
            sum(_beyond(*four) for _, four in sent),
        )

    def _whole(self, prediction: Prediction) -> Sums:
        sent = self._seconds(prediction.collectives)
        return Sums(prediction.compute.flops, prediction.memory.state_bytes, sum(prediction.bytes_by_use), sent)

    def _flops(self, i: int, split: int) -> int:
        """Returns what a device computes of the use at position `i`, which `split` devices share."""
        base = self._base
        return step_flops(base.flows[i].use, base.manner.backward) // split

    def _sent(self, sent: Mapping[int, Sent]) -> dict[int, float]:
        return {i: self._seconds(each) for i, each in sent.items()}


def _passes(leaf: LeafBytes) -> bool:
    """Whether a leaf has a gradient that a device stores for a moment only."""
    return bool(leaf.unsummed or leaf.of_turn)


def _meeting(
    both: Mapping[int, Value], first: Mapping[int, Value], second: Mapping[int, Value], base: Sequence[Value]
) -> Iterator[tuple[int, tuple[Value, Value, Value, Value]]]:
    """Yields each position of `both`, with what is there under two changes, under each of them, and under none."""
    for i, value in both.items():
        yield i, (value, first.get(i, base[i]), second.get(i, base[i]), base[i])


def _beyond(both: Number, first: Number, second: Number, base: Number) -> Number:
    """Returns what two changes add beyond what each adds: exactly 0 where one of them changes nothing."""
    return (both - first) - (second - base) if both != second else base - first
