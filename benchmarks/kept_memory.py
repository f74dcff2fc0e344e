"""What a training step gains on a processor where the C library keeps freed memory, as `splitjax launch` tells it to.

    python -m benchmarks kept_memory                everything (about eight minutes), and its page
    python -m benchmarks kept_memory --quick        one model, printed only

Each model trains on one core, in a process of its own, once with the environment of the machine and once with the
variables that `splitjax.runtime.launch.kept_memory` gives to workers; the two take turns, round by round. A ratio is
that of one round; the median of the rounds is reported, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks import machine
from benchmarks._common import table, write_stored

PAGE = "kept_memory"
MODELS = ("mlp", "vgg16", "transformer", "lstm", "deepfm")
ROUNDS, WARM, STEPS = 5, 4, 12
ONE_CORE = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
GIVES, KEEPS = "gives back", "keeps"


def main(argv: list[str] | None = None) -> int:
    """Measures all models, and writes the page."""
    parser = argparse.ArgumentParser(PAGE, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one model, one round")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the page instead of benchmarks/results")
    parser.add_argument("--child", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print(json.dumps(trained(options.child)))
        return 0
    command = f"python -m benchmarks {PAGE}{' --quick' if options.quick else ''}"
    found: dict[str, Any] = {"header": machine.header(machine.this_machine(), command).rstrip(), "models": {}}
    for name in MODELS[:1] if options.quick else MODELS:
        rounds = [{way: _child(name, way) for way in (GIVES, KEEPS)} for _ in range(1 if options.quick else ROUNDS)]
        found["models"][name] = rounds
        print(f"{name}: {ratios(rounds)[1]:.2f} of the time", flush=True)
    if options.quick and options.output is None:
        print("\n".join(page_lines(found)))
        return 0
    print("wrote", write_stored(PAGE, found, page_lines, options.output))
    return 0


def trained(name: str) -> dict[str, float]:
    """Trains a model in this process. Returns what a step takes, as medians: seconds, and pages that the system made
    anew; and the most bytes that the process had at a time."""
    import splitjax
    from benchmarks.planner.quality_ways import Runner, model_of

    model = model_of(name)
    run = Runner(model, splitjax.parallelize(model.step, mesh={"data": 1}, rules="data_parallel"))
    turns = []
    for _ in range(WARM + STEPS):
        before = time.perf_counter(), _new_pages()
        run()
        after = time.perf_counter(), _new_pages()
        turns.append([b - a for a, b in zip(before, after, strict=True)])
    seconds, pages = (statistics.median(each) for each in zip(*turns[WARM:], strict=True))
    most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": seconds, "pages": pages, "most_bytes": most}


def ratios(rounds: list[dict[str, dict[str, float]]]) -> tuple[float, float, float]:
    """The time of a step whose process keeps memory over that of one that gives it back: lowest, median, highest."""
    each = [one[KEEPS]["seconds"] / one[GIVES]["seconds"] for one in rounds]
    return min(each), statistics.median(each), max(each)


def page_lines(found: dict[str, Any]) -> list[str]:
    """The page of the stored figures."""
    rows = []
    for name, rounds in found["models"].items():
        of = lambda way, what, rounds=rounds: statistics.median(one[way][what] for one in rounds)
        low, middle, high = ratios(rounds)
        rows.append([
            name, f"{1e3 * of(GIVES, 'seconds'):.1f}", f"{1e3 * of(KEEPS, 'seconds'):.1f}", f"**{middle:.2f}**",
            f"{low:.2f} to {high:.2f}", f"{of(GIVES, 'pages'):.0f}", f"{of(KEEPS, 'pages'):.0f}",
            f"{of(GIVES, 'most_bytes') / 2**20:.0f}", f"{of(KEEPS, 'most_bytes') / 2**20:.0f}",
        ])  # fmt: skip
    titles = [
        "model", "gives back, ms", "keeps, ms", "keeps over gives back", "rounds", "new pages, gives back",
        "new pages, keeps", "most MiB, gives back", "most MiB, keeps",
    ]  # fmt: skip
    return [
        "# Memory that processes keep from step to step",
        "",
        found["header"],
        "",
        *(__doc__ or "").strip().split("\n\n")[-1].splitlines(),
        "",
        f"Medians of {len(next(iter(found['models'].values())))} rounds of {STEPS} steps. *New pages*: those of 4 KiB"
        " that the system had to make in a step. *Most MiB*: what the process had at most, programs and compiler"
        " included.",
        "",
        *table(titles, rows),
    ]


def _child(name: str, way: str) -> dict[str, float]:
    from splitjax.runtime.launch.kept_memory import kept_memory

    tuned = kept_memory({})
    base = {key: value for key, value in os.environ.items() if key not in tuned}
    environment = {**base, "JAX_PLATFORMS": "cpu", "NPROC": "1", "XLA_FLAGS": ONE_CORE}
    command = [sys.executable, "-m", "benchmarks", PAGE, "--child", name]
    environment |= tuned if way == KEEPS else {}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.strip().splitlines()[-1])


def _new_pages() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


if __name__ == "__main__":
    sys.exit(main())
