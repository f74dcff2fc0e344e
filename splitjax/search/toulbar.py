"""Solves problems to proven optimality as cost-function networks, by toulbar2 (`pytoulbar2`, the extra `planner`).

toulbar2 branches and bounds over the variables themselves, with costs in whole numbers. A limit of memory is a linear
constraint over values there; or memory has a price, and then what remains is what toulbar2 was made for. Costs are
rounded down to whole numbers on the way, so that what it proves is a bound of the problem as it was.

The package keeps its options in one place for the whole process: two searches at the same time do not go together.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from typing import Any

import numpy as np

from splitjax.errors import SearchError
from splitjax.search.exact import Exact
from splitjax.search.network import Floats
from splitjax.search.reducing import ReducedNetwork

PACKAGE = "pytoulbar2"
# Sums of costs stay below this, far within its whole numbers of 64 bits; so do sums of sizes.
LARGEST_SUM = 1e15
LARGEST_SIZE = 1e12


def is_installed() -> bool:
    """Tells whether toulbar2 can be used here."""
    return importlib.util.find_spec(PACKAGE) is not None


def load() -> Any:
    """Returns the package `pytoulbar2`. Raises `SearchError` where it is missing or does not load."""
    try:
        return importlib.import_module(PACKAGE)
    except ImportError as problem:
        raise SearchError(
            "the solver toulbar2 is not installed",
            value=str(problem),
            place="solver",
            remedy='install it with `pip install "splitjax[planner]"`, or name "milp", which needs nothing more',
        ) from problem


def solve_by_toulbar2(
    network: ReducedNetwork, max_backtracks: int, seconds: float, *, prices: Floats | None = None, seed: int = 0
) -> Exact:
    """Solves `network`, which has at least one variable.

    **Arguments:**

    - `max_backtracks`: the limit of work. `seconds`: of processor time, a guard; infinity: none.
    - `prices`: float[points]: memory is paid for at these prices instead of being limited, and the answer's bound is
      one of the problem with its limits. None: every limit is a constraint.
    - `seed`: of its draws.

    Raises `SearchError` where it is not installed.
    """
    package = load()
    own = np.concatenate(network.costs)
    if prices is not None:
        own = own + network.timeline.price(prices)
    starts = network.timeline.starts
    alone = [own[starts[v] : starts[v + 1]] for v in range(len(network.costs))]
    tables = [*alone, *network.pairs.values()]
    lowest = [float(table.min()) for table in tables]
    spans = [float((table[np.isfinite(table)] - low).max()) for table, low in zip(tables, lowest)]
    total = sum(spans)
    scale = 1.0
    if not all(bool((table == np.round(table)).all()) for table in tables) or total > LARGEST_SUM:
        scale = LARGEST_SUM / max(total, 1e-300)
    forbidden = int(total * scale) + len(tables) + 2

    def whole(table: Floats, low: float) -> list[int]:
        shifted = np.where(np.isfinite(table), np.floor((table - low) * scale), forbidden)
        return shifted.astype(np.int64).ravel().tolist()

    model = package.CFN(ubinit=forbidden, seed=1 + seed)
    model.Option.backtrackLimit = max_backtracks
    for variable, costs in enumerate(alone):
        model.AddVariable(f"v{variable}", range(costs.size))
        model.AddFunction([variable], whole(costs, lowest[variable]))
    for (pair, table), low in zip(network.pairs.items(), lowest[len(alone) :]):
        model.AddFunction(list(pair), whole(table, low))
    if prices is None:
        _add_limits(model, network)
    guard = 0 if math.isinf(seconds) else max(1, math.ceil(seconds))
    answer = model.Solve(timeLimit=guard)
    finished = model.Limit is None and not bool(getattr(model.Option, "limited", False))
    constant = network.constant + sum(lowest)
    if prices is not None:
        constant -= float(prices @ network.timeline.limits)
    num_nodes = int(model.GetNbBacktracks())
    if answer is None:
        if finished:
            return Exact(None, math.inf, num_nodes, True)
        return Exact(None, constant + float(model.GetDDualBound()) / scale, num_nodes, False)
    values = np.array([int(value) for value in answer[0]], dtype=np.int64)
    proven = float(answer[1]) if finished else min(float(answer[1]), float(model.GetDDualBound()))
    bound = constant + proven / scale
    return Exact(values, bound, num_nodes, finished)


def _add_limits(model: Any, network: ReducedNetwork) -> None:
    """Adds a constraint for every point in time; sizes are rounded down and limits up where they are no whole numbers,
    so that nothing that fits is lost."""
    timeline = network.timeline
    for point, limit in enumerate(timeline.limits.tolist()):
        used: dict[int, Floats] = {}
        for use in np.flatnonzero((timeline.begins <= point) & (point < timeline.ends)).tolist():
            variable, begin = int(timeline.variables[use]), int(timeline.offsets[use])
            sizes = timeline.sizes[begin : begin + network.costs[variable].size]
            used[variable] = used[variable] + sizes if variable in used else sizes
        most = sum(float(sizes.max()) for sizes in used.values())
        if most <= limit:
            continue
        entries = np.concatenate(list(used.values()))
        scale = 1.0
        if not (entries == np.round(entries)).all() or most > LARGEST_SIZE:
            scale = LARGEST_SIZE / most
        terms = [
            (variable, value, int(size * scale))
            for variable, sizes in used.items()
            for value, size in enumerate(sizes.tolist())
        ]
        model.AddGeneralizedLinearConstraint(terms, "<=", math.ceil(limit * scale) if scale != 1.0 else int(limit))
