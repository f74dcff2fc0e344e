"""Runs the tests of faults in copies of a checkout, one fault at a time in each, and says what came of each.

A checkout and faults go in, `Outcome`s come out. Only a named test that fails kills a fault. What else can go wrong (a
test that cannot be collected, a fixture that fails, a test that hangs) has a word of its own and does not count: such a
fault would be noticed by anything, or by nothing that can be relied on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.mutants.faults import PACKAGE, Fault, FaultError

KILLED, SURVIVED = "killed", "survived"
NOT_APPLIED = "does not apply"  # its text is not in its file exactly once
BROKEN_BEFORE = "fails without it"  # a named test does not pass on the unchanged checkout
TIMED_OUT, NOT_COLLECTED, NOT_RUN = "timed out", "error, no failure", "no tests ran"

# Exit statuses of pytest: https://docs.pytest.org/en/stable/reference/exit-codes.html
_PASSED, _USAGE, _NONE = 0, 4, 5
_MTIME_STEP_SECONDS = 60


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Says what came of a fault.

    **Attributes:**

    - `name`, `digest`: the fault's.
    - `verdict`: a word above; `noticed_by`: the id of the test that failed, empty where none did.
    - `message`: how that test failed, or why there is no verdict, in a line.
    - `seconds`: how long its tests took, with the start of Python and JAX.
    """

    name: str
    digest: str
    verdict: str
    noticed_by: str = ""
    message: str = ""
    seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class PytestRun:
    """Holds a run of pytest: its exit `status` (None where it was ended), what `failed` and what was in `error`, by id
    with a line each, the ids that `passed`, the end of its `output`, and how many `seconds` it took."""

    status: int | None
    passed: tuple[str, ...]
    failed: Mapping[str, str]
    error: Mapping[str, str]
    output: str
    seconds: float


@contextlib.contextmanager
def workspace(checkout: pathlib.Path) -> Iterator[pathlib.Path]:
    """Makes a temporary copy of a `checkout`'s files, those that git does not ignore, and removes it at the end.

    Raises `FaultError` where git does not list them, or where the copy's package is not what Python would import.
    """
    with tempfile.TemporaryDirectory(prefix="splitjax-mutants-", ignore_cleanup_errors=True) as folder:
        copy = pathlib.Path(folder)
        for name in source_files(checkout):
            target = copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(checkout / name, target)
        script = f"import importlib.util as u; print(u.find_spec({PACKAGE!r}).origin)"
        done = subprocess.run([sys.executable, "-c", script], cwd=copy, env=_environment(copy), capture_output=True)
        origin = pathlib.Path(done.stdout.decode().strip() or "nowhere")
        if not origin.resolve().is_relative_to(copy.resolve()):
            raise FaultError(f"Python would import {PACKAGE} from {origin} and not from the copy of {checkout}")
        yield copy


