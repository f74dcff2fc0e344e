"""What the parts of the benchmark of training share: real data, one-core processes, a decorated step on one or more
devices, CPU time of others."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

# XLA on one thread: the second core of this machine is then left to the host's threads, as an accelerator leaves the
# host's cores to them. The flags alone do not bound the pool on which jax runs compiled code; NPROC does.
ONE_THREAD = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1", "NPROC": "1"}
ONE_THREAD_WORDS = " ".join(f'{name}="{value}"' for name, value in ONE_THREAD.items())
MOST_OTHERS = 0.3  # cores that others keep busy before a round is called disturbed
_TICKS = os.sysconf("SC_CLK_TCK")


class Meter:
    """How many cores anybody but the given processes kept busy since the last look, by /proc."""

    def __init__(self, *pids: int) -> None:
        self._pids = pids or (os.getpid(),)
        self._before = self._now()

    def others(self) -> float:
        wall, busy = self._before
        self._before = self._now()
        return max(0.0, (self._before[1] - busy) / max(1e-9, self._before[0] - wall))

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), busy_seconds() - sum(map(cpu_seconds, self._pids))


def busy_seconds() -> float:
    """CPU time that this machine has spent on anything, all cores together."""
    fields = [int(one) for one in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / _TICKS


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process so far."""
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def quiet_rounds(others: Sequence[float]) -> tuple[list[int], str]:
    """The rounds to use, and a sentence on them: those in which others kept at most `MOST_OTHERS` cores busy, all where
    none was quiet."""
    quiet = [number for number, one in enumerate(others) if one <= MOST_OTHERS]
    if len(quiet) == len(others):
        return quiet, f"In no round did others keep more than {MOST_OTHERS:g} cores busy (highest {max(others):.2f})."
    if not quiet:
        return (
            list(range(len(others))),
            (
                f"**Every round was disturbed: others kept {min(others):.1f} to {max(others):.1f} cores busy. Run this"
                " on an idle machine.**"
            ),
        )
    return (
        quiet,
        (
            f"{len(others) - len(quiet)} of {len(others)} rounds had others keep more than {MOST_OTHERS:g} cores busy"
            " and are left out."
        ),
    )


def run_child(module: str, settings: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Any:
    """What `benchmarks.MODULE` writes to the file that it is given, in a process of its own with these settings and
    variables."""
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder) / "result.json"
        command = [sys.executable, "-m", f"benchmarks.{module}", json.dumps(dict(settings)), str(result)]
        code = subprocess.run(
            command, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu", **(environment or {})}
        ).returncode
        if code:
            raise RuntimeError(f"{module} ended with exit status {code}")
        return json.loads(result.read_text(encoding="utf-8"))


def child_arguments() -> tuple[dict[str, Any], pathlib.Path]:
    """In the process that `run_child` starts: the settings, and the file for the result."""
    parser = argparse.ArgumentParser(description="A process of `python -m benchmarks training`, which starts it.")
    parser.add_argument("settings", type=json.loads)
    parser.add_argument("result", type=pathlib.Path)
    options = parser.parse_args()
    return options.settings, options.result


def training_step(spec: Any, mesh: Mapping[str, int], optimizer: Any, **options: Any) -> tuple[Any, Any]:
    """(decorated step, function that makes a state)."""
    import splitjax
    from splitjax.models import make_step

    init, step, _ = make_step(spec, optimizer, value_and_grad=splitjax.value_and_grad)
    return splitjax.parallelize(step, mesh=dict(mesh), **options), init


def ready(step: Any, init: Any, dataset: Any, batch_size: int) -> tuple[Any, Any]:
    """(state, placement of the data set's batches) of a decorated step."""
    import jax

    from splitjax.runtime.training.placing import batch_layout

    one = next(dataset.train_batches(1))
    example = {name: jax.ShapeDtypeStruct((batch_size, *array.shape[1:]), array.dtype) for name, array in one.items()}
    state = step.init(init, jax.random.key(0), example=(example,))
    return state, batch_layout(step, state, example)
