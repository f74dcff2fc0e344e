"""Whether exchanging only the rows that were touched pays: schemes, training, messages, local work, a table of 5 GB,
what `auto` chooses, and steps that do not fit.

    python -m benchmarks sparse --data-dir DIR                                       everything, and its page (hours)
    python -m benchmarks sparse --data-dir DIR --only schemes --workers 16
            one part; the page keeps what was measured of the others
    python -m benchmarks sparse --data-dir DIR --only schemes --workers 4 --quick    a small part, printed only
    (sixteen processes need a quarter of an hour for each table: `--tables lm1b_input` measures one, the page keeps the
    others)

`--data-dir`: lm1b_word_counts.npy (int, occurrences of each word), criteo_sample.npz (`ids` int[rows, 26]) and
wikitext2_valid.txt. What each part found is kept beside the page (sparse.json), with its date and machine. Links need
Linux and root. Times want an idle machine: how busy others were is on the page.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

from benchmarks._common import quiet_tpu_compiler
from benchmarks._kept import Page, add_options, run_part, run_parts

PARTS = (
    "schemes", "choice", "end_to_end", "messages", "local", "big_table", "widths", "overflow", "overflow_time",
    "overflow_tried",
)  # fmt: skip
TABLES = ("lm1b_input", "lm1b_softmax", "criteo", "wikitext")
LINKS = ("100mbit", "200mbit", "1000mbit")


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 where a goal is missed or a part failed."""
    options = _options(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    quiet_tpu_compiler()
    jobs = {key: lambda key=key, run=run: _run(key, run, options) for key, run in _jobs(options).items()}
    return run_parts(PAGE, jobs, options)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "sparse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "folder of lm1b_word_counts.npy, criteo_sample.npz and wikitext2_valid.txt", PARTS)
    parser.add_argument(
        "--workers",
        nargs="+",
        type=int,
        default=[],
        metavar="N",
        help="schemes, widths: 4 8 16; overflow: 4 16; messages: 4 16; end_to_end, choice, overflow_time,"
        " overflow_tried: 4",
    )
    parser.add_argument(
        "--links",
        nargs="+",
        default=[],
        metavar="RATE",
        help="schemes, messages, overflow_time: 100mbit; end_to_end: 100mbit 200mbit 1000mbit",
    )
    parser.add_argument(
        "--tables", nargs="+", default=[], choices=TABLES, metavar="NAME", help=f"schemes: {' '.join(TABLES)}"
    )
    parser.add_argument(
        "--torch-python", type=pathlib.Path, help="a Python that has torch, for PyTorch's DDP beside it"
    )
    options = parser.parse_args(argv)
    options.data_dir = options.data_dir.absolute()
    return options


def _jobs(options: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Key of a section -> what measures it. Each starts processes of its own: devices and flags are what it asks
    for."""
    from benchmarks.sparse import (
        big_table,
        choice,
        end_to_end,
        local,
        messages,
        overflow,
        overflow_time,
        overflow_tried,
        schemes,
        widths,
    )

    def given(workers: list[int], links: list[str]) -> argparse.Namespace:
        quick = options.quick
        return argparse.Namespace(
            workers=options.workers or ([2] if quick else workers),
            links=options.links or (links[-1:] if quick else links),
            tables=options.tables or (["criteo"] if quick else list(TABLES)),
            torch_python=options.torch_python,
        )

    plans = {
        "schemes": (schemes, given([4, 8, 16], ["100mbit"])), "choice": (choice, given([4], ["100mbit", "1000mbit"])),
        "end_to_end": (end_to_end, given([4], list(LINKS))), "local": (local, given([16], [])),
        "messages": (messages, given([4, 16], ["100mbit"])),
        "big_table": (big_table, given([1], [])), "widths": (widths, given([4, 8, 16], [])),
        "overflow": (overflow, given([4, 16], [])), "overflow_time": (overflow_time, given([4], ["100mbit"])),
        "overflow_tried": (overflow_tried, given([4], [])),
    }  # fmt: skip
    found: dict[str, Callable[[], Any]] = {}
    for part in options.only or PARTS:
        module, chosen = plans[part]
        for key, what in module.jobs(chosen).items():
            found[key] = lambda module=module, what=what: module.section(options.quick, options.data_dir, **what)
    return found


def _run(key: str, measure: Callable[[], Any], given_options: argparse.Namespace) -> dict[str, Any] | None:
    """`key`: part, workers, link and table, as far as the part has them. `given_options`: of the command."""
    part, *given = key.split(", ")
    values = given if len(given) > 1 else []  # without a link the number of workers is fixed
    options = [
        f"{option} {value.removesuffix(' workers')}"
        for option, value in zip(("--workers", "--links", "--tables"), values)
    ]
    if part == "end_to_end" and given_options.torch_python is not None:
        options.append("--torch-python PYTHON")
    return run_part(key, measure, " ".join(["python -m benchmarks sparse --data-dir DIR --only", part, *options]))


def _order(key: str) -> tuple[int, list[int], int]:
    """More workers and faster links later, tables as they are named."""
    part, *given = key.split(", ")
    numbers = [int("".join(filter(str.isdigit, one))) for one in given[:2]]
    return PARTS.index(part), numbers, TABLES.index(given[2]) if given[2:] else 0


PAGE = Page("sparse", "Sparse gradient synchronisation", _order)


if __name__ == "__main__":
    sys.exit(main())
