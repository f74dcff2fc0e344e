"""How many files a reader meets who follows a step through planning and lowering, and how often the trail changes file.

    python -m benchmarks walk [--before CHECKOUT] [--output DIR]

Four small steps are planned and lowered in a process of their own: plain, with `group_comm="modulo"`, with
`sync="auto"` (also when its tables were observed and the step is planned once more), and with partial backpropagation.
Python's profiler reports every call. A *file* counts where a function of it runs; a *switch* is a call from a function
in one file of splitjax to a function in another, with what JAX does between the two left out. With `--before` the same
steps run under an earlier checkout, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import types
from collections.abc import Mapping
from typing import Any

from benchmarks import machine
from benchmarks._common import RESULTS, table, virtual_devices, write_stored

HERE = pathlib.Path(__file__).resolve().parents[1]


# What was done about the switches, for the page; the figures are of this command's table at the commits in between.
ATTEMPTS = """
The aim is half of the earlier switches. Planning again after observed steps, and lowering with exchanges in turns or
with partial backpropagation, are below it; planning, plain lowering and lowering with rows are not. What was tried:

1. *Decide once, then look nothing up.* Planning asked the table of operations, the layout of a parameter and the mesh
   again in every analysis. An operation has its facts from the table since it is flattened (`Op.facts`), a `LeafPlan`
   has its axes, a walk over boundaries stays in `primitives/walk.py`, and dims of examples are marked where the atoms
   are. Planning went from 3,509, 3,427, 3,464 and 3,735 switches (plain, modulo, `sync="auto"`, partial) to 1,919,
   2,191, 1,787 and 2,234.
2. *Ask handlers only about what is decided.* Lowering looked at every equation in four files. An evaluation is told
   which primitives and sites its handler is for (`interpreter.Selective`), and binds all other equations in one call.
   Lowering went from 662, 1,760, 1,136 and 2,756 switches to 323, 1,032, 863 and 1,428.
3. *Prepare the operations of a loop.* The evaluator of microbatches asked for the relation and the form of every
   operand each time; both stand in the analysis of the operation now. Lowering went on to 274 (plain), 704 (modulo) and
   1,015 (partial).

