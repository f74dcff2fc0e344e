"""Result pages of several parts. What each part found is kept as JSON beside the page, so that one is measured again
without the others."""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks._common import RESULTS, write_page

Part = dict[str, Any]  # title, lines, goals, seconds, load, header


@dataclasses.dataclass(frozen=True)
class Page:
    """`NAME.md`, and `NAME.json` beside it. `order`: by which key parts come. `has_gap`: an empty line between a part's
    text and its goals."""

    name: str
    title: str
    order: Callable[[str], Any]
    has_gap: bool = False

    def read(self, folder: pathlib.Path) -> dict[str, Part]:
        """What was measured before."""
        file = self._file(folder)
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def write(self, kept: Mapping[str, Part], folder: pathlib.Path) -> None:
        self._file(folder).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        print("wrote", write_page(self.name, self.lines(kept), folder))

    def lines(self, kept: Mapping[str, Part]) -> list[str]:
        """The page, parts in their order."""
        goals = [goal for one in kept.values() for goal in goals_of(one)]
        lines = [f"# {self.title}", "", f"**{sum(goal.ok for goal in goals)} of {len(goals)} goals met.**", ""]
        for key in sorted(kept, key=self.order):
            one = kept[key]
            lines += [
                f"## {one['title']}",
                "",
                one["header"].rstrip(),
                f"- {one['seconds']:.0f} s; {one['load']} before it began",
                "",
                *one["lines"],
            ]
            lines += [""] if self.has_gap else []
            lines += [
                *(f"- {'**' if not goal.ok else ''}{goal}{'**' if not goal.ok else ''}" for goal in goals_of(one)),
                "",
            ]
        return lines

    def _file(self, folder: pathlib.Path) -> pathlib.Path:
        return folder / f"{self.name}.json"


def add_options(parser: argparse.ArgumentParser, data_help: str, parts: Sequence[str]) -> None:
    """The options that all these benchmarks have. `data_help`: what `--data-dir` is; empty where none is read."""
    if data_help:
        parser.add_argument("--data-dir", type=pathlib.Path, required=True, help=data_help)
    parser.add_argument("--only", nargs="*", choices=tuple(parts), default=[], metavar="PART", help=", ".join(parts))
    parser.add_argument("--quick", action="store_true", help="a small part of each, printed only (or to --output)")
    parser.add_argument(
        "--output", type=pathlib.Path, default=RESULTS, help="folder of the page instead of benchmarks/results"
    )


def run_parts(
    page: Page,
    jobs: Mapping[str, Callable[[], Part | None]],
    options: argparse.Namespace,
    complete: Callable[[dict[str, Part]], None] | None = None,
) -> int:
    """Measures parts, and writes page and JSON after each; returns 1 where a goal is missed or a part failed. With
    `--quick` goals are printed and not held, as its sizes are too small for them, and the page is written to a folder
    that `--output` names alone. `jobs`:
    by key what measures it (None: it failed; its earlier figures stay). `complete`: makes of all parts, in place, what
    depends on several."""
    options.output.mkdir(parents=True, exist_ok=True)  # before anything is measured that would be lost
    kept, failed, done = page.read(options.output), [], []
    for key, run in jobs.items():
        one = run()
        if one is None:
            failed.append(key)
            continue
        kept[key] = one
        done.append(key)
        if complete is not None:
            complete(kept)
        if not options.quick or options.output != RESULTS:
            page.write(kept, options.output)
    found = [goal for key in done for goal in goals_of(kept[key])]
    print("\n" + "\n".join(map(str, found)))
    print(
        f"{sum(goal.ok for goal in found)} of {len(found)} goals met"
        + (f"; failed: {', '.join(failed)}" if failed else "")
    )
    return 1 if failed or not (options.quick or all(goal.ok for goal in found)) else 0


def run_part(key: str, measure: Callable[[], Any], command: str, packages: Sequence[str] | None = None) -> Part | None:
    """What a part found, as JSON values, with date and machine; None where it failed. `measure`: gives the section.
    `packages`: whose versions are told."""
    from benchmarks import machine
    from benchmarks.splitbrain.common import busy

    started, load = time.perf_counter(), busy()
    print(f"{key}: {load} before", flush=True)
    try:
        section = measure()
    except Exception:  # the others are measured, and this one's earlier figures stay
        traceback.print_exc()
        return None
    show(section.title, section.lines)
    header = machine.header(
        machine.this_machine() if packages is None else machine.this_machine(tuple(packages)), command
    )
    return {**dataclasses.asdict(section), "seconds": time.perf_counter() - started, "load": load, "header": header}


def add_child_options(parser: argparse.ArgumentParser, parts: Sequence[str]) -> None:
    """The options by which a benchmark calls itself for a part in a process of its own."""
    parser.add_argument("--part", choices=tuple(parts), help=argparse.SUPPRESS)
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)


def run_child(benchmark: str, part: str, options: argparse.Namespace) -> Part | None:
    """Measures a part in a process of its own, so that devices and flags are what it asks for; None where it failed.
    The process is `python -m benchmarks NAME --part PART`, which ends with `write_child`."""
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "section.json"
        command = [sys.executable, "-m", "benchmarks", benchmark, "--part", part, "--result", str(result)]
        command += ["--data-dir", str(options.data_dir.absolute())] if hasattr(options, "data_dir") else []
        code = subprocess.run([*command, *(["--quick"] if options.quick else [])], check=False).returncode
        if code or not result.is_file():
            print(f"the part {part} failed (exit status {code})", file=sys.stderr)
            return None
        return json.loads(result.read_text(encoding="utf-8"))


def write_child(
    options: argparse.Namespace, measure: Callable[[], Part], command: str, packages: Sequence[str] | None = None
) -> int:
    """What a process that `run_child` started does: `measure` gives title, lines, goals and facts, to which time, load
    and machine are added. `packages`: whose versions are told."""
    from benchmarks import machine
    from benchmarks.splitbrain.common import busy

    started, load = time.perf_counter(), busy()
    found = measure()
    header = machine.header(
        machine.this_machine() if packages is None else machine.this_machine(tuple(packages)), command
    )
    timed = {**found, "seconds": time.perf_counter() - started, "load": load, "header": header}
    options.result.write_text(json.dumps(timed), encoding="utf-8")
    return 0


def show(title: str, lines: Sequence[str]) -> None:
    print("\n".join(["", f"## {title}", "", *lines]), flush=True)


def goals_of(one: Part) -> list[Any]:
    """The goals of a part, as kept."""
    from benchmarks.splitbrain.common import Goal

    return [Goal(**goal) for goal in one["goals"]]
