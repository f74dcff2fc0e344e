"""A process that runs drawn programs and may die of it, and the handle on it that starts another.

`python -m benchmarks.partitioner.worker` reads requests as lines of JSON and answers each with one. What kills it, or
keeps it longer than is allowed, is told to the caller as `Died` with the signal and the last line that it wrote; the
next request starts another process.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from benchmarks._common import quiet_tpu_compiler

_ROOT = pathlib.Path(__file__).resolve().parents[2]
# A batch takes seconds. Programs whose collectives wait for each other for ever are ended after this.
LIMIT_SECONDS = 240.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a worker runs programs. `way`: "hand" or "splitjax"; `partitioner`: "shardy" or "gspmd"; `planted`: for tests
    of the search itself, the family whose results are spoiled where it has more than one example; `references`: a
    folder in which the numbers of one device are kept, "" for none."""

    way: str = "hand"
    partitioner: str = "shardy"
    planted: str = ""
    references: str = ""
    python: str = sys.executable


class Died(Exception):
    """The worker ended. `cause`: the signal or status; `last`: the last line of its standard error."""

    def __init__(self, cause: str, last: str) -> None:
        super().__init__(f"{cause}: {last}")
        self.cause, self.last = cause, last


def environment() -> None:
    """Sets what XLA reads when it starts: eight devices, little optimisation (the partitioner runs before it; the
    programs are small), and as many threads as collectives that wait for each other can need."""
    quiet_tpu_compiler()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    os.environ.setdefault("JAX_ENABLE_X64", "1")
    os.environ.setdefault("NPROC", "32")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false"
    os.environ.setdefault("XLA_FLAGS", flags)


class Worker:
    """Starts the process when it is first asked, and again after a death."""

    def __init__(self, settings: Settings, limit_seconds: float = LIMIT_SECONDS) -> None:
        self.settings, self.limit_seconds = settings, limit_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = None

    def ask(self, **request: object) -> dict:
        """The answer to a request: `{"draws": [JSON of draws]}` or `{"seed": ..., "numbers": [...], "only": family}`;
        with `reference` they run on one device alone. Raises `Died`."""
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._death("ended") from None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(self.limit_seconds):
                process.kill()
                raise self._death(f"no answer in {self.limit_seconds:.0f} s")
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._death("")
        return json.loads(line)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout, self._errors):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        pass  # what was still to be written to a process that is gone
            self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            self._errors = tempfile.TemporaryFile()
            command = [
                self.settings.python,
                "-m",
                "benchmarks.partitioner.worker",
                json.dumps(dataclasses.asdict(self.settings)),
            ]
            kept = {
                name: value
                for name, value in os.environ.items()
                if name not in ("XLA_FLAGS", "NPROC", "JAX_ENABLE_X64")
            }
            self._process = subprocess.Popen(
                command,
                cwd=_ROOT,
                env={**kept, "PYTHONPATH": str(_ROOT)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
            )
        return self._process

    def _death(self, cause: str) -> Died:
        assert self._process is not None and self._errors is not None
        status = self._process.wait()
        if not cause:
            cause = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self._errors.seek(0)
        lines = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        self.close()
        return Died(cause, _telling(lines))


def _telling(lines: Sequence[str]) -> str:
    """The line that says why: a failed check, else the last that is no part of a stack."""
    checks = [line for line in lines if "Check failed" in line]
    plain = [
        line for line in lines if not line.startswith((" ", "\t", "***", "Extension modules", "Current thread", "@"))
    ]
    return (checks or plain or list(lines) or [""])[-1][-300:]


def main(settings: Settings) -> int:
    """Answers requests until there are no more."""
    environment()
    # The protocol has a descriptor of its own, so that whatever a library prints cannot get into it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import jax

    if settings.way == "hand" or settings.partitioner == "gspmd":
        jax.config.update("jax_use_shardy_partitioner", settings.partitioner == "shardy")
    from benchmarks.partitioner.draw import Draw
    from benchmarks.partitioner.families import draw
    from benchmarks.partitioner.references import References
    from benchmarks.partitioner.run import run_by_hand, run_reference

    references = References(settings.references)

    for line in sys.stdin:
        request = json.loads(line)
        if "draws" in request:
            draws = [Draw.from_json(text) for text in request["draws"]]
        else:
            draws = [draw(request["seed"], number, request.get("only", "")) for number in request["numbers"]]
        if request.get("reference"):
            outcomes = run_reference(draws)
        elif settings.way == "hand":
            outcomes = run_by_hand(draws, settings.planted, references)
        else:
            from benchmarks.partitioner.splitjax import run_under_splitjax

            outcomes = run_under_splitjax(draws, references)
        answers.write(
            json.dumps({"outcomes": [dataclasses.asdict(outcome) for outcome in outcomes], "jax": jax.__version__})
            + "\n"
        )
        answers.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(Settings(**json.loads(sys.argv[1]))))
