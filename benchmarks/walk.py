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
The aim is half of the earlier switches. Before the work on it they had grown to 3,541, 3,460, 3,532 and 3,774 when
planning (plain, modulo, `sync="auto"`, partial) and to 662, 1,760, 1,147 and 2,757 when lowering. What was done:

1. *Decide once, then look nothing up.* Planning asked the table of operations, the layout of a parameter and the mesh
   again in every analysis. An operation has its facts from the table since it is flattened (`Op.facts`), a `LeafPlan`
   has its axes, a `MeshShape` the axes that split anything, and dims of examples are marked where the atoms are.
   Planning went to about 1,960, 2,150, 1,860 and 2,180.
2. *Ask handlers only about what is decided.* Lowering looked at every equation in four files. An evaluation is told
   which primitives, sites and types of operands its handler is for (`interpreter.Selective`), and binds all other
   equations in one call. With what follows lowering went to 226, 650, 534 and 941.
3. *Prepare the operations of a loop.* The evaluator of microbatches asked for the relation and the form of every
   operand each time; both stand in the analysis of the operation.
4. *Ask once for all of them.* Name stacks of a jaxpr, shardings of all arguments and terms of the memory are made in
   one call each, facts of an operation are looked up once a step, labels of elementwise operations once for the same
   shapes, and only calls are asked what they call. Planning went to 1,219, 1,393, 1,223 and 1,409: half or less. With
   what was added then (kernels, loops around the gradient, batches that do not divide) it grew to 1,595, 1,507, 1,318
   and 1,491.
5. *Predict what is asked for.* To choose a group communication, planning asked for two whole predictions and read their
   memory; it asks for the memory now. Boundaries are found without a call for each equation, and the user's line of an
   operation is looked up for the message that names it. It went to 1,154, 1,435, 1,177 and 1,413, and with padded
   arrays, chosen rules and marked balance losses to 1,166, 1,463, 1,186 and 1,443.
6. *State facts of all values at once.* Whether a value is made of state alone, and whether it reaches the loss, was
   asked of the flow of values for every operation; both stand in it by value. Dims of elementwise operations are
   labelled once for all shapes with the same dims of size 1. It went to the figures of the table.
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


# In the process of its own: splitjax comes from the checkout, and the steps and the counting from here.
_FOLLOW = """
import json, sys
sys.path.insert(0, sys.argv[1])
import splitjax
sys.path[0] = sys.argv[2]
from benchmarks import walk
walk.virtual_devices()
print(json.dumps(walk.walks()))
"""


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
    done = subprocess.run(
        [sys.executable, "-P", "-c", _FOLLOW, str(checkout.resolve()), str(HERE)],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    if done.returncode:
        raise SystemExit(f"the steps could not be followed in {checkout}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
