"""Rendered values under Jupyter's own stylesheets: which alignment and which font their words end up with.

There is no browser among the tests, so the cascade is done here: every selector that sets the property, matched against
each element, by its specificity and then its order (CSS Selectors 4, section 17).
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
# The same sheets set fonts, of everything and of code; heavier rules than theirs, as a theme may add.
FONTS = (
    "{0} {{ font-family: Theirs; }} {0} code {{ font-family: Theirs; }} {0} td, {0} th {{ font-family: Theirs; }}"
    " :not(.jp-RenderedMarkdown).{1} td {{ font: 20px Theirs; }}"
    " :not(.jp-RenderedMarkdown).{1} code {{ font: 9px Theirs; }}"
)
SHOWN = ("td", "th", "code", "p", "summary")


class Cells(HTMLParser):
    """A page's elements with words, each as (tag, classes) of its ancestors, outermost first, and its own; and the
    page's style sheets."""

    def __init__(self):
        super().__init__()
        self.open, self.cells, self.sheets, self.in_style = [], [], [], False

    def handle_starttag(self, tag, attrs):
        if tag == "br":
            return
        self.open.append((tag, frozenset((dict(attrs).get("class") or "").split())))
        self.in_style = tag == "style"
        if tag in SHOWN:
            self.cells.append(tuple(self.open))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag
        self.in_style = False

    def handle_data(self, data):
        if self.in_style:
            self.sheets.append(data)


def declarations(css, declared):
    """(selector, specificity, order, value) of every rule whose body the pattern `declared` fits."""
    found = []
    for selectors, body in re.findall(r"([^{}]+)\{([^}]*)\}", css):
        value = re.search(declared, body)
        for selector in selectors.split(",") if value else ():
            parts = [compound(part) for part in selector.split()]
            num_classes = sum(len(classes) + len(absent) for _, classes, absent in parts)
            found.append((parts, (num_classes, sum(len(tags) for tags, _, _ in parts)), len(found), value[1]))
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


def cascaded(source, stylesheet, wrapper, declared, initial):
    """Each element with words -> the value of the property that `declared` finds."""
    reader = Cells()
    reader.feed(f'<div class="{wrapper}">{source}</div>')
    rules = declarations(stylesheet + "".join(reader.sheets), declared)
    for cell in reader.cells:
        yield cell, max((rule[1:] for rule in rules if matches(rule[0], cell)), default=(None, None, initial))[2]


def aligned(source, stylesheet, wrapper):
    """Cell -> how it is aligned."""
    found = cascaded(source, stylesheet, wrapper, r"text-align:\s*(\w+)", "left")
    return [(cell, align) for cell, align in found if cell[-1][0] in ("td", "th")]


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


@pytest.mark.parametrize("wrapper", ["jp-RenderedHTMLCommon", "rendered_html"])
@pytest.mark.parametrize("value", VALUES)
def test_the_font_is_our_own(value, wrapper):
    declared = r"(?<![\w-])font(?:-family)?:\s*([^;]+)"
    found = list(
        cascaded(VALUES[value]()._repr_html_(), FONTS.format(f".{wrapper}", wrapper), wrapper, declared, "none")
    )
    kinds = {cell[-1][0]: font for cell, font in found}
    assert {"td", "th"} <= set(kinds) <= set(SHOWN)
    for cell, font in found:
        assert ("monospace" if cell[-1][0] == "code" else "sans-serif") in font, (cell[-1], font)


@pytest.mark.parametrize("value", VALUES)
def test_names_are_not_broken_and_sections_show_that_they_fold(value):
    """JupyterLab breaks code into lines (`pre-wrap`), and the classic notebook hides the marker of a summary."""
    source, sheet = VALUES[value]()._repr_html_(), ".jp-RenderedHTMLCommon code { white-space: pre-wrap; }"
    found = list(cascaded(source, sheet, "jp-RenderedHTMLCommon", r"white-space:\s*([\w-]+)", "none"))
    code = {space for cell, space in found if cell[-1][0] == "code"}
    assert code == {"inherit"}
    found = cascaded(source, "summary { display: block; }", "rendered_html", r"display:\s*([\w-]+)", "list-item")
    assert {display for cell, display in found if cell[-1][0] == "summary"} == {"list-item"}


def test_the_cascade_is_that_of_a_browser():
    table = '<div class="mine"><style>.mine td { text-align: left; }</style><table><tr><td>a</td></tr></table></div>'
    # A class and an element weigh less than two classes and an element, and as much as an equal selector before it.
    assert [align for _, align in aligned(table, LAB, "jp-RenderedHTMLCommon")] == ["right"]
    assert [align for _, align in aligned(table, OLD_LAB, "jp-RenderedHTMLCommon")] == ["left"]
    assert [align for _, align in aligned(table, LAB, "jp-RenderedMarkdown jp-RenderedHTMLCommon")] == ["left"]
