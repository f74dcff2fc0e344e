"""Reads the problems of the ASPLOS'25 / EuroSys'25 contest on intra-operator parallelism (github.com/google/iopddl).

A file of JSON, plain or gzip, goes in; a `CostNetwork` with one memory comes out. Nothing in a file is trusted: sizes,
indices and numbers are checked before anything is allocated for them.
"""

from __future__ import annotations

import json
import math
import pathlib
import zlib
from typing import Any

import numpy as np

from splitjax._files import unpack
from splitjax.errors import SearchError
from splitjax.search.network import CostNetwork, Floats, Memory, MemoryUse, Pair

# What the contest's compiler writes for a choice that is forbidden.
FORBIDDEN_COST = 10**18
# Far above any problem of the contest (65,000 nodes, tables of 10 MB): a file of some kB cannot unpack to more.
MAX_TEXT_BYTES = 1 << 30
MAX_TIME = 1 << 26


def read_problem(path: str | pathlib.Path) -> CostNetwork:
    """Reads the problem in the file `path`.

    Raises `SearchError` for a file that is missing, damaged, larger than 1 GiB unpacked, or malformed.
    """
    place = str(path)
    try:
        data = pathlib.Path(path).read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = unpack(data)
        if len(data) > MAX_TEXT_BYTES:
            raise SearchError("the problem is larger than 1 GiB", place=place, remedy="take a smaller problem")
        document = json.loads(data)
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as problem:
        if isinstance(problem, SearchError):
            raise
        raise SearchError(
            f"the problem cannot be read: {type(problem).__name__}: {problem}",
            place=place,
            remedy="give a JSON file of the contest, plain or gzip",
        ) from problem
    return problem_of(document, place)


def problem_of(document: Any, place: str) -> CostNetwork:
    """Makes a `CostNetwork` of the JSON values `document`; errors name `place`. Raises `SearchError`."""
    problem = _field(document, "problem", dict, place)
    nodes = _field(problem, "nodes", dict, place)
    edges = _field(problem, "edges", dict, place)
    limit = problem.get("usage_limit", None)
    node_costs, intervals, usages = (_field(nodes, key, list, place) for key in ("costs", "intervals", "usages"))
    if not len(node_costs) == len(intervals) == len(usages):
        raise SearchError(
            "nodes have costs, intervals and usages each",
            value=(len(node_costs), len(intervals), len(usages)),
            place=f"{place}: problem.nodes",
            remedy="give the three lists an entry for each node",
        )
    costs = tuple(_costs(entry, f"{place}: nodes.costs[{i}]") for i, entry in enumerate(node_costs))
    uses = []
    for i, (span, usage) in enumerate(zip(intervals, usages)):
        begin, end = _two(span, f"{place}: nodes.intervals[{i}]")
        if end > MAX_TIME:
            raise SearchError(
                "a live interval ends too late",
                value=end,
                place=f"{place}: nodes.intervals[{i}]",
                remedy="let it end below 2**31",
            )
        sizes = _numbers(usage, f"{place}: nodes.usages[{i}]")
        if end != begin or begin < 0:
            uses.append(MemoryUse(i, begin, end, sizes))
    if limit is None:
        memories: tuple[Memory, ...] = ()
    elif type(limit) not in (int, float):
        raise SearchError(
            "the limit is no number",
            value=limit,
            place=f"{place}: problem.usage_limit",
            remedy="write a number of bytes",
        )
    else:
        memories = (Memory("memory", float(_numbers([limit], f"{place}: problem.usage_limit")[0]), tuple(uses)),)
    pairs = []
    edge_nodes, edge_costs = _field(edges, "nodes", list, place), _field(edges, "costs", list, place)
    if len(edge_nodes) != len(edge_costs):
        raise SearchError(
            "edges have nodes and costs each",
            value=(len(edge_nodes), len(edge_costs)),
            place=f"{place}: problem.edges",
            remedy="give the two lists an entry for each edge",
        )
    for i, (ends, entry) in enumerate(zip(edge_nodes, edge_costs)):
        where = f"{place}: edges.nodes[{i}]"
        first, second = _two(ends, where)
        if not (0 <= first < len(costs) and 0 <= second < len(costs)):
            raise SearchError(
                f"there are nodes 0 to {len(costs) - 1}", value=[first, second], place=where, remedy="name two of them"
            )
        table = _costs(entry, f"{place}: edges.costs[{i}]")
        shape = costs[first].size, costs[second].size
        if table.size != math.prod(shape):
            raise SearchError(
                f"a table over {shape[0]} x {shape[1]} strategies",
                value=table.size,
                place=f"{place}: edges.costs[{i}]",
                remedy="give the table a cost for every pair of strategies",
            )
        pairs.append(Pair(first, second, table.reshape(shape)))
    return CostNetwork(costs, tuple(pairs), memories)


def _field(value: Any, key: str, kind: type, place: str) -> Any:
    if not isinstance(value, dict) or not isinstance(value.get(key), kind):
        raise SearchError(f"{key!r} is missing, or no {kind.__name__}", place=place, remedy="see google/iopddl")
    return value[key]


def _two(value: Any, place: str) -> tuple[int, int]:
    if isinstance(value, list) and len(value) == 2 and all(type(entry) is int for entry in value):
        return value[0], value[1]
    raise SearchError(
        "two whole numbers are needed", value=value, place=place, remedy="write a list of two whole numbers"
    )


def _numbers(value: Any, place: str) -> Floats:
    if isinstance(value, list) and value and all(type(entry) in (int, float) for entry in value):
        try:
            return np.array(value, dtype=np.float64)
        except OverflowError:
            pass
    raise SearchError("a list of numbers is needed", value=value, place=place, remedy="write a list of numbers")


def _costs(value: Any, place: str) -> Floats:
    numbers = _numbers(value, place)
    return np.where(numbers >= FORBIDDEN_COST, np.inf, numbers)
