"""What a rendered report shows, independent of how: lines of memory, sums, and rows of collectives with equal blocks
folded."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable

from splitjax.display.figures import bytes_text
from splitjax.plan import Collective
from splitjax.report.attribute import ReportedCollective
from splitjax.report.table import MIN_FOLD
from splitjax.report.value import Report, Total

_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """One collective, or `count` that differ only in a number of their names, such as those of equal blocks; bytes are
    of all."""

    layer: str
    op: str
    axis: str
    predicted_bytes: int
    compiled_bytes: int
    why: str  # cause, and how it differs from the plan
    rule: str
    source: str
    count: int = 1


def headline(report: Report) -> str:
    return (
        f"{report.step} on {report.mesh} ({report.mesh.num_devices} devices), rules {report.rules}, compiled for"
        f" {report.platform}"
    )


def memory_rows(report: Report) -> tuple[tuple[str, str, str, str], ...]:
    """(what the plan predicts, its size, what XLA compiled, its size)."""
    predicted, compiled = report.memory.predicted, report.memory.compiled
    if compiled is None:
        mine = (
            ("state", predicted.state_bytes),
            ("activations", predicted.activation_bytes),
            ("peak", predicted.peak_bytes),
        )
        return tuple((name, bytes_text(size), "not told by the backend", "") for name, size in mine)
    rows = [
        ("state", bytes_text(predicted.state_bytes), "arguments", bytes_text(compiled.argument_bytes)),
        ("activations", bytes_text(predicted.activation_bytes), "temporaries", bytes_text(compiled.temporary_bytes)),
        ("", "", "results in buffers of their own", bytes_text(compiled.output_bytes - compiled.alias_bytes)),
        ("peak", bytes_text(predicted.peak_bytes), "total", bytes_text(compiled.total_bytes)),
    ]
    if compiled.peak_bytes is not None:
        rows.append(("", "", "peak by the backend", bytes_text(compiled.peak_bytes)))
    return tuple(rows)


def total_rows(report: Report) -> tuple[tuple[str, ...], ...]:
    """(op over axis, predicted number and bytes, compiled number and bytes), the largest first, then the sum."""
    rows = [(f"{op} over {axis}", *_sums(total)) for (op, axis), total in report.by_op.items()]
    return (*rows, ("all", *_sums(report.total))) if rows else ()


def layer_rows(report: Report) -> tuple[tuple[str, ...], ...]:
    """(layer, predicted number and bytes, compiled number and bytes), the largest first; equal blocks folded, with the
    figures of one of them."""
    folded: dict[tuple[str, Total], list[str]] = {}
    for layer, total in report.by_layer.items():
        folded.setdefault((_NUMBER.sub("*", layer), total), []).append(layer)
    rows: list[tuple[str, Total, int]] = []
    for (pattern, total), layers in folded.items():
        if len(layers) < MIN_FOLD:
            rows += [(layer, total, 1) for layer in layers]
        else:
            rows.append((pattern, total, len(layers)))
    return tuple(
        ((f"each of {count}: " if count > 1 else "") + (layer or "(no layer)"), *_sums(total))
        for layer, total, count in rows
    )


def depth_rows(report: Report) -> tuple[tuple[str, str, str, str], ...]:
    """(worker in the first step, the first layer that it differentiates, its share of the backward pass, products in
    its branch)."""
    count = lambda one: "" if one.num_products is None else str(one.num_products)
    return tuple((str(one.slot), one.layer, f"{100 * one.backward:.1f} %", count(one)) for one in report.depths)


DEPTH_COLUMNS = ("worker", "differentiates from", "planned backward", "compiled products")


def planned_rows(report: Report) -> tuple[CollectiveRow, ...]:
    return _fold(_row(one) for one in report.collectives if one.planned is not None)


def unplanned_rows(report: Report) -> tuple[CollectiveRow, ...]:
    return _fold(sorted((_row(one) for one in report.unplanned), key=lambda row: -row.compiled_bytes))


def missing_rows(report: Report) -> tuple[CollectiveRow, ...]:
    return _fold(_missing_row(one) for one in report.missing)


def verdict(report: Report) -> str:
    """One line: how many collectives, and what became of the plan's."""
    realised = [one for one in report.collectives if one.planned is not None]
    differing = sum(bool(one.differs) for one in realised)
    how = f" ({differing} with another op, axis or size)" if differing else ""
    return (
        f"{len(report.collectives)} collectives a step: {len(realised)} planned{how}, {len(report.unplanned)}"
        f" unplanned, {len(report.unattributed)} unattributed; {len(report.missing)} planned but missing"
    )


def short_source(source: str) -> str:
    """`file:line` without folders and function, which `to_json` has; an `__init__.py` with its folder."""
    path, colon, line = source.partition(" (")[0].rpartition(":")
    folder, name = os.path.split(path)
    return (
        f"{os.path.join(os.path.basename(folder), name) if name == '__init__.py' else name}:{line}" if colon else source
    )


def _sums(total: Total) -> tuple[str, str, str, str]:
    return (
        str(total.predicted_count),
        bytes_text(total.predicted_bytes),
        str(total.compiled_count),
        bytes_text(total.compiled_bytes),
    )


def _row(one: ReportedCollective) -> CollectiveRow:
    notes = [one.differs]
    if not one.compiled.trips_known:
        notes.append("bytes of one turn of a loop of unknown length")
    if one.compiled.share < 1:
        notes.append(f"runs {100 * one.compiled.share:.3g} % of the time")
    elif one.compiled.conditional:
        notes.append("in a branch")
    why = "; ".join(part for part in (one.cause or "unattributed", *notes) if part)
    return CollectiveRow(
        one.layer,
        one.op,
        one.axis,
        one.predicted_bytes,
        one.bytes,
        _within(why, one.layer),
        _within(one.rule, one.layer),
        short_source(one.source),
    )


def _missing_row(one: Collective) -> CollectiveRow:
    return CollectiveRow(one.layer, one.op, one.axis, one.bytes, 0, _within(one.why, one.layer), "", "")


def _within(text: str, layer: str) -> str:
    """A text beside a layer's name, which it need not say again: `gradient of kernel`; of another layer what both
    share."""
    if not layer:
        return text
    shared = layer.rpartition("/")[0]
    text = text.replace(f"{layer}/", "").replace(f" {layer}", " it")
    return text.replace(f" {shared}/", " ").replace(f"with {shared}/", "with ") if shared else text


def _fold(rows: Iterable[CollectiveRow]) -> tuple[CollectiveRow, ...]:
    groups: dict[CollectiveRow, list[CollectiveRow]] = {}
    for row in rows:
        blank = dataclasses.replace(
            row, **{name: _NUMBER.sub("*", getattr(row, name)) for name in ("layer", "why", "rule", "source")}
        )
        groups.setdefault(blank, []).append(row)
    found: list[CollectiveRow] = []
    for blank, group in groups.items():
        if len(group) < (2 if len(set(group)) == 1 else MIN_FOLD):
            found += group
            continue
        # What all of them have in common keeps its numbers: a source line, say.
        shared = {
            name: getattr(group[0], name)
            for name in ("layer", "why", "rule", "source")
            if len({getattr(row, name) for row in group}) == 1
        }
        found.append(
            dataclasses.replace(
                blank,
                **shared,
                count=len(group),
                predicted_bytes=sum(row.predicted_bytes for row in group),
                compiled_bytes=sum(row.compiled_bytes for row in group),
            )
        )
    return tuple(found)
