"""Documents as text: alignment, wrapping, tables that are too wide, and what is left out."""

from __future__ import annotations

import re

import pytest

from splitjax.display import Bar, Column, Document, Matrix, Pairs, Paragraph, Section, Stretch, Table, Timeline
from splitjax.display.text_layout import render, text_width, wrap

COLUMNS = (Column("name", "code"), Column("what"), Column("size", "number"))
ROWS = (("a/b", "the first", "7.5 MiB"), ("longer/name", "another", "12 B"))


def lines(document, width=80):
    return render(document, width).split("\n")


def test_words_stand_on_the_left_and_figures_on_the_right():
    head, rule, *rows = lines(Document("", (Table(COLUMNS, ROWS),)))
    assert head == "name         what          size"
    assert rule == "─" * len(head)
    assert rows == ["a/b          the first  7.5 MiB", "longer/name  another       12 B"]


def test_parts_stand_apart_and_the_verdict_comes_last():
    document = Document(
        "title",
        (
            Section("section", (Table(COLUMNS, ROWS[:1]),)),
            Pairs((("one", ("first", "second")), ("two", ("third",)))),
            Paragraph("a note"),
        ),
        verdict="all is well",
    )
    text = render(document, 80)
    title, section, pairs, note, verdict = text.split("\n\n")
    assert (title, note, verdict) == ("title", "a note", "all is well")
    assert section.split("\n")[0] == "section" and pairs == "one  first\n     second\ntwo  third"


def test_a_long_title_takes_half_of_the_width_and_no_more_lines_than_its_text():
    title, text = "a" * 90, "beside " * 40
    made = render(Document("", (Pairs(((title, (text.strip(),)), ("b", ("short",)))),)), 60).split("\n")
    assert [line[:30] for line in made[:3]] == ["a" * 30] * 3 and max(map(len, made)) <= 60
    assert " ".join(line[32:] for line in made[:-1]).split() == text.split()
    assert made[-1] == "b" + " " * 31 + "short"


def test_what_is_empty_is_not_shown():
    empty = (Table(COLUMNS, ()), Pairs(()), Paragraph(""), Matrix((), ()))
    assert render(Document("title", (*empty, Section("section", empty))), 80) == "title"
    picture = Section("picture", (Matrix(((1.0,),), (("all",),)),))
    assert render(Document("title", (picture, Paragraph("below"))), 80) == "title\n\nbelow"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_a_table_fills_the_width_and_loses_nothing(width):
    words = ("in another layout than the plan has for it " * 3).strip()
    row = ("params/block_7/attention/query/kernel", words, "12.5 MiB")
    made = lines(Document("", (Table(COLUMNS, (row,) * 3),)), width)
    assert max(map(len, made)) == width
    body = "".join(made[2:])
    assert body.count("12.5 MiB") == 3 and re.sub(r"[^a-z]", "", body).count("layout") >= 3
    assert "".join(line[: line.find("  ")] for line in made[2:] if not line.startswith(" ")).count("kernel") == 3


def test_words_are_broken_only_where_they_are_longer_than_a_line():
    assert wrap("a gradient of  kernel", 40) == ["a gradient of  kernel"]
    assert wrap("gradient of kernel", 11) == ["gradient of", "kernel"]
    assert wrap("params/block_7/attention", 15) == ["params/block_7/", "attention"]
    assert wrap("x" * 7, 3) == ["xxx", "xxx", "x"]
    assert wrap("", 3) == [""]
    assert wrap("宽宽宽", 4) == ["宽宽", "宽"]  # each is two columns wide


def test_a_figure_stays_with_its_unit():
    assert wrap("saves 9 % of it", 7) == ["saves", "9 % of", "it"]
    assert wrap("sent 12.5 MiB, in 3 ms", 13) == ["sent", "12.5 MiB, in", "3 ms"]
    assert wrap("4 steps of a", 7) == ["4 steps", "of a"] and wrap("4 sums", 4) == ["4", "sums"]


