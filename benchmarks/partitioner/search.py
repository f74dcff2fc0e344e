"""Drives workers: runs numbers in batches, bisects what kills one, and shrinks what is wrong to its least form."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.partitioner.draw import Draw, case_of
from benchmarks.partitioner.families import draw, families
from benchmarks.partitioner.layouts import fits
from benchmarks.partitioner.run import Outcome
from benchmarks.partitioner.worker import Died, Worker


def run_numbers(worker: Worker, seed: str, numbers: Sequence[int], only: str = "") -> list[Outcome]:
    """The outcome of every number. A batch that kills the worker is halved until the program that does it stands
    alone."""
    try:
        answer = worker.ask(seed=seed, numbers=list(numbers), only=only)
        return [_outcome(each) for each in answer["outcomes"]]
    except Died as death:
        if len(numbers) == 1:
            return [_crashed(worker, draw(seed, numbers[0], only), death)]
    half = len(numbers) // 2
    return run_numbers(worker, seed, numbers[:half], only) + run_numbers(worker, seed, numbers[half:], only)


def run_one(worker: Worker, program: Draw) -> Outcome:
    """The outcome of one program, run alone."""
    try:
        return _outcome(worker.ask(draws=[program.to_json()])["outcomes"][0])
    except Died as death:
        return _crashed(worker, program, death)


def _crashed(worker: Worker, program: Draw, death: Died) -> Outcome:
    """The outcome of a program that ended the worker: "invalid" where it does so on one device too, which is not the
    partitioner's doing."""
    message = f"{death.cause}: {death.last}"
    try:
        reference = _outcome(worker.ask(draws=[program.to_json()], reference=True)["outcomes"][0])
        return Outcome(program.number, program.family, "crash", message=message, primitives=reference.primitives)
    except Died:
        return Outcome(program.number, program.family, "invalid", message=f"one device alone: {message}"[:300])


def _outcome(each: dict[str, Any]) -> Outcome:
    wrong = tuple((leaf, math.inf if error is None else error) for leaf, error in each["wrong"])
    return Outcome(**{**each, "wrong": wrong, "primitives": tuple(each["primitives"])})


def same_kind(first: Outcome, second: Outcome) -> bool:
    """Whether two outcomes are of one cause, as far as can be told: both wrong, or the same death or error but for the
    numbers in it."""
    cause = lambda outcome: re.sub(
        r"[0-9a-f]*[0-9][0-9a-f]*",
        "",
        outcome.message.partition("Check failed")[0][:60] + outcome.message.partition("Check failed")[2][:80],
    )
    return first.status == second.status and (first.status == "wrong" or cause(first) == cause(second))


def shrink(program: Draw, still: Callable[[Draw], bool], limit_seconds: float = 120.0) -> Draw:
    """Simplifies a program as long as `still` says of it what it says of the first; greedy, until nothing simpler is
    left or the time is up."""
    deadline, tried = time.monotonic() + limit_seconds, {program}
    progress = True
    while progress:
        progress = False
        for candidate in simpler(program):
            if time.monotonic() > deadline:
                return program
            if candidate in tried:
                continue
            tried.add(candidate)
            if still(candidate):
                program, progress = candidate, True
                break
    return program


def simpler(program: Draw) -> Iterator[Draw]:
    """Programs that are simpler in one respect, the boldest steps first; only such as can be built and laid out."""
    for candidate in _candidates(program):
        try:
            if candidate != program and fits(candidate, case_of(candidate, families())):
                yield candidate
        except (ValueError, TypeError, IndexError, ZeroDivisionError, KeyError):
            continue  # parameters that do not fit each other


