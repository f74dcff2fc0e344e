"""A process that solves one problem, and keeps the best answer so far in a file.

    python -m benchmarks.iopddl.worker PROBLEM ANSWER --seconds S --seed K [--solver NAME] [--clock wall|processor]

Every better answer replaces the file, so that a process that is ended, or dies, has not worked for nothing. Time runs
from the start of the process, reading included.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a process is one core
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from splitjax.errors import SplitjaxError  # noqa: E402
from splitjax.search.contest import read_problem  # noqa: E402
from splitjax.search.effort import PRICING_SHARE, Effort, Progress  # noqa: E402
from splitjax.search.solving import SOLVERS, solve  # noqa: E402

# More than any time limit allows.
NO_LIMIT = 10**18


def write(path: pathlib.Path, answer: dict[str, object]) -> None:
    """Replaces the file at once: a reader finds the old answer or the new one."""
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(answer), encoding="utf-8")
    beside.replace(path)


def main(argv: list[str] | None = None) -> int:
    """Solves the problem; the exit status is 1 for a typed error, which the answer's file holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("problem", type=pathlib.Path)
    parser.add_argument("answer", type=pathlib.Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--solver", choices=SOLVERS, default="auto")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall")
    parser.add_argument("--begin", type=float, default=None, help="when time began, as time.monotonic says")
    parser.add_argument("--pricing-share", type=float, default=PRICING_SHARE)
    options = parser.parse_args(argv)
    now = time.monotonic if options.clock == "wall" else time.process_time
    begin = 0.0 if options.clock == "processor" else options.begin if options.begin is not None else now()

    def keep(progress: Progress) -> None:
        values = progress.assignment()
        if values is not None:
            write(options.answer, {"solution": values.tolist(), "bound": progress.bound, "finished": False})

    try:
        network = read_problem(options.problem)
        left = max(0.05, options.seconds - (now() - begin))
        effort = Effort(NO_LIMIT, left, options.seed, now, options.pricing_share)
        solution = solve(network, solver=options.solver, effort=effort, watch=keep)
    except SplitjaxError as problem:
        write(options.answer, {"error": {"type": type(problem).__name__, "message": str(problem)}})
        return 1
    answer: dict[str, object] = {
        "solution": None if solution.values is None else solution.values.tolist(),
        "bound": solution.bound,
        "solver": solution.solver,
        "finished": True,
        "processor_seconds": time.process_time(),
    }
    if solution.conflict is not None:
        answer["conflict"] = solution.conflict.message
    write(options.answer, answer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
