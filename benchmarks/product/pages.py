"""The documentation as it is written: its code blocks, the words of the README, and the page that is a walk through a
first day."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
_PYTHON = re.compile(r"(?:<!-- not run: ([^\n]+?) -->\n\n)?^ *```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
_STEP = re.compile(r"^```(sh|python)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_FILE = re.compile(r"# (\w+\.py)\n")


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of Python on a page: its number there, its code, and why it does not run (empty: it does)."""

    page: str
    number: int
    code: str
    reason: str


def documents() -> list[pathlib.Path]:
    """Returns the README and the pages of `docs`, whose code blocks the tests run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks() -> list[Block]:
    """Returns the blocks of Python on all `documents`."""
    return [
        Block(page.stem, number, textwrap.dedent(code), (reason or "").strip())
        for page in documents()
        for number, (reason, code) in enumerate(_PYTHON.findall(page.read_text(encoding="utf-8")))
    ]


def readme_words() -> int:
    """Returns how many words the README has, code and the targets of links apart."""
    text = re.sub(r"```.*?```", "", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    return len(re.sub(r"\]\([^)]*\)", "]", text).split())


@dataclasses.dataclass(frozen=True)
class Step:
    """What a person does at one block of the first day: saves a file (`name`), or types commands (`name` empty)."""

    name: str
    text: str


def first_day() -> list[Step]:
    """Returns the blocks of `docs/first_day.md` in their order. Raises `ValueError` for a block of Python that does not
    begin with the name of its file."""
    steps = []
    for language, text in _STEP.findall((ROOT / "docs" / "first_day.md").read_text(encoding="utf-8")):
        name = _FILE.match(text) if language == "python" else None
        if language == "python" and name is None:
            raise ValueError(f"a file begins with its name, as a comment: {text[:60]!r}")
        steps.append(Step(name[1] if name else "", text))
    return steps
