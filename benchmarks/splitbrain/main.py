"""Whether SplitBrain saves memory, hides its communication, scales, and trains with the numbers of one device.

    python -m benchmarks splitbrain                     everything (about an hour on two busy cores), and its page
    python -m benchmarks splitbrain --quick             a small part of each section, printed only
    python -m benchmarks splitbrain --only memory bytes
    python -m benchmarks splitbrain --only scaling      its page is splitbrain-scaling.md

Each section runs in a process of its own, so that devices and flags are what it asks for (Lai, Kadav, Kruus:
SplitBrain, arXiv 2112.15317). Nothing that only memory or bytes are asked about is allocated: steps are compiled from
shapes, for TPUs ahead of time (libtpu, no TPU needed: `pip install splitjax[tpu]`). Times want an idle machine: what
else ran is on the page.
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

from benchmarks._common import virtual_devices, write_page
from benchmarks.splitbrain.common import NUM_DEVICES, Goal, Section

# Part -> (section of --only, module, function). A part is a process.
PARTS = {
    "memory": ("memory", "splitbrain.memory", "section"),
    "speed": ("memory", "splitbrain.memory", "speed_section"),
    "crossings": ("crossings", "splitbrain.crossings", "section"),
    "crossing-speed": ("crossings", "splitbrain.crossings", "speed_section"),
    "scaling": ("scaling", "splitbrain.scaling", "section"),
    "bytes": ("bytes", "splitbrain.bytes", "section"),
    "numbers": ("numbers", "splitbrain.numbers", "section"),
}
SECTIONS = tuple(dict.fromkeys(section for section, _, _ in PARTS.values()))


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen sections; returns 1 where a goal is missed."""
    parser = argparse.ArgumentParser(
        "splitbrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=[], metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="a small part of each section")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the page instead of benchmarks/results")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)  # what a child process does
    parser.add_argument("--result", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.part:
        return _child(options)
    found = []
    for part, (section, _, _) in PARTS.items():
        if not options.only or section in options.only:
            found.append(_run(part, options.quick))
    goals = [goal for one, _ in found for goal in one.goals]
    print("\n" + "\n".join(map(str, goals)))
    print(f"{sum(goal.ok for goal in goals)} of {len(goals)} goals met")
    if not options.quick or options.output:
        print("wrote", write_page("-".join(["splitbrain", *options.only]), _page(found, options), options.output))
    return 0 if all(goal.ok for goal in goals) and all(one.title for one, _ in found) else 1


def _run(part: str, quick: bool) -> tuple[Section, float]:
    """A part in a process of its own, with its seconds. One that fails leaves a section without a title."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "section.json"
        command = [
            sys.executable,
            "-m",
            "benchmarks",
            "splitbrain",
            "--part",
            part,
            "--result",
            str(result),
            *(["--quick"] if quick else []),
        ]
        code = subprocess.run(command, check=False).returncode
        seconds = time.perf_counter() - started
        if code or not result.is_file():
            print(f"the part {part} failed (exit status {code})", file=sys.stderr)
            return Section("", [f"The part `{part}` failed (exit status {code}).", ""], []), seconds
        read = json.loads(result.read_text(encoding="utf-8"))
    return Section(read["title"], read["lines"], [Goal(**goal) for goal in read["goals"]]), seconds


def _child(options: argparse.Namespace) -> int:
    _, module, function = PARTS[options.part]
    virtual_devices(NUM_DEVICES)
    section = getattr(importlib.import_module(f"benchmarks.{module}"), function)(quick=options.quick)
    options.result.write_text(json.dumps(dataclasses.asdict(section)), encoding="utf-8")
    return 0


def _page(found: list[tuple[Section, float]], options: argparse.Namespace) -> list[str]:
    virtual_devices(NUM_DEVICES)
    from benchmarks import machine

    goals = [goal for one, _ in found for goal in one.goals]
    command = " ".join(
        [
            "python -m benchmarks splitbrain",
            *(["--quick"] if options.quick else []),
            *(["--only", *options.only] if options.only else []),
        ]
    )
    lines = [
        "# SplitBrain: memory, communication, scaling, numbers", "",
        f"**{sum(goal.ok for goal in goals)} of {len(goals)} goals met.**", "",
        machine.header(machine.this_machine((*machine.PACKAGES, "libtpu")), command).rstrip(), "",
    ]  # fmt: skip
    for one, seconds in found:
        lines += [f"## {one.title or 'Failed'}", "", *one.lines]
        lines += [
            *(f"- {'**' if not goal.ok else ''}{goal}{'**' if not goal.ok else ''}" for goal in one.goals),
            "",
            f"({seconds:.0f} s)",
            "",
        ]
    return lines


if __name__ == "__main__":
    sys.exit(main())