def test_what_names_a_row_is_repeated():
    """Where cells of the first column are empty, the second says which row it is."""
    titles = ("table", "step", *(f"figure {i}" for i in range(6)))
    rows = (("items", "0", *("1.25 MiB",) * 6), ("", "1", *("2.5 MiB",) * 6))
    for block in render(Document("", (Table.of(titles, rows, range(1, 8)),)), 40).split("\n\n"):
        head, _, first, second = block.splitlines()
        assert head.startswith("table  step") and first.split()[:2] == ["items", "0"] and second.split()[0] == "1"


def test_a_table_with_too_many_columns_goes_on_below_itself():
    titles = ("way", *(f"figure {i}" for i in range(12)))
    rows = (("full", *(f"{i}.25 MiB" for i in range(12))), ("smaller batch", *("1 B",) * 12))
    text = render(Document("", (Table.of(titles, rows, range(1, 13)),)), 60)
    blocks = text.split("\n\n")
    assert len(blocks) == 3 and all(block.startswith("way") for block in blocks)
    assert max(map(len, text.split("\n"))) <= 60
    for i in range(12):
        assert text.count(f" {i}.25 MiB") == 1
    assert text.count("full") == 3


def test_bars_begin_together_and_give_way_where_there_is_no_room():
    table = Table(
        (*COLUMNS, Column("share", "bar")), tuple((*row, bar) for row, bar in zip(ROWS, (Bar(1, 4), Bar(1, 2))))
    )
    head, _, *rows = lines(Document("", (table,)))
    start = head.index("share")
    assert [row[start:] for row in rows] == ["████" + "░" * 12, "████" + "░" * 4]
    narrow = render(Document("", (table,)), 32)
    assert "share" not in narrow and "█" not in narrow and "7.5 MiB" in narrow
    assert lines(Document("", (Table((Column("bar", "bar"),), ((Bar(0, 0),), (Bar(0, 2),))),)))[2:] == ["", "░" * 16]


def test_names_cannot_break_out():
    hostile = "a\x1b[31m\nb\tc"
    visible = "a\\x1b[31m\\nb\\tc"
    document = Document(
        hostile,
        (
            Section(hostile, (Table((Column(hostile),), ((hostile,),)),)),
            Pairs(((hostile, (hostile,)),)),
            Paragraph(hostile),
        ),
        hostile,
    )
    text = render(document, 200)
    assert "\x1b" not in text and "\t" not in text and text.count(visible) == 8


def test_a_row_of_another_length_is_refused():
    with pytest.raises(AssertionError, match="2 cells under 3 columns"):
        Table(COLUMNS, (("a", "b"),))


def test_a_timeline_is_a_line_a_lane():
    lanes = (
        ("a", (Stretch(0, 2, ("x",)), Stretch(3, 4, ("x", "the second")))),
        ("bb", (Stretch(1, 4, ("the second",)),)),
        ("c", (Stretch(0, 1, ()),)),
    )
    text = render(Document("", (Timeline(lanes, 4.0, "hours"),)), 20)
    assert text.split("\n") == [
        "a   AAAAAAAA....ABAB",
        "bb  ....BBBBBBBBBBBB",
        "c   ................",
        "    0        4 hours",
        ". idle,",
        "letters in turn:",
        "shared,",
        "A x, B the second",
    ]


def test_the_width_is_that_of_the_terminal_that_is_written_to(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setenv("COLUMNS", "97")
    assert text_width(Terminal()) == 97 and text_width() == 120  # captured output is no terminal


def test_names_are_not_broken_in_a_terminal_of_80_columns():
    names = ("params/backbone/stage3/block12/attention", "conv*_*", "params/logits")
    columns = (Column("layer", "code"), Column("why"), Column("line", "code"), Column("bytes", "number"))
    rows = tuple(
        (name, "gradient of kernel, summed over the devices", "objectives.py:220", "1,234.5 MiB") for name in names
    )
    lines = render(Document("", (Table(columns, rows),)), 80).splitlines()
    assert max(map(len, lines)) <= 80
    for name in (*names, "objectives.py:220"):
        assert any(name in line.split() for line in lines)


def test_a_path_among_words_is_not_broken():
    columns = (Column("layer", "code"), Column("why"), Column("rule"))
    row = (
        "params/block1/attention/key",
        "forward: partial outputs of a row-split layer",
        "ties with block1/attention/query",
    )
    assert "block1/attention/query" in render(Document("", (Table(columns, (row,)),)), 60)
