"""Knows what an assignment keeps in memory when: the uses of a reduced problem over the points in time that matter.

Several memories stand behind each other on one axis, with a limit for every point. What is in use whatever is decided
is taken off the limits, so that every use is what a value needs above the least.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from splitjax.search.network import Floats, Ints


@dataclasses.dataclass(frozen=True, eq=False)
class Use:
    """Holds a use of memory `memory` by reduced variable `variable` (-1: whatever is decided) during [begin, end)."""

    variable: int
    memory: int
    begin: int
    end: int
    sizes: Floats


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """Holds the memory that assignments of a reduced problem use at each of its points in time.

    Values of all variables stand in one row, those of variable v from `starts[v]`.

    **Attributes:**

    - `starts`: int[variables + 1]. `limits`: float[points]: what decisions may use at each point; below 0: the least
      that any needs is more than the limit.
    - `points`: (memory, time) of each point. `least_bytes`: float[memories]: a peak below which no assignment stays.
    - `variables`, `begins`, `ends`: int[uses], by variable: whose use it is, over the points [begin, end).
    - `sizes`: float, those of each use's values behind each other, from `offsets[use]`.
    - `first_use`: int[variables + 1]: the uses of variable v are `first_use[v]` to `first_use[v + 1]`.
    - `use_of_size`, `value_of_size`: for each of `sizes`, its use, and its value among all variables' values.
    """

    starts: Ints
    limits: Floats
    points: tuple[tuple[int, int], ...]
    least_bytes: Floats
    variables: Ints
    begins: Ints
    ends: Ints
    sizes: Floats
    offsets: Ints
    first_use: Ints
    use_of_size: Ints
    value_of_size: Ints

    @classmethod
    def of(cls, num_values: Sequence[int], uses: Sequence[Use], memory_limits: Sequence[float | None]) -> Timeline:
        """Makes the timeline of `uses`; `num_values` are the values of each variable, `memory_limits` in bytes, None:
        the least peak."""
        starts = np.concatenate([[0], np.cumsum(num_values, dtype=np.int64)]).astype(np.int64)
        limits, points, least, rows = [], [], [], []
        shift = 0
        for memory, limit in enumerate(memory_limits):
            own = [use for use in uses if use.memory == memory]
            kept, room, peak = _points(own, limit)
            least.append(peak)
            for use in own:
                begin, end = np.searchsorted(kept, (use.begin, use.end))
                if use.variable >= 0 and end > begin and np.ptp(use.sizes) > 0:
                    rows.append((use.variable, int(begin) + shift, int(end) + shift, use.sizes - use.sizes.min()))
            limits.append(room)
            points += [(memory, int(time)) for time in kept]
            shift += len(kept)
        merged: dict[tuple[int, int, int], Floats] = {}
        for variable, begin, end, sizes in rows:
            key = variable, begin, end
            merged[key] = merged[key] + sizes if key in merged else sizes
        keys = sorted(merged)
        variables = np.array([key[0] for key in keys], dtype=np.int64)
        counts = np.array([merged[key].size for key in keys], dtype=np.int64)
        offsets = np.concatenate([[0], np.cumsum(counts)])[:-1].astype(np.int64)
        use_of_size = np.repeat(np.arange(counts.size), counts)
        value_of_size = np.arange(use_of_size.size) + (starts[variables] - offsets)[use_of_size]
        return cls(
            starts=starts,
            limits=np.concatenate(limits) if limits else np.zeros(0),
            points=tuple(points),
            least_bytes=np.array(least),
            variables=variables,
            begins=np.array([key[1] for key in keys], dtype=np.int64),
            ends=np.array([key[2] for key in keys], dtype=np.int64),
            sizes=np.concatenate([merged[key] for key in keys]) if keys else np.zeros(0),
            offsets=offsets,
            first_use=np.searchsorted(variables, np.arange(len(num_values) + 1)),
            use_of_size=use_of_size,
            value_of_size=value_of_size,
        )

    def in_use(self, values: Ints) -> Floats:
        """Returns float[points]: what an assignment, int[variables], uses at each point above the least."""
        sizes = self.sizes[self.offsets + values[self.variables]]
        return alive(self.begins, self.ends, sizes, self.limits.size)

    def change(self, variable: int, old: int, new: int) -> tuple[int, int, Floats]:
        """Returns (begin, end, float[end - begin]): what a variable's change of value adds at which points."""
        rows = slice(self.first_use[variable], self.first_use[variable + 1])
        offsets, begins, ends = self.offsets[rows], self.begins[rows], self.ends[rows]
        if not begins.size:
            return 0, 0, np.zeros(0)
        low, high = int(begins.min()), int(ends.max())
        sizes = self.sizes[offsets + new] - self.sizes[offsets + old]
        return low, high, alive(begins - low, ends - low, sizes, high - low)

    def price(self, prices: Floats) -> Floats:
        """Returns float[values of all variables]: what the memory of each value costs at `prices`, float[points]."""
        summed = np.concatenate([[0.0], np.cumsum(prices)])
        paid = summed[self.ends] - summed[self.begins]
        paid = self.sizes * paid[self.use_of_size]
        return np.bincount(self.value_of_size, paid, int(self.starts[-1])).astype(np.float64, copy=False)

    def price_of(self, variable: int, summed: Floats) -> Floats:
        """Returns float[values]: what the memory of a variable's values costs; `summed`, float[points + 1], holds the
        prices up to each point."""
        first, last = int(self.first_use[variable]), int(self.first_use[variable + 1])
        size = int(self.starts[variable + 1] - self.starts[variable])
        if first == last:
            return np.zeros(size)
        paid = summed[self.ends[first:last]] - summed[self.begins[first:last]]
        begin = int(self.offsets[first])
        return paid @ self.sizes[begin : begin + (last - first) * size].reshape(last - first, size)


def alive(begins: Ints, ends: Ints, sizes: Floats, num_points: int) -> Floats:
    """Returns float[points]: the sum at each point of those `sizes` whose span [`begins`, `ends`) holds it."""
    changes = np.bincount(begins, sizes, num_points + 1) - np.bincount(ends, sizes, num_points + 1)
    return np.cumsum(changes[:-1], dtype=np.float64)


def _points(uses: Sequence[Use], limit: float | None) -> tuple[Ints, Floats, float]:
    """Returns the times of one memory that matter, what is left for decisions at each, and the least peak."""
    if not uses:
        return np.zeros(0, dtype=np.int64), np.zeros(0), 0.0
    begins, ends = np.array([use.begin for use in uses]), np.array([use.end for use in uses])
    low = np.array([float(use.sizes.min()) for use in uses])
    high = np.array([float(use.sizes.max()) for use in uses])
    # Between a time and the next at which something ends, no more is alive than where the last of it began.
    sorted_begins, last = np.unique(begins), np.unique(ends)
    kept = np.unique(sorted_begins[np.searchsorted(sorted_begins, last, side="left") - 1])
    first, stop = np.searchsorted(kept, begins), np.searchsorted(kept, ends)

    least, most = alive(first, stop, low, kept.size), alive(first, stop, high, kept.size)
    limit = float(least.max()) if limit is None else limit
    matter = most > limit
    return kept[matter], limit - least[matter], float(least.max())
