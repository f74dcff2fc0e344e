"""Makes the rows of a report's table of involuntary full rematerialisations."""

from __future__ import annotations

from splitjax.report.attribute import ReportedCollective
from splitjax.report.rows import short_source
from splitjax.report.value import Report

COLUMNS: tuple[str, ...] = ("layer", "line", "rule", "gathered", "kept", "remedy")


def rematerialised_rows(report: Report) -> tuple[tuple[str, ...], ...]:
    """Returns a row for each array that is gathered whole although every device keeps a part of it."""
    return tuple(_row(collective) for collective in report.rematerialised)


def _row(collective: ReportedCollective) -> tuple[str, ...]:
    found = collective.rematerialised
    assert found is not None, "a row is made of what is rematerialised alone"
    # Where no way between the two layouts is known, the layer's other layouts are what there is to try.
    other = f"lay {collective.layer} out otherwise: plan.explain({collective.layer!r})" if collective.layer else ""
    return (
        collective.layer,
        short_source(collective.source),
        collective.rule,
        f"{list(found.whole)} over {collective.axis}",
        str(list(found.kept)),
        found.remedy or other or "let both sides of this line have one layout",
    )
