"""Checks claims against pages, and documents for figures that no claim covers."""

from __future__ import annotations

import functools
import pathlib
import re
from collections.abc import Callable, Iterator

from benchmarks.claims.claim import Claim, Claims, agrees, as_pattern
from benchmarks.claims.pages import NUMBER, ClaimError, ResultPage, read_page

# A number and what makes a measurement of it: a unit, a ratio ("1.9x", "3 times"), a share ("46 of 52").
_MEASURED = re.compile(
    rf"(?<![\w.]){NUMBER.pattern}\s?"
    r"(?:%|x\b(?!\s\d)|times\b|ms\b|µs\b|s\b|seconds?\b|minutes?\b|hours?\b|KiB|MiB|GiB|TiB|KB|MB|GB|kB|bytes?\b|of \d)"
)
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def problems(claims: Claims, root: pathlib.Path, results: pathlib.Path) -> list[str]:
    """Lists, a line each, the claims that the pages in `results` do not bear out and the figures of README.md and
    docs/*.md under `root` that no claim covers."""

    @functools.cache
    def read(name: str) -> ResultPage:
        return read_page(name, results)

    @functools.cache
    def document(name: str) -> str:
        return (root / name).read_text(encoding="utf-8")

    found = [problem for claim in claims.claims for problem in _wrong(claim, document(claim.doc), read)]
    for doc in documents(root):
        found += _uncovered(doc, document(doc), claims)
    return found


def documents(root: pathlib.Path) -> list[str]:
    """Names the documents whose figures are checked, relative to `root`."""
    return ["README.md", *(f"docs/{file.name}" for file in sorted((root / "docs").glob("*.md")))]


def _wrong(claim: Claim, text: str, read: Callable[[str], ResultPage]) -> Iterator[str]:
    """Yields what is wrong with one claim."""
    try:
        place(claim, text)
    except ClaimError as error:
        yield str(error)
        return
    for figure, source in zip(claim.figures, claim.sources, strict=True):
        try:
            value = source.value(read)
        except ClaimError as error:
            yield f"{claim.doc}: {claim.text!r}: {error}"
            continue
        if not agrees(figure, source, value):
            yield f"{claim.doc}: {claim.text!r} says {figure}; the page {source.page or 'of its formula'} has {value:g}"


def _uncovered(doc: str, text: str, claims: Claims) -> Iterator[str]:
    """Yields the figures of a document that stand neither in a claim nor among the settings."""
    covered: list[tuple[int, int]] = []
    for claim in claims.claims:
        if claim.doc == doc:
            try:
                found = place(claim, text)
            except ClaimError:
                continue  # said already
            covered += [found.span(group) for group in range(1, len(claim.figures) + 1)]
    for name, setting, _ in claims.settings:
        if name != doc:
            continue
        spans = [found.span() for found in re.finditer(as_pattern(setting), text)]
        if not spans:
            yield f"{doc}: the setting {setting!r} is not in the document any more"
        covered += spans
    for start, end in figures(text):
        if not any(first < end and start < last for first, last in covered):
            line = text.count("\n", 0, start) + 1
            yield f"{doc}:{line}: no claim covers {' '.join(text[max(0, start - 30) : end + 30].split())!r}"


def figures(text: str) -> list[tuple[int, int]]:
    """Gives where the measured numbers of a document are, in characters: those with a unit, ratios, shares; code
    apart."""
    code = [(found.start(), found.end()) for found in _CODE.finditer(text)]
    spans = [(found.start(), found.end()) for found in _MEASURED.finditer(text)]
    return [(a, b) for a, b in spans if not any(first <= a < last for first, last in code)]


def place(claim: Claim, text: str) -> re.Match[str]:
    """Finds a claim's text in that of its document; each figure is a group of the match.

    Raises `ClaimError` where it is not there, or more than once in paragraphs (or rows of tables) that contain `near`.
    """
    places = [found for found in claim.pattern.finditer(text) if claim.near in _paragraph(text, found.start())]
    if len(places) != 1:
        beside = f" beside {claim.near!r}" if claim.near else ""
        raise ClaimError(f"{claim.doc}: {claim.text!r} is there {len(places)} times{beside}, not once")
    return places[0]


def _paragraph(text: str, position: int) -> str:
    """Gives the paragraph around a position; in a table its row."""
    first = text.rfind("\n", 0, position) + 1
    last = text.find("\n", position)
    last = len(text) if last < 0 else last
    if text[first] == "|":
        return text[first:last]
    first = max(text.rfind("\n\n", 0, position), 0)
    last = text.find("\n\n", position)
    return text[first : len(text) if last < 0 else last]
