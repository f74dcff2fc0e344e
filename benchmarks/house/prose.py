"""Checks how docstrings begin and how long lines are: definitions and files go in, what violates comes out.

Whether a sentence has a verb cannot be decided without a grammar. Two signs of a missing verb can: the first sentence
does not end, or it begins with a word that begins a clause or an attribute rather than a sentence.
"""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterable, Sequence

from benchmarks.house.definitions import Definition
from benchmarks.house.source import Module, python_files, read_text

MAX_LINE = 120
# These begin a clause without the sentence that it belongs to ("Whether it fits.", "Theirs for a map.").
CLAUSE_WORDS = frozenset(
    "whether what how which where who whose why of by theirs its as like per than that and or but same ditto".split()
)
# These may begin a sentence ("For each layer, returns its cost."), but then a comma follows before it ends.
OPENING_WORDS = frozenset(
    "for with without from in on at to when if while after before under over between among".split()
)
ARTICLES = frozenset("a an the all every each no its their".split())
_ABBREVIATIONS = ("e.g.", "i.e.", "cf.", "vs.", "al.", "Fig.", "Sec.", "Eq.", "approx.", "etc.")


def first_sentence(docstring: str) -> str:
    """Gives the first sentence of a docstring, or its whole first paragraph where no sentence ends in it."""
    paragraph = " ".join(docstring.strip().split("\n\n")[0].split())
    for match in re.finditer(r"[.!?](?=\s|$)", paragraph):
        if not paragraph[: match.end()].endswith(_ABBREVIATIONS):
            return paragraph[: match.end()]
    return paragraph


def begins_with_fragment(docstring: str) -> bool:
    """Tells whether the first sentence of `docstring` does not end, or begins as a fragment does.

    A full stop, `!` or `?` ends it, and a colon that ends the paragraph (a list follows). How fragments begin:
    `CLAUSE_WORDS` and `OPENING_WORDS`. A question ("Which rows does a worker own?") is a sentence.
    """
    sentence = first_sentence(docstring)
    if not sentence or sentence[-1] not in ".!?:":
        return True
    word = _first_word(sentence)
    if sentence.endswith("?"):
        return False
    return word in CLAUSE_WORDS or (word in OPENING_WORDS and "," not in sentence)


def begins_with_article(docstring: str) -> bool:
    """Tells whether `docstring` begins with an article or alike, as in "The lines of a table.": mostly verbless."""
    return _first_word(first_sentence(docstring)) in ARTICLES


def fragments(modules: Iterable[Module], definitions: Iterable[Definition], is_public: bool) -> list[str]:
    """Describes each docstring that begins with a fragment.

    `is_public` chooses those of public definitions and of `modules`, or else those of all other definitions.
    """
    texts = [(str(it), it.docstring) for it in definitions if it.is_public == is_public]
    if is_public:
        texts += [(f"{module.path}:1 module", ast.get_docstring(module.tree)) for module in modules]
    return [f"{place}: {first_sentence(text)[:90]}" for place, text in texts if text and begins_with_fragment(text)]


def articles(definitions: Iterable[Definition]) -> list[str]:
    """Describes each public one of `definitions` that has parameters and a docstring that begins with an article.

    A property has none: it is a value, and "The lines of the table." tells which.
    """
    chosen = [it for it in definitions if it.is_public and it.kind != "class" and it.parameters and it.docstring]
    texts = [(it, it.docstring or "") for it in chosen]
    return [f"{it}: {first_sentence(text)[:90]}" for it, text in texts if begins_with_article(text)]


def long_lines(checkout: pathlib.Path, folder: str, limit: int = MAX_LINE) -> list[str]:
    """Gives the places of lines of more than `limit` characters in the Python files below `folder` of `checkout`."""
    places: list[str] = []
    for path in python_files(checkout, folder):
        lines = read_text(checkout, path).splitlines()
        places += [f"{path}:{number} has {len(line)}" for number, line in enumerate(lines, 1) if len(line) > limit]
    return places


def by_file(places: Sequence[str]) -> list[str]:
    """Counts `places`, which begin with `path:line`, by file: the file with the most comes first."""
    counts: dict[str, int] = {}
    for place in places:
        path = place.split(":", 1)[0]
        counts[path] = counts.get(path, 0) + 1
    return [f"{path}: {count}" for path, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def _first_word(sentence: str) -> str:
    match = re.match(r"[A-Za-z]+", sentence)
    return match.group().lower() if match else ""
