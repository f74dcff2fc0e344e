"""Whether SplitBrain saves memory, hides its communication, scales, and trains with the numbers of one device.

    python -m benchmarks splitbrain                     everything (about an hour on two busy cores), and its page
    python -m benchmarks splitbrain --quick             a small part of each section, printed only
    python -m benchmarks splitbrain --only memory bytes   these parts; the page keeps what was measured of the others

Each part runs in a process of its own, so that devices and flags are what it asks for (Lai, Kadav, Kruus: SplitBrain,
arXiv 2112.15317). What each found is kept beside the page (splitbrain.json), with its date and machine. Nothing that
only memory or bytes are asked about is allocated: steps are compiled from shapes, for TPUs ahead of time (libtpu, no
TPU needed: `pip install splitjax[tpu]`). Times want an idle machine: what else ran is on the page.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys

from benchmarks._common import virtual_devices
from benchmarks._kept import Page, Part, add_child_options, add_options, run_child, run_parts, show, write_child

NUM_DEVICES = 8
# module, function
PARTS = {
    "memory": ("splitbrain.memory", "section"),
    "speed": ("splitbrain.memory", "speed_section"),
    "crossings": ("splitbrain.crossings", "section"),
    "crossing-speed": ("splitbrain.crossings", "speed_section"),
    "scaling": ("splitbrain.scaling", "section"),
    "bytes": ("splitbrain.bytes", "section"),
    "numbers": ("splitbrain.numbers", "section"),
}
PAGE = Page("splitbrain", "SplitBrain: memory, communication, scaling, numbers", list(PARTS).index)


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 where a goal is missed or a part failed."""
    parser = argparse.ArgumentParser(
        "splitbrain", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "", tuple(PARTS))
    add_child_options(parser, tuple(PARTS))
    options = parser.parse_args(argv)
    if options.part:
        return _child(options)
    jobs = {part: lambda part=part: run_child("splitbrain", part, options) for part in options.only or PARTS}
    return run_parts(PAGE, jobs, options)


def _child(options: argparse.Namespace) -> int:
    module, function = PARTS[options.part]
    virtual_devices(NUM_DEVICES)
    from benchmarks import machine

    def measure() -> Part:
        section = getattr(importlib.import_module(f"benchmarks.{module}"), function)(quick=options.quick)
        show(section.title, section.lines)
        return dataclasses.asdict(section)

    command = f"python -m benchmarks splitbrain --only {options.part}"
    return write_child(options, measure, command, (*machine.PACKAGES, "libtpu"))


if __name__ == "__main__":
    sys.exit(main())
