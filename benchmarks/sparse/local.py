"""What a worker itself computes to exchange its rows, against what the transfer takes at 1 Gb/s: one process, no
network."""

from __future__ import annotations

import functools
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

WORKLOADS = ("lm1b_input", "lm1b_softmax", "criteo")
ROUNDS, STEPS = 7, 3
PROFILED = 2  # times as many steps
GIGABIT = 125e6  # bytes a second
MOST, STRETCH = 0.3, 0.15
PARTS = ("duplicates summed", "indices exchanged", "values exchanged", "update by SGD")


def jobs(options: Any) -> dict[str, dict[str, Any]]:
    """Key of a section -> what it is measured with."""
    return {f"local, {num_workers} workers": {"num_workers": num_workers} for num_workers in options.workers}


def section(quick: bool, data_dir: pathlib.Path, num_workers: int) -> Any:
    """The section, from one process that is all workers: what they send is copied in memory, which is counted too."""
    from benchmarks.training.common import run_child
    from splitjax.runtime.launch.kept_memory import kept_memory

    settings = {
        "workloads": ["criteo"] if quick else list(WORKLOADS), "num_workers": num_workers, "data_dir": str(data_dir),
        "rounds": 2 if quick else ROUNDS, "steps": 1 if quick else STEPS,
    }  # fmt: skip
    flags = (
        f"--xla_force_host_platform_device_count={num_workers} --xla_cpu_multi_thread_eigen=false"
        " intra_op_parallelism_threads=1"
    )
    # A worker that is a process of its own has one thread that computes. Devices of one process wait for each other
    # inside a collective, so each needs a thread, and there is one to spare; further ones look for work of which there
    # is none, and wake each other, which would be counted. No two steps are in flight at once here, which could take
    # all threads and wait forever.
    environment = {**kept_memory(os.environ), "XLA_FLAGS": flags, "NPROC": str(num_workers + 1)}
    return report(run_child("sparse.local", settings, environment), num_workers)


def report(found: dict[str, Any], num_workers: int) -> Any:
    """What the child measured, as a section."""
    from benchmarks._common import table
    from benchmarks.sparse import local_profile
    from benchmarks.splitbrain.common import Goal, Section

    out, goals = [], []
    for facts in found.values():
        transfer = facts["predicted"] / GIGABIT
        share = sum(facts["seconds"][part] for part in PARTS[:3]) / transfer
        out.append(
            [
                facts["name"],
                *(f"{1e3 * facts['seconds'][part]:.2f}" for part in PARTS),
                f"{facts['predicted'] / 1e6:.3f}",
                f"{1e3 * transfer:.1f}",
                f"**{share:.3f}**",
            ]
        )
        goals.append(
            Goal(f"{facts['name']}, {num_workers} workers: local work over the transfer at 1 Gb/s", share, MOST, True)
        )
    titles = ["", *(f"{part}, ms" for part in PARTS), "MB sent", "at 1 Gb/s, ms", "local work over transfer"]
    lines = [
        (
            f"Processor time of one of {num_workers} workers for a step of `row_exchange`, the least of {ROUNDS} turns."
            " All workers are devices of one process, so what they send to each other is copied from memory to memory,"
            " which is in these figures. The process keeps memory as workers of `splitjax launch` do, and has a thread"
            " for each worker and one more."
            " Local work is everything but the update, which every scheme has."
            " Indices could be exchanged while the forward pass computes."
            f" The goal is at most {MOST} on every table, and {STRETCH} where it can be had."
        ),
        "",
        *table(titles, out),
        "",
        *local_profile.lines({facts["name"]: facts["profile"] for facts in found.values()}),
    ]
    return Section(f"Local work of row_exchange: {num_workers} workers", lines, goals)


def _measure(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from benchmarks.sparse import data, local_profile, ways
    from splitjax import sync

    workload = data.named(name, pathlib.Path(settings["data_dir"]))
    mesh = Mesh(np.array(jax.devices()[: settings["num_workers"]]), ("data",))
    profiled = sync.measure(workload.sets(range(3), mesh.size), workload.num_rows, workload.width)
    scheme = sync.RowExchange()
    capacities = scheme.plan(profiled)
    lookups = np.stack([workload.ids(3, worker, mesh.size).reshape(-1) for worker in range(mesh.size)])
    sharding = jax.sharding.NamedSharding(mesh, ways.SPEC)
    ids = jax.device_put(lookups, sharding)
    cotangents = jax.jit(lambda: jnp.ones((*lookups.shape, workload.width), jnp.float32), out_shardings=sharding)()
    wrap = lambda tree: jax.tree.map(lambda one: one[None], tree)
    bare = lambda tree: jax.tree.map(lambda one: one[0], tree)
    sum_up, _ = ways.compiled(
        lambda ids, values: wrap(sync.from_lookups(ids[0], values[0], workload.num_rows)), mesh, (ids, cotangents)
    )
    local = sum_up(ids, cotangents)
    indices = lambda rows: wrap(
        scheme.exchange_indices(rows.ids[0], rows.count[0], workload.num_rows, "data", capacities)
    )
    ask, sets = ways.compiled(indices, mesh, (local,))
    routes = ask(local)
    values = lambda one, routes: wrap(
        scheme.exchange_values(one[0], bare(routes), workload.num_rows, "data", capacities)[0]
    )
    exchange, sums = ways.compiled(values, mesh, (local.values, routes))
    rows = exchange(local.values, routes)
    table = [ways.zeros(mesh, workload.num_rows, workload.width)]
    sgd = lambda table, rows: bare(rows).update(table, lambda old, new: old - 0.1 * new)
    update, _ = ways.compiled(sgd, mesh, (table[0], rows), donate=True)

    def updated() -> Any:
        table[0] = update(table[0], rows)
        return table[0]

    calls = (lambda: sum_up(ids, cotangents), lambda: ask(local), lambda: exchange(local.values, routes), updated)
    runs = dict(zip(PARTS, calls, strict=True))
    halves = {
        "indices": (PARTS[1], ask, ways.transfer(sets, mesh)),
        "values": (PARTS[2], exchange, ways.transfer(sums, mesh)),
    }
    alone = {f"messages of {half}": functools.partial(send, 0) for half, (_, _, send) in halves.items()}
    seconds = _least({**runs, **alone}, settings["rounds"], settings["steps"], mesh.size)
    profile = {
        half: local_profile.split_up(
            program, runs[part], seconds[part], seconds[f"messages of {half}"], PROFILED * settings["steps"]
        )
        for half, (part, program, _) in halves.items()
    }
    predicted = scheme.predicted_bytes(capacities, profiled.table)
    return {"name": workload.name, "seconds": seconds, "predicted": predicted, "profile": profile}


def _least(runs: Mapping[str, Callable[[], Any]], rounds: int, steps: int, num_workers: int) -> dict[str, float]:
    """Of each of the `runs`, the processor time of one of `num_workers` workers in seconds: the least of `rounds` turns
    of `steps` calls."""
    import jax

    seconds = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for part, run in runs.items():
            jax.block_until_ready(run())
            started = time.process_time()
            for _ in range(steps):
                jax.block_until_ready(run())
            seconds[part] = min(seconds[part], (time.process_time() - started) / steps / num_workers)
    return seconds


def _main() -> None:
    import json

    from benchmarks.sparse import local_profile
    from benchmarks.training.common import child_arguments

    settings, result = child_arguments()
    local_profile.mark_parts()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    result.write_text(json.dumps({name: _measure(name, settings) for name in settings["workloads"]}), encoding="utf-8")


if __name__ == "__main__":
    _main()
