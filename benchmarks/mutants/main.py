"""Whether the tests notice faults: one line of the package is changed at a time, and a test that is named has to fail.

    python -m benchmarks mutants               all faults (a quarter of an hour on two cores), and the page
    python -m benchmarks mutants --only NAME   these faults, printed only
    python -m benchmarks mutants --room ROOM   the faults of these rooms, printed only
    python -m benchmarks mutants --list        what there is, and whether it applies; runs nothing

Each fault is applied alone to a copy of the checkout, and only its tests run. It counts as killed where a named test
fails; where a fault survives, or its text is not in its file any more, the exit status is 1. Outcomes are kept in
`--work`, line by line, so that a run that was ended goes on where it was, as long as the package and a fault's tests
are what they were.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import queue
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from benchmarks._common import RESULTS
from benchmarks.mutants import page
from benchmarks.mutants.faults import FAULTS, ROOT, Fault, FaultError, problems, read_faults, rooms
from benchmarks.mutants.run import (
    KILLED,
    Outcome,
    broken_tests,
    run_fault,
    run_unchanged,
    source_files,
    workspace,
)

WORK = pathlib.Path(tempfile.gettempdir()) / "splitjax-mutants"
# What all verdicts depend on, beside the tests that a fault names: another commit that touches none of it keeps them.
_DEPENDS_ON = ("splitjax/", "sharding_rules/", "pyproject.toml")


def main(argv: list[str] | None = None) -> int:
    """Does what the options say; 1 where a chosen fault is not killed, 2 where something is not there."""
    options = _options(argv)
    try:
        faults = _chosen(read_faults(options.faults), options)
        if options.list:
            return _list(faults, options.checkout)
        with _ended_by_sigterm():
            outcomes, seconds = run_all(faults, options)
    except FaultError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    counts = collections.Counter(outcome.verdict for outcome in outcomes.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.most_common()), f"in {seconds:.0f} s")
    if not (options.only or options.room):
        header = _header(options)
        print("wrote", page.write(page.make_results(header, options.jobs, seconds, faults, outcomes), options.output))
    return 0 if counts[KILLED] == len(faults) else 1


def run_all(faults: Sequence[Fault], options: argparse.Namespace) -> tuple[dict[str, Outcome], float]:
    """Runs those of `faults` that have no outcome yet, and gives the outcomes of all by name, with the seconds that
    they took, earlier runs included; `options` are the command's.

    Raises `FaultError` where the checkout cannot be copied.
    """
    kept = Kept(options.work / f"{state_of(options.checkout)}.jsonl", options.checkout)
    outcomes = kept.killed(faults)
    if outcomes:
        print(f"{len(outcomes)} of {len(faults)} faults are in {kept.path}")
    left = [fault for fault in faults if fault.name not in outcomes]
    if not left:
        return outcomes, kept.seconds(faults)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        copies: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
        for _ in range(min(options.jobs, len(left))):
            copies.put(stack.enter_context(workspace(options.checkout)))

        def unchanged(tests: Sequence[str]) -> dict[str, str]:
            copy = copies.get()
            try:
                return broken_tests(tests, run_unchanged(copy, tests, options.timeout * max(1, len(tests) // 4)))
            finally:
                copies.put(copy)

        def try_fault(fault: Fault, broken: dict[str, str]) -> Outcome:
            copy = copies.get()
            try:
                return run_fault(copy, fault, broken, options.timeout)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(options.jobs) as pool:
            try:
                broken = _broken(pool, unchanged, left, options.jobs)
                futures = {pool.submit(try_fault, fault, broken): fault for fault in left}
                last = began
                for future in as_completed(futures):
                    outcome = outcomes[futures[future].name] = future.result()
                    now = time.monotonic()
                    kept.add(futures[future], outcome, round(now - last, 2))
                    last = now
                    print(f"{now - began:5.0f} s  {_text(outcome)}", flush=True)
            except BaseException:  # what is being tried is waited for, so that no process is left, and nothing else
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    return {fault.name: outcomes[fault.name] for fault in faults}, kept.seconds(faults)


def _broken(
    pool: ThreadPoolExecutor,
    run_part: Callable[[Sequence[str]], dict[str, str]],
    faults: Sequence[Fault],
    num_jobs: int,
) -> dict[str, str]:
    """Runs the tests of `faults` without a fault, and maps those that do not pass to a line each."""
    began = time.monotonic()
    tests = sorted({test for fault in faults for test in fault.tests})
    broken: dict[str, str] = {}
    for part in pool.map(run_part, _dealt(tests, num_jobs)):
        broken |= part
    seconds = time.monotonic() - began
    print(f"{seconds:5.0f} s  {len(tests)} tests without a fault, {len(broken)} do not pass", flush=True)
    for test, line in broken.items():
        print(f"         {test}: {line}")
    return broken


class Kept:
    """Keeps outcomes in the file at `path`, a line each, with the seconds that passed since the line before.

    An outcome counts as long as the fault and its test files in `checkout` are what they were.
    """

    def __init__(self, path: pathlib.Path, checkout: pathlib.Path) -> None:
        self.path, self._checkout = path, checkout
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)

    def killed(self, faults: Sequence[Fault]) -> dict[str, Outcome]:
        """Gives the outcomes of those of `faults` that were killed, by name. The others are tried again."""
        outcomes = {name: Outcome(**line["outcome"]) for name, line in self._current(faults).items()}
        return {name: outcome for name, outcome in outcomes.items() if outcome.verdict == KILLED}

    def seconds(self, faults: Sequence[Fault]) -> float:
        """Gives the seconds that the last try of each of `faults` took, in whichever run it was."""
        return sum(line["passed_seconds"] for line in self._current(faults).values())

    def add(self, fault: Fault, outcome: Outcome, passed_seconds: float) -> None:
        """Appends a line for the `outcome` of `fault`; `passed_seconds` since the one before."""
        entry = {"key": self._key(fault), "outcome": dataclasses.asdict(outcome), "passed_seconds": passed_seconds}
        line = json.dumps(entry)
        with self._lock, self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _current(self, faults: Sequence[Fault]) -> dict[str, dict]:
        """The last line of each fault, by name, where fault and tests are what they were."""
        keys = {fault.name: self._key(fault) for fault in faults}
        lines = ((line["outcome"]["name"], line) for line in self._lines())
        return {name: line for name, line in lines if keys.get(name) == line["key"]}

    def _key(self, fault: Fault) -> str:
        digest = hashlib.sha256(fault.digest.encode())
        for name in sorted({test.partition("::")[0] for test in fault.tests}):
            file = self._checkout / name
            digest.update(name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b""))
        return digest.hexdigest()[:16]

    def _lines(self) -> Iterator[dict]:
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except ValueError:  # the run was ended while it wrote this line
                    continue


def state_of(checkout: pathlib.Path) -> str:
    """Gives a hash of what all verdicts depend on: the package of a `checkout`, what tests share, Python and JAX."""
    from benchmarks.machine import version

    digest = hashlib.sha256(f"{sys.version} {version('jax')} {version('jaxlib')}".encode())
    for name in source_files(checkout):
        is_shared = name.startswith("tests/") and not pathlib.PurePosixPath(name).name.startswith("test_")
        if is_shared or name.startswith(_DEPENDS_ON):
            digest.update(name.encode() + b"\0" + (checkout / name).read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Lets SIGTERM end the process as Ctrl-C does, so that copies are removed and no tests run on."""
    if threading.current_thread() is not threading.main_thread():  # which alone may say what signals do
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _dealt(tests: Sequence[str], num_jobs: int) -> list[list[str]]:
    """Deals tests to processes file by file, as the tests of a file share what they compile."""
    files = sorted({test.partition("::")[0] for test in tests})
    hands = [[test for test in tests if test.partition("::")[0] in files[job::num_jobs]] for job in range(num_jobs)]
    return [hand for hand in hands if hand]