What is left when planning is spread: the largest pair of files has 135 of 1,925 switches (the loop over jaxprs, and
what each equation is flattened to), followed by a scope's name, the table and the dim rule, each once an equation.
Dim rules stand in one table, loops over jaxprs in one interpreter, and predictions are put together a term at a time,
so that a change of one layer predicts again what it touches alone: to halve the number further would put these
together again. Lowering with rows asks about every equation outside of a boundary, as any of them may read rows.
"""


@dataclasses.dataclass
class Trail:
    """Counts what runs of the package in `folder`, while it is the process's profiler.

    `files`: those of which a function ran; `num_switches`: calls from one of them to another."""

    folder: str
    files: set[str] = dataclasses.field(default_factory=set)
    num_switches: int = 0

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if event != "call" or not file.startswith(self.folder):
            return
        self.files.add(file)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self.folder):
            caller = caller.f_back
        self.num_switches += caller is not None and caller.f_code.co_filename != file

    def of(self, work: Any) -> dict[str, int]:
        """Follows `work`, a function without arguments, and returns the counts."""
        self.files, self.num_switches = set(), 0
        sys.setprofile(self)
        try:
            work()
        finally:
            sys.setprofile(None)
        return {"files": len(self.files), "switches": self.num_switches}


def walks() -> dict[str, dict[str, int]]:
    """Follows the four steps with the splitjax that is imported; by step and stage, the counts."""
    import jax
    import jax.numpy as jnp
    import optax

    import splitjax

    trail = Trail(str(pathlib.Path(splitjax.__file__).parent) + os.sep)
    optimizer = optax.adagrad(0.1)
    keys = jax.random.split(jax.random.key(0), 4)
    sizes = {"up": (16, 256), "down": (256, 256), "head": (256, 8)}
    params: dict[str, Any] = {"table": jax.random.normal(keys[3], (4096, 16)), "conv": jnp.ones((3, 3, 4, 16))}
    for key, (name, (width_in, width_out)) in zip(keys, sizes.items(), strict=False):
        params[name] = {"kernel": jax.random.normal(key, (width_in, width_out)), "bias": jnp.zeros(width_out)}
    with_table = {"params": params, "optimizer": optimizer.init(params)}
    dense = {name: value for name, value in params.items() if name != "table"}
    without_table = {"params": dense, "optimizer": optimizer.init(dense)}
    batch = {"ids": jnp.arange(96, dtype=jnp.int32).reshape(32, 3), "y": jnp.ones((32, 8))}
    batch["images"] = jnp.ones((32, 8, 8, 4))

    def step(state, batch):
        def loss(params):
            numbers = ("NHWC", "HWIO", "NHWC")
            convolved = jax.lax.conv_general_dilated(
                batch["images"], params["conv"], (1, 1), "SAME", dimension_numbers=numbers
            )
            hidden = jnp.tanh(convolved).mean((1, 2))
            if "table" in params:
                hidden = hidden + jnp.take(params["table"], batch["ids"], axis=0).sum(axis=1)
            for name in sizes:
                hidden = jnp.tanh(hidden @ params[name]["kernel"] + params[name]["bias"])
            return jnp.mean((hidden - batch["y"]) ** 2)

        value, gradients = splitjax.value_and_grad(loss)(state["params"])
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value

    counts = {}
    for name, rules, options in (
        ("plain", "splitbrain", {}),
        ("modulo", "splitbrain", {"group_comm": "modulo"}),
        ('sync="auto"', "data_parallel", {"sync": "auto"}),
        ("partial", "data_parallel", {"backprop": splitjax.PartialBackprop()}),
    ):
        state = with_table if "sync" in options else without_table
        mesh = {"data": 2, "model": 4} if rules == "splitbrain" else {"data": 8}
        make = lambda mesh=mesh, rules=rules, options=options: splitjax.parallelize(
            step, mesh=mesh, rules=rules, donate=False, **options
        )
        make().plan(state, batch)  # what is loaded when it is first used is loaded now
        parallel = make()
        counts[f"{name}: plan"] = trail.of(lambda parallel=parallel, state=state: parallel.plan(state, batch))
        counts[f"{name}: lower"] = trail.of(lambda parallel=parallel, state=state: parallel.lower(state, batch))
        if "sync" in options:
            for _ in range(3):
                jax.block_until_ready(parallel(state, batch))
            # The call that finds its tables observed plans, lowers and runs the program from then on.
            counts[f"{name}: plan and lower again, its tables observed"] = trail.of(
                lambda parallel=parallel, state=state: jax.block_until_ready(parallel(state, batch))
            )
    return counts


def main(argv: list[str] | None = None) -> int:
    """Follows the steps as the arguments `argv` say (None: those of the process), writes the page, returns 0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks walk", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--before", type=pathlib.Path, help="an earlier checkout, whose splitjax is followed, too")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS, help="where the page goes")
    options = parser.parse_args(argv)
    virtual_devices()
    stored: dict[str, Any] = {"after": _followed(HERE), "before": None, "before_commit": ""}
    if options.before is not None:
        commit = subprocess.run(
            ["git", "-C", str(options.before), "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        stored |= {"before": _followed(options.before), "before_commit": commit.stdout.strip()}
    stored["header"] = machine.header(machine.this_machine(), _command(options)).rstrip()
    print("\n".join(page_lines(stored)))
    print("wrote", write_stored("walk", stored, page_lines, options.output))
    return 0


def page_lines(stored: Mapping[str, Any]) -> list[str]:
    """Returns the page of what `walk.json` holds."""
    before = stored["before"]
    titles = ["step and stage", "files", "switches"]
    if before is not None:
        titles = ["step and stage", "files before", "files", "switches before", "switches", "switches after / before"]
    rows = []
    for name, now in stored["after"].items():
        row = [name, str(now["files"]), f"{now['switches']:,}"]
        if before is not None:
            then = before[name]
            ratio = f"{now['switches'] / then['switches']:.2f}"
            row = [name, str(then["files"]), row[1], f"{then['switches']:,}", row[2], ratio]
        rows.append(row)
    lines = ["# The walk: files that a step passes through", "", stored["header"], ""]
    if before is not None:
        lines += [f"Before: commit {stored['before_commit']}.", ""]
    lines += [*(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), "", *table(titles, rows)]
    if before is not None:
        lines += ["", *ATTEMPTS.strip().splitlines()]
    return lines


def _command(options: argparse.Namespace) -> str:
    return "python -m benchmarks walk" + (" --before CHECKOUT" if options.before else "")


def _followed(checkout: pathlib.Path) -> dict[str, dict[str, int]]:
    """The counts for the splitjax of a `checkout`, from a process of its own."""
    path = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        cwd=checkout,
    )
    if done.returncode:
        raise SystemExit(f"the steps could not be followed in {checkout}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":  # in the process of its own: `-P` keeps this folder from hiding modules of Python
    virtual_devices()
    print(json.dumps(walks()))
