"""Explains why nothing fits: where memory is short, what needs it there, and how much would do.

How much is needed is bounded from both sides: from below by prices (any prices prove a bound), from above by an
assignment that local search found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from splitjax.search.descent import Descent
from splitjax.search.network import CostNetwork, Floats, Ints
from splitjax.search.pricing import PriceSearch
from splitjax.search.reducing import ReducedNetwork, reduce_network

MAX_PASSES = 150
NUM_BISECTIONS = 8
NUM_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Conflict:
    """Holds why no assignment fits, or none was found.

    **Attributes:**

    - `message`: a sentence. `memory`: the name of what is short; None: choices are forbidden, whatever memory there is.
    - `time`: when it is shortest. `limit_bytes`: what there is.
    - `needed_bytes`: a bound from below: with less, nothing fits, and that is proven.
    - `enough_bytes`: the peak of an assignment that is allowed: with so much, something fits.
    - `holders`: (variable, the least bytes that any of its values holds then), the largest first.
    """

    message: str
    memory: str | None = None
    time: int = 0
    limit_bytes: float = 0.0
    needed_bytes: float = 0.0
    enough_bytes: float = 0.0
    holders: tuple[tuple[str, float], ...] = ()

    @property
    def proven(self) -> bool:
        """Whether it is proven that nothing fits."""
        return self.memory is None or self.needed_bytes > self.limit_bytes


def explain_conflict(network: CostNetwork, pins: Mapping[int, int] | None = None) -> tuple[Conflict, Ints | None]:
    """Returns what stands against each other in `network` with `pins` (variable -> value), and the assignment,
    int[variables], that needs the least memory of those that were seen; None where none is allowed."""
    unlimited = reduce_network(_free_of_cost(network), pins, at_least_bytes=True)
    if unlimited.impossible:
        cause = unlimited.impossible
        if pins and not reduce_network(_free_of_cost(network), at_least_bytes=True).impossible:
            cause = f"the pins forbid each other: {cause}"
        return Conflict(cause), None
    shortest: tuple[float, Conflict, Ints] | None = None
    for number, memory in enumerate(network.memories):
        alone = dataclasses.replace(network, memories=(memory,))
        reduced = reduce_network(_free_of_cost(alone), pins, at_least_bytes=True)
        needed, values = _least_peak(reduced)
        assignment = reduced.lift(values)
        enough = network.peaks_bytes(assignment)[number]
        short = enough - memory.limit_bytes
        if shortest is None or short / (1 + memory.limit_bytes) > shortest[0]:
            time, holders = _holders(alone, reduced, assignment, pins or {})
            text = "needs at least" if needed > memory.limit_bytes else "nothing was found that fits; it may need up to"
            amount = needed if needed > memory.limit_bytes else enough
            conflict = Conflict(
                f"{memory.name} of {memory.limit_bytes:,.0f} bytes {text} {amount:,.0f} bytes; "
                f"{enough:,.0f} are enough",
                memory.name,
                time,
                memory.limit_bytes,
                needed,
                enough,
                holders,
            )
            shortest = short / (1 + memory.limit_bytes), conflict, assignment
    assert shortest is not None, "without memories everything that is allowed fits"
    return shortest[1], shortest[2]


def _free_of_cost(network: CostNetwork) -> CostNetwork:
    """Returns the problem with what is allowed, at no cost."""

    def free(costs: Floats) -> Floats:
        return np.where(np.isfinite(costs), 0.0, np.inf)

    pairs = tuple(
        dataclasses.replace(pair, costs=free(pair.costs)) for pair in network.pairs if not np.isfinite(pair.costs).all()
    )
    return dataclasses.replace(network, costs=tuple(free(costs) for costs in network.costs), pairs=pairs)


def _least_peak(reduced: ReducedNetwork) -> tuple[float, Ints]:
    """Returns a lower bound of the peak of the only memory of `reduced`, and an assignment with a low one."""
    least = float(reduced.timeline.least_bytes.max(initial=0.0))
    if not reduced.costs or not reduced.timeline.limits.size:
        return least, np.zeros(len(reduced.costs), dtype=np.int64)
    prices = PriceSearch(reduced)
    needed, best, values = least, np.inf, np.zeros(len(reduced.costs), dtype=np.int64)
    for _ in range(MAX_PASSES):
        paid = float(prices.prices.sum())
        before = prices.prices
        bound = prices.step(1.0)
        if before.any():
            needed = max(needed, least + bound / paid)
    starts = [*prices.candidates(), values]
    limits = reduced.timeline.limits
    descent = Descent(reduced, starts[0])
    descent.allow(np.full(limits.size, np.inf))
    for start in starts:
        descent.begin(start)
        while descent.flip():  # out of what is forbidden
            pass
        over = float((reduced.timeline.in_use(descent.values) - limits).max())
        if descent.fits and over < best:
            best, values = over, descent.values.copy()
    low, high = needed - least, best
    for _ in range(NUM_BISECTIONS):
        if not low < high < np.inf:
            break
        middle = low + (high - low) / 2
        descent.allow(limits + middle)
        descent.begin(values)
        if descent.repair() and descent.fits:
            values = descent.values.copy()
            high = float((reduced.timeline.in_use(values) - limits).max())
        else:
            low = middle
    return needed, values


def _holders(
    network: CostNetwork, reduced: ReducedNetwork, assignment: Ints, pins: Mapping[int, int]
) -> tuple[int, tuple[tuple[str, float], ...]]:
    """Returns when an assignment uses most of the only memory, and what must hold how much of it then."""
    uses = network.memories[0].uses
    changes = np.zeros(2 + max((use.end for use in uses), default=0))
    for use in uses:
        size = use.usage_bytes[assignment[use.variable]]
        changes[use.begin] += size
        changes[use.end] -= size
    time = int(np.cumsum(changes).argmax())
    held: dict[int, float] = {}
    for use in uses:
        if use.begin <= time < use.end:
            allowed = np.isfinite(network.costs[use.variable])
            least = use.usage_bytes[pins[use.variable]] if use.variable in pins else use.usage_bytes[allowed].min()
            held[use.variable] = held.get(use.variable, 0.0) + float(least)
    largest = sorted(held.items(), key=lambda item: (-item[1], item[0]))[:NUM_NAMED]
    return time, tuple((network.name(variable), size) for variable, size in largest if size > 0)
