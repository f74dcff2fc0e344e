"""Makes the document of what removes a step's involuntary full rematerialisations."""

from __future__ import annotations

from splitjax.display.document import Column, Document, Pairs, Paragraph, Section, Table
from splitjax.display.figures import bytes_text, seconds_text
from splitjax.report.attribute import ReportedCollective
from splitjax.report.blame.remedies import Change, CompiledCost, Remedies
from splitjax.report.rows import short_source


def remedies_document(remedies: Remedies) -> Document:
    """Makes the document of `remedies`."""
    gathered = tuple(_row(number, each) for number, each in enumerate(remedies.gathered, 1))
    of_gathered = (
        Column("array", "number"),
        Column("layer", "code"),
        Column("line", "code"),
        Column("gathered", "code"),
        Column("kept", "code"),
    )
    planned = ("as it is", "", *_figures(remedies.planned))
    could = [each for each in remedies.changes if each.cost is not None]
    rows = (planned, *((each.name, _removed(each), *_figures(each.cost)) for each in could if each.cost is not None))
    columns = (
        Column("change"),
        Column("removes array", "number"),
        Column("left", "number"),
        Column("step", "number"),
        Column("sent", "number"),
        Column("memory", "number"),
    )
    sentence = (
        f"each change was compiled with everything else as it is; seconds are compiled figures, nothing overlapping, by"
        f" {remedies.machine}"
    )
    refused = tuple((each.name, (each.refused,)) for each in remedies.changes if each.cost is None)
    cheapest = {number: remedies.cheapest(number) for number in range(len(remedies.gathered))}
    codes = dict.fromkeys((each.name, tuple(each.code.splitlines())) for each in cheapest.values() if each is not None)
    return Document(
        f"what {remedies.step} on {remedies.mesh} gathers whole to keep a part of",
        (
            Table(of_gathered, gathered),
            Section("what removes it", (Paragraph(sentence), Table(columns, rows)) if gathered else ()),
            Section("what to write for the cheapest", (Pairs(tuple(each for each in codes if each[1])),)),
            Section("cannot be had", (Pairs(refused),)),
        ),
        _verdict(remedies, cheapest),
    )


def _row(number: int, collective: ReportedCollective) -> tuple[str, ...]:
    found = collective.rematerialised
    assert found is not None, "a row is made of what is rematerialised alone"
    whole, kept = f"{list(found.whole)} over {collective.axis}", str(list(found.kept))
    return str(number), collective.layer, short_source(collective.source), whole, kept


def _figures(cost: CompiledCost) -> tuple[str, ...]:
    memory = "" if cost.memory_bytes is None else bytes_text(cost.memory_bytes)
    return str(cost.num_rematerialised), seconds_text(cost.seconds), bytes_text(cost.sent_bytes), memory


def _removed(change: Change) -> str:
    return ", ".join(str(number + 1) for number in change.removes) or "none"


def _verdict(remedies: Remedies, cheapest: dict[int, Change | None]) -> str:
    if not remedies.gathered:
        return "no array is gathered whole to keep a part of it"
    sentences = [
        f"array {number + 1}: {'no change that was tried removes it' if change is None else change.name}"
        for number, change in cheapest.items()
    ]
    return "; ".join(sentences)
