"""The first day of `docs/first_day.md`, walked: its files saved and its commands run by one shell, each step timed."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

from benchmarks.product.pages import ROOT, first_day

# What a person's shell does not have set; the walk is to need none of it.
_OURS = ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS", "NPROC", "JAX_", "SPLITJAX_")
_MARK = "--- walked: "


@dataclasses.dataclass(frozen=True)
class Walk:
    """What came of a walk: the shell's `status` (0: each command succeeded), what it `said` on both of its outputs, its
    `seconds` in all, and by step, in order, what was done (the command, or the file that was saved) and its seconds."""

    status: int
    said: str
    seconds: float
    steps: tuple[tuple[str, float], ...]


def clean_environment() -> dict[str, str]:
    """Returns the environment of this process without what tests and benchmarks set, and with this Python first."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    # Where it runs in an environment of its own, a person's `python3` is the one that this was made of.
    return {**kept, "PATH": os.pathsep.join([str(pathlib.Path(sys.base_prefix) / "bin"), kept["PATH"]])}


def script() -> str:
    """Returns the page as a script of a shell: a file is saved, a command is typed, and after each the time is said."""
    lines = ["set -e"]
    for step in first_day():
        if step.name:
            lines += [f"cat > {step.name} <<'END OF FILE'", step.text.rstrip("\n"), "END OF FILE"]
            continue
        for command in step.text.splitlines():
            lines += [command, f"echo '{_MARK}'$(date +%s.%N) {shlex.quote(command)}"]
    return "\n".join(lines) + "\n"


def walk(folder: pathlib.Path, timeout_seconds: float) -> Walk:
    """Walks through the first day in an empty `folder`, with this checkout's last commit as what is cloned. A walk that
    takes longer than `timeout_seconds` raises `subprocess.TimeoutExpired`."""
    begin, started = time.monotonic(), time.time()
    done = subprocess.run(
        ["bash", "-c", script()],
        cwd=folder,
        env={**clean_environment(), "SPLITJAX": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_seconds,
    )
    seconds = time.monotonic() - begin
    steps = []
    for moment, command in re.findall(rf"^{_MARK}([\d.]+) (.*)$", done.stdout, re.MULTILINE):
        steps.append((command, float(moment) - started))
        started = float(moment)
    return Walk(done.returncode, re.sub(rf"^{_MARK}.*\n", "", done.stdout, flags=re.MULTILINE), seconds, tuple(steps))
