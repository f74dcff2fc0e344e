"""Holds what a device stores at each moment of a step, as a value: arrays, each from one operation to another.

The prediction makes one of the step's program (`lifetimes`), a report one of what XLA compiled (`report.memory`); both
read alike.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

from splitjax.plan import StoredArray

FORWARD, BACKWARD, OTHER = "forward", "backward", "other"


@dataclasses.dataclass(frozen=True)
class StoredSpan:
    """Says from when to when a device stores an `array`: from the operation of number `start` to the one before
    `end`."""

    array: StoredArray
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class MemoryTimeline:
    """Says what a device stores at each moment of a step. A moment is an operation, in the order in which they run: the
    body of a loop once, of branches the one that stores most.

    **Attributes:**

    - `argument_bytes`: of states, batch and other arguments, which are stored from the beginning to the end.
    - `operations`: by moment the name of the operation. `passes`: whether it is of the `forward` or the `backward`
      pass, or of anything else, such as the optimizer's update (`other`).
    - `spans`: every array beside the arguments, and when it is stored.
    - `set_aside_bytes`: what XLA set aside beside the arguments; more than what is stored at the peak where holes are
      left between arrays. None where nothing was compiled.
    """

    argument_bytes: int
    operations: tuple[str, ...]
    passes: tuple[str, ...]
    spans: tuple[StoredSpan, ...]
    set_aside_bytes: int | None = None

    @functools.cached_property
    def stored_bytes(self) -> tuple[int, ...]:
        """The bytes that are stored at each moment beside the arguments."""
        return running(self.spans, len(self.operations))

    @functools.cached_property
    def peak(self) -> int:
        """The moment at which most is stored, the first of several."""
        return max(range(len(self.operations)), key=self.stored_bytes.__getitem__, default=0)

    @property
    def temporary_bytes(self) -> int:
        """The bytes that are stored at the peak beside the arguments."""
        return self.stored_bytes[self.peak] if self.operations else 0

    @property
    def peak_bytes(self) -> int:
        """The bytes that are stored at the peak, the arguments among them."""
        return self.argument_bytes + self.temporary_bytes

    @functools.cached_property
    def at_peak(self) -> tuple[StoredArray, ...]:
        """The arrays beside the arguments that are stored at the peak, the largest first."""
        alive = [span.array for span in self.spans if span.start <= self.peak < span.end]
        return tuple(sorted(alive, key=lambda array: -array.num_bytes))


def running(spans: Iterable[StoredSpan], num_moments: int) -> tuple[int, ...]:
    """Returns the bytes of `spans` at each of so many moments (`num_moments`)."""
    changes = [0] * (num_moments + 1)
    for span in spans:
        changes[span.start] += span.array.num_bytes
        changes[span.end] -= span.array.num_bytes
    return tuple(itertools.accumulate(changes[:-1]))


def passes_of(names: Iterable[str]) -> tuple[str, ...]:
    """Returns of which pass each operation is, by the scopes of its name; one without any belongs to the operation
    before it. `names`: as JAX gives them to what it differentiates (`jvp(...)`, `transpose(jvp(...))`)."""
    passes: list[str] = []
    for name in names:
        if "transpose(" in name:
            passes.append(BACKWARD)
        elif "jvp(" in name:
            passes.append(FORWARD)
        else:
            passes.append(OTHER if name or not passes else passes[-1])
    return tuple(passes)
