"""What structured partial backpropagation saves, what it costs in quality, and over which links it pays.

    python -m benchmarks partial --data-dir DIR                     everything, and its page (hours)
    python -m benchmarks partial --data-dir DIR --only saved        one part; the page keeps what was measured of the others
    python -m benchmarks partial --data-dir DIR --quick             a small part of each, printed only

`--data-dir`: the folder of the binary CIFAR-10 batches. What each part found is kept beside the page (partial.json), with its date and machine. Processor
times want an idle machine: how busy others were is on the page. Source: Kumar et al., arXiv 2111.10672.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks._common import RESULTS, virtual_devices, write_page

PARTS = {"saved": ("_partial_saved", 8), "quality": ("_partial_quality", 4), "pays": ("_partial_pays", 1)}  # module, virtual devices


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 where a goal is missed or a part failed."""
    parser = argparse.ArgumentParser("partial", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=pathlib.Path, required=True, help="folder of the binary CIFAR-10 batches")
    parser.add_argument("--only", nargs="*", choices=tuple(PARTS), default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="a small part of each, printed only")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the page instead of benchmarks/results")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)  # what a child process does
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    options.data_dir = options.data_dir.absolute()
    if options.part:
        return _child(options)
    file = options.output / "partial.json"
    kept: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() and not options.quick else {}
    failed, found = [], []
    for part in options.only or PARTS:
        one = _run(part, options)
        if one is None:
            failed.append(part)
            continue
        kept[part] = one
        found += _goals(one)
        if not options.quick:
            options.output.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print("wrote", write_page("partial", _page(kept), options.output))
    print("\n" + "\n".join(map(str, found)))
    print(f"{sum(goal.ok for goal in found)} of {len(found)} goals met" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 0 if all(goal.ok for goal in found) and not failed else 1


def _run(part: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """A part in a process of its own, so that devices are what it asks for. None where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "section.json"
        command = [sys.executable, "-m", "benchmarks", "partial", "--data-dir", str(options.data_dir), "--part", part, "--result", str(result)]
        code = subprocess.run([*command, *(["--quick"] if options.quick else []), "--output", str(options.output)], check=False).returncode
        if code or not result.is_file():
            print(f"the part {part} failed (exit status {code})", file=sys.stderr)
            return None
        return json.loads(result.read_text(encoding="utf-8"))


def _child(options: argparse.Namespace) -> int:
    module, devices = PARTS[options.part]
    virtual_devices(devices)
    from benchmarks import machine
    from benchmarks._splitbrain_common import busy

    started, load = time.perf_counter(), busy()
    section, facts = importlib.import_module(f"benchmarks.{module}").section(options.quick, options.data_dir)
    print("\n".join(["", f"## {section.title}", "", *section.lines]), flush=True)
    header = machine.header(machine.this_machine(), f"python -m benchmarks partial --data-dir DIR --only {options.part}")
    found = {**dataclasses.asdict(section), "facts": facts, "seconds": time.perf_counter() - started, "load": load, "header": header}
    options.result.write_text(json.dumps(found), encoding="utf-8")
    return 0


def _goals(one: dict[str, Any]) -> list[Any]:
    from benchmarks._splitbrain_common import Goal

    return [Goal(**goal) for goal in one["goals"]]


def _page(kept: dict[str, Any]) -> list[str]:
    goals = [goal for part in PARTS if part in kept for goal in _goals(kept[part])]
    lines = ["# Structured partial backpropagation", "", f"**{sum(goal.ok for goal in goals)} of {len(goals)} goals met.**", ""]
    for part in PARTS:
        if part not in kept:
            continue
        one = kept[part]
        lines += [f"## {one['title']}", "", one["header"].rstrip(), f"- {one['seconds']:.0f} s; {one['load']} before it began", "", *one["lines"]]
        lines += [*(f"- {'**' if not goal.ok else ''}{goal}{'**' if not goal.ok else ''}" for goal in _goals(one)), ""]
    return lines


if __name__ == "__main__":
    sys.exit(main())