def source_files(checkout: pathlib.Path) -> list[str]:
    """Lists the files of a `checkout` that git does not ignore, relative to it. Raises `FaultError` without git."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise FaultError(f"git does not list the files of {checkout}: {error}; run this in a git checkout") from error
    names = sorted(set(done.stdout.decode().split("\0")) - {""})
    return [name for name in names if (checkout / name).is_file()]


def run_unchanged(copy: pathlib.Path, tests: Sequence[str], timeout_seconds: float) -> PytestRun:
    """Runs `tests` (pytest ids) in the unchanged `copy`, all of them even if some fail, within `timeout_seconds`."""
    return run_tests(copy, tests, timeout_seconds, stop_at_first=False)


def run_fault(copy: pathlib.Path, fault: Fault, broken: Mapping[str, str], timeout_seconds: float) -> Outcome:
    """Applies `fault` to the `copy`, runs its tests within `timeout_seconds`, and puts the file back.

    `broken` maps tests that do not pass without any fault to why not.
    """
    answer = lambda verdict, **more: Outcome(fault.name, fault.digest, verdict, **more)
    bad = next((test for test in fault.tests if test in broken), None)
    if bad is not None:
        return answer(BROKEN_BEFORE, message=f"{bad}: {broken[bad]}")
    file = copy / fault.file
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    changed = fault.applied(text)
    if changed is None:
        return answer(NOT_APPLIED, message=f"{fault.file} has {fault.old!r} {text.count(fault.old)} times, not once")
    with _edited(file, changed):
        run = run_tests(copy, fault.tests, timeout_seconds, stop_at_first=True, keeps_byte_code=False)
    verdict, noticed_by, message = _judge(run)
    return answer(verdict, noticed_by=noticed_by, message=message, seconds=run.seconds)


def _judge(run: PytestRun) -> tuple[str, str, str]:
    """Gives the verdict of a run, the test that noticed the fault, and a line about it."""
    if run.status is None:
        return TIMED_OUT, "", f"after {run.seconds:.0f} s"
    for test, message in run.failed.items():
        return KILLED, test, message
    for test, message in run.error.items():
        return NOT_COLLECTED, "", f"{test}: {message}"
    if run.status == _PASSED:
        return SURVIVED, "", ""
    if run.status in (_NONE, _USAGE):
        return NOT_RUN, "", run.output
    return NOT_COLLECTED, "", run.output


@contextlib.contextmanager
def _edited(file: pathlib.Path, text: str) -> Iterator[None]:
    """Lets a file have another text. Python takes byte code for that of a source of the same size and time (in whole
    seconds), so the time differs too."""
    before, stat = file.read_bytes(), file.stat()
    try:
        file.write_text(text, encoding="utf-8")
        os.utime(file, (stat.st_atime, stat.st_mtime + _MTIME_STEP_SECONDS))
        yield
    finally:
        file.write_bytes(before)
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def run_tests(
    copy: pathlib.Path,
    tests: Sequence[str],
    timeout_seconds: float,
    *,
    stop_at_first: bool,
    keeps_byte_code: bool = True,
) -> PytestRun:
    """Runs pytest over some tests.

    **Arguments:**

    - `copy`: the top of the checkout they are in.
    - `tests`: pytest ids.
    - `timeout_seconds`: after so long the process and all that it started are killed.
    - `stop_at_first`: whether the first failure ends the run.
    - `keeps_byte_code`: whether modules that are imported are kept compiled, for the next run.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "junit_family=xunit1", "--tb=line"]
    environment = _environment(copy)
    if not keeps_byte_code:
        environment["PYTHONDONTWRITEBYTECODE"] = "1"
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="splitjax-mutants-report-") as folder:
        report, log = pathlib.Path(folder) / "report.xml", pathlib.Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [*command, *(["-x"] if stop_at_first else []), f"--junitxml={report}", *tests],
                cwd=copy,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):  # what its tests may have left, too
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        passed, failed, error = _read_report(report)
        last = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()][-1:]
    return PytestRun(status, passed, failed, error, _line("".join(last)), time.monotonic() - began)


def _read_report(report: pathlib.Path) -> tuple[tuple[str, ...], dict[str, str], dict[str, str]]:
    """Reads pytest's report: the ids that passed, and with a line each those that failed or were in error."""
    passed: list[str] = []
    failed: dict[str, str] = {}
    error: dict[str, str] = {}
    try:
        cases = list(xml.etree.ElementTree.parse(report).iter("testcase"))
    except (OSError, xml.etree.ElementTree.ParseError):  # the process did not live to write it
        cases = []
    for case in cases:
        test = _id_of(case)
        if (failure := case.find("failure")) is not None:
            failed[test] = _line(failure.get("message") or "")
        elif (problem := case.find("error")) is not None:
            error[test] = _line(problem.get("message") or "")
        elif case.find("skipped") is None:
            passed.append(test)
    return tuple(passed), failed, error


def _id_of(case: xml.etree.ElementTree.Element) -> str:
    """Gives the pytest id of a case of the report, which names file, dotted class and name."""
    file, owner, name = case.get("file") or "", case.get("classname") or "", case.get("name") or ""
    module = file.removesuffix(".py").replace("/", ".")
    inner = owner.removeprefix(module).strip(".").split(".") if owner.startswith(module) else []
    return "::".join([file or owner, *filter(None, inner), name])


def ran(test: str, run: Sequence[str]) -> bool:
    """Tells whether a `test` is among the ids of a `run`, with some parameters where it names none."""
    return any(full == test or full.partition("[")[0] == test for full in run)


def broken_tests(tests: Sequence[str], run: PytestRun) -> dict[str, str]:
    """Maps those of `tests` that did not pass in `run`, that of the unchanged checkout, to a line each."""
    broken: dict[str, str] = {}
    for test in tests:
        bad = [line for full, line in {**run.failed, **run.error}.items() if ran(test, [full])]
        if bad:
            broken[test] = bad[0]
        elif not ran(test, run.passed):
            broken[test] = "timed out" if run.status is None else f"it did not run ({run.output})"
    return broken


def _environment(copy: pathlib.Path) -> dict[str, str]:
    """The environment of the tests: the copy's package comes before any that is installed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "XLA_FLAGS"))}
    ours = {
        "PYTHONPATH": str(copy),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # plugins take as long to import as many a test takes to run
        "TPU_SKIP_MDS_QUERY": "1",
    }
    return {**kept, **ours}


def _line(text: str, most: int = 200) -> str:
    """The first line of a text, cut."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first if len(first) <= most else first[: most - 1] + "…"
