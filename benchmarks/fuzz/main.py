"""Whether any input makes a parser fail other than by its own typed error, or take too much memory or time.

    python -m benchmarks fuzz                       a million inputs or a core-hour for each parser, and the page
    python -m benchmarks fuzz --only plan rules --core-seconds 60
            some of them, for a minute each; the page keeps the others as they were
    python -m benchmarks fuzz --inputs 1000 --no-page
            a thousand inputs each: what the tests run

Led by coverage where atheris is installed (`pip install 'splitjax[fuzz]'`: Linux), by chance otherwise. Inputs begin
with valid documents and are changed with knowledge of their format. An input that shows a defect is written to
`--found`; once the defect is mended it belongs into `benchmarks/fuzz/corpus`, and is tried first from then on.
"""

from __future__ import annotations

import argparse
import hashlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks.fuzz.page import record
from benchmarks.fuzz.searching import Budget, Search, has_atheris
from benchmarks.fuzz.worker import search_of

MILLION = 1_000_000
CORE_HOUR = 3600.0
_ROOT = pathlib.Path(__file__).resolve().parents[2]


def main(argv: list[str] | None = None) -> int:
    """Runs the searches, writes the page, and returns 1 if there is a defect."""
    options = _options(argv)
    from benchmarks.fuzz.table import PARSERS

    names = options.only or list(PARSERS)
    unknown = [name for name in names if name not in PARSERS]
    if unknown:
        print(f"error: there is no parser {unknown[0]!r}\n  remedy: name some of {', '.join(PARSERS)}", file=sys.stderr)
        return 2
    searches = []
    for search in run(names, Budget(options.inputs, options.core_seconds, options.seed), nice=options.nice):
        searches.append(search)
        print(f"{search.parser:16} {search.inputs:9,} inputs, {search.seconds:7.1f} s, {search.engine}", flush=True)
        for defect in search.defects:
            print(f"    {defect.kind}: {defect.what} ({defect.place})".replace("\n", " "), flush=True)
            if options.found is not None:
                folder = options.found / search.parser.replace(" ", "_")
                folder.mkdir(parents=True, exist_ok=True)
                (folder / hashlib.sha256(defect.data).hexdigest()[:12]).write_bytes(defect.data)
        if not options.no_page:
            command = "python -m benchmarks fuzz" + "".join(f" {word}" for word in argv or sys.argv[2:])
            record(searches, PARSERS, command)
    without = names[len(searches) :]
    if without:
        print(
            f"error: the search of {without[0]!r} ended without a result\n  remedy: the engine may have run out of"
            " memory: search again with another --seed, or fewer --inputs",
            file=sys.stderr,
        )
    return int(any(search.defects for search in searches) or bool(without))


def run(names: Sequence[str], budget: Budget, *, nice: int = 0) -> Iterator[Search]:
    """Yields the searches of the parsers `names`, one after the other, in a process of a lower priority by `nice`."""
    engine = "atheris" if has_atheris() else "chance"
    command = [
        sys.executable,
        "-m",
        "benchmarks.fuzz.worker",
        str(budget.inputs),
        str(budget.seconds),
        str(budget.seed),
        str(budget.process_inputs),
    ]
    prefix = ["nice", "-n", str(nice)] if nice else []
    with subprocess.Popen(
        [*prefix, *command, engine, *names], cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.startswith("{"):
                yield search_of(line)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fuzz", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="PARSER", help="some parsers instead of all")
    parser.add_argument("--inputs", type=int, default=MILLION, help="for each parser, at most (a million)")
    parser.add_argument("--core-seconds", type=float, default=CORE_HOUR, help="for each parser, at most (3600)")
    parser.add_argument("--seed", type=int, default=0, help="of all chances")
    parser.add_argument("--nice", type=int, default=0, help="lower the priority by so much")
    parser.add_argument("--found", type=pathlib.Path, help="folder for inputs that show a defect")
    parser.add_argument("--no-page", action="store_true", help="leave the page as it is")
    return parser.parse_args(argv)
