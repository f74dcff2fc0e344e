"""Makes the document of a choice of rules or a mesh: what was compared, what each candidate was predicted to take, and
which was taken and why."""

from __future__ import annotations

import math

from splitjax.choosing import Candidate, Choice
from splitjax.choosing.axis_orders import told
from splitjax.choosing.choice import listed
from splitjax.display.document import Column, Document, Pairs, Paragraph, Part, Section, Table
from splitjax.display.figures import bytes_text, seconds_text, share_text

_OF_COMPILED = (
    Column("mesh", "code"),
    Column("rules"),
    Column("needs", "number"),
    Column("fits"),
    Column("sends", "number"),
    Column("planned", "number"),
    Column("longer by", "number"),
    Column("compiling", "number"),
)
# `Choice.candidates`, `refused` and `variables` have all of them.
_NUM_ROWS = 24


def choice_document(choice: Choice) -> Document:
    """Makes the document of `choice`."""
    best = choice.best
    facts: list[tuple[str, tuple[str, ...]]] = [("mesh", (str(choice.mesh),)), ("rules", (best.name,))]
    facts.append(("predicted", (f"{seconds_text(best.program_seconds or best.seconds)} a step",)))
    if not math.isinf(choice.budget_bytes):
        facts.append(("budget of a device", (bytes_text(int(choice.budget_bytes)),)))
    if choice.slow_axes:
        facts.append(("order of the axes", (told(choice.mesh, choice.slow_axes),)))
    if choice.proof is not None:
        facts.append(("certified gap", (share_text(choice.gap) if choice.gap else "none: proven best of its sum",)))
    rows = tuple(_row(choice, each) for each in choice.candidates[:_NUM_ROWS])
    columns = (
        Column("mesh", "code"),
        Column("rules"),
        Column("program", "number"),
        Column("parts", "number"),
        Column("states", "number"),
        Column("sum", "number"),
        Column("at most", "number"),
        Column("verdict"),
    )
    refused = tuple((str(each.mesh), each.rules, each.why) for each in choice.refused[:_NUM_ROWS])
    variables = tuple(
        (each.name, str(len(each.layers)), each.chosen, "; ".join(each.values)) for each in choice.variables[:_NUM_ROWS]
    )
    of_refused = Column("mesh", "code"), Column("rules"), Column("why")
    of_variables = Column("layer", "code"), Column("layers", "number"), Column("value"), Column("among")
    parts: tuple[Part, ...] = (
        Pairs(tuple(facts)),
        _section("compared", columns, rows, len(choice.candidates)),
        _section("compiled ahead of time", _OF_COMPILED, tuple(map(_compiled_row, choice.compiled)), 0),
        _section("not on this step or mesh", of_refused, refused, len(choice.refused)),
        _section("decided by the search", of_variables, variables, len(choice.variables)),
    )
    fitting = "" if math.isinf(choice.budget_bytes) else " that fits"
    sent = ", with what it sends as compiled" if best.compiled is not None else ""
    verdict = f"{best.name} on {choice.mesh} is taken: the fastest by the prediction{sent}{fitting}"
    return Document(f"choice of {listed(choice.options)}", parts, verdict)


def _compiled_row(each: Candidate) -> tuple[str, ...]:
    found = each.compiled
    assert found is not None, "`Choice.compiled` has those that were compiled"
    return (
        str(each.mesh),
        each.name,
        "" if found.needed_bytes is None else bytes_text(found.needed_bytes),
        {True: "yes", False: "no", None: "not known"}[found.fits],
        "" if found.sent_bytes is None else bytes_text(found.sent_bytes),
        bytes_text(found.planned_bytes),
        seconds_text(found.more_seconds),
        seconds_text(found.compile_seconds),
    )


def _section(title: str, columns: tuple[Column, ...], rows: tuple[tuple[str, ...], ...], count: int) -> Section:
    """Returns a table under a `title`. `count`: of its rows, which may not all be shown."""
    left_out = f"and {count - _NUM_ROWS} more" if count > _NUM_ROWS else ""
    return Section(title, (Table(columns, rows), Paragraph(left_out)))


def _row(choice: Choice, each: Candidate) -> tuple[str, ...]:
    at_most = "" if each.bound_bytes is None else bytes_text(each.bound_bytes)
    return (
        str(each.mesh),
        each.name,
        "" if each.program_seconds is None else seconds_text(each.program_seconds),
        seconds_text(each.seconds),
        bytes_text(each.state_bytes),
        bytes_text(each.peak_bytes),
        at_most,
        choice.verdict(each),
    )
