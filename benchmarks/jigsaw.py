"""Whether the scheduler's simulator can be believed, and what packing iterations gains: fidelity to a measured testbed, and other parts.

    python -m benchmarks jigsaw --data-dir DIR                     everything, and its page
    python -m benchmarks jigsaw --data-dir DIR --only fidelity     one part; the page keeps what was measured of the others
    python -m benchmarks jigsaw --data-dir DIR --quick             a small part of each, printed only

`--data-dir`: philly_jobs.csv.gz, gavel_throughputs.json.gz and the folder muri/ (trace1..3.csv, testbed_trace.csv, testbed_POLICY.csv). A part is a module
`benchmarks/_jigsaw_PART.py` with `section(quick, data_dir) -> Section`. What each found is kept beside the page (jigsaw.json), with its date and machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import time
import traceback
from typing import Any

from benchmarks._common import RESULTS, quiet_tpu_compiler, write_page

_FOLDER = pathlib.Path(__file__).resolve().parent
_FIRST = ("fidelity", "efficiency", "honesty", "scale", "exact", "real")  # the order on the page; others follow by name


def parts() -> list[str]:
    """Names of all parts, in their order on the page."""
    found = [file.stem.removeprefix("_jigsaw_") for file in _FOLDER.glob("_jigsaw_*.py") if "\ndef section(" in file.read_text(encoding="utf-8")]
    return sorted(found, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name))


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 where a goal is missed or a part failed."""
    options = _options(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    quiet_tpu_compiler()
    options.output.mkdir(parents=True, exist_ok=True)  # before anything is measured that would be lost
    kept, failed, found = {} if options.quick else _kept(options.output), [], []
    for part in options.only or parts():
        one = _run(part, options)
        if one is None:
            failed.append(part)
            continue
        kept[part] = one
        found += goals_of(one)
        if not options.quick:
            _file(options.output).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print("wrote", write_page("jigsaw", page(kept), options.output))
    print("\n" + "\n".join(map(str, found)))
    print(f"{sum(goal.ok for goal in found)} of {len(found)} goals met" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 0 if all(goal.ok for goal in found) and not failed else 1


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("jigsaw", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=pathlib.Path, required=True, help="folder of the traces")
    parser.add_argument("--only", nargs="*", choices=parts(), default=[], metavar="PART", help=", ".join(parts()))
    parser.add_argument("--quick", action="store_true", help="a small part of each, printed only")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the page instead of benchmarks/results")
    options = parser.parse_args(argv)
    options.data_dir = options.data_dir.absolute()
    return options


def _run(part: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What a part found, as JSON values; None where it failed."""
    from benchmarks import machine
    from benchmarks._splitbrain_common import busy

    started, load = time.perf_counter(), busy()
    print(f"{part}: {load} before", flush=True)
    try:
        section = importlib.import_module(f"benchmarks._jigsaw_{part}").section(options.quick, options.data_dir)
    except Exception:  # the others are measured, and this one's earlier figures stay
        traceback.print_exc()
        return None
    print("\n".join(["", f"## {section.title}", "", *section.lines]), flush=True)
    header = machine.header(machine.this_machine(), f"python -m benchmarks jigsaw --data-dir DIR --only {part}")
    return {**dataclasses.asdict(section), "seconds": time.perf_counter() - started, "load": load, "header": header}


def page(kept: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of the page, parts in their order."""
    goals = [goal for one in kept.values() for goal in goals_of(one)]
    lines = ["# Scheduling iterations", "", f"**{sum(goal.ok for goal in goals)} of {len(goals)} goals met.**", ""]
    for part in sorted(kept, key=lambda name: (_FIRST.index(name) if name in _FIRST else len(_FIRST), name)):
        one = kept[part]
        lines += [f"## {one['title']}", "", one["header"].rstrip(), f"- {one['seconds']:.0f} s; {one['load']} before it began", "", *one["lines"], ""]
        lines += [*(f"- {'**' if not goal.ok else ''}{goal}{'**' if not goal.ok else ''}" for goal in goals_of(one)), ""]
    return lines


def goals_of(one: dict[str, Any]) -> list[Any]:
    """The goals of a section, as kept."""
    from benchmarks._splitbrain_common import Goal

    return [Goal(**goal) for goal in one["goals"]]


def _file(folder: pathlib.Path) -> pathlib.Path:
    return folder / "jigsaw.json"


def _kept(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """What was measured before."""
    return json.loads(_file(folder).read_text(encoding="utf-8")) if _file(folder).is_file() else {}
