"""Makes the document of a search's answer: what was found, how far from the best it can be, and what stands against
each other where nothing fits."""

from __future__ import annotations

import math

from splitjax.display.document import Column, Document, Pairs, Paragraph, Section, Table
from splitjax.display.figures import bytes_text, share_text
from splitjax.search.solving import Solution

# `Solution.values` has all of them.
_NUM_VALUES = 24


def solution_document(solution: Solution) -> Document:
    """Makes the document of `solution`."""
    facts: list[tuple[str, tuple[str, ...]]] = [("solver", (solution.solver,))]
    facts.append(("cost", (_number(solution.cost) if solution.feasible else "none",)))
    if solution.feasible:
        facts.append(("least cost proven", (_number(solution.bound),)))
    if solution.peaks_bytes:
        facts.append(("memory at its peak", tuple(bytes_text(round(peak)) for peak in solution.peaks_bytes)))
    stopped = ", stopped by the clock: another run may find another answer" if solution.clock_struck else ""
    facts.append(("work", (f"{solution.work:,} table entries looked at{stopped}",)))
    conflict = solution.conflict
    holders = () if conflict is None else tuple((name, bytes_text(round(held))) for name, held in conflict.holders)
    values = () if solution.values is None else tuple(map(str, solution.values.tolist()))
    listed = ", ".join(values[:_NUM_VALUES]) + (f" and {len(values) - _NUM_VALUES} more" * (len(values) > _NUM_VALUES))
    return Document(
        "answer of a search",
        (
            Pairs(tuple(facts)),
            Paragraph("" if conflict is None else conflict.message),
            Section(
                "what needs the memory where it is shortest",
                (Table((Column("variable", "code"), Column("at least", "number")), holders),),
            ),
            Section("value of each variable, in order", (Paragraph(listed),)),
        ),
        verdict=_verdict(solution),
    )


def _verdict(solution: Solution) -> str:
    if not solution.feasible:
        proven = solution.conflict is not None and solution.conflict.proven
        return "nothing fits, which is proven" if proven else "nothing was found that fits"
    if not solution.gap:
        return "proven best"
    if math.isinf(solution.bound):
        return "how far from the best it is, is not known"
    return f"at most {share_text(solution.gap)} from the best"


def _number(value: float) -> str:
    return f"{value:,.6g}"
