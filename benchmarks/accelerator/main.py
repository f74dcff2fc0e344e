"""One accelerator: what `step.memory` and `step.time` predict, against the compiler and the device itself.

    python -m benchmarks accelerator [--quick] [--output FOLDER]
    python -m benchmarks accelerator --repredict     what is stored, predicted anew; memory with JAX's plugin for GPUs

Steps of one device (a mesh of one, rule set `data_parallel`), so that nothing is sent: what is tried is the prediction
of memory and of computing, the cost of a call, and that numbers are those of `jax.jit`. The device is calibrated first,
as `splitjax calibrate` does. Where there is no accelerator nothing is written; `--quick` runs small models there.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._common import RESULTS, table, write_stored
from benchmarks.accelerator.cells import MODELS, Cell, every_cell

MEMORY_GOALS = {"median": 0.05, "p90": 0.12, "worst": 0.20, "bound_holds": 0.98}
TIME_GOAL = 0.20
BUDGET_MODELS = ("vgg16", "transformer", "scanned_remat")
CALIBRATION = "calibration-h100.json"  # beside the page: of the device whose times are stored
_BUDGET_SHARE = 0.1  # of the device's memory
_AT_ONCE = 6
_MIB = 2**20


def _run(what: str, folder: pathlib.Path, name: str, *rest: str, quick: bool, **environment: str) -> Any:
    """Runs `benchmarks.accelerator.running` in a process of its own, and returns what it found or how it failed; what
    an earlier run left in `folder` is not run again."""
    file = folder / f"{what}-{name.replace('/', '-')}.json"
    if file.exists():
        return json.loads(file.read_text())
    command = [sys.executable, "-m", "benchmarks.accelerator.running", what, str(file), *rest]
    command += ["--quick"] if quick else []
    done = subprocess.run(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)
    if done.returncode or not file.exists():
        print(f"{what} {name} failed:\n{done.stderr[-1500:]}", file=sys.stderr, flush=True)
        return {"cell": name, "error": done.stderr.strip().splitlines()[-1:]}
    found = json.loads(file.read_text())
    print(what, json.dumps(found), flush=True)
    return found


def found_memory(cells: Sequence[Cell], folder: pathlib.Path, quick: bool) -> tuple[list[Any], list[Any]]:
    """Memory of every cell, and which batches run under a budget; several processes share the device."""
    apart = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0",
    }
    budget = {**apart, "XLA_PYTHON_CLIENT_MEM_FRACTION": str(_BUDGET_SHARE)}
    models = ("mlp",) if quick else BUDGET_MODELS
    with concurrent.futures.ThreadPoolExecutor(1 if quick else _AT_ONCE) as pool:
        budgets = [pool.submit(_run, "budget", folder, model, model, quick=quick, **budget) for model in models]
        memory = [pool.submit(_run, "memory", folder, cell.name, cell.name, quick=quick, **apart) for cell in cells]
        return [each.result() for each in memory], [each.result() for each in budgets]


def memory_summary(cells: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The figures that goals are about, of predictions against what the compiler says."""
    errors = sorted(abs(cell["estimate"] / cell["compiled"] - 1) for cell in cells)
    return {
        "median": statistics.median(errors), "p90": errors[min(len(errors) - 1, int(0.9 * len(errors)))],
        "worst": errors[-1], "bound_holds": statistics.mean(cell["bound"] >= cell["compiled"] for cell in cells),
    }  # fmt: skip


def repredicted(stored: Mapping[str, Any], target: str, commit: str, mesh: Any = None) -> dict[str, Any]:
    """What is stored, predicted anew; nothing runs, and no device is needed.

    **Arguments:** `stored`: what runs on a device wrote, with the calibration of that device for every time. `target`:
    what splitjax's tables know the device as. `commit`: what predicts. `mesh`: of one such device that need not be
    here; without it memory stays as it is stored."""
    from benchmarks.accelerator.running import predicted_memory, predicted_times

    times = [
        cell | predicted_times(Cell.parse(cell["cell"]), str(RESULTS / cell["calibration"]), target)
        for cell in stored["times"]
    ]
    found: dict[str, Any] = {**stored, "times": times, "predicted_with": commit}
    if mesh is None:
        return found
    found["memory"] = [cell | predicted_memory(Cell.parse(cell["cell"]), mesh) for cell in stored["memory"]]
    found["budgets"] = [
        each | {"tried": [one | predicted_memory(Cell(each["model"], one["batch"]), mesh) for one in each["tried"]]}
        for each in stored["budgets"]
    ]
    return found


