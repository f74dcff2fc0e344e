"""Rendered values under Jupyter's own stylesheets: which alignment the cells of their tables end up with.

There is no browser among the tests, so the cascade is done here: every selector that sets `text-align`, matched against
each cell, by its specificity and then its order (CSS Selectors 4, section 17).
"""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from tests.report.test_render import SMALL
from tests.report.test_report import made as made_report
from tests.sync.test_analysis import profile_of

# Of JupyterLab 4 (@jupyterlab/rendermime, style/base.css), of versions before it, and of the classic notebook.
TAGS = ("td", "th", "tr")
LAB = ", ".join(f":not(.jp-RenderedMarkdown).jp-RenderedHTMLCommon {tag}" for tag in TAGS) + " { text-align: right; }"
OLD_LAB = ".jp-RenderedHTMLCommon tr, .jp-RenderedHTMLCommon th, .jp-RenderedHTMLCommon td { text-align: right; }"
CLASSIC = ".rendered_html tr, .rendered_html th, .rendered_html td { text-align: right; }"


class Cells(HTMLParser):
    """A page's cells, each as (tag, classes) of its ancestors, outermost first, and its own; and its style sheets."""

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.sheets, self.in_style = [], [], [], False

    def handle_starttag(self, tag, attrs):
        if tag == "br":
            return
        self.open.append((tag, frozenset((dict(attrs).get("class") or "").split())))
        self.in_style = tag == "style"
        if tag in ("td", "th"):
            self.cells.append(tuple(self.open))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag
        self.in_style = False

    def handle_data(self, data):
        if self.in_style:
            self.sheets.append(data)


def alignments(css):
    """(selector, specificity, order, alignment) of every rule that aligns."""
    found = []
    for selectors, body in re.findall(r"([^{}]+)\{([^}]*)\}", css):
        align = re.search(r"text-align:\s*(\w+)", body)
        for selector in selectors.split(",") if align else ():
            parts = [compound(part) for part in selector.split()]
            num_classes = sum(len(classes) + len(absent) for _, classes, absent in parts)
            found.append((parts, (num_classes, sum(len(tags) for tags, _, _ in parts)), len(found), align[1]))
    return found


def compound(part):
    """Its element, its classes, and the classes that it excludes, which weigh as much."""
    classes = re.findall(r"\.([\w-]+)", re.sub(r":not\([^)]*\)", "", part))
    return re.findall(r"^[a-z]+", part), classes, re.findall(r":not\(\.([\w-]+)\)", part)


def fits(part, element):
    tags, classes, absent = part
    return (not tags or tags[0] == element[0]) and set(classes) <= element[1] and not set(absent) & element[1]


def matches(parts, chain):
    if not fits(parts[-1], chain[-1]):
        return False
    rest = list(parts[:-1])
    for element in reversed(chain[:-1]):
        if rest and fits(rest[-1], element):
            rest.pop()
    return not rest


def aligned(source, stylesheet, wrapper):
    """Cell -> how it is aligned."""
    reader = Cells()
    reader.feed(f'<div class="{wrapper}">{source}</div>')
    rules = alignments(stylesheet + "".join(reader.sheets))
    for cell in reader.cells:
        yield cell, max((rule[1:] for rule in rules if matches(rule[0], cell)), default=(None, None, "left"))[2]


VALUES = {"plan": lambda: SMALL, "report": made_report, "profile": profile_of}


@pytest.mark.parametrize(
    ("stylesheet", "wrapper"),
    [(LAB, "jp-RenderedHTMLCommon"), (OLD_LAB, "jp-RenderedHTMLCommon"), (CLASSIC, "rendered_html")],
    ids=["lab", "old lab", "classic"],
)
@pytest.mark.parametrize("value", VALUES)
def test_text_is_on_the_left_and_numbers_are_on_the_right(value, stylesheet, wrapper):
    found = list(aligned(VALUES[value]()._repr_html_(), stylesheet, wrapper))
    outside = [(cell[-1][1], align) for cell, align in found if not any("matrix" in classes for _, classes in cell)]
    numbers, texts = (
        [align for classes, align in outside if ("number" in classes) == wanted] for wanted in (True, False)
    )
    assert numbers and set(numbers) == {"right"} and texts and set(texts) == {"left"}
    workers = [
        align for cell, align in found if any("matrix" in classes for _, classes in cell) and cell[-1][0] == "th"
    ]
    assert set(workers) == ({"right"} if value == "profile" else set())


def test_the_cascade_is_that_of_a_browser():
    table = '<div class="mine"><style>.mine td { text-align: left; }</style><table><tr><td>a</td></tr></table></div>'
    # A class and an element weigh less than two classes and an element, and as much as an equal selector before it.
    assert [align for _, align in aligned(table, LAB, "jp-RenderedHTMLCommon")] == ["right"]
    assert [align for _, align in aligned(table, OLD_LAB, "jp-RenderedHTMLCommon")] == ["left"]
    assert [align for _, align in aligned(table, LAB, "jp-RenderedMarkdown jp-RenderedHTMLCommon")] == ["left"]
