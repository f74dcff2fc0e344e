"""What structured partial backpropagation saves, what it costs in quality, and over which links it pays.

    python -m benchmarks partial --data-dir DIR                     everything, and its page (hours)
    python -m benchmarks partial --data-dir DIR --only saved   one part; the page keeps what was measured of the others
    python -m benchmarks partial --data-dir DIR --quick             a small part of each, printed only
    python -m benchmarks partial --data-dir DIR --page
            measures nothing: the page and its plot again, from what was kept

`--data-dir`: the folder of the binary CIFAR-10 batches. What each part found is kept beside the page (partial.json),
with its date and machine. Processor times want an idle machine: how busy others were is on the page. `pays` needs Linux
and root (links, shares of cores), and the runs of `quality`. Source: Kumar et al., arXiv 2111.10672.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import sys

from benchmarks._common import RESULTS, virtual_devices
from benchmarks._kept import Page, Part, add_child_options, add_options, run_child, run_parts, show, write_child

# module, virtual devices
PARTS = {
    "saved": ("partial.saved", 8),
    "memory": ("partial.memory", 4),
    "quality": ("partial.quality", 4),
    "full": ("partial.full", 4),
    "pays": ("partial.pays", 4),
}
PAGE = Page("partial", "Structured partial backpropagation", list(PARTS).index)


def main(argv: list[str] | None = None) -> int:
    """Measures the chosen parts; returns 1 where a goal is missed or a part failed."""
    parser = argparse.ArgumentParser(
        "partial", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser, "folder of the binary CIFAR-10 batches", tuple(PARTS))
    parser.add_argument("--page", action="store_true", help="only the page and its plot, from what was kept")
    add_child_options(parser, tuple(PARTS))
    options = parser.parse_args(argv)
    if options.part:
        return _child(options)
    if options.page:
        kept = PAGE.read(options.output)
        _complete(kept, options)
        PAGE.write(kept, options.output)
        return 0
    jobs = {part: lambda part=part: run_child("partial", part, options) for part in options.only or PARTS}
    return run_parts(PAGE, jobs, options, lambda kept: _complete(kept, options))


def _child(options: argparse.Namespace) -> int:
    name, devices = PARTS[options.part]
    virtual_devices(devices)

    def measure() -> Part:
        module = importlib.import_module(f"benchmarks.{name}")
        if hasattr(module, "render"):  # its section is made of what others found, too
            return {"facts": module.measure(options.quick, options.data_dir)}
        section, facts = module.section(options.quick, options.data_dir)
        show(section.title, section.lines)
        return {**dataclasses.asdict(section), "facts": facts}

    return write_child(options, measure, f"python -m benchmarks partial --data-dir DIR --only {options.part}")


def _complete(kept: dict[str, Part], options: argparse.Namespace) -> None:
    """Makes the sections that are rendered from several parts' facts, and writes their pictures."""
    for part, (name, _) in PARTS.items():
        module = importlib.import_module(f"benchmarks.{name}")
        if part not in kept or not hasattr(module, "render"):
            continue
        section, pictures = module.render(kept[part]["facts"], kept)
        kept[part] = {**kept[part], **dataclasses.asdict(section)}
        if options.quick:
            show(section.title, section.lines)
        if not options.quick or options.output != RESULTS:
            for file, text in pictures.items():
                (options.output / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
