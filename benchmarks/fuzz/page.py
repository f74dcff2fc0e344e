"""Keeps what searches found as JSON, and writes it as a page: parsers that were not tried again stay as they were."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._common import RESULTS, table, write_page
from benchmarks.fuzz.parser import SECONDS, Parser
from benchmarks.fuzz.searching import Search, kept
from benchmarks.machine import this_machine, version

_FILE = RESULTS / "fuzz.json"
_NOTES = (
    "*Kept* are inputs that showed a defect once, mended since (`benchmarks/fuzz/corpus`); they are tried first.",
    "*Memory* is the peak of what Python's and numpy's allocators are asked for while an input is read, beside the",
    "length of the input times the factor; of a packed one what it unpacks to counts, bounded itself to 4 MiB and",
    "200 times its size. It is measured for a fourth of the inputs, and all that are kept, and once more for an input",
    "that takes too much: an import, or a table of Python's own that grows, is no input's. A process has 3 GiB above",
    "what it begins with. Most inputs are at most four times as long as the longest valid document that the search",
    "begins with, or 4 KiB; one in fifty may have 32 KiB.",
)


def record(searches: Sequence[Search], parsers: Mapping[str, Parser], command: str) -> None:
    """Writes the figures of `searches`, made by `command`, into `results/fuzz.json`, and the page anew."""
    known: dict[str, Any] = json.loads(_FILE.read_text()) if _FILE.is_file() else {}
    machine = this_machine()
    for search in searches:
        known[search.parser] = {
            "engine": f"{search.engine} {version(search.engine)}" if search.engine == "atheris" else search.engine,
            "inputs": search.inputs,
            "seconds": round(search.seconds, 1),
            "defects": [f"{defect.kind}: {defect.what[:150]} ({defect.place[:80]})" for defect in search.defects],
            "commit": machine.commit,
            "date": machine.date,
            "command": command,
            "machine": f"{machine.system}, {machine.processor}, {machine.num_cores} cores, Python {machine.python}",
        }
    kept_order = {name: known[name] for name in parsers if name in known}
    _FILE.write_text(json.dumps(kept_order, indent=1) + "\n")
    write_page("fuzz", _lines(kept_order, parsers))


def _lines(known: Mapping[str, Any], parsers: Mapping[str, Parser]) -> list[str]:
    total = sum(entry["inputs"] for entry in known.values())
    seconds = sum(entry["seconds"] for entry in known.values())
    defects = sum(len(entry["defects"]) for entry in known.values())
    rows = [
        (
            name,
            f"{entry['inputs']:,}",
            f"{entry['seconds']:,.0f}",
            str(len(entry["defects"])),
            str(len(kept(parsers[name]))),
            f"{parsers[name].floor_bytes / 2**20:.0f} MiB + {parsers[name].multiple} x",
            f"{entry['engine']}, {entry['date']}, {entry['commit']}",
        )
        for name, entry in known.items()
    ]
    columns = ("parser", "inputs", "core-seconds", "defects", "kept", "memory allowed", "taken with")
    commands = sorted({entry["command"] for entry in known.values()})
    if len(commands) > 1:  # those of single parsers
        commands = ["python -m benchmarks fuzz --only PARSER --found FOLDER"]
    machines = sorted({entry["machine"] for entry in known.values()})
    return [
        "# Fuzzing the parsers",
        "",
        *(f"- machine: {machine}" for machine in machines),
        *(f"- command: `{command}`" for command in commands),
        "",
        f"**{total:,} inputs in {seconds:,.0f} core-seconds: {defects} defects.** A defect is an error other than",
        f"the typed one of its parser, more than {SECONDS:g} s of processor time, or more memory than allowed, for one",
        "input.",
        "",
        *table(columns, rows),
        "",
        *_NOTES,
        *(
            line
            for name, entry in known.items()
            for line in (
                "",
                f"## Defects of {name}",
                "",
                *(f"- {text}".replace("\n", " ") for text in entry["defects"]),
            )
            if entry["defects"]
        ),
    ]
