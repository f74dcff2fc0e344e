"""Whether training works for real: accuracy on real data, input, asynchronous checkpoints, two processes over real
links.

    python -m benchmarks training --data-dir DIR   everything, and its page (about half an hour on two idle cores)
    python -m benchmarks training --data-dir DIR --only scaling
            one part; the page keeps what was measured of the others
    python -m benchmarks training --data-dir DIR --quick          a small part of each, printed only

`--data-dir`: CIFAR-10's binary files (`data_batch_*.bin`, `test_batch.bin`), all of them or the first records of each.
What each part found is kept beside the page (training.json), with its date and machine. Times want an idle machine: how
busy others were is on the page. `scaling` behind rate limits needs Linux and root.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from benchmarks._common import quiet_tpu_compiler
from benchmarks._kept import Page, add_options, run_part, run_parts

PARTS = ("accuracy", "input", "checkpoints", "scaling")


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 where a goal is missed or a part failed."""
    parser = argparse.ArgumentParser(
        "training", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "folder of CIFAR-10's binary files", PARTS)
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    quiet_tpu_compiler()
    return run_parts(PAGE, {part: lambda part=part: _run(part, options) for part in options.only or PARTS}, options)


def _run(part: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Each part starts processes of its own: devices and flags are what it asks for."""
    from benchmarks import machine

    measure = lambda: importlib.import_module(f"benchmarks.training.{part}").section(
        options.quick, options.data_dir.absolute()
    )
    return run_part(
        part,
        measure,
        f"python -m benchmarks training --data-dir DIR --only {part}",
        (*machine.PACKAGES, "orbax-checkpoint"),
    )


PAGE = Page("training", "Training for real: accuracy, input, checkpoints, scaling", PARTS.index)


if __name__ == "__main__":
    sys.exit(main())
