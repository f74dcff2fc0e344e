"""Makes the documents of what is predicted of a step before it is compiled, its time and its memory, and of the
calibration that times are predicted by."""

from __future__ import annotations

import re
from collections.abc import Sequence

from splitjax.cost.memory.lifetimes import ProgramMemory
from splitjax.cost.time.prediction import LayerCost, StepTime
from splitjax.display.document import Bar, Cell, Column, Document, Pairs, Paragraph, Section, Table
from splitjax.display.figures import bytes_text, seconds_text, share_text
from splitjax.machines.calibration import Calibration, OperationKind

# The longest operations and the largest arrays are shown; `StepTime.parts` and `ProgramMemory.at_peak` have more.
_NUM_PARTS = 12
_NUM_LAYERS = 20
_NUM_ARRAYS = 20
_NUMBER = re.compile(r"\d+")


def time_document(time: StepTime) -> Document:
    """Makes the document of a predicted `time`: sentences, and what takes longest."""
    kind = "at least" if time.is_lower_bound else "about"
    sentence = (
        f"a step takes {kind} {seconds_text(time.seconds)}: its devices compute for"
        f" {seconds_text(time.computing_seconds)}, collectives take {seconds_text(time.sending_seconds)}, of which"
        f" {seconds_text(time.hidden_seconds)} go on while they compute"
    )
    if time.waiting_seconds:
        sentence += f" and {seconds_text(time.waiting_seconds)} are spent waiting for the last process to come"
    if time.new_memory_seconds:
        sentence += (
            f"; {seconds_text(time.new_memory_seconds)} go by while the system makes the memory that it asks for"
        )
    bound = "nothing was measured of this machine: operations are taken to reach its published peaks"
    rows = []
    for part in time.parts[:_NUM_PARTS]:
        rows.append(
            (
                part.name,
                str(list(part.shape)) if part.shape else "",
                str(part.times),
                seconds_text(part.seconds),
                share_text(part.seconds / time.seconds) if time.seconds else "0 %",
                f"over {', '.join(part.axes)}, {bytes_text(round(part.sent_bytes))}" if part.op else "",
            )
        )
    if rest := time.parts[_NUM_PARTS:]:
        seconds = sum(part.seconds for part in rest)
        share = share_text(seconds / time.seconds) if time.seconds else "0 %"
        rows.append((f"{len(rest)} more", "", "", seconds_text(seconds), share, ""))
    columns = (
        Column("operation", "code"),
        Column("shape", "code"),
        Column("times", "number"),
        Column("in all", "number"),
        Column("of the step", "number"),
        Column("sent"),
    )
    if not any(row[-1] for row in rows):
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    parts = (
        Paragraph(sentence),
        Paragraph(bound if time.is_lower_bound else ""),
        Table(columns, tuple(rows)),
        Section("what each layer costs a device, the longest first", (_layers(time.layers),)),
    )
    return Document("", parts)


