"""The page of steps that are compared with one device: how many pass everywhere, a row for each, and refusals."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._common import table
from benchmarks.modern.comparing import RAISED, REFUSED, SAME, WRONG
from benchmarks.modern.refusals import MAY_REFUSE

PAGE = "modern_numbers"
GOAL = 56 / 60  # of the steps, that pass everywhere


def passes(step: Mapping[str, Any]) -> bool:
    """Tells whether a step passes everywhere: it has one device's numbers in every cell that is not refused as was
    expected, and is compared in one at least."""
    cells = step["cells"]
    return any(cell["status"] == SAME for cell in cells) and all(
        cell["status"] == SAME or (cell["status"] == REFUSED and cell["why"]) for cell in cells
    )


def page_lines(stored: Mapping[str, Any]) -> list[str]:
    """Returns the page of what `modern_numbers.json` holds."""
    from benchmarks.modern import numbers

    steps = stored["steps"]
    cells = [cell for step in steps for cell in step["cells"]]
    passed = sum(map(passes, steps))
    count = collections.Counter(cell["status"] for cell in cells)
    unexpected = sum(cell["status"] == REFUSED and not cell["why"] for cell in cells)
    lines = [
        "# Modern steps: the same numbers as on one device",
        "",
        f"**{passed} of {len(steps)} steps pass everywhere** (goal: {GOAL:.0%} of them): in {len(cells)} cells"
        f" {count[SAME]} have one device's numbers, {count[REFUSED]} are refused ({unexpected} of them unexpectedly),"
        f" {count[WRONG]} have wrong numbers, {count[RAISED]} raise another error.",
        "",
        stored["header"],
        "",
        *(numbers.__doc__ or "").strip().split("\n\n", 2)[2].splitlines(),
        "",
        "A step takes its gradient with `splitjax.value_and_grad` where its last column says so, and otherwise with"
        " plain JAX. *Difference* is the largest in any cell of any loss or leaf, beside what is allowed: rounding in"
        " another order, which is coarser where a step computes in bfloat16 or rounds to eight bits.",
        "",
        *table(
            ("step", "idiom", "cells", "same", "refused", "wrong", "other error", "difference", "allowed", "has"),
            map(_row, steps),
        ),
        "",
        *_refusals(steps),
        *_failures(steps),
    ]
    return lines


def _row(step: Mapping[str, Any]) -> tuple[str, ...]:
    cells = step["cells"]
    count = collections.Counter(cell["status"] for cell in cells)
    apart = [cell["difference"] for cell in cells if cell["difference"] is not None]
    return (
        step["name"] if passes(step) else f"**{step['name']}**",
        step["idiom"],
        str(len(cells)),
        *(str(count[status]) for status in (SAME, REFUSED, WRONG, RAISED)),
        f"{max(apart):.1e}" if apart else "",
        f"{step['tolerance']:.0e}",
        ", ".join(step["has"]),
    )


def _refusals(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Refusals that were expected, by reason."""
    lines = ["## Refused, as was written down beforehand", ""]
    for may in MAY_REFUSE:
        names = [
            step["name"]
            for step in steps
            if any(
                cell["status"] == REFUSED and cell["rules"] == may.rules and cell["why"] == may.why
                for cell in step["cells"]
            )
        ]
        if names:
            lines += [f"- `{may.rules}`, by a `{may.error}`: {may.why}. {len(names)} steps: {'; '.join(names)}."]
    return [*(lines if len(lines) > 2 else [*lines, "None."]), ""]


def _failures(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """What counts against a step, cell by cell, with the first line of the error or the leaf that differs most."""
    rows = []
    for step in steps:
        for cell in step["cells"]:
            if cell["status"] == SAME or (cell["status"] == REFUSED and cell["why"]):
                continue
            text = cell["text"].strip().splitlines()
            apart = "not finite" if cell["difference"] is None else f"{cell['difference']:.1e}"
            what = (text[0] if cell["status"] == REFUSED else text[-1]) if text else f"{apart} at {cell['where']}"
            rows.append((step["name"], f"{cell['rules']}, {cell['mesh']}, {cell['axes']}", cell["status"], what))
    heading = ["## What counts against a step", ""]
    return [*heading, *(table(("step", "cell", "", "what"), rows) if rows else ["Nothing."]), ""]
