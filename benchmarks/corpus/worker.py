"""A process that plans and compiles cells with the splitjax of some checkout, each in a process of its own.

`python -m benchmarks.corpus.worker PACKAGE` imports what is needed once, and then forks for each request (a line of
JSON) before JAX has looked for devices: what a cell gives depends on no cell before it, a compiler that crashes ends
its cell alone, and nothing is imported twice.
"""

from __future__ import annotations

import gc
import gzip
import importlib.metadata
import json
import os
import pathlib
import platform
import signal
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

from benchmarks._common import quiet_tpu_compiler
from benchmarks.corpus.cells import Cell, Unit, cells_of, takes_effect

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 600.0


def environment() -> dict[str, str]:
    """What XLA reads when it starts: eight devices, and whatever could make a program depend on the machine fixed.

    LLVM's optimisations are off, which come behind everything that is recorded. XLA cuts loops by the number of threads
    and chooses by the processor's instructions: both are set."""
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false"
    if platform.machine() in ("x86_64", "AMD64"):
        flags += " --xla_cpu_max_isa=AVX2"
    return {
        "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags, "NPROC": "32",
        "TF_CPP_MIN_LOG_LEVEL": "3", "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip


class Worker:
    """The handle on such a process: starts it when it is first asked, and again after a death."""

    def __init__(self, package: pathlib.Path, hash_seed: str = "random") -> None:
        """`package`: the checkout whose splitjax is used. `hash_seed`: `PYTHONHASHSEED`."""
        self._package, self._hash_seed = package, hash_seed
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: dict[str, Any], limit_seconds: float = LIMIT_SECONDS) -> str:
        """Makes a request; returns "" once its file is there, or what ended the process."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(limit_seconds + 60, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({**request, "limit_seconds": limit_seconds}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            status = process.wait()
            self.close()
            return f"the process that starts others ended with status {status}"
        return json.loads(line)["died"]

    def close(self) -> None:
        """Ends the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
        variables = {**kept, **environment(), "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": self._hash_seed}
        command = [sys.executable, "-m", "benchmarks.corpus.worker", str(self._package)]
        return subprocess.Popen(
            command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )


def main(package: str) -> int:
    """Answers requests until there are no more."""
    quiet_tpu_compiler()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    # Benchmarks come from this checkout, which is on the path and imported already; splitjax comes from that one.
    sys.path.insert(0, package)
    _import_everything(pathlib.Path(package))
    # Tracing makes many small objects: looking for garbage among them, and among what imports have made, takes a
    # quarter of it.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _as_child(request)
        answers.write(json.dumps({"died": _wait(child, request["limit_seconds"])}) + "\n")
        answers.flush()
    return 0


def _import_everything(package: pathlib.Path) -> None:
    import optax  # noqa: F401
    from flax import nnx  # noqa: F401

    import splitjax.models
    import splitjax.nnx

    if package.resolve() not in pathlib.Path(splitjax.__file__).resolve().parents:
        raise SystemExit(f"splitjax comes from {splitjax.__file__}, and not from {package}")


def _wait(child: int, limit_seconds: float) -> str:
    timer = threading.Timer(limit_seconds, os.kill, (child, signal.SIGKILL))
    timer.start()
    _, status = os.waitpid(child, 0)
    timer.cancel()
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit status {os.waitstatus_to_exitcode(status)}" if status else ""


def _as_child(request: dict[str, Any]) -> None:
    """Does what is asked, and ends the process."""
    status = 1
    try:
        file = pathlib.Path(request["file"])
        if request["kind"] == "plans":
            answer: Any = plans(Unit(*request["unit"]), set(request["only"]))
        else:
            answer = program(Cell.parse(request["cell"]))
        part = file.with_suffix(".part")
        with gzip.open(part, "wt", encoding="utf-8", compresslevel=5) as opened:
            json.dump(answer, opened)
        part.replace(file)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def plans(unit: Unit, only: set[str]) -> list[dict[str, Any]]:
    """The plans of a unit's cells, of all or of those named: canonical texts, or the types of errors."""
    from benchmarks.corpus.steps import ready

    made, found = ready(unit), []
    for cell in cells_of(unit):
        if only and cell.name not in only:
            continue
        started = time.process_time()
        record = _attempt(lambda cell=cell: _planned(cell, made)[0])
        found.append({"cell": cell.name, **record, "cpu_seconds": round(time.process_time() - started, 4)})
    return found


def program(cell: Cell) -> dict[str, Any]:
    """What a cell compiles to: canonical modules, memory, collectives, and what is missing. Of a cell whose tables are
    observed first, the program of the first steps and that of all others."""
    from benchmarks.corpus.steps import ready

    made = ready(cell.unit)

    def compiled() -> dict[str, Any]:
        record, steps = _planned(cell, made)
        return {**record, "programs": {name: _compiled(step, made.arguments) for name, step in steps.items()}}

    # Of the whole process, which is this cell's alone: with the compiler's threads.
    return {"cell": cell.name, **_attempt(compiled), "cpu_seconds": round(time.process_time(), 3)}


def _attempt(make: Any) -> dict[str, Any]:
    """What is made, or the type of the error: `refused` by a typed one, `raised` for any other."""
    from splitjax import SplitjaxError

    try:
        return {"status": "ok", **make()}
    except SplitjaxError as error:
        return {"status": "refused", "error": type(error).__name__, "message": str(error)}
    except Exception as error:
        return {"status": "raised", "error": type(error).__name__, "message": traceback.format_exc()[-2000:]}


def _planned(cell: Cell, made: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    from benchmarks.corpus.canonical import canonical_plan
    from benchmarks.corpus.steps import decided, parallel

    steps = {"first": parallel(cell, made)}
    # What lifetimes say of the memory takes seconds for each of thousands of cells.
    plan = steps["first"].plan(*made.arguments).with_summed_memory()
    then = decided(cell, made, plan)
    if then is not None:
        steps["then"] = then
    written = {
        name: (plan if name == "first" else step.plan(*made.arguments).with_summed_memory()).to_json()
        for name, step in steps.items()
    }
    effect = takes_effect(cell, json.loads(written["first"]))
    return {"takes_effect": effect, "plans": {name: canonical_plan(text) for name, text in written.items()}}, steps


def _compiled(step: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    from benchmarks.corpus.modules import canonical_program

    compiled = step.lower(*arguments).compile()
    memory, report = compiled.memory_analysis(), step.report(*arguments)
    sizes = ("argument", "output", "alias", "temp")
    collectives: dict[str, list[int]] = {}
    for one in report.collectives:
        count = collectives.setdefault(f"{one.op} {one.axis}", [0, 0])
        count[0] += 1
        count[1] += one.bytes
    return {
        "module": canonical_program(compiled),
        "memory": {f"{name}_bytes": getattr(memory, f"{name}_size_in_bytes") for name in sizes},
        "collectives": dict(sorted(collectives.items())),
        "report": "".join(sorted(_reported(one) for one in report.collectives)),
        "missing": sorted(f"{one.op} {one.axis} {one.bytes} {one.layer}".strip() for one in report.missing),
        "num_unplanned": len(report.unplanned),
        "num_unattributed": len(report.unattributed),
    }


def _reported(one: Any) -> str:
    """What a report says of a collective, without sentences and lines of code."""
    planned = (
        ""
        if one.planned is None
        else f"planned {one.planned.op} {one.planned.axis} {one.planned.bytes} {one.planned.layer}"
    )
    return f"{one.op} {one.axis} {one.bytes} {one.layer} {one.phase} {one.rule} {planned}".rstrip() + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
