"""Makes the document of machines that were compared for a step: a plot of time against memory, and a row a layout."""

from __future__ import annotations

import math
from collections.abc import Iterator

from splitjax.choosing.trade_off import Point, TradeOff
from splitjax.display.document import Column, Document, Dot, Paragraph, Part, Scatter, Table
from splitjax.display.figures import bytes_text, seconds_text

_COLUMNS = (
    Column("machine", "code"),
    Column("devices", "number"),
    Column("step", "number"),
    Column("a device at most", "number"),
    Column("mesh", "code"),
    Column("rules"),
    Column("verdict"),
)
_EXPLAINED = (
    "Every machine has its fastest layout first, then the fastest that need less and less memory. A layout is beaten"
    " where another takes no more time, no more memory of a device and no more devices. Seconds are lower bounds by"
    " published peaks; nothing was compiled or run."
)


def trade_off_document(compared: TradeOff) -> Document:
    """Makes the document of `compared`."""
    rows = tuple(
        (
            str(each.target),
            str(each.num_devices),
            seconds_text(each.seconds),
            bytes_text(each.memory_bytes),
            str(each.mesh),
            each.rules,
            _verdict(compared, each),
        )
        for each in compared.points
    )
    targets = [each.target for each in compared.points]
    begins = frozenset(k for k in range(len(targets)) if not k or targets[k] != targets[k - 1])
    parts: tuple[Part, ...] = (_picture(compared), Table(_COLUMNS, rows, begins), Paragraph(_EXPLAINED))
    return Document("machines compared for a step", parts, compared.verdict)


def _verdict(compared: TradeOff, point: Point) -> str:
    if not compared.fits(point):
        return f"does not fit: {bytes_text(compared.limit_bytes(point))} a device"
    if point == compared.fewest:
        return "the fewest devices that fit" + (", the fastest" if point == compared.fastest else "")
    if point == compared.fastest:
        return "the fastest that fits"
    by = compared.beaten_by(point)
    return "fits" if by is None else f"fits; beaten by {by.target}, {by.mesh}"


def _picture(compared: TradeOff) -> Scatter:
    series, fronts = [], []
    front = set(compared.front)
    for target in dict.fromkeys(each.target for each in compared.points):
        points = sorted((each for each in compared.points if each.target == target), key=lambda each: each.memory_bytes)
        dots = tuple(Dot(each.memory_bytes, each.seconds, compared.fits(each), _note(each)) for each in points)
        devices = f"{target.num_devices} device{'s' * (target.num_devices > 1)}"
        series.append((f"{target} ({devices})", dots))
        fronts.append(tuple(k for k, each in enumerate(points) if each in front))
    budget = compared.budget_bytes
    memory = [*(each.memory_bytes for each in compared.points), *([budget] if budget else [])]
    seconds = [each.seconds for each in compared.points]
    return Scatter(
        tuple(series),
        "memory that a device needs at most" + ("; dashed: the budget" if compared.budget_bytes else ""),
        "time of a step, at least",
        tuple((place, bytes_text(int(place))) for place in _powers(2.0, min(memory), max(memory))),
        tuple((place, seconds_text(place)) for place in _rounded(min(seconds), max(seconds))),
        tuple(fronts),
        compared.budget_bytes,
        filled="it fits",
        ring="it does not fit" if not all(map(compared.fits, compared.points)) else "",
        joined="joined: no layout beats them",
    )


def _note(point: Point) -> str:
    takes = f"{seconds_text(point.seconds)}, {bytes_text(point.memory_bytes)}"
    return f"{point.target}, {point.mesh}, {point.rules}: {takes}"


def _powers(base: float, low: float, high: float) -> Iterator[float]:
    """Yields the powers of a base from just below `low` to just above `high`."""
    for exponent in range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1):
        yield base**exponent


def _rounded(low: float, high: float) -> Iterator[float]:
    """Yields 1, 2 and 5 times the powers of ten around two values."""
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (lead * 10.0**exponent for lead in (1, 2, 5))
