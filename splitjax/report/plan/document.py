"""Makes the document of a plan: what it saves, what it sends and what to try next; a table of parameters with a bar per
layer; titled lines below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from splitjax.display.document import Bar, Cell, Column, Document, Pairs, Section, Table
from splitjax.display.figures import bytes_text, percent_saved
from splitjax.plan import LeafPlan, Plan
from splitjax.report.plan.summary import collective_rows, memory_rows, peak_rows, splitting_axes, summary
from splitjax.report.plan.table import Row, table

# Optimizer state that lies whole on every device is worth a line if it is more than one in so many bytes of what a
# device holds. A whole number: bytes may be too many for a float.
_WORTH_SPLITTING = 20


def plan_document(plan: Plan) -> Document:
    """Makes the document of `plan`. The bar of a layer is as long as the layer takes bytes, relative to the largest
    layer, and filled for what one device holds of it."""
    memory = Table.of(("", "per device", "on one device", "saved"), memory_rows(plan), (1, 2, 3))
    peak = Table.of(("layer", "made by", "shape", "per device"), peak_rows(plan), (3,), code=(0, 1, 2))
    sent = Table.of(("collective", "number", "bytes"), collective_rows(plan), (1, 2))
    return Document(
        "",
        (
            Pairs(headline(plan)),
            _parameters(table(plan)),
            Section("memory", (memory,)),
            Section("stored at the peak, beside the arguments", (peak,)),
            Section("sent per device and step", (sent,)),
            Pairs(summary(plan)),
        ),
    )


def _parameters(groups: tuple[tuple[Row, ...], ...]) -> Table:
    """Makes the table of parameters; where equal layers are folded, with a column that says how many a row stands
    for."""
    is_folded = any(row.repeat > 1 for group in groups for row in group)
    rows: list[tuple[Cell, ...]] = []
    firsts = []
    for group in groups:
        firsts.append(len(rows))
        for number, row in enumerate(group):
            layer, kind, bar = ("", "", "") if number else (row.layer, row.kind, _bar(group))
            count = ("" if row.repeat == 1 else str(row.repeat),) if is_folded else ()
            names = (layer, row.param, kind, str(row.shape), row.spec, row.rule)
            rows.append((*names, *count, bytes_text(row.device_bytes), bar))
    columns = (
        Column("layer", "code"),
        Column("parameter", "code"),
        Column("kind"),
        Column("shape", "code"),
        Column("spec", "code"),
        Column("rule"),
        *((Column("layers", "number"),) if is_folded else ()),
        Column("each, per device" if is_folded else "per device", "number"),
        Column("filled: this device's part", "bar"),
    )
    return Table(columns, tuple(rows), frozenset(firsts))


def _bar(group: tuple[Row, ...]) -> Bar:
    held = sum(row.device_bytes * row.repeat for row in group)
    whole = sum(row.whole_bytes * row.repeat for row in group)
    note = f"{bytes_text(held)} per device of {bytes_text(whole)}: {percent_saved(held, whole)} saved"
    return Bar(held, whole, note)


def headline(plan: Plan) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Returns titled lines about all of `plan`."""
    return (("saves", (_saves(plan),)), ("sends", (_sends(plan),)), ("next", (_next(plan),)))


def _bytes(leaves: Iterable[LeafPlan], of: Callable[[LeafPlan], int]) -> int:
    return sum(map(of, leaves))


def _saves(plan: Plan) -> str:
    state = [leaf for leaf in plan.leaves if leaf.is_state]
    held, whole = (
        _bytes(state, lambda leaf: leaf.bytes_per_device),
        _bytes(state, lambda leaf: leaf.whole_bytes(plan.mesh)),
    )
    if not whole:
        return "nothing: the step has no state"
    if held < whole:
        return f"{percent_saved(held, whole)} of the state: each device holds {bytes_text(held)} of {bytes_text(whole)}"
    if plan.mesh.num_devices == 1:
        why = "there is one device"
    elif set(plan.mesh.names) <= set(plan.batch_axes):
        why = f"the rules use {plan.mesh} for the batch alone"
    else:
        why = "no parameter is split"
    return f"nothing: each device holds the whole state, {bytes_text(whole)}, as {why}"


def _sends(plan: Plan) -> str:
    sums: dict[str, int] = {}
    for collective in plan.collectives:
        name = f"{collective.op} over {collective.axis}"
        sums[name] = sums.get(name, 0) + collective.bytes
    total = sum(sums.values())
    if not total:
        return "nothing"
    most = max(sums, key=sums.__getitem__)
    part = "" if len(sums) == 1 else f", of it {bytes_text(sums[most])}"
    return f"{bytes_text(total)} a device and step{part} by {most}"


def _next(plan: Plan) -> str:
    if plan.warnings:
        return plan.warnings[0].remedy
    state = [leaf for leaf in plan.leaves if leaf.is_state]
    held = _bytes(state, lambda leaf: leaf.bytes_per_device)
    everywhere = [leaf for leaf in state if leaf.role == "optimizer" and not leaf.axes]
    could_go = _bytes(everywhere, lambda leaf: leaf.bytes_per_device)
    if plan.mesh.num_devices > 1 and could_go * _WORTH_SPLITTING > held:
        text = f"shard_state=True: {bytes_text(could_go)} of optimizer state lie on every device alike"
        if not splitting_axes(plan):
            text += '; rules="fsdp" splits parameters too, and a mesh axis model the layers'
        return text
    if plan.mesh.num_devices > 1 and held and not splitting_axes(plan):
        return 'rules="fsdp" to split the state over these devices, or a mesh with an axis model to split layers'
    return "step.report(state, batch): what XLA makes of it"
