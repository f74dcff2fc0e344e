"""A table of 20 million rows x 64 (5 GB): that a step allocates no dense gradient, from compiled memory, and that steps
run."""

from __future__ import annotations

import json
import math
import os
import pathlib
import resource
import time
from typing import Any

ROWS, WIDTH, LOOKUPS = 20_000_000, 64, 20_480
STEPS = 8  # the first three are observed; then the step is compiled once more
MOST_TEMPORARY = 0.05  # of the table's bytes


def jobs(options: Any) -> dict[str, dict[str, Any]]:
    """Key of a section -> what it is measured with."""
    return {f"big_table, {num_workers} workers": {"num_workers": num_workers} for num_workers in options.workers}


def section(quick: bool, data_dir: pathlib.Path, num_workers: int) -> Any:
    """The section, from one process with that many devices, each with the whole table."""
    from benchmarks.training.common import run_child

    flags = (
        f"--xla_force_host_platform_device_count={num_workers}"
        " --xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
    )
    rows = ROWS // 5 if quick else ROWS
    available = _available_bytes()
    if available < 1.5 * num_workers * rows * WIDTH * 4:
        raise RuntimeError(
            f"the table needs {num_workers * rows * WIDTH * 4 / 1e9:.1f} GB and some room; {available / 1e9:.1f} GB of"
            " memory are free"
        )
    found = run_child("sparse.big_table", {"rows": rows, "num_workers": num_workers}, {"XLA_FLAGS": flags})
    return report(found, num_workers)


def report(found: dict[str, Any], num_workers: int) -> Any:
    """What the child measured, as a section."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    table_bytes = found["rows"] * WIDTH * 4
    titles = [
        "step",
        "arguments, GB",
        "temporaries, GB",
        "results not written over arguments, GB",
        "temporaries over the table",
    ]
    out = [
        [
            name,
            *(f"{1e-9 * one[part]:.3f}" for part in ("arguments", "temporaries", "fresh")),
            f"{one['temporaries'] / table_bytes:.4f}",
        ]
        for name, one in found["memory"].items()
    ]
    lines = [
        f"A table of {found['rows']:,} rows x {WIDTH} float32 ({table_bytes / 1e9:.2f} GB), {LOOKUPS:,} lookups of a"
        " worker by a falling frequency, SGD, mesh "
        f'data={num_workers}, `sync="row_exchange"`. Memory of one device as compiled; `dense` is compiled beside it'
        " and not run.",
        "",
        *table(titles, out),
        "",
        (
            f"{len(found['seconds'])} steps ran: {', '.join(f'{one:.2f}' for one in found['seconds'])} s (the first"
            " compiles, and the first after the three that are observed). Peak memory of the process:"
            f" {found['peak'] / 1e9:.2f} GB, of which {num_workers * table_bytes / 1e9:.2f} GB are the table. Loss"
            f" {found['losses'][0]:.4f} to {found['losses'][-1]:.4f}."
        ),
        "",
    ]
    sparse = found["memory"]["row_exchange"]
    goals = [
        Goal(
            "a table of 5 GB: temporaries of a step, of the table",
            sparse["temporaries"] / table_bytes,
            MOST_TEMPORARY,
            True,
        ),
        Goal(
            "a table of 5 GB: results not written over arguments, of the table",
            sparse["fresh"] / table_bytes,
            MOST_TEMPORARY,
            True,
        ),
        Goal(
            "a table of 5 GB: peak of the process over the tables and the dense gradients",
            found["peak"] / (2 * num_workers * table_bytes),
            1.0,
            True,
        ),
        Goal(
            "a table of 5 GB: loss after the steps over the first", found["losses"][-1] / found["losses"][0], 1.0, True
        ),
    ]
    return Section(
        f"A table of 20 million rows: {num_workers} {'device' if num_workers == 1 else 'devices'}", lines, goals
    )


def _measure(rows: int, num_workers: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import splitjax

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return jnp.mean((params["table"][batch["ids"]] - batch["target"]) ** 2)

        loss, grads = splitjax.value_and_grad(loss_fn)(state)
        return jax.tree.map(lambda old, grad: old - 200.0 * grad, state, grads), {"loss": loss}

    def batch_of(number: int) -> dict[str, Any]:
        rng = np.random.default_rng(number)
        ids = np.minimum(np.exp(rng.random(LOOKUPS * num_workers) * math.log(rows)), rows - 1).astype(np.int32)
        ids[:2] = 0, rows - 1
        return {"ids": ids, "target": np.ones((ids.size, WIDTH), np.float32)}

    init = lambda key: {"table": jnp.zeros((rows, WIDTH), jnp.float32)}
    options = {"mesh": {"data": num_workers}, "rules": "data_parallel"}
    batch, memory = batch_of(0), {}
    dense = splitjax.parallelize(step, **options)
    memory["dense"] = _memory(dense, dense.abstract_state(init, jax.random.key(0), example=(batch,)), batch)
    sparse = splitjax.parallelize(step, **options, sync="row_exchange")
    state = sparse.init(init, jax.random.key(0), example=(batch,))
    seconds, losses = [], []
    for number in range(STEPS):
        started = time.perf_counter()
        state, metrics = sparse(state, batch_of(number))
        losses.append(float(metrics["loss"]))
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - started)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory["row_exchange"] = _memory(sparse, state, batch)
    return {"rows": rows, "memory": memory, "seconds": seconds, "losses": losses, "peak": peak}


def _memory(step: Any, state: Any, batch: Any) -> dict[str, int]:
    sizes = step.lower(state, batch).compile().memory_analysis()
    return {
        "arguments": sizes.argument_size_in_bytes, "temporaries": sizes.temp_size_in_bytes,
        "fresh": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
    }  # fmt: skip


def _available_bytes() -> int:
    return (
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        if not os.path.exists("/proc/meminfo")
        else next(
            int(line.split()[1]) * 1024
            for line in pathlib.Path("/proc/meminfo").read_text().splitlines()
            if line.startswith("MemAvailable")
        )
    )


def _main() -> None:
    from benchmarks.training.common import child_arguments

    settings, result = child_arguments()
    result.write_text(json.dumps(_measure(**settings)), encoding="utf-8")


if __name__ == "__main__":
    _main()
