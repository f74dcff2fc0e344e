"""Ctrl-C at random moments of every command: a clean message, no traceback, no crash, and everything saved stays."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.faults import run
from benchmarks.faults.checks import Fault, compare, lost
from benchmarks.faults.run import Recipe

NUM_MOMENTS = 40
END_SECONDS = 60.0  # `--stop-timeout-seconds` of the launcher here; the others end at once, but the machine is busy
INTERRUPTED = 128 + signal.SIGINT
_LOOK_SECONDS = 0.002
_LIMIT_SECONDS = 600.0
_CRASHES = ("Traceback", "Fatal Python error", "core dumped", "Segmentation fault", "terminate called", "KeyboardInter")
_JOBS = "".join(f"job-{n},{60 * n},{1 + n % 4},{400 + 37 * (n % 11)},wide\n" for n in range(4000))
_PROFILE = {
    "name": "wide",
    "forward_seconds": 0.1,
    "depths": [{"fraction": 1.0, "backward_seconds": 0.2, "gradient_bytes": 1000}],
}


@dataclasses.dataclass(frozen=True)
class Command:
    """What is interrupted: `splitjax NAME options`, in a folder of its own.

    `results`: files that it writes there, which are JSON. `statuses`: with which it ends where nobody interrupts it.
    """

    name: str
    options: tuple[str, ...]
    results: tuple[str, ...] = ()
    statuses: tuple[int, ...] = (0,)


COMMANDS = (
    Command("plan", ("--model", "vgg11", "--json", "out.json"), ("out.json",)),
    Command("report", ("--model", "vgg11", "--width", "0.25", "--mesh", "data=2", "--json", "out.json"), ("out.json",)),
    Command(
        "profile",
        ("--model", "mlp", "--data", "digits", "--mesh", "data=2", "--platform", "cpu", "--json", "out.json"),
        ("out.json",),
    ),
    Command(
        "simulate",
        tuple("--trace j.csv --profiles p.json --cluster 2x4 --policy gang-srtf,gang-las --json out.json".split()),
        ("out.json",),
    ),
    Command(
        "demo",
        tuple("--width 0.125 --head-features 64 --mesh data=2 --steps 40 --output-dir .".split()),
        ("plan.json",),
    ),
    Command("lint", ("splitbrain", "--model", "mlp", "--mesh", "data=2,model=2")),
    Command("doctor", ()),
)
SAVING = ("train", "launch")  # they save first, and the same command goes on
ALL = (*SAVING, *(command.name for command in COMMANDS))


@dataclasses.dataclass(frozen=True)
class End:
    """How a process ended that was interrupted. `moment_seconds`: from its entry point; `end_seconds`: from the
    signal. `was_met`: whether it still ran at that moment."""

    moment_seconds: float
    status: int
    end_seconds: float
    text: str
    was_met: bool = True


@dataclasses.dataclass(frozen=True)
class Moments:
    """How often, and by which draws, a command is interrupted; fewer times where `seconds` are over before."""

    seed: int
    number: int = NUM_MOMENTS
    seconds: float = 3600.0


def interrupt(name: str, folder: pathlib.Path, reference: Recipe, moments: Moments) -> Fault:
    """Interrupts a command at random moments between its entry point and its end, in a new `folder`. A start that had
    ended before its moment is not counted. `reference`: the undisturbed run of those that train."""
    until = time.monotonic() + moments.seconds
    rng = random.Random(f"{moments.seed}:{name}")
    folder.mkdir(parents=True)
    go_on = lambda ends: len(ends) < moments.number and time.monotonic() < until
    if name in SAVING:
        return _interrupt_training(name, folder, reference, rng, go_on)
    command = next(one for one in COMMANDS if one.name == name)
    (folder / "j.csv").write_text(f"name,arrival_seconds,num_workers,num_iterations,profile\n{_JOBS}")
    (folder / "p.json").write_text(json.dumps([_PROFILE]))
    arguments = [sys.executable, "-m", "splitjax.cli", name, *command.options]
    whole = _run(arguments, folder, reference.environment(), None)
    problems = [] if whole.status in command.statuses else [f"undisturbed: {whole.status}: {whole.text[-500:]}"]
    kept = {result: (folder / result).read_text() for result in command.results if not problems}
    ends: list[End] = []
    while not problems and go_on(ends):
        end = _run(arguments, folder, reference.environment(), rng.uniform(0.0, whole.end_seconds))
        if not end.was_met:
            continue
        ends.append(end)
        problems += _problems(end, command.statuses, ("interrupted",))
        problems += _damaged(folder, kept, end)
    return _fault(name, ends, problems, f"{whole.end_seconds:.1f} s undisturbed")


def _interrupt_training(
    name: str, folder: pathlib.Path, reference: Recipe, rng: random.Random, go_on: Callable[[Sequence[End]], bool]
) -> Fault:
    """Each start goes on where the one before it was interrupted; what is complete is compared with `reference`, and
    the next run begins anew."""
    recipe = dataclasses.replace(reference, folder=folder / "0")
    launcher = [sys.executable, "-m", "splitjax.cli", "launch", "-n", "2", "--threads", "1"]
    launcher += ["--stop-timeout-seconds", str(END_SECONDS), "--"]
    ends: list[End] = []
    problems: list[str] = []
    complete = 0
    whole_seconds = None
    while go_on(ends):
        recipe.folder.mkdir(exist_ok=True)
        train = recipe.command()
        arguments = train if name == "train" else [*launcher, *train]
        environment = {**recipe.environment(), **({"XLA_FLAGS": _TWO_DEVICES} if name == "train" else {})}
        before = run.checkpoints(recipe)
        moment = None if whole_seconds is None else rng.uniform(0.0, whole_seconds)
        end = _run(arguments, recipe.folder, environment, moment)
        if whole_seconds is None:
            whole_seconds = end.end_seconds
            problems += [] if end.status == 0 else [f"undisturbed: {end.status}: {end.text[-800:]}"]
        elif end.was_met:
            ends.append(end)
            problems += _problems(end, (0,), ("interrupted", "stopped on request", "Ctrl-C"))
            problems += lost(recipe, before)
        if end.status == 0:
            problems += compare(recipe, reference)
            complete += 1
            recipe = dataclasses.replace(recipe, folder=folder / str(complete))
        if len(problems) > 20:
            break
    if run.checkpoints(recipe):
        end = _run(arguments, recipe.folder, environment, None)
        problems += compare(recipe, reference) if end.status == 0 else [f"the last start: {end.text[-800:]}"]
        complete += 1
    return _fault(name, ends, problems, f"{complete} runs came to their end, bit-identical to the undisturbed one")


_TWO_DEVICES = "--xla_force_host_platform_device_count=2"


def _fault(name: str, ends: list[End], problems: list[str], note: str) -> Fault:
    in_time = sum(end.status == INTERRUPTED for end in ends)
    slowest = max((end.end_seconds for end in ends if end.status == INTERRUPTED), default=None)
    return Fault(
        f"Ctrl-C to splitjax {name}",
        "any",
        0,
        end_seconds=slowest,
        limit_seconds=END_SECONDS,
        count=len(ends),
        note=f"{in_time} ended by it, {len(ends) - in_time} had ended by themselves; {note}",
        problems=tuple(problems),
    )


def _problems(end: End, statuses: tuple[int, ...], words: tuple[str, ...]) -> list[str]:
    at = f"{end.moment_seconds:.2f} s after its entry point"
    found = [f"{at}: {crash} in {end.text[-800:]!r}" for crash in _CRASHES if crash in end.text]
    if end.status == INTERRUPTED:
        found += [] if any(word in end.text for word in words) else [f"{at}: no message: {end.text[-300:]!r}"]
    elif end.status not in statuses:
        found.append(f"{at}: exit status {end.status}: {end.text[-800:]!r}")
    if end.end_seconds > END_SECONDS:
        found.append(f"{at}: ended after {end.end_seconds:.1f} s")
    return found


def _damaged(folder: pathlib.Path, kept: dict[str, str], end: End) -> list[str]:
    """What an earlier start wrote has to be there as it was, or as this one writes it: the same."""
    found = []
    for name, text in kept.items():
        with contextlib.suppress(OSError):
            now = (folder / name).read_text()
            if now == text or _is_json(now):
                continue
        found.append(f"{end.moment_seconds:.2f} s after its entry point: {name} is damaged or gone")
        (folder / name).write_text(text)
    return found


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _run(arguments: list[str], folder: pathlib.Path, environment: dict[str, str], moment: float | None) -> End:
    """Runs it to its end, interrupted `moment` seconds after its entry point; None: not at all, and `end_seconds` is
    from there."""
    tag, was_met = secrets.token_hex(8), False
    with open(folder / "output.txt", "w+", errors="replace") as output:
        process = subprocess.Popen(
            arguments,
            cwd=folder,
            env={**environment, run.TAG: tag},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            entered = _await(lambda: process.poll() is not None or _has_entered(process.pid))
            if moment is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(moment)
                entered = time.monotonic()
                was_met = process.poll() is None
                if was_met:
                    os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of the foreground
            status = process.wait(_LIMIT_SECONDS)
            took = time.monotonic() - entered
            left = run.tagged(tag)
        finally:
            for pid in run.tagged(tag):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()
        output.seek(0)
        text = output.read()
    text += "\nTraceback: processes were left running" if left else ""
    return End(moment or 0.0, status, took, text, was_met)


def _await(happened: Callable[[], bool]) -> float:
    while not happened():
        time.sleep(_LOOK_SECONDS)
    return time.monotonic()


def _has_entered(pid: int) -> bool:
    """Whether the entry point of a command runs: from there on it catches SIGTERM, which Python itself does not."""
    with contextlib.suppress(OSError):
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", pathlib.Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
        return caught is not None and bool(int(caught[1], 16) >> (signal.SIGTERM - 1) & 1)
    return False
