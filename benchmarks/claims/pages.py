"""Reads a page of results: its sections, the cells of its tables, and the values of its goals."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Iterator, Sequence

NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_GOAL = re.compile(r"^- (?:\*\*)?(?:pass|MISS) (?P<what>.*): (?P<value>\S+) \(goal: ")


class ClaimError(Exception):
    """A claim that cannot be looked up: what it names is not on the page, or is there more than once."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a page: its titles, and its rows without markup. `section`: the headings that it stands under."""

    section: tuple[str, ...]
    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class ResultPage:
    """`lines` of a page of results with the headings that each stands under, outermost first."""

    name: str
    lines: tuple[tuple[tuple[str, ...], str], ...]

    def tables(self, section: str) -> Iterator[Table]:
        """Yields the tables under the headings that contain `section`, in their order."""
        rows: list[tuple[str, ...]] = []
        where: tuple[str, ...] = ()
        for headings, line in [*self.lines, ((), "")]:
            if line.startswith("|"):
                where = headings
                rows.append(cells(line))
            elif rows:
                if is_under(where, section):
                    yield Table(where, rows[0], tuple(rows[2:]))
                rows = []

    def text(self, section: str) -> str:
        """Gives the lines under the headings that contain `section`."""
        return "\n".join(line for headings, line in self.lines if is_under(headings, section))

    def goal(self, what: str, section: str = "") -> str:
        """Gives the value of the goal called `what`, as it is written on the page.

        Raises `ClaimError` where no goal or more than one has this name.
        """
        goals = filter(None, map(_GOAL.match, self.text(section).splitlines()))
        values = [goal["value"] for goal in goals if goal["what"] == what]
        return self._only(values, f"goal {what!r}")

    def cell(self, section: str, row: str, column: str, near: str = "") -> str:
        """Gives the cell in the column titled `column` of the row that begins with `row`, in the tables of `section`.

        `row`: the first cell, or the first cells joined by " | ". `near`: what another cell of the row has to be.
        Raises `ClaimError` where there is no such cell or more than one.
        """
        names = cells(f"| {row} |")
        values = [
            line[table.titles.index(column)]
            for table in self.tables(section)
            if column in table.titles
            for line in table.rows
            if line[: len(names)] == names and (not near or near in line)
        ]
        return self._only(values, f"row {row!r} with a column {column!r} under {section!r}")

    def match(self, section: str, pattern: str) -> str:
        """Gives the group of the regular expression `pattern`, which has to match once in the text of `section`."""
        return self._only(re.findall(pattern, self.text(section)), f"text like {pattern!r} under {section!r}")

    def _only(self, values: Sequence[str], what: str) -> str:
        if len(values) != 1:
            raise ClaimError(f"{self.name}.md has {len(values)} times a {what}, not once")
        return values[0]


def read_page(name: str, folder: pathlib.Path) -> ResultPage:
    """Reads `folder`/NAME.md; raises `ClaimError` where there is no such page."""
    file = folder / f"{name}.md"
    if not file.is_file():
        raise ClaimError(f"there is no page {name}.md")
    headings: list[str] = []
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            depth = len(line) - len(line.lstrip("#"))
            headings = [*headings[: depth - 1], line.lstrip("# ")]
        lines.append((tuple(headings), line))
    return ResultPage(name, tuple(lines))


def is_under(headings: Sequence[str], section: str) -> bool:
    """Tells whether text under `headings`, outermost first, belongs to `section`.

    `section` has parts of headings, outermost first, joined by " / "; headings may lie between them. With " /" at its
    end the text has to stand directly under the last one.
    """
    *parts, last = section.removesuffix(" /").split(" / ")
    if section.endswith(" /") and not (headings and last in headings[-1]):
        return False
    left = iter(headings)
    return all(any(part in heading for heading in left) for part in (*parts, last))


def cells(line: str) -> tuple[str, ...]:
    """Gives the cells of a table's line without bold type and code marks."""
    parts = re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|"))
    return tuple(part.strip().replace("**", "").replace("`", "").replace("\\|", "|") for part in parts)


def number(text: str, position: int = 0) -> float:
    """Reads the number at `position` among those in `text`; thousands may have commas.

    Raises `ClaimError` where there are fewer.
    """
    numbers = NUMBER.findall(text)
    if len(numbers) <= position:
        raise ClaimError(f"{text!r} has {len(numbers)} numbers, not {position + 1}")
    return float(numbers[position].rstrip(",").replace(",", ""))
