"""Compares machines for one step: seconds against memory, with the fewest devices of each that will do.

What was chosen for a step on each machine, under smaller and smaller budgets, comes in; points
come out, with those that no other beats and the sentence that says what it would take. It prints as a table, and shows
itself in Jupyter as a picture, too (`report.prediction.trade_off` makes both).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from splitjax.choosing.choice import Choice
from splitjax.display import registry
from splitjax.display.figures import bytes_text, seconds_text
from splitjax.errors import BudgetError
from splitjax.machines import Target
from splitjax.mesh import MeshShape

# Every budget is so much of what the choice before it needs.
SHRINKING = 0.8


@dataclasses.dataclass(frozen=True)
class Point:
    """Is a layout on a machine with what it is predicted to take.

    **Attributes:** `target`: the machine. `mesh`, `rules`: what was chosen there. `seconds`: of a step.
    `memory_bytes`: what a device needs at most.
    """

    target: Target
    mesh: MeshShape
    rules: str
    seconds: float
    memory_bytes: int

    @property
    def num_devices(self) -> int:
        """The devices of the machine."""
        return self.target.num_devices

    def beats(self, other: Point) -> bool:
        """Whether it takes no more time, no more memory of a device and no more devices than `other`, and less of
        one of these."""
        mine = (self.seconds, self.memory_bytes, self.num_devices)
        theirs = (other.seconds, other.memory_bytes, other.num_devices)
        return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


@dataclasses.dataclass(frozen=True, repr=False)
class TradeOff:
    """Is what a step would take on several machines: time, memory of a device, and devices.

    **Attributes:** `points`: by machine in the order given, the fastest first. `budget_bytes`: what a device may need;
    None for the memory that a device of each machine has.
    """

    points: tuple[Point, ...]
    budget_bytes: int | None = None

    def limit_bytes(self, point: Point) -> int:
        """Returns what a device may need at a point: the budget, and no more than a device has."""
        has = point.target.kind.memory_bytes
        return has if self.budget_bytes is None else min(self.budget_bytes, has)

    def fits(self, point: Point) -> bool:
        """Returns whether a device needs no more at a point than it may."""
        return point.memory_bytes <= self.limit_bytes(point)

    @property
    def front(self) -> tuple[Point, ...]:
        """The points that no other beats (the Pareto front of seconds, memory and devices), fitting or not."""
        return tuple(each for each in self.points if not self.beaten_by(each))

    def beaten_by(self, point: Point) -> Point | None:
        """Returns the fastest point that beats another; None for none."""
        return min((each for each in self.points if each.beats(point)), key=lambda each: each.seconds, default=None)

    @property
    def fewest(self) -> Point | None:
        """The fastest point that fits with the fewest devices; None where nothing fits."""
        fitting = filter(self.fits, self.points)
        return min(fitting, key=lambda each: (each.num_devices, each.seconds, each.memory_bytes), default=None)

    @property
    def fastest(self) -> Point | None:
        """The fastest point that fits; None where nothing fits."""
        fitting = filter(self.fits, self.points)
        return min(fitting, key=lambda each: (each.seconds, each.num_devices, each.memory_bytes), default=None)

    @property
    def verdict(self) -> str:
        """What it would take, in a sentence or two."""
        budget = self.budget_bytes
        limit = "within the memory that devices have" if budget is None else f"within {bytes_text(budget)} a device"
        fewest, fastest = self.fewest, self.fastest
        if fewest is None or fastest is None:
            least = min(self.points, key=lambda each: each.memory_bytes)
            return (
                f"nothing fits {limit}: the least that a device needs is {bytes_text(least.memory_bytes)}, on"
                f" {least.target}"
            )
        told = f"{limit} it takes {_told(fewest)}"
        return told if fastest == fewest else f"{told}; the fastest is {_told(fastest)}"

    def __repr__(self) -> str:
        return f"<TradeOff of {len(self.points)} points>"

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)


def trade_off(
    choose: Callable[[Target, int | None], Choice],
    targets: Sequence[Target],
    budget_bytes: int | None = None,
    most_points: int = 3,
) -> TradeOff:
    """Chooses for each machine, again and again for a smaller budget.

    **Arguments:** `choose`: chooses for a machine and the bytes that a device may need (None for any), or raises
    `BudgetError`. `targets`: the machines. `budget_bytes`: what a device may need in the end. `most_points`: of each
    machine. Of a machine's layouts that another of its own beats nothing is told."""
    points: list[Point] = []
    for target in dict.fromkeys(targets):
        own = list(_points_on(choose, target, budget_bytes, most_points))
        points += [each for each in own if not any(other.beats(each) for other in own)]
    return TradeOff(tuple(points), budget_bytes)


def _points_on(
    choose: Callable[[Target, int | None], Choice], target: Target, budget_bytes: int | None, most_points: int
) -> Iterator[Point]:
    """Yields the points of a machine, of which each needs less than the one before it."""
    has = target.kind.memory_bytes
    wanted = has if budget_bytes is None else min(budget_bytes, has)
    allowed: int | None = None
    seen: set[Point] = set()
    for _ in range(most_points):
        try:
            best = choose(target, allowed).best
        except BudgetError:
            return
        taken = best.seconds if best.program_seconds is None else best.program_seconds
        point = Point(target, best.mesh, best.name, taken, best.needed_bytes)
        if point not in seen:
            yield point
        seen.add(point)
        smaller = int(SHRINKING * point.memory_bytes)
        # The budget itself is asked for, whatever lies between.
        allowed = wanted if point.memory_bytes > wanted else smaller


def _told(point: Point) -> str:
    devices = "a device" if point.num_devices == 1 else f"{point.num_devices} devices"
    return (
        f"{point.target} ({devices}): {seconds_text(point.seconds)} a step, {bytes_text(point.memory_bytes)} a device"
        " at most"
    )