def _candidates(program: Draw) -> Iterator[Draw]:
    change = dataclasses.replace
    if program.wrapper != "plain":
        yield change(program, wrapper="plain")
        yield from _with_layouts_of(program, "plain")
    if program.reuse != "once":
        yield change(program, reuse="once")
    if program.pinned:
        yield change(program, pinned=False)
    if program.dtype != "float64":
        yield change(program, dtype="float64")
    if program.boundary:
        yield change(program, boundary=False)
    for mesh in ((("data", 2), ("model", 2)), (("data", 1), ("model", 2)), (("data", 2), ("model", 1))):
        if _weight(mesh) < _weight(program.mesh):
            yield change(
                program,
                mesh=mesh,
                layouts=_without(program.layouts, {axis for axis, _ in program.mesh} - {"data", "model"}),
            )
    for axis in [axis for axis, _ in program.mesh]:
        if axis in program.used_axes:
            yield change(program, layouts=_without(program.layouts, {axis}))
    for k, layout in enumerate(program.layouts):
        for d, axes in enumerate(layout):
            for axis in axes:
                smaller = tuple(a for a in axes if a != axis)
                yield change(
                    program,
                    layouts=(*program.layouts[:k], (*layout[:d], smaller, *layout[d + 1 :]), *program.layouts[k + 1 :]),
                )
    family = families()[program.family]
    settings = program.settings
    for key, value in family.simplest.items():
        if settings.get(key) != value and key in settings:
            yield program.with_params({**settings, key: value})
    for key, value in settings.items():
        for smaller in _smaller(value):
            # Empty arrays are another story: only what may be nothing to begin with becomes so.
            if (
                smaller != 0
                or isinstance(smaller, (bool, float))
                or family.simplest.get(key) == 0
                or key in _MAY_BE_NOTHING
            ):
                yield program.with_params({**settings, key: smaller})
    for axis, size in program.mesh:
        if size > 2:
            yield change(program, mesh=tuple((a, 2 if a == axis else s) for a, s in program.mesh))
    for mesh in ((("data", 2), ("model", 2)),):
        # The same layout with the axes' names exchanged is easier to read where `data` splits the batch.
        if program.mesh == mesh and "model" in program.layouts[0][:1] and "data" not in program.used_axes:
            yield change(
                program,
                layouts=tuple(tuple(tuple("data" for _ in axes) for axes in layout) for layout in program.layouts),
            )


def _with_layouts_of(program: Draw, wrapper: str) -> Iterator[Draw]:
    """Without the wrapper's dims: layouts that lose the one dim that an input has no more."""
    try:
        before = case_of(program, families())
        after = case_of(dataclasses.replace(program, wrapper=wrapper), families())
    except ValueError:
        return
    layouts = []
    for wide, one, layout in zip(before.inputs, after.inputs, program.layouts, strict=True):
        if len(wide.shape) == len(one.shape):
            layouts.append(layout)
        elif one.role == "weight":
            layouts.append(layout[1:])
        else:
            layouts.append((layout[0], *layout[2:]))
    yield dataclasses.replace(program, wrapper=wrapper, layouts=tuple(layouts))


def _weight(mesh: Sequence[tuple[str, int]]) -> tuple[int, int]:
    return (sum(size > 1 for _, size in mesh), math.prod(size for _, size in mesh))


def _without(layouts: Any, gone: set[str]) -> Any:
    return tuple(tuple(tuple(axis for axis in axes if axis not in gone) for axes in layout) for layout in layouts)


_MAY_BE_NOTHING = frozenset({"low", "high", "shift", "at", "keys", "classes", "axis", "interior"})


def _smaller(value: Any) -> Iterator[Any]:
    if isinstance(value, bool) or value is None:
        if value:
            yield False
    elif isinstance(value, int):
        for less in (0, 1, 2, value // 2, value - 1):
            if 0 <= less < value:
                yield less
            elif value < 0 and less == 0:
                yield 0
    elif isinstance(value, float):
        if value:
            yield 0.0
    elif isinstance(value, tuple):
        for k, part in enumerate(value):
            yield (*value[:k], *value[k + 1 :])
            for less in _smaller(part):
                if less != 0 or isinstance(part, tuple):
                    yield (*value[:k], less, *value[k + 1 :])
