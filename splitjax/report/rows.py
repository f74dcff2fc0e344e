"""Makes the texts and rows of a report's document: lines of memory, sums, and rows of collectives.

A `Report` goes in; rows come out that say nothing of how they are laid out. Equal blocks of a network give equal rows,
which are folded.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable

from splitjax.display.figures import bytes_text, flops_text
from splitjax.plan import Collective, beside
from splitjax.report.attribute import ReportedCollective
from splitjax.report.plan.table import MIN_FOLD
from splitjax.report.value import Report, Total

_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True)
class CollectiveRow:
    """Describes a collective, or `count` that differ only in a number of their names, such as those of equal blocks.

    **Attributes:**

    - `layer`, `op`, `axis`, `rule`: as in `ReportedCollective`.
    - `predicted_bytes`, `compiled_bytes`: what each device sends per step for all of them, by the plan and as compiled.
    - `why`: the cause, and how it differs from the plan.
    - `source`: `file:line`.
    - `count`: how many collectives the row stands for.
    """

    layer: str
    op: str
    axis: str
    predicted_bytes: int
    compiled_bytes: int
    why: str
    rule: str
    source: str
    count: int = 1


def headline(report: Report) -> str:
    """Returns what `report` is of: the step, its devices and rules, and what it was compiled for."""
    return (
        f"{report.step} on {report.mesh} ({report.mesh.num_devices} devices), rules {report.rules}, compiled for"
        f" {report.platform}"
    )


def memory_rows(report: Report) -> tuple[tuple[str, str, str, str], ...]:
    """Returns the memory per device in `report`: (what the plan predicts, its size, what XLA compiled, its size)."""
    predicted, compiled = report.memory.predicted, report.memory.compiled
    mine = [("state", predicted.state_bytes)]
    if predicted.argument_bytes is None or predicted.bound_bytes is None:
        mine += [
            ("activations, if all live at once", predicted.activation_bytes),
            ("", None),
            ("peak, if all lives at once", predicted.peak_bytes),
        ]
    else:
        mine = [
            ("arguments", predicted.argument_bytes),
            ("beside them at the peak", predicted.activation_bytes),
            ("of the arguments state", predicted.state_bytes),
            ("peak, estimated", predicted.peak_bytes),
            ("peak, at most (upper bound)", predicted.bound_bytes),
        ]
    theirs: list[tuple[str, int | None]] = [("not told by the backend", None)]
    if compiled is not None:
        theirs = [
            ("arguments", compiled.argument_bytes),
            ("temporaries", compiled.temporary_bytes),
            ("results in buffers of their own", compiled.output_bytes - compiled.alias_bytes),
            ("total", compiled.total_bytes),
        ]
        if compiled.peak_bytes is not None:
            theirs.append(("peak by the backend", compiled.peak_bytes))
        if compiled.vector_bytes is not None:
            theirs.append(("in VMEM, at most at a time", compiled.vector_bytes))
    size = lambda number: "" if number is None else bytes_text(number)
    pairs = itertools.zip_longest(mine, theirs, fillvalue=("", None))
    rows = ((name, size(number), beside, size(other)) for (name, number), (beside, other) in pairs)
    return tuple(row for row in rows if any(row))


def compute_rows(report: Report) -> tuple[tuple[str, str, str, str], ...]:
    """Returns the flops per device and step in `report`: (what the plan predicts, its number, what XLA compiled, its
    number); nothing where nothing is predicted and none are counted."""
    predicted, compiled = report.compute.predicted, report.compute.compiled
    if not predicted.ideal_flops and not compiled:
        return ()
    beside = "not told by calls into libraries" if compiled is None else flops_text(compiled)
    return (
        ("products with weights", flops_text(predicted.flops), "all products", beside),
        ("an even share of them", flops_text(predicted.ideal_flops), "", ""),
    )


def total_rows(report: Report) -> tuple[tuple[str, ...], ...]:
    """Returns the sums of `report`: (op over axis, predicted number and bytes, compiled number and bytes), the largest
    first, then the sum of all."""
    rows = [(f"{op} over {axis}", *_sums(total)) for (op, axis), total in report.by_op.items()]
    return (*rows, ("all", *_sums(report.total))) if rows else ()


def layer_rows(report: Report) -> tuple[tuple[str, ...], ...]:
    """Returns the sums of `report` by layer: (layer, predicted number and bytes, compiled number and bytes), the
    largest first. Equal blocks are folded, with the figures of each."""
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
    """Returns the depths in `report`: (worker in the first step, the first layer that it differentiates, its share of
    the backward pass, products in its branch)."""
    rows = []
    for depth in report.depths:
        products = "" if depth.num_products is None else str(depth.num_products)
        rows.append((str(depth.slot), depth.layer, f"{100 * depth.backward:.1f} %", products))
    return tuple(rows)


DEPTH_COLUMNS = ("worker", "differentiates from", "planned backward", "compiled products")


def planned_rows(report: Report) -> tuple[CollectiveRow, ...]:
    """Returns the collectives of `report` that realise a planned one, in the order of the program."""
    return _fold(_row(collective) for collective in report.collectives if collective.planned is not None)


def unplanned_rows(report: Report) -> tuple[CollectiveRow, ...]:
    """Returns the collectives of `report` that the plan does not have, the largest first."""
    return _fold(sorted((_row(collective) for collective in report.unplanned), key=lambda row: -row.compiled_bytes))


def missing_rows(report: Report) -> tuple[CollectiveRow, ...]:
    """Returns the planned collectives of `report` that XLA did without."""
    return _fold(_missing_row(collective) for collective in report.missing)


def verdict(report: Report) -> str:
    """Returns a line: how many collectives `report` has, and what became of the plan's."""
    realised = [collective for collective in report.collectives if collective.planned is not None]
    differing = sum(bool(collective.differs) for collective in realised)
    how = f" ({differing} with another op, axis or size)" if differing else ""
    return (
        f"{len(report.collectives)} collectives a step: {len(realised)} planned{how}, {len(report.unplanned)}"
        f" unplanned, {len(report.unattributed)} unattributed; {len(report.missing)} planned but missing"
    )


