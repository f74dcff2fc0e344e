"""Whether training steps in today's idioms have one device's numbers, whatever the layout.

    python -m benchmarks modern --only numbers                  all steps, and the page
    python -m benchmarks modern --only numbers --step NAME      one; printed, and no page. Can be given again
    python -m benchmarks modern --only numbers --quick          a few small steps under a few layouts

Three steps of training run on one device under `jax.jit` and on eight virtual devices under `splitjax.parallelize`,
from the same state with the same batches. Every loss and every leaf of the new state (parameters, moments, averages,
counts, keys) is compared: absolutely below one, relatively above.

Layouts are rule sets, meshes of two and three axes, and axes of type Explicit and Auto. Not all combinations run but a
pairwise cover of them: every step meets every rule set that splitjax ships, every mesh that fits it and both types of
axes, and every rule set meets every mesh that it knows with both types. A mesh fits a step if it has no axis of
experts, or the step has experts that divide by it; a rule set knows a mesh if it has a use for each of its axes.

A typed `SplitjaxError` is a refusal. Which steps may be refused under which rule set was written down before the first
whole run; any other refusal counts against the step, as wrong numbers and other errors do.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import machine
from benchmarks._common import RESULTS, virtual_devices, write_stored
from benchmarks.modern.cells import Cell, covering
from benchmarks.modern.comparing import RAISED, SAME, Outcome
from benchmarks.modern.numbers_page import PAGE, page_lines, passes
from benchmarks.modern.refusals import expected
from benchmarks.modern.steps.case import ModernStep
from benchmarks.modern.steps.catalogue import every_step

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMIT_SECONDS = 900.0  # of a cell by the clock: many times what any takes, even on a busy machine
QUICK = ("LoRA", "Mixtral, capacity")
QUICK_CELLS = 3  # of each


def run(
    names: Sequence[str] | None,
    quick: bool,
    folder: pathlib.Path | None,
    jobs: int = 2,
    work: pathlib.Path | None = None,
) -> int:
    """Compares steps with one device, and returns 1 where one does not pass everywhere, 2 for an unknown name.

    **Arguments:** `names`: of steps; None for all. `quick`: those of `QUICK`, in few cells. `folder`: of the page,
    which otherwise is written by a whole run alone. `jobs`: processes at once. `work`: a folder where outcomes are kept
    by commit, so that a run that was ended goes on where it was."""
    steps = {step.name: step for step in every_step()}
    if unknown := [name for name in names or () if name not in steps]:
        print(f"error: there is no step {unknown[0]!r}\n  remedy: name one of {'; '.join(steps)}", file=sys.stderr)
        return 2
    chosen = [steps[name] for name in names or (QUICK if quick else steps)]
    cells = {name: list(each) for name, each in itertools.groupby(covering(chosen), lambda cell: cell.step)}
    if quick:
        cells = {name: each[-QUICK_CELLS:] for name, each in cells.items()}
    outcomes: list[Outcome] = []
    kept = None if work is None else work / machine.this_commit().replace(" ", "_")
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for found in pool.map(lambda step: _compared(step, cells[step.name], kept), chosen):
            outcomes += found
    whole = not names and not quick
    rows = [_row(step, [each for each in outcomes if each.step == step.name]) for step in chosen]
    passed = sum(map(passes, rows))
    print(f"{passed} of {len(chosen)} steps pass everywhere", flush=True)
    if whole or folder is not None:
        virtual_devices()
        command = f"python -m benchmarks modern --only numbers{' --quick' if quick else ''}"
        stored = {"header": machine.header(machine.this_machine(), command).rstrip(), "steps": rows}
        print("wrote", write_stored(PAGE, stored, page_lines, folder or RESULTS))
    return int(passed < len(chosen))


def _row(step: ModernStep, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What is stored of a step."""
    cells = [
        {**dataclasses.asdict(each), "why": expected(step, each.rules, each.text) if each.text else ""}
        for each in outcomes
    ]
    about = {name: getattr(step, name) for name in ("name", "idiom", "dtype", "tolerance", "num_experts")}
    return {**about, "has": list(step.has), "cells": cells}


