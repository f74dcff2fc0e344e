"""Cells that may differ between two recordings of the same decisions: known defects, named before a refactoring
begins."""

from __future__ import annotations

import dataclasses
import fnmatch

LIMIT = 10  # cells


@dataclasses.dataclass(frozen=True)
class KnownDefect:
    """`pattern`: of cells' names (`fnmatch`). `part`: `plan`, or `program`. `why`: what is not the same twice."""

    pattern: str
    part: str
    why: str


# None: every recorded cell is the same in two processes with different hash seeds.
KNOWN: tuple[KnownDefect, ...] = ()


def known_defect(cell: str, part: str) -> str:
    """Why a cell's plan or program may differ; empty where it may not."""
    return next((one.why for one in KNOWN if one.part == part and fnmatch.fnmatchcase(cell, one.pattern)), "")
