"""Which operations XLA's partitioner computes wrongly: drawn programs on a mesh against one device.

    python -m benchmarks partitioner --programs 10000   by hand, with Shardy and with GSPMD, on this interpreter's JAX
    python -m benchmarks partitioner --way splitjax --programs 10000       under splitjax.parallelize
    python -m benchmarks partitioner --only fourier --programs 300         one family, which has a table of its own
    python -m benchmarks partitioner --quick                               a few dozens, printed only
    python -m benchmarks partitioner --program SEED:NUMBER                 one program, in full
    python -m benchmarks partitioner --page                                the page anew, from what is kept of all runs

A program is a small training step around one operation (or a chain of layers): its forward values, and gradients for
weights and data. By hand it is a `jax.jit` with a `NamedSharding` on every argument. What a run has done is kept in
`--work`, line by line, so that a run that was ended goes on where it was. Programs that are wrong, or kill the
compiler, are shrunk to their least form.
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

from benchmarks._common import RESULTS
from benchmarks.partitioner import page as pages
from benchmarks.partitioner import worker as workers
from benchmarks.partitioner.draw import Draw
from benchmarks.partitioner.families import draw
from benchmarks.partitioner.known import kind_of
from benchmarks.partitioner.layouts import RUN
from benchmarks.partitioner.run import Outcome
from benchmarks.partitioner.search import run_numbers, run_one, same_kind, shrink

SEED = "1"
# Of each kind of mismatch so many programs are shrunk.
NUM_SHRUNK = 2
WORK = pathlib.Path(tempfile.gettempdir()) / "splitjax-partitioner"


def main(argv: list[str] | None = None) -> int:
    """Runs what the options say; returns 1 where a program by hand is wrong in a way that is not known, or any under
    splitjax."""
    workers.environment()
    options = _options(argv)
    if options.program:
        return _one(options)
    if options.page:
        print("wrote", pages.write(options.output))
        return 0
    new = 0
    for settings in _settings(options):
        numbers = range(64 if options.quick else options.programs)
        with tempfile.TemporaryDirectory() as folder:
            work = pathlib.Path(folder) if options.quick else options.work
            path = work / f"{jax.__version__}-{settings.partitioner}-{settings.way}-{options.seed}{options.only}.jsonl"
            pairs = []
            for outcome in run_kept(settings, options.seed, numbers, path, options.only):
                program = draw(options.seed, outcome.number, options.only)
                pairs.append((program, outcome))
                if outcome.status in pages.BAD and not outcome.kept:
                    kind = kind_of(program, outcome, settings.partitioner)
                    print(
                        f"{options.seed}:{outcome.number}  {kind}  {outcome.status} "
                        f" {outcome.message}{outcome.wrong[:2] or ''}",
                        flush=True,
                    )
            key = pages.key_of(jax.__version__, settings.partitioner, settings.way, options.only)
            shrunk = pages.shrunk_kinds(pages.load(options.output), key)
            least = least_forms(settings, pairs, path.with_suffix(".least.json"), shrunk)
            run = pages.summary(
                jax.__version__,
                settings.partitioner,
                settings.way,
                options.seed,
                _header(settings, options),
                pairs,
                least,
                options.only,
            )
        print(f"jax {run.jax}, {run.partitioner}, {run.way}: {run.num_programs} programs, {run.statuses}")
        new += sum(
            entry["programs"]
            for kind, entry in run.findings.items()
            if kind.startswith("new") or settings.way == "splitjax"
        )
        if not options.quick:
            print("wrote", pages.store(run, options.output), pages.write(options.output))
    return 1 if new else 0


def least_forms(
    settings: workers.Settings,
    pairs: Sequence[tuple[Draw, Outcome]],
    path: pathlib.Path,
    shrunk: frozenset[str] = frozenset(),
) -> dict[str, list[dict[str, str]]]:
    """Shrinks the first programs of every kind of mismatch to their least forms, but for the kinds in `shrunk`, of
    which another run has some. They are kept in the file at `path`, as shrinking takes minutes."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    worker = workers.Worker(settings)
    for program, outcome in pairs:
        if outcome.status not in pages.BAD:
            continue
        kind = kind_of(program, outcome, settings.partitioner)
        if kind in shrunk:
            continue
        mine = kept.setdefault(kind, [])
        number = f"{program.seed}:{program.number}"
        if len(mine) >= NUM_SHRUNK or any(number == each["number"] for each in mine):
            continue
        least = shrink(program, lambda candidate, outcome=outcome: same_kind(run_one(worker, candidate), outcome))
        after = run_one(worker, least)
        text = ", ".join(f"{leaf} {error:.2g}" for leaf, error in after.wrong) or after.message
        mine.append({"number": number, "draw": least.to_json(), "outcome": f"{after.status} {text}"})
        print(f"{number}  {kind}  least form  {mine[-1]['outcome']}\n    {least}", flush=True)
        path.write_text(json.dumps(kept), encoding="utf-8")
    worker.close()
    return kept


