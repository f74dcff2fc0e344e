"""Which operations XLA's partitioner computes wrongly: drawn programs on a mesh against one device.

    python -m benchmarks partitioner --programs 10000                      by hand, with Shardy and with GSPMD, on this interpreter's JAX
    python -m benchmarks partitioner --way splitjax --programs 10000       under splitjax.parallelize
    python -m benchmarks partitioner --quick                               a few dozens, printed only
    python -m benchmarks partitioner --program SEED:NUMBER                 one program, in full
    python -m benchmarks partitioner --page                                the page anew, from what is kept of all runs

A program is a small training step around one operation (or a chain of layers): its forward values, and gradients for weights and data. By hand it is a
`jax.jit` with a `NamedSharding` on every argument. What a run has done is kept in `--work`, line by line, so that a run that was ended goes on where it
was. Programs that are wrong, or kill the compiler, are shrunk to their least form.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import jax

from benchmarks import _partitioner_worker as workers
from benchmarks._partitioner_families import draw
from benchmarks._partitioner_layouts import RUN
from benchmarks._partitioner_run import Outcome
from benchmarks._partitioner_search import run_numbers, run_one, shrink

SEED = "1"
WORK = pathlib.Path(tempfile.gettempdir()) / "splitjax-partitioner"


def main(argv: list[str] | None = None) -> int:
    """Runs what the options say; returns 1 where a program is wrong that no known defect covers."""
    options = _options(argv)
    if options.program:
        return _one(options)
    for settings in _settings(options):
        numbers = range(64 if options.quick else options.programs)
        path = options.work / f"{jax.__version__}-{settings.partitioner}-{settings.way}-{options.seed}{options.only}.jsonl"
        for outcome in run_kept(settings, options.seed, numbers, path, options.only):
            if outcome.status not in ("right", "invalid", "refused"):
                print(f"{options.seed}:{outcome.number}  {outcome.family}  {outcome.status}  {outcome.message}{outcome.wrong[:2] or ''}", flush=True)
    return 0


def run_kept(settings: workers.Settings, seed: str, numbers: Sequence[int], path: pathlib.Path, only: str = "") -> Iterator[Outcome]:
    """Runs those of the numbers that the file at `path` does not have, appends them to it, and gives their outcomes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {outcome.number for outcome in read_kept(path)}
    worker = workers.Worker(settings)
    try:
        for start in range(0, len(numbers), RUN):
            todo = [number for number in numbers[start : start + RUN] if number not in done]
            if not todo:
                continue
            began = time.monotonic()
            outcomes = run_numbers(worker, seed, todo, only)
            seconds = time.monotonic() - began
            with path.open("a", encoding="utf-8") as file:
                for outcome in outcomes:
                    file.write(json.dumps({**dataclasses.asdict(outcome), "seconds": round(seconds / len(outcomes), 3)}) + "\n")
            yield from outcomes
    finally:
        worker.close()


def read_kept(path: pathlib.Path) -> list[Outcome]:
    """The outcomes in a file of them; a last line that was cut off is left out."""
    outcomes = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue
        fields.pop("seconds", None)
        outcomes.append(Outcome(**{**fields, "wrong": tuple((leaf, error) for leaf, error in fields["wrong"]), "primitives": tuple(fields["primitives"])}))
    return outcomes


def _one(options: argparse.Namespace) -> int:
    seed, _, number = options.program.rpartition(":")
    program = draw(seed, int(number), options.only)
    failed = 0
    for settings in _settings(options):
        worker = workers.Worker(settings)
        outcome = run_one(worker, program)
        print(f"{settings.way}, {settings.partitioner}, jax {jax.__version__}: {outcome.status} {outcome.message} {outcome.wrong}\n{program}")
        if outcome.status not in ("right", "invalid", "refused"):
            failed = 1
            least = shrink(program, lambda candidate, worker=worker, status=outcome.status: run_one(worker, candidate).status == status)
            print(f"least form: {run_one(worker, least)}\n{least}")
        worker.close()
    return failed


def _settings(options: argparse.Namespace) -> list[workers.Settings]:
    ways = ("hand", "splitjax") if options.way == "both" else (options.way,)
    partitioners = ("shardy", "gspmd") if options.partitioner == "both" else (options.partitioner,)
    return [workers.Settings(way, partitioner) for way in ways for partitioner in partitioners]


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("partitioner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=10_000, help="how many for each partitioner and way")
    parser.add_argument("--seed", default=SEED)
    parser.add_argument("--way", choices=("hand", "splitjax", "both"), default="hand")
    parser.add_argument("--partitioner", choices=("shardy", "gspmd", "both"), default="both")
    parser.add_argument("--only", default="", help="one family of operations")
    parser.add_argument("--quick", action="store_true", help="64 programs, printed only")
    parser.add_argument("--program", metavar="SEED:NUMBER", help="one program, shrunk if it is wrong")
    parser.add_argument("--work", type=pathlib.Path, default=WORK, help="folder of what is done already")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
