"""Documents as HTML: what stands where, how it folds, and names that try to break out."""

from __future__ import annotations

import re

import pytest

from splitjax.display import Bar, Column, Document, Matrix, Pairs, Paragraph, Section, Stretch, Table, Timeline
from splitjax.display.html_layout import STYLE, render


def body(document):
    """The HTML without its style sheet."""
    return render(document).replace(f"<style>{STYLE}</style>", "")


def test_every_kind_of_cell():
    columns = (Column("name", "code"), Column("what"), Column("size", "number"), Column("share", "bar"))
    long = "words that go on " * 4
    table = Table(columns, (("a", long, "1 B", Bar(1, 4, "1 of 4")), ("", "", "2 B", Bar(2, 2, "all"))), frozenset({0}))
    source = body(Document("", (table,)))
    assert '<th scope="col">name</th>' in source and '<th scope="col" class="number">size</th>' in source
    assert (
        f'<tr class="first"><td><code>a</code></td><td class="words long">{long}</td><td class="number">1 B</td>'
        in source
    )
    bars = re.findall(r'class="bar" style="width: (\d+)px" title="([^"]*)"><span style="width: ([\d.]+)%"', source)
    assert bars == [("100", "1 of 4", "25.0"), ("50", "all", "100.0")]
    assert source.count("<code>") == 1  # none around nothing


def test_words_are_broken_only_where_they_are_long():
    """Short words and names are kept whole, phrases may be broken, sentences have room."""
    texts = ("smaller batch", "ties with query/kernel", "partial outputs of a layer that is split by rows")
    table = Table((*map(Column, "abc"), Column("d", "code")), ((*texts, "P(None, 'model')"),))
    source = body(Document("", (table,)))
    assert re.findall("<td([^>]*)>", source) == ["", ' class="words"', ' class="words long"', ""]


def test_sections_fold_and_the_verdict_stands_on_top():
    parts = (
        Section("open", (Paragraph("p"),)),
        Section("closed", (Matrix(((1.0, 0.5), (0.5, 1.0)), (("a", "b"), ("c", "d"))),), is_open=False),
        Section("empty", (Table((Column("a"),), ()),)),
        Pairs((("title", ("first", "second")),)),
    )
    source = body(Document("headline", parts, "verdict"))
    assert source.index("headline") < source.index("verdict") < source.index("<details")
    assert "<details open><summary>open</summary><p>p</p></details>" in source
    assert "<details><summary>closed</summary>" in source and "empty" not in source
    assert source.count("rgba(66, 133, 214, 0.500)") == 2 and source.count("title=") == 4
    assert '<th scope="row">title</th><td>first<br>second</td>' in source


def test_names_cannot_break_out():
    hostile = "<script>alert('x')</script>&\"\x1b\n"
    document = Document(
        hostile,
        (
            Section(hostile, (Table((Column(hostile), Column("b", "bar")), ((hostile, Bar(1, 1, hostile)),)),)),
            Pairs(((hostile, (hostile,)),)),
            Paragraph(hostile),
            Matrix(((1.0,),), ((hostile,),)),
        ),
        hostile,
    )
    source = render(document)
    assert "<script" not in source and "alert('" not in source and "\x1b" not in source
    assert source.count("&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;&amp;&quot;\\x1b\\n") == 10


def test_it_is_self_contained():
    assert not re.search(r"https?:|src=|@import|url\(", render(Document("a", (Paragraph("b"),))))


def test_a_timeline_has_a_colour_a_key():
    first = (Stretch(0, 2, ("x",), "x alone"), Stretch(3, 4, ("x", "y")))
    second = (Stretch(1, 4, ("x",)), Stretch(4, 4, ("y",)))
    source = body(Document("", (Timeline((("a", first), ("<b>", second)), 4.0, "hours"),)))
    spans = re.findall(r'left: ([\d.]+)%; width: ([\d.]+)%; background: ([^"]*)" title="([^"]*)"', source)
    assert [(float(left), float(width)) for left, width, _, _ in spans] == [(0, 50), (75, 25), (25, 75), (100, 0)]
    x, shared, again, y = (fill for _, _, fill, _ in spans)
    assert x == again != y and shared == f"linear-gradient({x} 0% 50%, {y} 50% 100%)"
    assert [note for *_, note in spans] == ["x alone", "x, y", "x", "y"]
    assert "&lt;b&gt;" in source and "<span>4 hours</span>" in source
    assert re.findall(r'class="key"><span style="background: ([^"]*)"></span>(\w)', source) == [(x, "x"), (y, "y")]


def test_neighbours_of_a_timeline_touch():
    """Whatever the rounding: a stretch ends where the next begins, or a seam would show."""
    moments = [0.0, *(number / 7 for number in range(1, 7)), 1.0]
    lane = tuple(Stretch(a, b, (str(n),)) for n, (a, b) in enumerate(zip(moments, moments[1:], strict=False)))
    source = body(Document("", (Timeline((("a", lane),), 1.0, "s"),)))
    edges = [(float(a), float(b)) for a, b in re.findall(r"left: ([\d.]+)%; width: ([\d.]+)%", source)]
    assert [left + width for left, width in edges] == pytest.approx([left for left, _ in edges[1:]] + [100], abs=1e-6)


def test_many_that_share_or_many_colours_are_not_explained():
    crowd = tuple(f"job {number}" for number in range(60))
    source = body(Document("", (Timeline((("a", (Stretch(0, 1, crowd),)),), 1.0, "s"),)))
    assert "rgb(128, 128, 128)" in source and "gradient" not in source and 'class="key"' not in source
