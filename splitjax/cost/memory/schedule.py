"""Holds what runs on a device as steps that read and write buffers, in program order: `buffers` makes them, `orders`
and `timeline` say when each runs and what is stored meanwhile.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(eq=False, slots=True)
class Step:
    """Is something that runs: reads and writes numbers of buffers; `inside` for a loop or branch.

    `shares`: whether its first write may take over a buffer of its size that is read for the last time. `combines`: of
    what kind of all-reduce it is; empty for other steps. `read_bytes`: by buffer, what it reads of it, where that is
    not all. `filled_bytes`: what it writes into an array that is there. `made`: the value that says what kind of kernel
    it is; None for its first write. `gathers`: of what kind of all-gather or reduce-scatter it is; empty for others.
    `takes`: of a loop, (what a value that it hands on begins with, what it ends with): the latter takes the former's
    buffer where that is read for the last time."""

    name: str
    reads: list[int]
    writes: list[int]
    shares: bool = False
    inside: tuple[Schedule, ...] = ()
    combines: tuple[Any, ...] = ()
    read_bytes: dict[int, int] = dataclasses.field(default_factory=dict)
    filled_bytes: int = 0
    made: int | None = None
    gathers: tuple[Any, ...] = ()
    takes: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Place:
    """Is where a donated argument was that has been copied: free from the step that copies it until the result is
    written that takes it over.

    **Attributes:** `copy`, `result`: the buffers of both. `num_bytes`: of either.
    """

    copy: int
    result: int
    num_bytes: int


@dataclasses.dataclass(eq=False, slots=True)
class Schedule:
    """Holds the steps of a region in program order. `carry`: (buffer before, buffer after) of what a loop hands on;
    `outputs`: buffers that live to its end; `places`: what donated arguments leave for others."""

    steps: list[Step]
    outputs: list[int]
    carry: list[tuple[int, int]]
    places: tuple[Place, ...] = ()