def lines_of(stored: Mapping[str, Any]) -> list[str]:
    """The lines of the page."""
    memory = [cell for cell in stored["memory"] if "error" not in cell]
    times = stored["times"]
    again = stored.get("predicted_with", "")
    lines = [
        "# One accelerator", "",
        "Training steps on one device, where nothing is sent. Predicted before compiling: memory by `step.memory`; time"
        " by `step.time` from a calibration of this device (`splitjax calibrate`: single operations, no step), and from"
        " the figures that its vendor publishes, which is a lower bound where a step's kernels are those that are"
        " predicted. A third of the steps, by a hash of"
        " their names, is held out: nothing was fitted to those.", "",
        stored["header"], "", *stored["notes"], "",
        *([f"What was measured then was predicted anew with commit {again}:"
           " `python -m benchmarks accelerator --repredict`. Calibrations are stored beside this page.", ""]
          if again else []),
        "## Time", "",
    ]  # fmt: skip
    if times:
        rows = []
        for kind in ("held out", "looked at"):
            cells = [cell for cell in times if cell["held_out"] == (kind == "held out")]
            if not cells:
                continue
            errors = [abs(cell["predicted"] / cell["measured"] - 1) for cell in cells]
            mark = "" if statistics.mean(errors) <= TIME_GOAL else " (missed)"
            rows.append([
                kind, str(len(cells)), f"{statistics.mean(errors):.1%} of {TIME_GOAL:.0%}{mark}", f"{max(errors):.1%}",
                f"{statistics.median(cell['measured'] / cell['plain'] for cell in cells):.3f}",
                f"{max(cell['measured'] / cell['plain'] for cell in cells):.3f}",
            ])  # fmt: skip
        lines += table(
            ["steps", "number", "mean error of the calibrated prediction", "worst error",
             "time over that of `jax.jit`, median", "time over that of `jax.jit`, worst"],
            rows,
        )  # fmt: skip
        lines += ["", "Every step, in ms:", ""]
        lines += table(
            ["step (model/examples)", "", "predicted", "measured", "off by", "lower bound by published figures",
             "the same step under `jax.jit`", "loss of the second step", "under `jax.jit`"],
            [
                [
                    cell["cell"], "held out" if cell["held_out"] else "", f"{1e3 * cell['predicted']:.2f}",
                    f"{1e3 * cell['measured']:.2f}", f"{cell['predicted'] / cell['measured'] - 1:+.1%}",
                    f"{1e3 * cell['published']:.2f}" if cell["published"] else "",
                    f"{1e3 * cell['plain']:.2f}", f"{cell['loss']:.5f}", f"{cell['plain_loss']:.5f}",
                ]
                for cell in times
            ],
        )  # fmt: skip
    return [*lines, *(_lines_of_memory(memory) if memory else []), *_lines_of_budgets(stored["budgets"])]