def _compared(step: ModernStep, cells: Sequence[Cell], kept: pathlib.Path | None = None) -> list[Outcome]:
    """Compares the cells of a step in processes of their own: where one ends early, another goes on behind the cell
    that ended it. Where one device has no numbers to compare with, every cell has that error. `kept`: a folder with
    what was compared before, a line for each cell."""
    found: list[Outcome] = []
    file = None if kept is None else kept / f"{re.sub('[^A-Za-z0-9]+', '_', step.name)}.jsonl"
    if file is not None and file.is_file():
        found += [Outcome(**json.loads(line)) for line in file.read_text(encoding="utf-8").splitlines()]
        if [outcome.cell for outcome in found] != list(cells[: len(found)]):
            raise ValueError(f"{file} is of other cells: give another folder")

    def keep(outcome: Outcome) -> None:
        found.append(outcome)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            with file.open("a", encoding="utf-8") as opened:
                opened.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
        _show(step, outcome)

    while len(found) < len(cells):
        for answer in _ask(step, cells[len(found) :]):
            if "step" in answer:
                keep(Outcome(**answer))
                continue
            left = cells[len(found) :]
            for cell in left if "broken" in answer else left[:1]:
                text = answer.get("broken") or answer["ended"]
                keep(Outcome(*dataclasses.astuple(cell), status=RAISED, text=text))
    return found


def _ask(step: ModernStep, cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """Yields what a process answers: the outcomes of cells in their order. Where it gives fewer, one answer more says
    why: `broken`, the step's error on one device, or `ended`, how the process did."""
    request = {"step": step.name, "cells": [[cell.rules, cell.mesh, cell.axes] for cell in cells]}
    variables = {**os.environ, **_environment(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.modern.worker"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    late = threading.Event()

    def end() -> None:
        late.set()
        process.kill()

    num_answers = 0
    try:
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        while True:
            timer = threading.Timer(LIMIT_SECONDS, end)
            timer.start()
            line = process.stdout.readline()
            timer.cancel()
            if not line:
                break
            answer = json.loads(line)
            num_answers += 1
            yield answer
            if "broken" in answer:
                return
        if num_answers < len(cells):
            status = process.wait()
            yield {"ended": f"no end within {LIMIT_SECONDS:.0f} s" if late.is_set() else f"exit status {status}"}
    finally:
        process.kill()
        process.communicate()


def _environment() -> dict[str, str]:
    """Variables of the processes: eight devices, and a compiler that takes half the time, since LLVM's optimisations
    come behind all that is compared here."""
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_parallel_codegen_split_count=1"
    # On a busy machine devices may have to wait for each other for longer than XLA thinks that they should.
    flags += " --xla_cpu_collective_call_terminate_timeout_seconds=600"
    flags += " --xla_cpu_collective_call_warn_stuck_timeout_seconds=300"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        flags += " --xla_cpu_use_fusion_emitters=false"
    # Steps in flight on virtual devices can take all threads of their pool, without NPROC, and wait for each other
    # forever.
    return {
        "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "XLA_FLAGS": flags, "NPROC": "32",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }  # fmt: skip


def _show(step: ModernStep, outcome: Outcome) -> None:
    """Prints a line of a cell, and its error where it may not have one."""
    status = outcome.status
    if outcome.text and (why := expected(step, outcome.rules, outcome.text)):
        status, text = f"{status}, as expected", why
    else:
        text = outcome.text
    apart = "" if outcome.difference is None else f"{outcome.difference:.1e} at {outcome.where or 'none'}"
    print(f"{status:8} {outcome.seconds:5.1f} s  {step.name}: {outcome.cell.layout}  {apart}", flush=True)
    if text and outcome.status != SAME:
        print("    " + text.replace("\n", "\n    "), flush=True)