def short_source(source: str) -> str:
    """Returns `source` (`file:line (function)`) as `file:line` without folders and function, which `to_json` has; an
    `__init__.py` with its folder."""
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


def _row(collective: ReportedCollective) -> CollectiveRow:
    notes = [collective.differs]
    if not collective.compiled.trips_known:
        notes.append("bytes of one turn of a loop of unknown length")
    if collective.compiled.share < 1:
        notes.append(f"runs {100 * collective.compiled.share:.3g} % of the time")
    elif collective.compiled.conditional:
        notes.append("in a branch")
    planned = dict.fromkeys(planned.purpose.sentence(collective.layer) for planned in collective.realised)
    cause = "; ".join(planned) or collective.cause_beside or collective.cause
    why = "; ".join(part for part in (cause or "unattributed", *notes) if part)
    return CollectiveRow(
        collective.layer,
        collective.op,
        collective.axis,
        collective.predicted_bytes,
        collective.bytes,
        why,
        _rule_beside(collective.rule, collective.layer),
        short_source(collective.source),
    )


def _missing_row(collective: Collective) -> CollectiveRow:
    return CollectiveRow(
        collective.layer,
        collective.op,
        collective.axis,
        collective.bytes,
        0,
        collective.purpose.sentence(collective.layer),
        "",
        "",
    )


def _rule_beside(rule: str, layer: str) -> str:
    """Returns a rule as it reads beside a layer's name: with the parameter that it names, `ties with PATH` or
    `RULE (with PATH)`, said as `splitjax.plan.beside` says it."""
    head, with_, path = rule.rpartition("with ")
    name, bracket = path.removesuffix(")"), ")" if path.endswith(")") else ""
    return f"{head}{with_}{beside(name, layer)}{bracket}" if with_ else rule


def _fold(rows: Iterable[CollectiveRow]) -> tuple[CollectiveRow, ...]:
    """Joins rows that differ only in a number of their names, where there are several."""
    groups: dict[CollectiveRow, list[CollectiveRow]] = {}
    for row in rows:
        blank = dataclasses.replace(
            row, **{name: _NUMBER.sub("*", getattr(row, name)) for name in ("layer", "why", "rule", "source")}
        )
        groups.setdefault(blank, []).append(row)
    folded: list[CollectiveRow] = []
    for blank, group in groups.items():
        if len(group) < (2 if len(set(group)) == 1 else MIN_FOLD):
            folded += group
            continue
        # What all of them have in common keeps its numbers: a source line, say.
        shared = {
            name: getattr(group[0], name)
            for name in ("layer", "why", "rule", "source")
            if len({getattr(row, name) for row in group}) == 1
        }
        folded.append(
            dataclasses.replace(
                blank,
                **shared,
                count=len(group),
                predicted_bytes=sum(row.predicted_bytes for row in group),
                compiled_bytes=sum(row.compiled_bytes for row in group),
            )
        )
    return tuple(folded)
