"""Makes the document of memory timelines: what a device stores when, predicted above compiled with the same axes, and
what is stored at each peak, by layer and array by array."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence

from splitjax.cost.memory.moments import MemoryTimeline, StoredSpan, running
from splitjax.display.document import (
    Areas,
    Band,
    Bar,
    Cell,
    Column,
    Document,
    Pairs,
    Panel,
    Paragraph,
    Part,
    Section,
    Stretch,
    Table,
)
from splitjax.display.figures import bytes_text
from splitjax.report.memory.value import MemoryTimelines

_NUMBER = re.compile(r"\d+")
# So many groups of layers have a band of their own, and so many rows the arrays at a peak.
_MOST_BANDS, _MOST_ARRAYS = 8, 12
_ARGUMENTS, _REST, _NOBODY = "arguments", "other layers", "no layer"
_NUM_TICKS = 4
# How much higher than the highest peak the panels are; the share of the arrays at the peaks that a band has at least;
# where the largest bands have less than this, blocks that differ in numbers alone share one.
_ABOVE, _LEAST, _ENOUGH = 1.04, 0.02, 0.6


def timelines_document(timelines: MemoryTimelines) -> Document:
    """Makes the document of `timelines`."""
    shown = [("predicted", timelines.predicted)]
    if timelines.compiled is not None:
        shown.append(("compiled", timelines.compiled))
    groups = _groups([timeline for _, timeline in shown])
    most = max(timeline.peak_bytes for _, timeline in shown)
    panels = tuple(_panel(name, timeline, groups) for name, timeline in shown)
    sections: list[Part] = [Section("stored at the peak, by layer", (_by_layer(shown, groups),))]
    for name, timeline in shown:
        table = _arrays(timeline, "whole shape" if timeline.set_aside_bytes is None else "shape on a device")
        sections.append(Section(f"{name}: what is stored at the peak beside the arguments", (table,)))
    note = "" if timelines.compiled is not None else "what XLA compiles is not shown: it was not asked, or does not say"
    return Document(
        f"memory of a device during {timelines.step}",
        (Pairs(_figures(shown)), Areas(panels, _ticks(most), _ABOVE * max(most, 1)), Paragraph(note), *sections),
    )


def _figures(shown: Sequence[tuple[str, MemoryTimeline]]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    rows = []
    for name, timeline in shown:
        at = f"at operation {timeline.peak + 1} of {len(timeline.operations)}, {timeline.operations[timeline.peak]}"
        line = (
            f"{bytes_text(timeline.peak_bytes)} at the peak ({at}): {bytes_text(timeline.argument_bytes)} of arguments,"
            f" {bytes_text(timeline.temporary_bytes)} beside them"
        )
        more = ()
        if timeline.set_aside_bytes is not None:
            more = (f"XLA sets aside {bytes_text(timeline.set_aside_bytes)} beside the arguments for it",)
        rows.append((name, (line, *more)))
    return tuple(rows)


def _groups(timelines: Sequence[MemoryTimeline]) -> dict[str, str]:
    """Returns the group of every layer: the module of the model that it is in, such as a block, equal ones together
    where there are many of them; what is small at the peaks is in a group of its own."""
    names = sorted({span.array.layer for timeline in timelines for span in timeline.spans if span.array.layer})
    split = [name.split("/") for name in names]
    shared = min((len(parts) - 1 for parts in split), default=0)
    while any(parts[:shared] != split[0][:shared] for parts in split):
        shared -= 1
    # Arguments that belong to no layer have a root of their own, such as `batch`, beside that of the parameters.
    keep = 1 if shared else 2
    found = {name: "/".join(parts[: shared + keep]) for name, parts in zip(names, split, strict=True)}
    sizes = _sizes(timelines, found)
    if sum(sorted(sizes.values(), reverse=True)[:_MOST_BANDS]) < _ENOUGH * sum(sizes.values()):
        found = {name: _NUMBER.sub("*", group) for name, group in found.items()}
        sizes = _sizes(timelines, found)
    least = _LEAST * sum(timeline.temporary_bytes for timeline in timelines)
    largest = sorted(sizes, key=lambda group: -sizes[group])[:_MOST_BANDS]
    kept = {group for group in largest if sizes[group] >= least}
    return {"": _NOBODY if _NOBODY in kept else _REST} | {
        name: group if group in kept else _REST for name, group in found.items()
    }


def _sizes(timelines: Sequence[MemoryTimeline], groups: Mapping[str, str]) -> dict[str, int]:
    """Adds up what is stored at the peaks, by the group of its layer."""
    sizes: dict[str, int] = {}
    for timeline in timelines:
        for array in timeline.at_peak:
            group = groups.get(array.layer, _NOBODY)
            sizes[group] = sizes.get(group, 0) + array.num_bytes
    return sizes


def _panel(name: str, timeline: MemoryTimeline, groups: dict[str, str]) -> Panel:
    count = len(timeline.operations)
    spans: dict[str, list[StoredSpan]] = {}
    for span in timeline.spans:
        spans.setdefault(groups[span.array.layer], []).append(span)
    bands = [Band(_ARGUMENTS, (float(timeline.argument_bytes),) * count)]
    order = [group for group in dict.fromkeys(groups.values()) if group not in (_REST, _NOBODY)]
    for group in (*order, _NOBODY, _REST):
        if group in groups.values():
            bands.append(Band(group, tuple(map(float, running(spans.get(group, ()), count)))))
    axis = f"{count} operations in the order in which they run, the body of a loop once; the mark is at the peak"
    title = f"{name}: {bytes_text(timeline.peak_bytes)} at the peak"
    return Panel(title, tuple(bands), axis, timeline.peak, _passes(timeline))


def _passes(timeline: MemoryTimeline) -> tuple[Stretch, ...]:
    stretches, start = [], 0
    for key, run in itertools.groupby(timeline.passes):
        end = start + len(tuple(run))
        stretches.append(Stretch(start, end, (key,), f"{key}, operations {start + 1} to {end}"))
        start = end
    return tuple(stretches)


def _ticks(most: int) -> tuple[tuple[float, str], ...]:
    """Amounts from 0 up to the largest, a round number of their unit apart."""
    unit = 1024 ** max(0, int(math.log(max(most, 1), 1024)))
    rough = max(most, 1) / unit / _NUM_TICKS
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough) * unit
    return tuple((number * step, bytes_text(round(number * step))) for number in range(int(most / step) + 1))


def _by_layer(shown: Sequence[tuple[str, MemoryTimeline]], groups: dict[str, str]) -> Table:
    """A row for each group of layers, with a bar of what is stored of it at the peak."""
    sums: dict[str, list[int]] = {_ARGUMENTS: [timeline.argument_bytes for _, timeline in shown]}
    for number, (_, timeline) in enumerate(shown):
        for array in timeline.at_peak:
            row = sums.setdefault(groups[array.layer], [0] * len(shown))
            row[number] += array.num_bytes
    rows: list[tuple[Cell, ...]] = []
    most = max(max(sizes) for sizes in sums.values())
    for group, sizes in sorted(sums.items(), key=lambda item: -max(item[1])):
        cells: list[Cell] = [group]
        for size in sizes:
            cells += [bytes_text(size), Bar(size, most, f"{group}: {bytes_text(size)}")]
        rows.append(tuple(cells))
    columns = [Column("layers", "code")]
    for name, _ in shown:
        columns += [Column(name, "number"), Column("", "bar")]
    return Table(tuple(columns), tuple(rows))


def _arrays(timeline: MemoryTimeline, shape_title: str) -> Table:
    """The largest arrays at the peak, those alike in one row."""
    found: dict[tuple[str, str, str, int], list[StoredSpan]] = {}
    alive = [span for span in timeline.spans if span.start <= timeline.peak < span.end]
    for span in alive:
        array = span.array
        key = _NUMBER.sub("*", array.layer), array.made_by, str(list(array.shape)), array.num_bytes
        found.setdefault(key, []).append(span)
    size_of = lambda spans: sum(span.array.num_bytes for span in spans)
    rows = []
    largest = sorted(found.items(), key=lambda item: -size_of(item[1]))
    for (pattern, made_by, shape, _), spans in largest[:_MOST_ARRAYS]:
        layers = {span.array.layer for span in spans}
        count = f"{len(spans)} x " if len(spans) > 1 else ""
        first, last = min(span.start for span in spans) + 1, max(span.end for span in spans)
        layer = pattern if len(layers) > 1 else layers.pop()
        rows.append((layer, f"{count}{made_by}", shape, f"{first} to {last}", bytes_text(size_of(spans))))
    if rest := largest[_MOST_ARRAYS:]:
        count = sum(len(spans) for _, spans in rest)
        rows.append(("all else", f"{count} arrays", "", "", bytes_text(sum(size_of(spans) for _, spans in rest))))
    return Table.of(
        ("layer", "made by", shape_title, "stored during", "per device"), tuple(rows), (3, 4), code=(0, 1, 2)
    )