def _header(settings: workers.Settings, options: argparse.Namespace) -> str:
    from benchmarks import machine

    command = (
        f"python -m benchmarks partitioner --way {settings.way} --partitioner {settings.partitioner} --programs"
        f" {options.programs} --seed {options.seed}" + (f" --only {options.only}" if options.only else "")
    )
    return machine.header(machine.this_machine(), command)


def run_kept(
    settings: workers.Settings, seed: str, numbers: Sequence[int], path: pathlib.Path, only: str = ""
) -> Iterator[Outcome]:
    """Runs those of the numbers that the file at `path` does not have, appends them to it, and gives the outcomes of
    all; `kept` says which were there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = {outcome.number: outcome for outcome in read_kept(path)}
    worker = workers.Worker(settings)
    try:
        for start in range(0, len(numbers), RUN):
            yield from (done[number] for number in numbers[start : start + RUN] if number in done)
            todo = [number for number in numbers[start : start + RUN] if number not in done]
            if not todo:
                continue
            began = time.monotonic()
            outcomes = run_numbers(worker, seed, todo, only)
            seconds = time.monotonic() - began
            with path.open("a", encoding="utf-8") as file:
                for outcome in outcomes:
                    file.write(
                        json.dumps({**dataclasses.asdict(outcome), "seconds": round(seconds / len(outcomes), 3)}) + "\n"
                    )
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
        fields = {name: value for name, value in fields.items() if name not in ("seconds", "kept")}
        outcomes.append(
            Outcome(
                **{
                    **fields,
                    "kept": True,
                    "wrong": tuple((leaf, error) for leaf, error in fields["wrong"]),
                    "primitives": tuple(fields["primitives"]),
                }
            )
        )
    return outcomes


def _one(options: argparse.Namespace) -> int:
    seed, _, number = options.program.rpartition(":")
    program = draw(seed, int(number), options.only)
    failed = 0
    for settings in _settings(options):
        worker = workers.Worker(settings)
        outcome = run_one(worker, program)
        print(
            f"{settings.way}, {settings.partitioner}, jax {jax.__version__}: {outcome.status} {outcome.message}"
            f" {outcome.wrong}\n{program}"
        )
        if outcome.status not in ("right", "invalid", "refused"):
            failed = 1
            least = shrink(
                program,
                lambda candidate, worker=worker, outcome=outcome: same_kind(run_one(worker, candidate), outcome),
            )
            print(f"least form: {run_one(worker, least)}\n{least}")
        worker.close()
    return failed


def _settings(options: argparse.Namespace) -> list[workers.Settings]:
    ways = ("hand", "splitjax") if options.way == "both" else (options.way,)
    partitioners = ("shardy", "gspmd") if options.partitioner == "both" else (options.partitioner,)
    references = str(options.references.resolve()) if options.references else ""
    return [workers.Settings(way, partitioner, references=references) for way in ways for partitioner in partitioners]


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "partitioner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=10_000, help="how many for each partitioner and way")
    parser.add_argument("--seed", default=SEED)
    parser.add_argument("--way", choices=("hand", "splitjax", "both"), default="hand")
    parser.add_argument("--partitioner", choices=("shardy", "gspmd", "both"), default="both")
    parser.add_argument("--only", default="", help="one family of operations")
    parser.add_argument("--quick", action="store_true", help="64 programs, printed only")
    parser.add_argument("--program", metavar="SEED:NUMBER", help="one program, shrunk if it is wrong")
    parser.add_argument("--page", action="store_true", help="write the page anew, and run nothing")
    parser.add_argument(
        "--output", type=pathlib.Path, default=RESULTS, help="folder of the page and of what it is made from"
    )
    parser.add_argument(
        "--references", type=pathlib.Path, help="folder that keeps the numbers of one device, for several runs"
    )
    parser.add_argument("--work", type=pathlib.Path, default=WORK, help="folder of what is done already")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
