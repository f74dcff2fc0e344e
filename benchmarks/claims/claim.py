"""What a claim is: a sentence of README or docs, and where each of its figures comes from."""

from __future__ import annotations

import ast
import dataclasses
import operator
import pathlib
import re
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.claims.pages import NUMBER, ClaimError, ResultPage, number

_FIGURE = re.compile(r"\{(" + NUMBER.pattern + r")\}")
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"max": max, "min": min}


@dataclasses.dataclass(frozen=True)
class Source:
    """Where a figure comes from: a value of a page, or `formula` over the sources in `values`.

    `page`: a page of results. `section`: parts of its headings, joined by " / ". A `goal` by name; or a cell, by `row`
    (its first cells, joined by " | "), `column` (a title) and, where rows begin alike, `near` (another cell of it); or
    the group of a `pattern` in the section's text. `position`: which number of that text, from 0.
    `bound`: the claim is that the value is at most the figure, or, with "at least", at least.
    """

    page: str = ""
    section: str = ""
    goal: str = ""
    row: str = ""
    column: str = ""
    near: str = ""
    pattern: str = ""
    position: int = 0
    formula: str = ""
    values: tuple[tuple[str, Source], ...] = ()
    bound: str = ""

    def value(self, read: Callable[[str], ResultPage]) -> float:
        """Looks the value up; `read` gives a page by name. Raises `ClaimError` where it is not there."""
        if self.formula:
            known = {name: source.value(read) for name, source in self.values}
            return _evaluate(ast.parse(self.formula, mode="eval").body, known)
        page = read(self.page)
        if self.goal:
            text = page.goal(self.goal, self.section)
        elif self.pattern:
            text = page.match(self.section, self.pattern)
        else:
            text = page.cell(self.section, self.row, self.column, self.near)
        return number(text, self.position)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A text of a document and where its figures come from.

    `says`: the text as it stands in `doc`, with each figure in braces, as in "{42}x that of a dense all-reduce".
    `near`: a text of the same paragraph or row, where `says` alone occurs more than once. `sources`: one for each
    figure, in order.
    """

    doc: str
    says: str
    sources: tuple[Source, ...]
    near: str = ""

    @property
    def text(self) -> str:
        """The text as a reader sees it."""
        return _FIGURE.sub(r"\1", self.says)

    @property
    def figures(self) -> tuple[str, ...]:
        """The figures of the text, as they are written."""
        return tuple(_FIGURE.findall(self.says))

    @property
    def pattern(self) -> re.Pattern[str]:
        """What finds the text in the document, wherever its lines break; a group for each figure."""
        return re.compile("".join(_as_pattern(part, i % 2 == 1) for i, part in enumerate(_FIGURE.split(self.says))))


@dataclasses.dataclass(frozen=True)
class Claims:
    """All claims; texts with numbers that are no measured figures, by document, with the reason; and the code that a
    page measures, as paths of the checkout."""

    claims: tuple[Claim, ...]
    settings: tuple[tuple[str, str, str], ...]  # (document, text, reason)
    code: Mapping[str, tuple[str, ...]]


def read_claims(file: pathlib.Path) -> Claims:
    """Reads a file of claims. Raises `ClaimError` for unknown keys and where figures and sources differ in number."""
    data = tomllib.loads(file.read_text(encoding="utf-8"))
    claims = []
    for entry in data.get("claim", ()):
        page = entry.pop("page", "")
        section = entry.pop("section", "")
        sources = tuple(_source({"page": page, "section": section, **given}) for given in entry.pop("from"))
        claim = Claim(sources=sources, **entry)
        if len(claim.figures) != len(sources):
            raise ClaimError(f"{claim.says!r} has {len(claim.figures)} figures and {len(sources)} sources")
        claims.append(claim)
    settings = tuple((entry["doc"], text, entry["why"]) for entry in data.get("setting", ()) for text in entry["texts"])
    return Claims(tuple(claims), settings, {name: tuple(paths) for name, paths in data.get("code", {}).items()})


def agrees(figure: str, source: Source, value: float) -> bool:
    """Tells whether `value` rounds to `figure` as it is written, or keeps the bound that the source states.

    Signs are left to the sentence: "52 % less" agrees with -52.1.
    """
    written = abs(float(figure.replace(",", "")))
    value = abs(value)
    if source.bound:
        return value >= written if source.bound == "at least" else value <= written
    mantissa, _, exponent = figure.partition("e")
    decimals = len(mantissa.partition(".")[2])
    half = 0.5 * 10 ** (int(exponent or 0) - decimals)
    return abs(written - value) <= half * (1 + 1e-9)


def as_pattern(text: str) -> str:
    """Gives the regular expression that finds `text` wherever its lines break."""
    return r"\s+".join(re.escape(word) for word in re.split(r"\s+", text))


def _as_pattern(part: str, is_figure: bool) -> str:
    return f"({re.escape(part)})" if is_figure else as_pattern(part)


def _source(given: dict[str, Any]) -> Source:
    page, section = given["page"], given["section"]
    values = {
        name: _source({"page": page, "section": section, **value}) for name, value in given.pop("values", {}).items()
    }
    try:
        return Source(values=tuple(values.items()), **given)
    except TypeError as error:
        raise ClaimError(f"a source cannot be read: {error}") from None


def _evaluate(node: ast.expr, known: Mapping[str, float]) -> float:
    """Evaluates arithmetic over names."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluate(node.left, known), _evaluate(node.right, known))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*(_evaluate(argument, known) for argument in node.args))
    raise ClaimError(f"a formula may have names, numbers, + - * /, max and min, not {ast.unparse(node)!r}")