def _chosen(faults: Sequence[Fault], options: argparse.Namespace) -> tuple[Fault, ...]:
    """Gives the faults that the options ask for; raises `FaultError` for a name or a room that there is not."""
    names, known_rooms = {fault.name for fault in faults}, {fault.room for fault in faults}
    if unknown := sorted(set(options.only) - names):
        raise FaultError(f"there is no fault {', '.join(unknown)}; there are {', '.join(sorted(names))}")
    if unknown := sorted(set(options.room) - known_rooms):
        raise FaultError(
            f"there is no room {', '.join(unknown)} with a fault; there are {', '.join(sorted(known_rooms))}"
        )
    return tuple(
        fault
        for fault in faults
        if (not options.only or fault.name in options.only) and (not options.room or fault.room in options.room)
    )


def _list(faults: Sequence[Fault], checkout: pathlib.Path) -> int:
    for fault in faults:
        print(f"{fault.name}  ({fault.file})\n    {fault.breaks}")
    wrong = problems(faults, checkout)
    num_rooms = len({fault.room for fault in faults})
    print("\n".join([f"{len(faults)} faults in {num_rooms} of {len(rooms(checkout))} rooms", *wrong]))
    return 1 if wrong else 0


def _text(outcome: Outcome) -> str:
    about = outcome.noticed_by or outcome.message
    return f"{outcome.verdict:<9} {outcome.name}  {outcome.seconds:.0f} s" + (f"  {about}" if about else "")


def _header(options: argparse.Namespace) -> str:
    from benchmarks._common import quiet_tpu_compiler
    from benchmarks.machine import header, this_machine

    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    quiet_tpu_compiler()
    command = f"python -m benchmarks mutants --jobs {options.jobs}"
    return header(this_machine(), command)


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="these faults alone")
    parser.add_argument("--room", nargs="*", default=[], help="the faults of these rooms alone, such as lower/turns")
    parser.add_argument("--list", action="store_true", help="show the faults and check that they apply")
    parser.add_argument("--jobs", type=int, default=2, help="copies of the checkout, and processes, at once")
    parser.add_argument("--timeout", type=float, default=180.0, metavar="SECONDS", help="limit of a fault's tests")
    parser.add_argument("--faults", type=pathlib.Path, default=FAULTS, help="another file of faults")
    parser.add_argument("--checkout", type=pathlib.Path, default=ROOT, help="top of the checkout that is tried")
    parser.add_argument("--work", type=pathlib.Path, default=WORK, help="folder of the outcomes so far")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="folder of the page")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
