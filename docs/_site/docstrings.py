"""Docstrings of the package are Markdown (fences, single backticks); Sphinx's autodoc reads reStructuredText."""

from __future__ import annotations

import re
from collections.abc import Sequence

# A star that is not one of two, a bar, and an underscore at the end of a word.
_MARKUP = re.compile(r"(?<!\*)\*(?!\*)|\||(?<=\w)_(?!\w)")
_BULLET = re.compile(r"\s*- ")


def as_restructured_text(lines: Sequence[str]) -> list[str]:
    """Returns the `lines` of a docstring with code, fenced code and lists as reStructuredText has them; what else there
    is (bold words, paragraphs) is written alike."""
    text = _code("\n".join(lines)).split("\n")
    out: list[str] = []
    fence: int | None = None  # how far the fence that is open is indented
    for line in text:
        stripped = line.strip()
        if stripped.startswith("```"):
            indent = len(line) - len(line.lstrip())
            if fence is None:
                language = stripped.strip("`") or "text"
                out += ["", " " * indent + f".. code-block:: {language}", ""]
                fence = indent
            else:
                out.append("")
                fence = None
        elif fence is not None:
            out.append(f"   {line}" if stripped else "")
        else:
            is_bullet = _BULLET.match(line) is not None
            if is_bullet and out and out[-1].strip() and not _in_list(out, line):
                out.append("")
            out.append(line)
    return out


def _in_list(before: Sequence[str], bullet: str) -> bool:
    """Whether the paragraph above a bullet is an item of the same list: it began with a bullet, no deeper."""
    depth = len(bullet) - len(bullet.lstrip())
    for line in reversed(before):
        if not line.strip():
            return False
        if _BULLET.match(line):
            return len(line) - len(line.lstrip()) == depth
    return False


def _code(text: str) -> str:
    """Doubles single backticks, also over ends of lines, and escapes what reStructuredText would take for markup."""
    parts = re.split(r"(```.*?```|`[^`]+`)", text, flags=re.DOTALL)
    return "".join(
        _piece(part, parts[number + 1] if number + 1 < len(parts) else "") for number, part in enumerate(parts)
    )


def _piece(part: str, after: str) -> str:
    if part.startswith("```"):
        return part
    if part.startswith("`") and part.endswith("`") and len(part) > 1:
        # A literal ends at a character that is no letter; an escaped space stands for none.
        return f"``{part[1:-1]}``" + ("\\ " if after[:1].isalnum() else "")
    return _MARKUP.sub(r"\\\g<0>", part)
