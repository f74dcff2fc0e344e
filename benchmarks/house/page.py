"""Keeps the figures of checkouts as JSON and writes them as a page, before beside after."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TypedDict, cast

from benchmarks._common import table, write_page
from benchmarks.house.figures import SPECS, House, Spec
from benchmarks.house.prose import CLAUSE_WORDS, OPENING_WORDS, by_file

LABELS = ("before", "after")
_SHORT, _SHOWN = 60, 25  # a list of up to so many entries is shown whole, and of a longer one so many
_COUNTED = ("long_lines_", "uses_of_", "any", "ignores")  # lists of places too long to read: shown as counts by file
_ABOUT = """Taken from the syntax trees of the files, of which none is imported, so that lazy imports and those for
a type checker are seen too. All figures but line lengths and files per folder are of `splitjax/`.

- *Room*: a folder of the package, without rooms inside it. A file at the package's top is a room of its own.
- *Circle*: modules (or rooms) each of which imports, in some steps, every other: a strongly connected component. Room A
  imports room B where a module of A imports a module of B. Imports at the top of a file, in functions and for types all
  count; `a/__init__.py`, which Python runs before `a/b.py`, does not count as imported by whoever imports `a.b`.
- *Longest chain*: each module imports the next; a circle counts as a single module. A module's *floor* is the length of
  the longest chain that starts at it.
- *Parameters*: without `self`, `cls`, `*args` and `**kwargs`; of every function, nested ones included.
- *Class names*: of classes at the top of modules. The table does not decide whether two rooms mean the same by a name.
- *Public*: no underscore before its name or that of a class around it, not inside a function, not a dunder method;
  overloads, setters and what is marked `override` need no docstring. A docstring *names* an argument that occurs in it
  as a word.
- *Fragment*: no full stop, `!`, `?` or, at the end of the paragraph, `:` ends the first sentence; or it begins with a
  word that begins a clause or an attribute,
  %CLAUSES%;
  or it begins with one of these and has no comma after which the sentence proper could begin:
  %OPENINGS%.
  So "Whether it fits." is a fragment: the clause's verb is not the sentence's. Articles are counted apart: "The lines
  of a table." has no verb, "The table has lines." has one.
- *Uses* of a name: wherever it stands as a variable or a parameter, read or written.
- *Sets of primitive names*: assignments at the top of a module that collect at least three strings (two of call-like
  primitives), more than half of them names of JAX's primitives.
- *`Any`*: all uses of the name but its imports: annotations, aliases, casts.
- *Import times*: medians of alternating imports in fresh processes.
"""


class RoomEntry(TypedDict):
    """Mirrors `figures.Room` in JSON."""

    files: int
    lines: int
    floors: int


class Entry(TypedDict):
    """Holds what is kept of a checkout: `lists` has the first entries of each list, `sizes` their full lengths."""

    label: str
    commit: str
    header: str
    values: dict[str, float | None]
    rooms: dict[str, RoomEntry]
    lists: dict[str, list[str]]
    sizes: dict[str, int]


def make_entry(label: str, commit: str, header: str, house: House) -> Entry:
    """Makes what is kept of `house`, a checkout at `commit`; `header` tells date, machine and command in Markdown."""
    lists = {key: _condensed(key, entries) for key, entries in house.lists.items()}
    return Entry(
        label=label,
        commit=commit,
        header=header,
        values=dict(house.values),
        rooms={name: cast("RoomEntry", dataclasses.asdict(room)) for name, room in house.rooms.items()},
        lists={key: entries if len(entries) <= _SHORT else entries[:_SHOWN] for key, entries in lists.items()},
        sizes={key: len(entries) for key, entries in lists.items()},
    )


def read(folder: pathlib.Path) -> dict[str, Entry]:
    """Reads the entries of `folder`/house.json by "label commit", the newest last; none where there is no such file."""
    file = folder / "house.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def add(kept: dict[str, Entry], entry: Entry) -> None:
    """Adds `entry` to `kept` as its newest.

    Figures that it lacks come from an earlier entry of the same label and commit, as type errors and import times are
    not measured every time. Figures of a checkout with changes are not reused: what changed is not known.
    """
    key = f"{entry['label']} {entry['commit']}"
    earlier = kept.pop(key, None)
    if earlier and not entry["commit"].endswith("with changes"):
        entry["values"] |= {
            name: value for name, value in earlier["values"].items() if entry["values"].get(name) is None
        }
        entry["lists"] = {**earlier["lists"], **entry["lists"]}
        entry["sizes"] = {**earlier["sizes"], **entry["sizes"]}
    kept[key] = entry


def write(kept: Mapping[str, Entry], folder: pathlib.Path) -> pathlib.Path:
    """Writes `kept` as house.json and house.md into `folder`; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "house.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return write_page("house", lines(kept), folder)


