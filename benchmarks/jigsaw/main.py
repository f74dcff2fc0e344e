"""Whether the scheduler's simulator can be believed, and what packing iterations gains: fidelity to a measured testbed,
and other parts.

    python -m benchmarks jigsaw --data-dir DIR                     everything, and its page
    python -m benchmarks jigsaw --data-dir DIR --only fidelity
            one part; the page keeps what was measured of the others
    python -m benchmarks jigsaw --data-dir DIR --quick             a small part of each, printed only

`--data-dir`: philly_jobs.csv.gz, gavel_throughputs.json.gz and the folder muri/ (trace1..3.csv, testbed_trace.csv,
testbed_POLICY.csv). A part is a module `benchmarks/jigsaw/PART.py` with `section(quick, data_dir) -> Section`. What
each found is kept beside the page (jigsaw.json), with its date and machine.
"""

from __future__ import annotations

import argparse
import importlib
import os
import pathlib
from typing import Any

from benchmarks._common import quiet_tpu_compiler
from benchmarks._kept import Page, add_options, run_part, run_parts

_FOLDER = pathlib.Path(__file__).resolve().parent
# the order on the page; others follow by name
_FIRST = (
    "fidelity",
    "efficiency",
    "switches",
    "packings",
    "honesty",
    "scale",
    "exact",
    "real",
    "switch_cost",
    "accuracy",
    "real_accuracy",
)


def parts() -> list[str]:
    """Names of all parts, in their order on the page."""
    found = [file.stem for file in _FOLDER.glob("*.py") if "\ndef section(" in file.read_text(encoding="utf-8")]
    return sorted(found, key=_order)


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 where a goal is missed or a part failed."""
    parser = argparse.ArgumentParser(
        "jigsaw", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "folder of the traces", parts())
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    quiet_tpu_compiler()
    return run_parts(PAGE, {part: lambda part=part: _run(part, options) for part in options.only or parts()}, options)


def _run(part: str, options: argparse.Namespace) -> dict[str, Any] | None:
    measure = lambda: importlib.import_module(f"benchmarks.jigsaw.{part}").section(
        options.quick, options.data_dir.absolute()
    )
    return run_part(part, measure, f"python -m benchmarks jigsaw --data-dir DIR --only {part}")


def _order(name: str) -> tuple[int, str]:
    return _FIRST.index(name) if name in _FIRST else len(_FIRST), name


PAGE = Page("jigsaw", "Scheduling iterations", _order, has_gap=True)
