"""States a search over discrete choices as a value: variables, what their values cost alone and in pairs, and the
memory that they hold over time.

This is a cost-function network (a weighted constraint satisfaction problem) with limits of memory beside it: the form
in which the planner states its decisions, and in which the contest of ASPLOS'25 on intra-operator parallelism states
its problems. `solving.solve` finds an assignment of small cost and proves how small any could be.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from splitjax.errors import SearchError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

# Sums of costs stay exact in float64, and differences of large and small ones mean something.
MAX_COST = 2.0**53


@dataclasses.dataclass(frozen=True, eq=False)
class Pair:
    """Holds what two variables cost together.

    **Attributes:** `first`, `second`: numbers of two different variables. `costs`: float[values of `first`, values of
    `second`]; infinity forbids a pair.
    """

    first: int
    second: int
    costs: Floats


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryUse:
    """Holds the memory that a variable's value occupies during one span of time.

    **Attributes:** `variable`: its number. `begin`, `end`: the span is [`begin`, `end`), in steps of a schedule.
    `usage_bytes`: float[values of the variable].
    """

    variable: int
    begin: int
    end: int
    usage_bytes: Floats


@dataclasses.dataclass(frozen=True, eq=False)
class Memory:
    """Holds one kind of memory: its limit, and what occupies it when.

    **Attributes:** `name`: such as `"HBM"`. `limit_bytes`: what is alive at any time has to fit into it. `uses`: a
    variable may have several, such as the layers that share it.
    """

    name: str
    limit_bytes: float
    uses: tuple[MemoryUse, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class CostNetwork:
    """Holds a problem: choose a value for every variable so that the sum of all costs is least and every memory fits.

    **Attributes:**

    - `costs`: for each variable, float[its values]: what a value costs alone; infinity forbids it.
    - `pairs`: costs of two variables together; the same two may have several, which add up.
    - `memories`: what has to fit.
    - `names`: of the variables, for messages; empty: their numbers.

    Raises `SearchError` for numbers of variables out of range, tables of another shape than their variables' values,
    costs that are NaN, minus infinity or beyond 2**53, memory that is negative or not finite.
    """

    costs: tuple[Floats, ...]
    pairs: tuple[Pair, ...] = ()
    memories: tuple[Memory, ...] = ()
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for number, costs in enumerate(self.costs):
            place = f"costs[{number}]"
            if costs.ndim != 1 or not costs.size:
                raise SearchError(
                    "a variable needs a list of values",
                    value=costs.shape,
                    place=place,
                    remedy="give a list of costs, one for each value",
                )
            _check_costs(costs, place)
        for number, pair in enumerate(self.pairs):
            place = f"pairs[{number}]"
            self._check_variable(pair.first, place)
            self._check_variable(pair.second, place)
            if pair.first == pair.second:
                raise SearchError(
                    "a pair names one variable twice", value=pair.first, place=place, remedy="add it to its costs"
                )
            shape = (self.costs[pair.first].size, self.costs[pair.second].size)
            if pair.costs.shape != shape:
                raise SearchError(
                    f"a pair needs a table of shape {shape}",
                    value=pair.costs.shape,
                    place=place,
                    remedy="give a cost for each value of the first variable (rows) and of the second (columns)",
                )
            _check_costs(pair.costs, place)
        for memory in self.memories:
            if not 0 <= memory.limit_bytes < math.inf:
                raise SearchError(
                    "a limit of memory is no size",
                    value=memory.limit_bytes,
                    place=memory.name,
                    remedy="give a limit of 0 bytes or more",
                )
            for number, use in enumerate(memory.uses):
                self._check_use(use, f"{memory.name}: uses[{number}]")
        if self.names and len(self.names) != len(self.costs):
            raise SearchError(
                "every variable needs a name, or none",
                value=len(self.names),
                place="names",
                remedy="give a name for each, or leave names out",
            )

    def _check_variable(self, number: int, place: str) -> None:
        if not 0 <= number < len(self.costs):
            raise SearchError(
                "there is no such variable", value=number, place=place, remedy=f"name one of 0 to {len(self.costs) - 1}"
            )

    def _check_use(self, use: MemoryUse, place: str) -> None:
        self._check_variable(use.variable, place)
        if use.begin < 0 or use.end < use.begin:
            raise SearchError(
                "a span of time ends before it begins",
                value=(use.begin, use.end),
                place=place,
                remedy="give a begin that is not above the end",
            )
        if use.usage_bytes.shape != self.costs[use.variable].shape:
            raise SearchError(
                "a use needs a size for every value",
                value=use.usage_bytes.shape,
                place=place,
                remedy="give an array with a size for each value of the variable",
            )
        if not (np.isfinite(use.usage_bytes).all() and (use.usage_bytes >= 0).all()):
            raise SearchError(
                "memory is a finite number of bytes",
                value=float(use.usage_bytes.min()),
                place=place,
                remedy="give sizes of 0 or more",
            )

    def name(self, variable: int) -> str:
        """Returns the name of a variable, `variable 7` where it has none."""
        return self.names[variable] if self.names else f"variable {variable}"

    @property
    def whole(self) -> bool:
        """Whether all costs are whole numbers, as then every assignment's is."""
        tables = [*self.costs, *(pair.costs for pair in self.pairs)]
        return all(bool((table == np.round(table)).all()) for table in tables)

    def cost(self, values: Sequence[int] | Ints) -> float:
        """Returns the sum of all costs of an assignment: `values` holds the number of each variable's value."""
        chosen = self._chosen(values)
        total = sum(float(costs[value]) for costs, value in zip(self.costs, chosen))
        return total + sum(float(pair.costs[chosen[pair.first], chosen[pair.second]]) for pair in self.pairs)

    def peaks_bytes(self, values: Sequence[int] | Ints) -> tuple[float, ...]:
        """Returns the most bytes that are alive at any time under an assignment, for each memory."""
        chosen = self._chosen(values)
        peaks = []
        for memory in self.memories:
            changes = np.zeros(1 + max((use.end for use in memory.uses), default=0))
            for use in memory.uses:
                size = use.usage_bytes[chosen[use.variable]]
                changes[use.begin] += size
                changes[use.end] -= size
            peaks.append(float(np.cumsum(changes).max(initial=0.0)))
        return tuple(peaks)

    def fits(self, values: Sequence[int] | Ints) -> bool:
        """Tells whether an assignment keeps every limit and takes nothing that is forbidden."""
        within = all(peak <= memory.limit_bytes for peak, memory in zip(self.peaks_bytes(values), self.memories))
        return within and math.isfinite(self.cost(values))

    def _chosen(self, values: Sequence[int] | Ints) -> list[int]:
        chosen = [int(value) for value in values]
        if len(chosen) != len(self.costs):
            raise SearchError(
                "an assignment has a value for every variable",
                value=len(chosen),
                place="values",
                remedy="give as many values as there are variables",
            )
        for number, (value, costs) in enumerate(zip(chosen, self.costs)):
            if not 0 <= value < costs.size:
                raise SearchError(
                    f"{self.name(number)} has no such value",
                    value=value,
                    place=f"values[{number}]",
                    remedy="give the number of a value that it has, counted from 0",
                )
        return chosen


def _check_costs(costs: Floats, place: str) -> None:
    """Raises `SearchError` for costs that no sum can hold."""
    if not ((costs > -MAX_COST) & ((costs < MAX_COST) | (costs == math.inf))).all():
        bad = costs[~((costs > -MAX_COST) & ((costs < MAX_COST) | (costs == math.inf)))].flat[0]
        raise SearchError(
            "a cost is neither below 2**53 nor infinity",
            value=float(bad),
            place=place,
            remedy="scale the costs, and write infinity where a choice is forbidden",
        )