def _layers(layers: Sequence[LayerCost]) -> Table:
    """A row for each layer, or for all that differ in numbers alone where there are many: bars of its seconds, and of
    the bytes that are held and stored for it."""
    alike: dict[str, list[LayerCost]] = {}
    for each in layers:
        alike.setdefault(_NUMBER.sub("*", each.layer) if len(layers) > _NUM_LAYERS else each.layer, []).append(each)
    shown = sorted(alike.items(), key=lambda item: -sum(each.seconds for each in item[1]))
    names = [f"{len(group)} x {name}" if len(group) > 1 else group[0].layer or "(no layer)" for name, group in shown]
    groups = [group for _, group in shown]
    if len(groups) > _NUM_LAYERS:
        rest = [each for group in groups[_NUM_LAYERS:] for each in group]
        names[_NUM_LAYERS:], groups[_NUM_LAYERS:] = [f"{len(rest)} more"], [rest]
    sums = [
        LayerCost(
            name,
            sum(each.seconds for each in group),
            sum(each.sent_bytes for each in group),
            sum(each.state_bytes for each in group),
            sum(each.stored_bytes for each in group),
        )
        for name, group in zip(names, groups, strict=True)
    ]
    longest = max((each.seconds for each in sums), default=0.0)
    largest = max((each.state_bytes + each.stored_bytes for each in sums), default=0)
    rows: list[tuple[Cell, ...]] = []
    for each in sums:
        held = each.state_bytes + each.stored_bytes
        note = f"{bytes_text(each.state_bytes)} of state, {bytes_text(each.stored_bytes)} more at the peak"
        rows.append(
            (
                each.layer,
                seconds_text(each.seconds),
                Bar(each.seconds, longest, f"{seconds_text(each.seconds)} a step"),
                bytes_text(held),
                Bar(held, largest, note),
                bytes_text(round(each.sent_bytes)),
            )
        )
    return Table(
        (
            Column("layer", "code"),
            Column("a step", "number"),
            Column("", "bar"),
            Column("at the peak", "number"),
            Column("", "bar"),
            Column("sent", "number"),
        ),
        tuple(rows),
    )


def memory_document(memory: ProgramMemory) -> Document:
    """Makes the document of a predicted `memory`: its figures, and the largest arrays at the peak."""
    figures = (
        ("peak, estimated", (bytes_text(memory.estimate_bytes),)),
        ("peak, at most", (f"{bytes_text(memory.bound_bytes)} (upper bound)",)),
        ("arguments", (bytes_text(memory.argument_bytes),)),
        ("beside them", (f"{bytes_text(memory.temporary_bytes)} at the peak",)),
    )
    columns = (
        Column("made by", "code"),
        Column("shape", "code"),
        Column("layer", "code"),
        Column("per device", "number"),
    )
    rows = tuple(
        (array.made_by, str(list(array.shape)), array.layer, bytes_text(array.num_bytes))
        for array in memory.at_peak[:_NUM_ARRAYS]
    )
    return Document("", (Paragraph("memory of a device, predicted"), Pairs(figures), Table(columns, rows)))


def calibration_document(calibration: Calibration) -> Document:
    """Makes the document of a `calibration`: the machine, then rates of operations and of collectives."""
    processes = f"{calibration.num_processes} process{'es' * (calibration.num_processes > 1)}"
    operations = [curve for curve in calibration.curves if curve.kind is not OperationKind.WAITING]
    waits = [curve.points[index] for curve in calibration.curves if curve not in operations for index in (0, -1)]
    facts: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("measured", (f"{calibration.date}, {calibration.clock} time",)),
        ("devices", (f"{processes} x {calibration.devices_per_process} ({calibration.device})",)),
        ("a call", (f"{seconds_text(calibration.call_seconds)}, before anything is computed",)),
        ("smallest kernel", (f"{1e6 * calibration.node_seconds:.3g} us",)),
    )
    if waits:
        texts = [f"{seconds_text(each.seconds)} after {seconds_text(each.size)} of computing" for each in waits]
        facts += (("waiting for others", tuple(texts)),)
    rates = [(curve, [point.size / point.seconds for point in curve.points]) for curve in operations]
    curves = tuple(
        (curve.kind.value, curve.dtype, f"{min(rate):.3g}", f"{max(rate):.3g}", str(len(curve.points)))
        for curve, rate in rates
    )
    collectives = tuple(
        (
            each.op,
            str(each.participants),
            "between processes" if each.between else "within a process",
            seconds_text(each.link.latency_seconds),
            f"{each.link.bytes_per_second / 1e6:,.4g} MB",
        )
        for each in calibration.collectives
    )
    return Document(
        f"calibration of {calibration.platform}",
        (
            Pairs(facts),
            Table.of(("operations", "dtype", "slowest, a second", "fastest, a second", "sizes"), curves, range(2, 5)),
            Table.of(("collective", "devices", "where", "latency", "a second"), collectives, (1, 3, 4), code=(0,)),
        ),
    )