def lines(kept: Mapping[str, Entry]) -> list[str]:
    """Gives the lines of the page: the newest entry of each label beside the other, then lists of the newer label."""
    newest = {entry["label"]: entry for entry in kept.values()}
    shown = [newest.get(label) for label in LABELS]
    latest = next(entry for entry in reversed(shown) if entry)
    page = ["# House: how the package is built", ""]
    for entry in filter(None, shown):
        page += [f"**{entry['label']}**, commit {entry['commit'] or 'unknown'}", "", entry["header"].rstrip(), ""]
    about = _ABOUT.replace("%CLAUSES%", ", ".join(sorted(CLAUSE_WORDS)))
    about = about.replace("%OPENINGS%", ", ".join(sorted(OPENING_WORDS)))
    page += [*about.splitlines(), "", "## Figures", ""]
    page += table(["figure", "goal", *LABELS], [_row(spec, shown) for spec in SPECS])
    page += ["", "## Rooms", "", "Floors: the longest chain of imports inside the room, in modules.", ""]
    page += _rooms(shown)
    page += ["", f"## What the figures count, {latest['label']}", ""]
    titles = {spec.key: spec.title for spec in SPECS}
    extra = {"floors": "modules by floor", "type_errors_by_rule": "type errors by rule"}
    for key, title in (titles | extra).items():
        if latest["lists"].get(key):
            page += [f"### {title[0].upper()}{title[1:]}", "", *_list(key, latest), ""]
    return page


def _row(spec: Spec, shown: Sequence[Entry | None]) -> list[str]:
    values = [_cell(entry["values"].get(spec.key), spec.digits) if entry else "" for entry in shown]
    return [spec.title, spec.goal, *values]


def _cell(value: float | None, digits: int) -> str:
    return "not measured" if value is None else f"{value:,.{digits}f}"


def _rooms(shown: Sequence[Entry | None]) -> list[str]:
    names = {name for entry in shown if entry for name in entry["rooms"]}
    counts: tuple[str, ...] = ("files", "lines", "floors")
    rows = []
    for name in sorted(names, key=lambda it: (it.endswith(".py"), it)):  # files at the package's top come last
        row = [name]
        for count in counts:
            for entry in shown:
                room = cast("Mapping[str, int]", entry["rooms"].get(name, {})) if entry else {}
                row.append(f"{room[count]:,}" if count in room else "")
        rows.append(row)
    return table(["room", *(f"{count} {label}" for count in counts for label in LABELS)], rows)


def _condensed(key: str, entries: Sequence[str]) -> list[str]:
    return by_file(entries) if key.startswith(_COUNTED) else [*entries]


def _list(key: str, entry: Entry) -> list[str]:
    shown, size = entry["lists"][key], entry["sizes"][key]
    more = f"- and {size - len(shown):,} more: `python -m benchmarks house --list {key}`"
    return [*(f"- {line}" for line in shown), *([more] if size > len(shown) else [])]
