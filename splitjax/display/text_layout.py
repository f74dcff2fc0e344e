"""Documents as plain text: no colour codes, so that it can be logged, compared and piped.

Words stand on the left of their column and figures on the right. Nothing is cut: long names go on in further lines of
their cell, and a table with more columns than fit is continued below itself with what names its rows repeated.
"""

from __future__ import annotations

import bisect
import itertools
import re
import shutil
import string
import sys
from collections.abc import Mapping, Sequence
from typing import IO

from rich.cells import cell_len

from splitjax.display.areas import areas_text
from splitjax.display.document import (
    Areas,
    Bar,
    Document,
    Matrix,
    Pairs,
    Paragraph,
    Part,
    Scatter,
    Section,
    Stretch,
    Table,
    Timeline,
    is_empty,
)
from splitjax.display.figures import clean
from splitjax.display.scatter import scatter_text

MAX_WIDTH, PIPED_WIDTH, MIN_WIDTH = 160, 120, 60
_GAP = "  "
# Columns of words are not made narrower than their longest word; where a table does not fit so, than the first of these
# numbers of characters with which it does. Names are not broken at all. Where it fits with none, it is continued below
# itself.
_LONGEST_WORDS = (16, 12, 10, 8)
_MIN_LINE = 12
# What a long name leaves of the page for a second name and a column beside it.
_BESIDE_NAMES = 30
_BAR_WIDTHS = (16, 10, 6)
_FILLED, _EMPTY = "█", "░"
# In timelines: what occupies a lane, in turn where there are more; nothing.
_LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
_IDLE = "."
# A name that is longer than its column is continued behind one of these, if it has any.
_JOINTS = "/._-,:|+="
# A name among words, such as `block1/attention/query`.
_PATH = re.compile(r"\w/\w")
# Words are what stands between spaces; a figure and its unit are a single word.
_BETWEEN_WORDS = re.compile(r" (?:(?<!\d )|(?!(?:%|[KMGT]iB|B|us|ms|s|min|h|d)(?:\W|$)))")


def text_width(file: IO[str] | None = None) -> int:
    """Returns the columns of the terminal that `file` (None: the standard output) writes to within bounds, or of a page
    where it is no terminal."""
    try:
        is_terminal = (sys.stdout if file is None else file).isatty()
    except (AttributeError, ValueError):  # replaced or closed
        is_terminal = False
    if not is_terminal:
        return PIPED_WIDTH
    return max(MIN_WIDTH, min(MAX_WIDTH, shutil.get_terminal_size((PIPED_WIDTH, 24)).columns))


def render(document: Document, width: int | None = None) -> str:
    """Lays `document` out in `width` columns; None for the terminal's, at most 160, and for 120 where the output is no
    terminal. Returns its lines, without a line end behind the last."""
    width = text_width() if width is None else width
    blocks = [wrap(clean(document.title), width)] if document.title else []
    blocks += _blocks(document.parts, width)
    if document.verdict:
        blocks.append(wrap(clean(document.verdict), width))
    return "\n".join(line.rstrip() for line in "\n\n".join("\n".join(block) for block in blocks).split("\n"))


def _blocks(parts: Sequence[Part], width: int) -> list[list[str]]:
    """The blocks of lines of some parts, between which an empty line stands."""
    blocks: list[list[str]] = []
    for part in parts:
        if is_empty(part):
            continue
        if isinstance(part, Section):
            first, *rest = _blocks(part.parts, width) or [[]]
            if first:
                blocks += [[*wrap(clean(part.title), width), *first], *rest]
        elif isinstance(part, Table):
            blocks += _table(part, width)
        elif isinstance(part, Pairs):
            blocks.append(_pairs(part, width))
        elif isinstance(part, Paragraph):
            blocks.append(wrap(clean(part.text), width))
        elif isinstance(part, Timeline):
            blocks.append(_timeline(part, width))
        elif isinstance(part, Areas):
            blocks.append(areas_text(part, width))
        elif isinstance(part, Scatter):
            blocks.append(scatter_text(part, width))
        else:
            assert isinstance(part, Matrix)  # a picture: HTML shows it
    return blocks


