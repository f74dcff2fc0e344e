"""Whether exchanging only the rows that were touched pays: schemes, training, local work, a table of 5 GB, and what `auto` chooses.

    python -m benchmarks sparse --data-dir DIR                                       everything, and its page (hours)
    python -m benchmarks sparse --data-dir DIR --only schemes --workers 16           one part; the page keeps what was measured of the others
    python -m benchmarks sparse --data-dir DIR --only schemes --workers 4 --quick    a small part, printed only

`--data-dir`: lm1b_word_counts.npy (int, occurrences of each word), criteo_sample.npz (`ids` int[rows, 26]) and wikitext2_valid.txt. What each part
found is kept beside the page (sparse.json), with its date and machine. Links need Linux and root. Times want an idle machine: how busy others were is
on the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from benchmarks._common import RESULTS, quiet_tpu_compiler, write_page

PARTS = ("schemes", "choice", "end_to_end", "local", "big_table")
LINKS = ("100mbit", "200mbit", "1000mbit")


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 where a goal is missed or a part failed."""
    options = _options(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    quiet_tpu_compiler()
    options.output.mkdir(parents=True, exist_ok=True)  # before anything is measured that would be lost
    kept, failed, found = {} if options.quick else _kept(options.output), [], []
    for key, run in _jobs(options).items():
        one = _run(key, run)
        if one is None:
            failed.append(key)
            continue
        kept[key] = one
        found += goals_of(one)
        if not options.quick:
            _file(options.output).write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
            print("wrote", write_page("sparse", page(kept), options.output))
    print("\n" + "\n".join(map(str, found)))
    print(f"{sum(goal.ok for goal in found)} of {len(found)} goals met" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 0 if all(goal.ok for goal in found) and not failed else 1


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("sparse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=pathlib.Path, required=True, help="folder of lm1b_word_counts.npy, criteo_sample.npz and wikitext2_valid.txt")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=[], metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--workers", nargs="+", type=int, default=[], metavar="N", help="schemes: 4 8 16; end_to_end, choice: 4")
    parser.add_argument("--links", nargs="+", default=[], metavar="RATE", help="schemes: 100mbit; end_to_end: 100mbit 200mbit 1000mbit")
    parser.add_argument("--torch-python", type=pathlib.Path, help="a Python that has torch, for PyTorch's DDP beside it")
    parser.add_argument("--quick", action="store_true", help="a small part of each, printed only")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the page instead of benchmarks/results")
    options = parser.parse_args(argv)
    options.data_dir = options.data_dir.absolute()
    return options


def _jobs(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Key of a section -> what measures it. Each starts processes of its own: devices and flags are what it asks for."""
    from benchmarks import _sparse_big_table, _sparse_choice, _sparse_end_to_end, _sparse_local, _sparse_schemes

    def given(workers: list[int], links: list[str]) -> argparse.Namespace:
        quick = options.quick
        return argparse.Namespace(
            workers=options.workers or ([2] if quick else workers), links=options.links or (links[-1:] if quick else links),
            torch_python=options.torch_python,
        )  # fmt: skip

    plans = {
        "schemes": (_sparse_schemes, given([4, 8, 16], ["100mbit"])), "choice": (_sparse_choice, given([4], ["100mbit", "1000mbit"])),
        "end_to_end": (_sparse_end_to_end, given([4], list(LINKS))), "local": (_sparse_local, given([16], [])),
        "big_table": (_sparse_big_table, given([1], [])),
    }  # fmt: skip
    found: dict[str, Callable[[], Any]] = {}
    for part in options.only or PARTS:
        module, chosen = plans[part]
        for key, what in module.jobs(chosen).items():
            found[key] = lambda module=module, what=what: module.section(options.quick, options.data_dir, **what)
    return found


def _run(key: str, measure: Callable[[], Any]) -> dict[str, Any] | None:
    """What a job found, as JSON values; None where it failed."""
    from benchmarks._splitbrain_common import busy

    started, load = time.perf_counter(), busy()
    print(f"{key}: {load} before", flush=True)
    try:
        section = measure()
    except Exception:  # the others are measured, and this one's earlier figures stay
        traceback.print_exc()
        return None
    from benchmarks import machine

    print("\n".join(["", f"## {section.title}", "", *section.lines]), flush=True)
    part, _, rest = key.partition(", ")
    workers, _, link = rest.partition(" workers, ")
    command = f"python -m benchmarks sparse --data-dir DIR --only {part}" + (f" --workers {workers} --links {link}" if link else "")
    return {**dataclasses.asdict(section), "seconds": time.perf_counter() - started, "load": load,
            "header": machine.header(machine.this_machine(), command)}  # fmt: skip


def page(kept: dict[str, dict[str, Any]]) -> list[str]:
    """The lines of the page, parts in their order, more workers and faster links later."""
    goals = [goal for one in kept.values() for goal in goals_of(one)]
    lines = ["# Sparse gradient synchronisation", "", f"**{sum(goal.ok for goal in goals)} of {len(goals)} goals met.**", ""]
    for key in sorted(kept, key=_order):
        one = kept[key]
        lines += [f"## {one['title']}", "", one["header"].rstrip(), f"- {one['seconds']:.0f} s; {one['load']} before it began", "", *one["lines"]]
        lines += [*(f"- {'**' if not goal.ok else ''}{goal}{'**' if not goal.ok else ''}" for goal in goals_of(one)), ""]
    return lines


def _order(key: str) -> tuple[int, list[int], str]:
    return PARTS.index(key.partition(",")[0]), [int("".join(filter(str.isdigit, word))) for word in key.split() if any(map(str.isdigit, word))], key


def goals_of(one: dict[str, Any]) -> list[Any]:
    """The goals of a section, as kept."""
    from benchmarks._splitbrain_common import Goal

    return [Goal(**goal) for goal in one["goals"]]


def _file(folder: pathlib.Path) -> pathlib.Path:
    return folder / "sparse.json"


def _kept(folder: pathlib.Path) -> dict[str, dict[str, Any]]:
    """What was measured before."""
    return json.loads(_file(folder).read_text(encoding="utf-8")) if _file(folder).is_file() else {}


if __name__ == "__main__":
    sys.exit(main())
