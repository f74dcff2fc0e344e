"""What happens to a process from outside: its clock jumps, its memory is over, the process that coordinates is gone."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

from benchmarks.faults import run as runs
from benchmarks.faults.checks import Fault, compare, lost, with_problems
from benchmarks.faults.kills import KILLED_WITHIN_SECONDS, START_SECONDS, ended, settle
from benchmarks.faults.run import Launched, Overdue, Recipe
from benchmarks.faults.stuck import CHECKPOINT_EVERY, script
from benchmarks.faults.worker import BACK

# Of Debian's package `libfaketime`; it is preloaded into one run, and the machine's clock is left alone.
FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
FAKETIME_VARIABLE = "SPLITJAX_FAULTS_FAKETIME"
# JAX's own heartbeat where no launcher sets one, and as much again for its error to end the process.
CLUSTER_HEARTBEAT_SECONDS = 100.0
NUM_RESTARTS = 2
PACE = ("--pace", "0.1")
_RESUMED = re.compile(r"resumed from the checkpoint of step ([0-9]+)")


# libfaketime 0.9.10 moves also those sleeps that end at a time of the monotonic clock, as Python's do: they fail. This
# goes before it, and hands them to the kernel.
_SLEEP = """
#define _GNU_SOURCE
#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left) {
    return syscall(SYS_clock_nanosleep, clock, flags, time, left) ? errno : 0;
}
"""


def faketime(folder: pathlib.Path) -> str:
    """What is preloaded; partly compiled into `folder`. Raises `Overdue` where it cannot be had."""
    library = os.environ.get(FAKETIME_VARIABLE, FAKETIME)
    if not pathlib.Path(library).exists() or shutil.which("cc") is None:
        raise Overdue(f"install libfaketime (or say in {FAKETIME_VARIABLE} where it is) and a C compiler")
    sleep = folder / "sleep.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(sleep)]
    subprocess.run(command, input=_SLEEP, text=True, check=True)
    return f"{sleep}:{library}"


def clock_jumps(recipe: Recipe, reference: Recipe, seconds: float, rng: random.Random) -> Fault:
    """The clock of a whole run, its launcher's too, is set by so many seconds in the middle: nobody is ended. Set back,
    JAX's own service ends all workers, which the launcher must tell from a fault of theirs: without a restart that it
    may count, the run goes on."""
    is_back = seconds < 0
    fault = Fault(f"clock set by {seconds:+.0f} s", "step", CHECKPOINT_EVERY)
    recipe.folder.mkdir(parents=True)
    try:
        library = faketime(recipe.folder)
    except Overdue as error:
        return with_problems(fault, [str(error)])
    file = recipe.folder / "clock"
    file.write_text("+0\n")
    variables = {
        "LD_PRELOAD": library,
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",  # setting a clock does not move the other one
        "DONT_FAKE_MONOTONIC": "1",
    }
    recipe = dataclasses.replace(script(recipe.folder, recipe.cache, *PACE), variables=tuple(variables.items()))
    wanted = rng.randrange(CHECKPOINT_EVERY, 3 * CHECKPOINT_EVERY)
    problems: list[str] = []
    options = ["--step-timeout-seconds", "60", "--heartbeat-seconds", "30"]
    with Launched(recipe, restarts=0 if is_back else 1, options=options) as run:
        try:
            run.until(f"step {wanted}", lambda: run.last_step() >= wanted, START_SECONDS)
            sight = run.sight()
            scratch = file.with_name("clock.new")
            scratch.write_text(f"{seconds:+.0f}\n")
            scratch.replace(file)
            again = run.until("a step", lambda: run.last_step() > sight.last_step + 1, START_SECONDS)
            status = run.end(START_SECONDS)
            if is_back and "ended them" not in run.text:
                problems.append("the launcher does not say that the clock was set back")
            if not is_back and "starting all workers again" in run.text:
                problems.append("an attempt was ended")
            problems += [f"exit status {status}: {run.text[-800:]}"] if status else compare(recipe, reference)
            problems += lost(recipe, sight.complete)
            moved = _clock_at_end(run.text) - time.time()
            problems += [] if abs(moved - seconds) < 600 else [f"the clock was {moved:.0f} s off at the end"]
            fault = dataclasses.replace(
                fault,
                moment=sight.phase,
                last_step=sight.last_step,
                again_seconds=again - sight.at,
                note="JAX ended all workers; the launcher blamed the clock, counted no restart and went on"
                if is_back
                else "nobody was ended (step deadline 60 s, heartbeat 30 s)",
            )
        except Overdue as error:
            problems.append(str(error))
        problems += ["processes were left running"] if run.process.poll() is not None and run.left_running() else []
    return with_problems(fault, problems)


def _clock_at_end(text: str) -> float:
    """What the script says that its clock shows when it ends."""
    found = re.findall(r"the clock shows ([0-9]+)", text)
    return float(found[-1]) if found else float("nan")


def out_of_memory(recipe: Recipe, reference: Recipe, rank: int, rng: random.Random) -> Fault:
    """A worker takes more memory than it may have (RLIMIT_AS, 128 MiB above what it has): it fails with an error that
    the launcher shows, and the next attempt goes on."""
    at = rng.randrange(CHECKPOINT_EVERY + 5, 3 * CHECKPOINT_EVERY)
    recipe = script(recipe.folder, recipe.cache, "--fault", "memory", "--rank", str(rank), "--at", str(at))
    kind = "rank out of memory"
    fault = Fault(kind, f"step {at}", CHECKPOINT_EVERY)
    problems: list[str] = []
    with Launched(recipe, restarts=1) as run:
        try:
            run.until(f"step {at - 2}", lambda: run.last_step() >= at - 2, START_SECONDS)
            sight = run.sight()
            one = ended(run, dataclasses.replace(sight, phase="step"), kind, KILLED_WITHIN_SECONDS + 10)
            text = run.text
            [fault] = settle(run, [one])
            fault = dataclasses.replace(fault, note=f"worker {rank}", moment=f"step {at}")
            status = run.end(START_SECONDS)
            problems += [f"exit status {status}: {run.text[-800:]}"] if status else compare(recipe, reference)
            problems += lost(recipe, sight.complete)
            problems += [] if f"[launch] worker {rank} failed" in text else [f"worker {rank} was not named"]
            problems += [] if "MemoryError" in text or "bad_alloc" in text else [f"memory was not named: {text[-800:]}"]
        except Overdue as error:
            problems.append(str(error))
        problems += ["processes were left running"] if run.process.poll() is not None and run.left_running() else []
    return with_problems(fault, problems)


def gone_for_good(recipe: Recipe, reference: Recipe, rank: int, rng: random.Random) -> Fault:
    """A worker is killed, and fails at every further start: once the restarts are used up the launcher ends and says
    who is missing; when it is there again, the same command goes on."""
    at = rng.randrange(CHECKPOINT_EVERY + 5, 3 * CHECKPOINT_EVERY)
    recipe = script(recipe.folder, recipe.cache, *("--fault", "gone", "--rank", str(rank), "--at", str(at)))
    fault = Fault("worker gone for good", f"step {at}", CHECKPOINT_EVERY)
    problems: list[str] = []
    try:
        with Launched(recipe, restarts=NUM_RESTARTS) as run:
            run.until(f"step {at - 2}", lambda: run.last_step() >= at - 2, START_SECONDS)
            status = run.end(START_SECONDS)
            text, before, last = run.text, run.complete(), run.last_step()
        problems += [] if status == 3 else [f"exit status {status}, not the worker's 3"]
        problems += [] if text.count(f"[launch] worker {rank} failed") == 1 + NUM_RESTARTS else ["it was not named"]
        if f"all {NUM_RESTARTS} restarts are used up" not in text:
            problems.append(f"that restarts are used up was not said: {text[-500:]}")
        (recipe.folder / BACK).touch()
        recipe = script(recipe.folder, recipe.cache)
        with Launched(recipe) as run:
            begun = run.began
            again = run.until("a step", run.has_stepped, START_SECONDS)
            resumed = run.resumed_step()
            status = run.end(START_SECONDS)
        problems += [f"exit status {status}: {run.text[-800:]}"] if status else compare(recipe, reference)
        problems += lost(recipe, before)
        fault = dataclasses.replace(
            fault,
            last_step=last,
            resumed_step=resumed,
            again_seconds=again - begun,
            note=f"{NUM_RESTARTS} restarts in vain, naming worker {rank}; once it was back the same command went on",
        )
    except Overdue as error:
        problems.append(str(error))
    return with_problems(fault, problems)


def coordinator_gone(recipe: Recipe, reference: Recipe, number: int, rng: random.Random) -> Fault:
    """Process 0 of a run without a launcher, which holds JAX's coordination service as on a cluster, is killed or
    stopped: the other process ends by itself, and the same commands go on."""
    name = signal.Signals(number).name
    fault = Fault(f"coordinator gone ({name})", "step", CHECKPOINT_EVERY)
    recipe = script(recipe.folder, recipe.cache, *PACE)
    wanted = rng.randrange(CHECKPOINT_EVERY, 3 * CHECKPOINT_EVERY)
    problems: list[str] = []
    limit = 2 * CLUSTER_HEARTBEAT_SECONDS
    try:
        with _cluster(recipe) as (processes, _):
            _await(lambda: runs.last_step(recipe.metrics) >= wanted, f"step {wanted}")
            before, last, struck = runs.checkpoints(recipe), runs.last_step(recipe.metrics), time.monotonic()
            saving = runs.saving(recipe)
            processes[0].send_signal(number)
            try:
                status = processes[1].wait(limit)
                end_seconds = time.monotonic() - struck
                problems += ["the other process ended well"] if status == 0 else []
            except subprocess.TimeoutExpired:
                raise Overdue(f"the other process did not end within {limit:g} s") from None
            last = max(last, runs.last_step(recipe.metrics))
        with _cluster(recipe) as (processes, output):
            begun = time.monotonic()
            _await(lambda: _RESUMED.search(output.read_text(errors="replace")) is not None, "a resume")
            resumed = int(_RESUMED.findall(output.read_text(errors="replace"))[0])
            problems += [f"resumed from {resumed}, {max(before)} was complete"] if resumed < max(before) else []
            _await(lambda: runs.last_step(recipe.metrics) > resumed, "a step")
            again = time.monotonic() - begun
            statuses = [process.wait(START_SECONDS) for process in processes]
            problems += [f"exit statuses {statuses}"] if any(statuses) else compare(recipe, reference)
            problems += lost(recipe, before)
        fault = dataclasses.replace(
            fault,
            last_step=last,
            saving_step=saving,
            resumed_step=resumed,
            end_seconds=end_seconds,
            limit_seconds=limit,
            again_seconds=again,
            note="no launcher; the other process ended by itself; started again by hand",
        )
    except (Overdue, subprocess.TimeoutExpired) as error:
        problems.append(str(error))
    return with_problems(fault, problems)


@contextlib.contextmanager
def _cluster(recipe: Recipe) -> Iterator[tuple[list[subprocess.Popen[bytes]], pathlib.Path]]:
    """Two processes as SLURM would start them on one machine; nothing of them is left running."""
    recipe.folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tag = secrets.token_hex(8)
    output = recipe.folder / "output.txt"
    with open(output, "w") as file:
        processes = [
            subprocess.Popen(
                recipe.command(),
                cwd=recipe.folder,
                env={
                    **recipe.environment(),
                    runs.TAG: tag,
                    "NPROC": "1",
                    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
                    "SLURM_JOB_ID": str(port),
                    "SLURM_STEP_NODELIST": "127.0.0.1",
                    "SLURM_NTASKS": "2",
                    "SLURM_PROCID": str(rank),
                    "SLURM_LOCALID": str(rank),
                    "SLURM_STEP_NUM_NODES": "1",
                    "JAX_COORDINATOR_PORT": str(port),
                },
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            for rank in range(2)
        ]
    try:
        yield processes, output
    finally:
        for pid in runs.tagged(tag):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in processes:
            process.kill()
            process.wait()


def _await(happened: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not happened():
        if time.monotonic() > deadline:
            raise Overdue(f"{what}: not within {START_SECONDS:g} s")
        time.sleep(0.01)