def _lines_of_memory(memory: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = ["", "## Memory", ""]
    rows = []
    for kind in ("held out", "looked at"):
        cells = [cell for cell in memory if cell["held_out"] == (kind == "held out")]
        if not cells:
            continue
        found = memory_summary(cells)
        shown = [
            f"{found[name]:.1%} of {MEMORY_GOALS[name]:.0%}{'' if found[name] <= MEMORY_GOALS[name] else ' (missed)'}"
            for name in ("median", "p90", "worst")
        ]
        rows.append([kind, str(len(cells)), *shown, f"{found['bound_holds']:.0%}"])
    lines += table(
        ["steps", "number", "median error against the compiler", "90th percentile", "worst", "upper bound holds in"],
        rows,
    )
    lines += ["", "Every step, in MiB:", ""]
    lines += table(
        ["step (model/examples)", "", "estimate", "the compiler says", "off by", "upper bound",
         "the device held at most"],
        [
            [
                cell["cell"], "held out" if cell["held_out"] else "", f"{cell['estimate'] / _MIB:.0f}",
                f"{cell['compiled'] / _MIB:.0f}", f"{cell['estimate'] / cell['compiled'] - 1:+.1%}",
                f"{cell['bound'] / _MIB:.0f}", f"{cell['peak'] / _MIB:.0f}",
            ]
            for cell in memory
        ],
    )  # fmt: skip
    return lines


def _lines_of_budgets(budgets: Sequence[Mapping[str, Any]]) -> list[str]:
    if not budgets:
        return []
    return [
        "", "## Verdicts, executed", "",
        "The largest batch (in steps of 8 examples) that the upper bound let through under a budget when this ran, then"
        " larger ones until one did not run. The budget is the memory that the process may use.", "",
        *_table_of_budgets(budgets),
    ]  # fmt: skip


def _table_of_budgets(budgets: Sequence[Mapping[str, Any]]) -> list[str]:
    return table(
        ["model", "budget, MiB", "examples", "estimate, MiB", "upper bound, MiB", "verdict by the bound", "ran"],
        [
            [
                each["model"], f"{each['limit'] / _MIB:.0f}", str(one["batch"]), f"{one['estimate'] / _MIB:.0f}",
                f"{one['bound'] / _MIB:.0f}", "fits" if one["bound"] <= each["limit"] else "does not fit",
                "yes" if one["ran"] else "no",
            ]
            for each in budgets if "error" not in each
            for one in each["tried"]
        ],
    )  # fmt: skip


def _repredict(target: str, folder: pathlib.Path | None) -> int:
    import jax

    from benchmarks.machine import this_commit
    from benchmarks.planner.cells import GPU
    from benchmarks.planner.targets import mesh_of

    mesh = mesh_of(GPU, {"data": 1}) if "cuda" in (jax.config.jax_platforms or "") else None
    stored = json.loads((RESULTS / "accelerator.json").read_text())
    print("wrote", write_stored("accelerator", repredicted(stored, target, this_commit(), mesh), lines_of, folder))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Returns 0, or 2 where there is no accelerator."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks accelerator", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two small steps, on whatever device there is")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the page, instead of benchmarks/results")
    parser.add_argument("--target", default="gpu:h100:1x1", help="the device as splitjax's tables know it")
    parser.add_argument("--calibration", type=pathlib.Path, help="this file, instead of a new one")
    parser.add_argument("--cells", nargs="*", help="only these steps, such as mlp/1024; the page goes to --output")
    parser.add_argument("--parts", type=pathlib.Path, help="folder that keeps what has run: a run cut short goes on")
    parser.add_argument("--only", choices=("memory", "time"), help="one half")
    parser.add_argument("--repredict", action="store_true", help="predict stored times anew; needs no device")
    options = parser.parse_args(argv)
    if options.repredict:
        return _repredict(options.target, options.output)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    cells = [Cell(name, 16) for name in list(MODELS)[:1]] if options.quick else every_cell()
    cells = [Cell.parse(name) for name in options.cells] if options.cells else cells
    with tempfile.TemporaryDirectory() as name:
        folder = options.parts or pathlib.Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        import jax

        from benchmarks.machine import header, this_machine
        from splitjax.measure.calibrating import calibrate

        if jax.default_backend() == "cpu" and not options.quick:
            print("error: there is no accelerator\n  remedy: run this where jax.devices() shows one", file=sys.stderr)
            return 2
        times: list[Any] = []
        if options.only != "memory":
            file = options.calibration or folder / "calibration.json"
            if not file.exists():
                calibrate(quick=options.quick, told=lambda line: print(line, flush=True)).save(file)
            target = "" if jax.default_backend() == "cpu" else options.target
            for cell in cells:
                found = _run("time", folder, cell.name, str(file), target, cell.name, quick=options.quick)
                times.append(found | {"calibration": CALIBRATION})
        memory, budgets = found_memory(cells, folder, options.quick) if options.only != "time" else ([], [])
        failed = [each for each in [*times, *memory, *budgets] if "error" in each]
        times = [each for each in times if "error" not in each]
        notes = [f"{each['cell']} failed: {each['error']}" for each in failed]
        machine = header(this_machine(), "python -m benchmarks accelerator" + (" --quick" if options.quick else ""))
    content = {"header": machine, "notes": notes, "memory": memory, "budgets": budgets, "times": times}
    if options.output or not options.quick:
        print("wrote", write_stored("accelerator", content, lines_of, options.output))
    else:
        print("\n".join(lines_of(json.loads(json.dumps(content)))))
    return 0
