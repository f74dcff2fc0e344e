"""Makes the document of an explanation: why a layer lies so, then a row for every layout that it could have."""

from __future__ import annotations

from splitjax.display.document import Column, Document, Pairs, Paragraph, Section, Table
from splitjax.display.figures import bytes_text, seconds_text
from splitjax.plan import Alternative, Explanation, spec_text

_SHOWN = 6  # names in one line


def explanation_document(explanation: Explanation) -> Document:
    """Makes the document of an `explanation`."""
    planned = explanation.planned
    title = f"{explanation.layer or explanation.name}, {explanation.kind}" if explanation.kind else explanation.name
    facts = [("why", explanation.reasons)]
    if explanation.alike:
        facts.append(("repeated by", (_listed(explanation.alike),)))
    sent = tuple(
        f"{each.op} over {each.axis}, {bytes_text(each.bytes)}" + (f": {each.why}" if each.why else "")
        for each in explanation.collectives
    )
    if explanation.layer:
        facts.append(("sends", sent or ("nothing",)))
    step = (
        f"as planned a step takes {seconds_text(planned.seconds)} by {explanation.machine}, and a device sends"
        f" {bytes_text(planned.sent_bytes)} and stores {bytes_text(planned.peak_bytes)} if all that a step stores is"
        " added up"
    )
    columns = (
        Column("layout"),
        Column("weight", "code"),
        Column("step", "number"),
        Column("sent", "number"),
        Column("state", "number"),
        Column("memory", "number"),
    )
    can = [each for each in explanation.alternatives if each.cost is not None]
    table = Table(columns, tuple(_row(each, explanation) for each in can))
    along = [(each.name, (_listed(each.along),)) for each in can if each.along]
    refused = [(each.name, (each.refused,)) for each in explanation.alternatives if each.cost is None]
    rules = [(each.name, tuple(each.rule.splitlines())) for each in explanation.cheaper[:1] if each.rule]
    return Document(
        title,
        (
            Pairs(tuple(facts)),
            Section("every layout of it, beside the plan", (Paragraph(step), table)),
            Section("other layers that change along", (Pairs(tuple(along)),)),
            Section("cannot be had", (Pairs(tuple(refused)),)),
            Section("the rule of the fastest, to stand in front of the others", (Pairs(tuple(rules)),)),
        ),
        _verdict(explanation),
    )


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _row(each: Alternative, explanation: Explanation) -> tuple[str, ...]:
    assert each.cost is not None, "what cannot be had has no row"
    beyond, weight = each.cost.beyond(explanation.planned), spec_text(each.specs[0][1]) if each.specs else ""
    if each.is_planned:
        return f"{each.name} (planned)", weight, "as planned", "as planned", "as planned", "as planned"
    return (
        each.name,
        weight,
        _signed(beyond.seconds, seconds_text(abs(beyond.seconds))),
        *(_signed(more, bytes_text(abs(more))) for more in (beyond.sent_bytes, beyond.state_bytes, beyond.peak_bytes)),
    )


def _signed(more: float, text: str) -> str:
    return f"{'+' if more > 0 else '-'}{text}" if more else "same"


def _verdict(explanation: Explanation) -> str:
    if not explanation.layer:
        return ""
    if len(explanation.alternatives) < 2:
        return "there is no other layout of it on this mesh"
    if not explanation.cheaper:
        return "no other layout of this layer alone is predicted to be faster"
    best = explanation.cheaper[0]
    assert best.cost is not None, "what is cheaper has a cost"
    saved = explanation.planned.seconds - best.cost.seconds
    return f"{best.name} is predicted to save {seconds_text(saved)} a step"
