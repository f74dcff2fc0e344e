"""What the tests of the launcher share: runs of tiny scripts, in this process or under the real command."""

from __future__ import annotations

import io
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from splitjax.runtime.launch import launch
from splitjax.runtime.launch.outcome import LaunchOutcome
from splitjax.runtime.launch.output import Console

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Launched:
    """A run in this process, with what it wrote."""

    def __init__(self, script: str, **options):
        self.out, self.err = io.StringIO(), io.StringIO()
        path = os.pathsep.join(part for part in (str(ROOT), os.environ.get("PYTHONPATH")) if part)
        environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "NPROC")} | {
            "PYTHONPATH": path
        }
        self.run = launch.start(
            launch.LaunchConfig(**options),
            [sys.executable, "-c", script],
            environment=environment,
            console=Console(self.out, self.err),
        )

    def wait(self) -> LaunchOutcome:
        outcome = self.run.wait(60)
        if outcome is None:
            self.run.kill()
            self.run.wait(10)
            pytest.fail(f"the run hangs:\n{self.out.getvalue()}{self.err.getvalue()}")
        return outcome

    def until(self, text: str, count: int = 1) -> None:
        """Waits until the workers have written `text` so often."""
        written = lambda: self.out.getvalue().count(text) >= count
        until(lambda: written() or self.run.wait(0) is not None, lambda: self.out.getvalue() + self.err.getvalue())
        assert written(), self.out.getvalue() + self.err.getvalue()


def until(condition: Callable[[], bool], words: Callable[[], str] = str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, words()
        time.sleep(0.02)


@pytest.fixture
def launched():
    """`launched(script, num_processes=2, ...)`: what still runs at the end of the test is killed."""
    made: list[Launched] = []

    def make(script: str, **options) -> Launched:
        made.append(Launched(script, **options))
        return made[-1]

    yield make
    for one in made:
        if one.run.wait(0) is None:
            one.run.kill()
            one.run.wait(10)


def command(*arguments: str, **options) -> subprocess.Popen[str]:
    """`splitjax launch ...` as a process of its own."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "splitjax.cli", "launch", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def is_alive(pid: int) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