def _pairs(pairs: Pairs, width: int) -> list[str]:
    """Titles on the left, in half of the `width` at most, and their lines beside them."""
    longest = max(cell_len(clean(title)) for title, _ in pairs.entries)
    indent = min(longest, max(width // 2, _MIN_LINE)) + len(_GAP)
    lines = []
    for title, texts in pairs.entries:
        if not texts:
            continue
        heads = wrap(clean(title), indent - len(_GAP))
        beside = [line for text in texts for line in wrap(clean(text), max(width - indent, _MIN_LINE))]
        lines += [_left(head, indent) + line for head, line in itertools.zip_longest(heads, beside, fillvalue="")]
    return lines


def _timeline(timeline: Timeline, width: int) -> list[str]:
    """A line for each lane, a character for each moment, then the axis and what the characters mean. Who share a
    stretch have its moments in turn."""
    titles = [clean(title) for title, _ in timeline.lanes]
    indent = max(map(cell_len, titles)) + len(_GAP)
    num_moments = max(width - indent, _MIN_LINE)
    letters = {key: _LETTERS[number % len(_LETTERS)] for number, key in enumerate(timeline.keys)}
    lines = []
    for title, (_, lane) in zip(titles, timeline.lanes, strict=True):
        moments = [(number + 0.5) / num_moments * timeline.end for number in range(num_moments)]
        lines.append(
            _left(title, indent) + "".join(_occupant(lane, n, moment, letters) for n, moment in enumerate(moments))
        )
    end = f"{timeline.end:.3g} {timeline.unit}"
    lines.append(" " * indent + "0" + _right(end, num_moments - 1))
    meanings = [f"{_IDLE} idle"]
    if any(len(stretch.keys) > 1 for _, lane in timeline.lanes for stretch in lane):
        meanings.append("letters in turn: shared")
    if len(letters) <= len(_LETTERS):
        meanings += [f"{letter} {clean(key)}" for key, letter in letters.items()]
    return [*lines, *_joined(meanings, width)]


def _occupant(lane: Sequence[Stretch], number: int, moment: float, letters: Mapping[str, str]) -> str:
    """The character of what occupies a lane at a moment, which is the one with this number."""
    for stretch in lane:
        if stretch.start <= moment < stretch.end and stretch.keys:
            return letters[stretch.keys[number % len(stretch.keys)]]
    return _IDLE


def _joined(texts: Sequence[str], width: int) -> list[str]:
    """Texts with commas between, in lines that are broken between them alone where each fits."""
    lines = [""]
    for position, text in enumerate(texts):
        text += "," if position + 1 < len(texts) else ""
        if lines[-1] and cell_len(f"{lines[-1]} {text}") > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {text}" if lines[-1] else text
    return [part for line in lines for part in wrap(line, width)]


def _table(table: Table, width: int) -> list[list[str]]:
    """The table's lines; in several blocks where its columns do not fit side by side."""
    # Bars show what figures say: they are shortened, and in the end left out, where there is no room for them.
    cells: list[list[str]] = []
    natural: list[int] = []
    for bar_width in _BAR_WIDTHS:
        cells = [[_cell(cell, place, table, bar_width) for place, cell in enumerate(row)] for row in table.rows]
        natural = [max(map(cell_len, texts)) for texts in _columns(table, cells)]
        if _total(natural) <= width:
            break
    kept = [i for i, column in enumerate(table.columns) if column.kind != "bar" or _total(natural) <= width]
    for longest_word in _LONGEST_WORDS:
        least = _least(table, cells, longest_word, width)
        if _total([least[i] for i in kept]) <= width:
            break
    else:
        least = _least(table, cells, _LONGEST_WORDS[0], width)
    blocks = []
    num_names = 2 if len(kept) > 2 and not all(row[0] for row in cells) else 1
    for positions in _pages(kept, least, width, num_names):
        widths = _widths([natural[p] for p in positions], [least[p] for p in positions], width)
        numeric = [table.columns[p].kind == "number" for p in positions]
        lines = _row([clean(table.columns[p].title) for p in positions], widths, numeric)
        lines.append("─" * _total(widths))
        for row in cells:
            lines += _row([row[p] for p in positions], widths, numeric)
        blocks.append(lines)
    return blocks


def _columns(table: Table, cells: Sequence[Sequence[str]]) -> list[list[str]]:
    """Each column's texts, the title first."""
    return [[clean(column.title), *(row[i] for row in cells)] for i, column in enumerate(table.columns)]


def _least(table: Table, cells: Sequence[Sequence[str]], longest_word: int, width: int) -> list[int]:
    """Returns how narrow each column can be: as its longest word, up to `longest_word`. Figures are not broken, nor
    names, as long as they leave room for other columns in the `width` of the page."""
    longest_name = max(longest_word, width - _BESIDE_NAMES)
    least = []
    for column, (title, *texts) in zip(table.columns, _columns(table, cells), strict=True):
        words = [word for text in (title, *texts) for word in _BETWEEN_WORDS.split(text)]
        figures = 0 if column.kind in ("text", "code") else max(map(cell_len, texts))
        longest = [longest_name if column.kind == "code" or _PATH.search(word) else longest_word for word in words]
        least.append(max(figures, *(min(cell_len(word), most) for word, most in zip(words, longest, strict=True))))
    return least


def _pages(positions: Sequence[int], least: Sequence[int], width: int, num_names: int) -> list[list[int]]:
    """The columns, those that fit side by side together; the first `num_names` are in every group."""
    names = list(positions[:num_names])
    pages = [list(names)]
    for position in positions[num_names:]:
        if _total([least[p] for p in (*pages[-1], position)]) > width and len(pages[-1]) > num_names:
            pages.append(list(names))
        pages[-1].append(position)
    return pages


def _widths(natural: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """Widths of columns between `least` and `natural` that fill `width` together: the widest give way first."""

    def below(level: int) -> list[int]:
        return [min(now, max(low, level)) for now, low in zip(natural, least, strict=True)]

    # All that are wider than some level come down to it before any goes below it: the loop has a step a column left.
    widths = below(bisect.bisect_left(range(max(natural, default=0)), width, key=lambda level: _total(below(level))))
    while _total(widths) > width:
        movable = [position for position, now in enumerate(widths) if now > least[position]]
        if not movable:
            break
        widths[max(movable, key=widths.__getitem__)] -= 1
    return widths


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _row(texts: Sequence[str], widths: Sequence[int], numeric: Sequence[bool]) -> list[str]:
    """The lines of one row: cells that are wrapped take several."""
    columns = [wrap(text, width) for text, width in zip(texts, widths, strict=True)]
    lines = []
    for number in range(max(map(len, columns))):
        parts = [column[number] if number < len(column) else "" for column in columns]
        lines.append(
            _GAP.join(
                _right(part, width) if is_number else _left(part, width)
                for part, width, is_number in zip(parts, widths, numeric, strict=True)
            )
        )
    return lines


def _cell(cell: str | Bar, position: int, table: Table, bar_width: int) -> str:
    """The text of a cell in the column at `position`; a bar is drawn relative to the longest of its column, which is
    `bar_width` characters long."""
    if isinstance(cell, str):
        return clean(cell)
    longest = max(bar.whole for row in table.rows if isinstance(bar := row[position], Bar))
    if not cell.whole or not longest:
        return ""
    length = max(1, round(bar_width * cell.whole / longest))
    filled = round(length * cell.part / cell.whole)
    return _FILLED * filled + _EMPTY * (length - filled)


def wrap(text: str, width: int) -> list[str]:
    """Breaks `text` into lines of at most `width` columns: between words, and within a word only where that is longer
    than a line. A text that fits stays as it is."""
    if cell_len(text) <= width:
        return [text]
    lines = [""]
    for word in _BETWEEN_WORDS.split(text):
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if cell_len(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        start = 0
        while (fitting := _num_fitting(word, start, width)) < len(word) - start:
            head = _head(word[start : start + max(1, fitting)])
            lines[-1] = head
            lines.append("")
            start += len(head)
        lines[-1] = word[start:]
    return lines


def _num_fitting(word: str, start: int, width: int) -> int:
    """Returns how many characters of a word fit into `width` columns, from the one at `start` on. It looks no further:
    a word of a megabyte is broken into as many lines as it has, and each is measured once."""
    columns = 0
    for position in range(start, len(word)):
        columns += cell_len(word[position])
        if columns > width:
            return position - start
    return len(word) - start


def _head(fitting: str) -> str:
    """Returns what of the beginning of a word that fits stands on one line: up to a joint where one is near its end."""
    end = len(fitting)
    joint = max(fitting.rfind(mark) for mark in _JOINTS) + 1
    return fitting[: joint if joint > end // 3 else end]


def _left(text: str, width: int) -> str:
    return text + " " * (width - cell_len(text))


def _right(text: str, width: int) -> str:
    return " " * (width - cell_len(text)) + text
