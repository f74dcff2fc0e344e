"""Whether training works for real: accuracy on real data, input, asynchronous checkpoints, two processes over real links.

    python -m benchmarks training --data-dir DIR                  everything, and its page (about half an hour on two idle cores)
    python -m benchmarks training --data-dir DIR --only scaling   one part; the page keeps what was measured of the others
    python -m benchmarks training --data-dir DIR --quick          a small part of each, printed only

`--data-dir`: CIFAR-10's binary files (`data_batch_*.bin`, `test_batch.bin`), all of them or the first records of each. What each part found is
kept beside the page (training.json), with its date and machine. Times want an idle machine: how busy others were is on the page.
`scaling` behind rate limits needs Linux and root.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import sys
import time
import traceback
from typing import Any

from benchmarks._common import RESULTS, quiet_tpu_compiler, write_page

PARTS = ("accuracy", "input", "checkpoints", "scaling")


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 where a goal is missed or a part failed."""
    parser = argparse.ArgumentParser("training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=pathlib.Path, required=True, help="folder of CIFAR-10's binary files")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="a small part of each, printed only")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the page instead of benchmarks/results")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    quiet_tpu_compiler()
    options.output.mkdir(parents=True, exist_ok=True)  # before anything is measured that would be lost
    kept, failed = {} if options.quick else _kept(options.output), []
    for part in options.only or PARTS:
        found = _run(part, options)
        if found is None:
            failed.append(part)
            continue
        kept[part] = found
        if not options.quick:
            _file(options.output).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print("wrote", write_page("training", _page(kept), options.output))
    goals = [goal for part in options.only or PARTS if part in kept for goal in _goals(kept[part])]
    print("\n" + "\n".join(map(str, goals)))
    print(f"{sum(goal.ok for goal in goals)} of {len(goals)} goals met" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 0 if all(goal.ok for goal in goals) and not failed else 1


def _run(part: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """What a part found, as JSON values; None where it failed. Each starts processes of its own: devices and flags are what it asks for."""
    from benchmarks._splitbrain_common import busy

    started, load = time.perf_counter(), busy()
    print(f"{part}: {load} before", flush=True)
    try:
        section = importlib.import_module(f"benchmarks._training_{part}").section(options.quick, options.data_dir.absolute())
    except Exception:  # the other parts are measured, and this one's earlier figures stay
        traceback.print_exc()
        return None
    from benchmarks import machine

    print("\n".join(["", f"## {section.title}", "", *section.lines]), flush=True)
    command = f"python -m benchmarks training --data-dir DIR --only {part}"
    return {**dataclasses.asdict(section), "seconds": time.perf_counter() - started, "load": load,
            "header": machine.header(machine.this_machine((*machine.PACKAGES, "orbax-checkpoint")), command)}  # fmt: skip


def _page(kept: dict[str, dict[str, Any]]) -> list[str]:
    goals = [goal for part in PARTS if part in kept for goal in _goals(kept[part])]
    lines = ["# Training for real: accuracy, input, checkpoints, scaling", "", f"**{sum(goal.ok for goal in goals)} of {len(goals)} goals met.**", ""]
    for part in PARTS:
        if part in kept:
            one = kept[part]
            lines += [f"## {one['title']}", "", one["header"].rstrip(), f"- {one['seconds']:.0f} s; {one['load']} before it began", "", *one["lines"]]
            lines += [*(f"- {'**' if not goal.ok else ''}{goal}{'**' if not goal.ok else ''}" for goal in _goals(one)), ""]
    return lines


def _goals(one: dict[str, Any]) -> list[Any]:
    from benchmarks._splitbrain_common import Goal

    return [Goal(**goal) for goal in one["goals"]]


def _file(folder: pathlib.Path) -> pathlib.Path:
    return folder / "training.json"


def _kept(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """What was measured before."""
    return json.loads(_file(folder).read_text(encoding="utf-8")) if _file(folder).is_file() else {}


if __name__ == "__main__":
    sys.exit(main())
