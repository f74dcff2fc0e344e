"""Documents as values: what a rendered plan, report, profile or advice says, independent of how it is laid out.

Rooms that know a value make a `Document` of it; `text_layout` and `html_layout` lay every document out. Names may hold
anything, markup and control characters included: renderers make them harmless.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Kind = Literal["text", "code", "number", "bar"]


@dataclasses.dataclass(frozen=True)
class Column:
    """Describes one column of a table.

    - `title`: its heading, possibly empty.
    - `kind`: `"text"` (words, aligned on the left), `"code"` (names, on the left, in a font of equal widths),
      `"number"` (one figure with its unit, on the right), or `"bar"` (cells that are `Bar`, all from one line on).
    """

    title: str
    kind: Kind = "text"


@dataclasses.dataclass(frozen=True)
class Bar:
    """Draws a bar of the length `whole`, filled for the length `part` from its left end on.

    The bars of a column share their unit and where they begin, so that their lengths compare; the longest is as long as
    the column is wide. `note`: a sentence with the figures, which HTML shows under the pointer.
    """

    part: float
    whole: float
    note: str = ""


Cell = str | Bar


@dataclasses.dataclass(frozen=True)
class Table:
    """Holds rows under columns. A table without rows is not shown.

    - `columns`: from left to right; the first names the row, together with the second where some of its cells are
      empty. What names the rows is repeated where a table is too wide for a page of text and is continued below itself.
    - `rows`: one cell a column; an empty string stands for nothing.
    - `first_of_group`: positions of the rows that begin a group of rows, such as those of one layer.
    """

    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    first_of_group: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), f"a row of {len(row)} cells under {len(self.columns)} columns"

    @classmethod
    def of(
        cls,
        columns: tuple[str, ...],
        rows: tuple[tuple[str, ...], ...],
        numbers: tuple[int, ...] | range,
        code: tuple[int, ...] = (),
    ) -> Table:
        """Makes a table of words and figures.

        **Arguments:** `columns`: the titles. `rows`: the cells. `numbers`, `code`: the positions of the columns that
        hold figures, and names or code; the others hold words.
        """
        kinds: list[Kind] = [
            "number" if position in numbers else "code" if position in code else "text"
            for position in range(len(columns))
        ]
        return cls(tuple(map(Column, columns, kinds)), rows)


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Holds titles with the lines that belong to each, in `entries`: (title, lines)."""

    entries: tuple[tuple[str, tuple[str, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Paragraph:
    """Holds sentences that stand by themselves, such as a note, in `text`."""

    text: str


@dataclasses.dataclass(frozen=True)
class Matrix:
    """Shows a square of values between 0 and 1 as the strength of a fill. It is a picture: text leaves it out.

    - `values`: [n][n]. `notes`: [n][n], a sentence with the figure of each.
    """

    values: tuple[tuple[float, ...], ...]
    notes: tuple[tuple[str, ...], ...]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Marks a stretch of a lane, from `start` to `end` in the unit of its timeline.

    - `keys`: what occupies it, several where they share it. The same key has the same colour and letter everywhere.
    - `note`: a sentence about it, which HTML shows under the pointer.
    """

    start: float
    end: float
    keys: tuple[str, ...]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Shows what occupies each of several lanes, such as devices, when.

    - `lanes`: (title, its stretches in order of time, which do not overlap).
    - `end`: where the axis ends, which begins at 0. `unit`: of the axis, such as `"hours"`.
    """

    lanes: tuple[tuple[str, tuple[Stretch, ...]], ...]
    end: float
    unit: str

    @property
    def keys(self) -> tuple[str, ...]:
        """Returns all keys, in the order in which lanes show them."""
        return tuple(dict.fromkeys(key for _, lane in self.lanes for stretch in lane for key in stretch.keys))


@dataclasses.dataclass(frozen=True)
class Band:
    """Holds an amount at each moment of a panel, `levels`, under a `title`. The same title has the same colour and
    letter in every panel."""

    title: str
    levels: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Panel:
    """Stacks bands over the moments that they share.

    - `title`: its heading. `bands`: from the ground up, at least one.
    - `axis`: a sentence below it that says what the moments are.
    - `mark`: a moment that is marked, such as that of the peak; None for none.
    - `strip`: stretches of moments, which a strip below the bands shows by the first letter or the name of their key.
    """

    title: str
    bands: tuple[Band, ...]
    axis: str = ""
    mark: int | None = None
    strip: tuple[Stretch, ...] = ()


@dataclasses.dataclass(frozen=True)
class Areas:
    """Shows panels below one another, all of them with the same axes.

    - `panels`: from top to bottom.
    - `ticks`: (amount, label) of the lines that are drawn, from 0 up. `top`: the amount that is as high as a panel.
    """

    panels: tuple[Panel, ...]
    ticks: tuple[tuple[float, str], ...]
    top: float

    @property
    def titles(self) -> tuple[str, ...]:
        """The titles of all bands, in the order in which panels stack them."""
        return tuple(dict.fromkeys(band.title for panel in self.panels for band in panel.bands))


@dataclasses.dataclass(frozen=True)
class Dot:
    """Marks a place of a plot: `x`, `y`, above 0. `is_filled`: else it is a ring. `note`: a sentence with the figures,
    which HTML shows under the pointer."""

    x: float
    y: float
    is_filled: bool = True
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Scatter:
    """Plots series of dots over two axes, both logarithmic.

    - `series`: (title, its dots from left to right). HTML joins those dots of a series that are on its `fronts`: the
      positions, by series.
    - `x_title`, `y_title`: what the axes are, with the unit. `x_ticks`, `y_ticks`: (place, label).
    - `limit`: a place of the x axis that is marked; None for none.
    - `filled`, `ring`, `joined`: what these dots are, in words; empty for what there is none of.
    """

    series: tuple[tuple[str, tuple[Dot, ...]], ...]
    x_title: str
    y_title: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    fronts: tuple[tuple[int, ...], ...] = ()
    limit: float | None = None
    filled: str = ""
    ring: str = ""
    joined: str = ""


@dataclasses.dataclass(frozen=True)
class Section:
    """Holds parts under a title, which a reader of HTML can fold away. A section without content is not shown.

    - `title`: its heading. `parts`: what stands in it.
    - `is_open`: whether it is unfolded at first.
    """

    title: str
    parts: tuple[Part, ...]
    is_open: bool = True


Part = Table | Pairs | Paragraph | Matrix | Timeline | Areas | Scatter | Section


@dataclasses.dataclass(frozen=True)
class Document:
    """Holds what there is to say about one value.

    - `title`: the first line, such as what was measured where; empty for none.
    - `parts`: from top to bottom.
    - `verdict`: what it comes to, in a sentence. HTML says it below the title; text at the end, which is what
      a terminal still shows after a long table.
    """

    title: str
    parts: tuple[Part, ...]
    verdict: str = ""


def is_empty(part: Part) -> bool:
    """Returns whether there is nothing to show of `part`: a table without rows, a section without content."""
    if isinstance(part, Section):
        return all(map(is_empty, part.parts))
    if isinstance(part, Paragraph):
        return not part.text
    if isinstance(part, Table):
        return not part.rows
    if isinstance(part, Pairs):
        return not part.entries
    if isinstance(part, Areas):
        return not part.panels
    if isinstance(part, Scatter):
        return not any(dots for _, dots in part.series)
    return not (part.lanes if isinstance(part, Timeline) else part.values)
