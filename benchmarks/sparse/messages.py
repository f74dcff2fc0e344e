"""What messages cost: the ways to move them between which `sync.wire` chooses by size, one collective or one round of
them at a time.

A worker process is this module, run by `benchmarks.sparse` with its settings as an argument."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable
from typing import Any

ROUNDS, STEPS = 5, 8
KIB = 1024
PARTS_KIB, GATHERED_KIB, SWAPPED_KIB = (0.6, 4, 14, 27, 37, 64), (7, 32, 128, 256), (64, 256, 1024)


def jobs(options: Any) -> dict[str, dict[str, Any]]:
    """Key of a section -> what it is measured with."""
    return {
        f"messages, {n} workers, {link}": {"num_workers": n, "link": link}
        for n in options.workers
        for link in options.links
    }


def section(quick: bool, data_dir: pathlib.Path, num_workers: int, link: str) -> Any:
    """The section of one number of workers and one link."""
    from benchmarks._common import table
    from benchmarks.sparse.launch import others_text, over_workers, run_workers
    from benchmarks.splitbrain.common import Section

    settings = {"rounds": 1 if quick else ROUNDS, "steps": 1 if quick else STEPS}
    answers = run_workers("sparse.messages", settings, num_workers, link)
    rows = []
    for name in answers.workers[0]:
        took = over_workers([worker[name] for worker in answers.workers])
        sent = "" if took.sent is None else f"{took.sent / 1e3:.1f}"
        rows.append(
            [
                name,
                f"{1e3 * took.seconds:.1f}",
                f"{1e3 * took.low:.1f} to {1e3 * took.high:.1f}",
                f"{1e3 * took.cpu:.2f}",
                sent,
            ]
        )
    lines = [
        (
            f"{num_workers} processes of one thread on one machine behind links of {link}."
            " KiB are those of one worker's message to another, or, for gathers, to all. Milliseconds are"
            f" those of the slowest worker: the median of {settings['rounds']} turns, with quartiles."
            f" {others_text(answers.others)}"
        ),
        "",
        *table(["", "ms", "quartiles", "processor time of a worker, ms", "kB sent by the busiest worker"], rows),
        "",
    ]
    return Section(f"Messages: {num_workers} workers, {link}", lines, [])


def _programs(n: int) -> dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]]:
    """By name, what a worker does with its bytes, and their shape."""
    from jax import lax

    from splitjax.sync import wire

    exchanged = lambda pattern: lambda x: wire.exchange([x], "data", pattern)[0][0]
    found: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {}
    for size in PARTS_KIB:
        shape = (n, round(size * KIB))
        found |= {
            f"all-to-all, {size:g} KiB": (exchanged("all_to_all"), shape),
            f"rounds of permutations, {size:g} KiB": (exchanged("ppermute"), shape),
        }
    for size in GATHERED_KIB:
        found[f"gather by a ring, {size} KiB"] = (lambda x: lax.all_gather(x, "data")), (size * KIB,)
        found[f"gather in rounds that double, {size} KiB"] = (
            (lambda x: wire.gather_by_doubling(x, axis="data")),
            (size * KIB,),
        )
    swap, shift = [(i, i ^ 1) for i in range(n - n % 2)], [(i, (i + 1) % n) for i in range(n)]
    for size in SWAPPED_KIB:
        found[f"two swap, {size} KiB"] = (lambda x: lax.ppermute(x, "data", swap)), (size * KIB,)
        found[f"two swap, {size} KiB, in parts as `wire` does"] = (
            (lambda x: wire.permute([x], "data", swap)[0]),
            (size * KIB,),
        )
        found[f"to the next one, {size} KiB"] = (lambda x: lax.ppermute(x, "data", shift)), (size * KIB,)
    return found


def _work(settings: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding

    from benchmarks.sparse import ways
    from benchmarks.sparse.launch import Team

    team = Team(settings)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding, runs = NamedSharding(mesh, ways.SPEC), {}
    for name, (run, shape) in _programs(mesh.size).items():
        message = jax.jit(lambda shape=shape: jnp.zeros((mesh.size, *shape), jnp.uint8), out_shardings=sharding)()
        program, _ = ways.compiled(lambda x, run=run: run(x[0])[None], mesh, (message,))
        runs[name] = lambda step, program=program, message=message: jax.block_until_ready(program(message))
        team.together()
        runs[name](0)
    team.begin()
    turns: dict[str, list[Any]] = {name: [] for name in runs}
    for _ in range(settings["rounds"]):
        for name, run in runs.items():
            turns[name].append(team.turn(run, settings["steps"]))
    team.finish(turns)


if __name__ == "__main__":
    import splitjax

    splitjax.initialize()
    _work(json.loads(sys.argv[1]))
