"""Walks every code path of every benchmark at a tiny size: whether all of them still run, not what they measure.

    python -m benchmarks all --quick                     all benchmarks (ten minutes on two cores)
    python -m benchmarks all --quick --only sparse walk  these benchmarks
    python -m benchmarks all --quick --data-dir DIR      with the real data instead of drawn stand-ins
    python -m benchmarks all --list                      the commands, and runs none

Two commands run at once, each with pages and data in a temporary folder of its own: no page of `benchmarks/results`
is written. Programs are compiled without LLVM's optimisations, which takes half the time. Sizes are those of each
benchmark's own `--quick` (two workers where there are four to sixteen, one table, one rate, one small model, hundreds
of jobs, steps in ones and twos, a single round); where a benchmark has none, the commands of `benchmarks/all/walks.py`.
A benchmark that is not named there is run as `NAME --quick --output FOLDER`, so that a new one is walked, too. Goals
are printed and not judged: figures of such sizes say nothing. A command that fails is named with the end of what it
printed, and the exit status is 1.

`--data-dir`: the folder of all benchmarks' data, with `muri/` and `cifar-10-batches-bin/` in it. Parts that need Linux,
root or a package that is not installed fail where these are missing.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import hashlib
import os
import pathlib
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from benchmarks import _compiling
from benchmarks._common import RESULTS
from benchmarks.all.stand_ins import write_stand_ins
from benchmarks.all.walks import WALKS, Walk

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 1200.0  # of a command: far more than any takes, even on a machine that others share


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a walk went. `failed`: the command that failed, empty where none did. `text`: the end of what it printed."""

    walk: Walk
    seconds: float
    failed: str = ""
    text: str = ""


def walks_of(names: Sequence[str]) -> list[Walk]:
    """Returns the walks of the benchmarks `names`: those that are written down, and for others `--quick --output`."""
    plain = lambda name: (Walk(name, (("--quick", "--output", "{output}"),)),)
    return [walk for name in names for walk in WALKS.get(name, plain(name))]


def main(argv: list[str] | None = None) -> int:
    """Runs the walks; returns 1 where one failed or wrote over a page of results, 2 where nothing was asked for."""
    from benchmarks.__main__ import registry

    order = {name: number for number, name in enumerate(WALKS)}
    names = sorted((name for name in registry() if name != "all"), key=lambda name: order.get(name, len(order)))
    options = _options(argv, names)
    walks = [walk for walk in walks_of(options.only or names) if options.part in ("", walk.part)]
    if options.list:
        for walk in walks:
            print("\n".join(shlex.join(["python", "-m", "benchmarks", walk.benchmark, *c]) for c in walk.commands))
        return 0
    if not options.quick:
        print("error: all benchmarks together take days\n  remedy: walk through them with --quick", file=sys.stderr)
        return 2
    before, began = _digest(RESULTS), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="splitjax-walks-") as name:
        folder = pathlib.Path(name)
        data = options.data_dir
        if data is None:
            data = folder / "data"
            write_stand_ins(data)
        sources = options.sources or folder / "data"
        places = {
            "{data}": str(data.absolute()),
            "{images}": str((data / "cifar-10-batches-bin").absolute()),
            "{sources}": str(sources.absolute()),
        }
        outcomes = _run_all(walks, places, folder, options.jobs)
    failed = [outcome for outcome in outcomes if outcome.failed]
    touched = _digest(RESULTS) != before
    if touched:
        print(f"\n==== a walk wrote over the pages of {RESULTS}")
    seconds = time.monotonic() - began
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(
        f"\n{len(outcomes) - len(failed)} of {len(outcomes)} walks came to their end, in {seconds:.0f} s by the clock"
        f" ({used.ru_utime + used.ru_stime:.0f} s of processor time; load average {os.getloadavg()[2]:.1f})"
    )
    if failed:
        print("failed: " + ", ".join(outcome.walk.name for outcome in failed))
    return 1 if failed or touched else 0


def _options(argv: list[str] | None, names: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("all", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="walk through them at tiny sizes")
    parser.add_argument("--only", nargs="*", choices=tuple(names), default=[], metavar="NAME", help="these benchmarks")
    parser.add_argument("--part", default="", help="only this part of each")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    parser.add_argument("--data-dir", type=pathlib.Path, help="folder of the real data")
    parser.add_argument("--sources", type=pathlib.Path, help="folder of the checkouts that `strangers` reads")
    parser.add_argument("--jobs", type=int, default=2, help="commands at once")
    return parser.parse_args(argv)


def _run_all(walks: Sequence[Walk], places: Mapping[str, str], folder: pathlib.Path, num_jobs: int) -> list[Outcome]:
    """Runs `walks`, each in a folder of its own under `folder`, and prints a line for each as it ends."""

    def run(number: int, walk: Walk) -> Outcome:
        outcome = _run(walk, places, folder / f"walk{number}")
        print(f"{'FAILED' if outcome.failed else 'ran':<6} {outcome.seconds:5.0f} s  {walk.name}", flush=True)
        if outcome.failed:
            print(f"{outcome.failed}\n{outcome.text}\n", flush=True)
        return outcome

    with concurrent.futures.ThreadPoolExecutor(num_jobs) as pool:
        return list(pool.map(run, range(len(walks)), walks))


def _run(walk: Walk, places: Mapping[str, str], folder: pathlib.Path) -> Outcome:
    """Runs the commands of `walk` until one fails."""
    began = time.monotonic()
    own = {**places, "{output}": str(folder / "results"), "{work}": str(folder / "work")}
    for where in ("{output}", "{work}"):
        pathlib.Path(own[where]).mkdir(parents=True)
    log = folder / "log"
    for command in walk.commands:
        options = [_filled(option, own) for option in command]
        environment = {**os.environ, **quick_compiling(), "PYTHONUNBUFFERED": "1"}
        with log.open("w", encoding="utf-8") as file:
            call = [sys.executable, "-m", "benchmarks", walk.benchmark, *options]
            try:
                code = subprocess.run(
                    call, cwd=ROOT, env=environment, stdout=file, stderr=file, timeout=LIMIT_SECONDS, check=False
                ).returncode
                why = f"exit status {code}" if code else ""
            except subprocess.TimeoutExpired:
                why = f"no end within {LIMIT_SECONDS:.0f} s"
        if why:
            text = log.read_text(encoding="utf-8", errors="replace")[-4000:]
            return Outcome(walk, time.monotonic() - began, f"{shlex.join(call[1:])}: {why}", text)
    return Outcome(walk, time.monotonic() - began)


def quick_compiling() -> dict[str, str]:
    """Returns the environment of a process that compiles as quickly as those of the tests."""
    return {**_compiling.ENVIRONMENT, "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {_compiling.flags()}".strip()}


def _filled(option: str, places: Mapping[str, str]) -> str:
    for name, value in places.items():
        option = option.replace(name, value)
    return option


def _digest(folder: pathlib.Path) -> str:
    """Returns a hash of all files in `folder`, with their names."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


if __name__ == "__main__":
    sys.exit(main())
