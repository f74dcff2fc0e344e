"""The command: records the corpus, compares two recordings, stores what is kept in the repository.

    python -m benchmarks corpus record --output DIR               plans and programs of this checkout
    python -m benchmarks corpus record --output DIR --package CHECKOUT   those of another checkout's splitjax
    python -m benchmarks corpus compare BEFORE AFTER              what differs, by cell; 1 if anything does
    python -m benchmarks corpus compare AFTER                     against what is stored for this release of JAX
    python -m benchmarks corpus store DIR                         its digests into the repository, and the page

A recording that was ended goes on where it was when it is begun again.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import sys

from benchmarks.corpus.cells import Cell, units
from benchmarks.corpus.compare import compare
from benchmarks.corpus.page import header, write_corpus_page
from benchmarks.corpus.record import LIMIT, RecordError, Recording, record_cover, record_plans, record_programs
from benchmarks.corpus.store import StoreError, baseline, load, store, summary_of
from benchmarks.corpus.worker import ROOT


def main(argv: list[str] | None = None) -> int:
    """Does what the options say; 1 where cells differ that are not named as exceptions, 2 where something is not
    there."""
    options = _options(argv)
    try:
        return options.run(options)
    except (RecordError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _record(options: argparse.Namespace) -> int:
    recording = Recording(options.output.resolve(), options.package.resolve())
    recording.prepare()
    both = not (options.plans or options.programs)
    load_before = f"{os.getloadavg()[0]:.1f}"
    if options.plans or both:
        chosen = [unit for unit in units() if not options.models or unit.model in options.models]
        seconds = record_plans(recording, chosen, options.jobs, options.hash_seed)
        _note(recording, "plan", seconds, load_before, options.jobs)
    if options.programs or both:
        if options.cells:
            seconds = record_programs(
                recording, [Cell.parse(name) for name in options.cells], options.jobs, options.hash_seed
            )
        elif options.like is not None:
            known = [Cell.parse(name) for name in load(options.like).programs]
            seconds = record_programs(recording, known, options.jobs, options.hash_seed)
        else:
            seconds = record_cover(recording, options.limit, options.jobs, options.hash_seed)
        _note(recording, "program", seconds, load_before, options.jobs)
    return 0


def _note(recording: Recording, what: str, seconds: float, load_before: str, num_jobs: int) -> None:
    """Adds the seconds to those of earlier runs of the same recording."""
    about = recording.about()
    total = about.get(f"{what}_seconds", 0.0) + seconds
    load_then = about.get(f"{what}_load", load_before)
    recording.note(
        **{f"{what}_seconds": round(total, 1), f"{what}_load": load_then, "jobs": num_jobs, "machine": header()}
    )
    print(f"{what}s: {seconds:.0f} s, {total:.0f} s in all")


def _compare(options: argparse.Namespace) -> int:
    before, after = (options.before, options.after) if options.after is not None else (baseline(), options.before)
    return compare(before, after, options.lines)


def _store(options: argparse.Namespace) -> int:
    recording = Recording(options.folder)
    print("wrote", store(summary_of(recording), options.results))
    print("wrote", write_corpus_page(options.results))
    return 0


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "corpus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    record = commands.add_parser("record", help="plan and compile")
    record.add_argument(
        "--output",
        type=pathlib.Path,
        required=True,
        help="folder of the full texts, such as splitjax-corpus/before, which git ignores",
    )
    record.add_argument(
        "--package",
        type=pathlib.Path,
        default=ROOT,
        help="the checkout whose splitjax is recorded, instead of this one",
    )
    record.add_argument("--plans", action="store_true", help="the plans alone")
    record.add_argument("--programs", action="store_true", help="the programs alone, of plans recorded before")
    record.add_argument("--models", nargs="*", default=[], help="plans of these models alone")
    record.add_argument(
        "--cells", nargs="*", default=[], metavar="CELL", help="programs of these cells instead of a cover"
    )
    record.add_argument(
        "--like", type=pathlib.Path, help="programs of the cells of another recording instead of a cover"
    )
    record.add_argument("--limit", type=int, default=LIMIT, help="programs at most")
    record.add_argument("--jobs", type=int, default=2, help="processes at once")
    record.add_argument("--hash-seed", default="random", help="PYTHONHASHSEED of the processes")
    record.set_defaults(run=_record)
    differ = commands.add_parser("compare", help="two recordings, or one with what is stored")
    differ.add_argument("before", type=pathlib.Path)
    differ.add_argument("after", type=pathlib.Path, nargs="?")
    differ.add_argument("--lines", type=int, default=6, help="lines of difference that are shown of each cell")
    differ.set_defaults(run=_compare)
    keep = commands.add_parser("store", help="keep a recording's digests")
    keep.add_argument("folder", type=pathlib.Path)
    keep.add_argument("--results", type=pathlib.Path, default=ROOT / "benchmarks" / "results")
    keep.set_defaults(run=_store)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
