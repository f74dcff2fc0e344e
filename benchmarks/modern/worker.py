"""A process that compares the cells of one step, so that a compiler that crashes or never ends takes no other step with
it.

`python -m benchmarks.modern.worker` reads one request, `{"step": name, "cells": [[rules, mesh, axes], ...]}`, as a line
of JSON, and answers with a line for each cell as it is compared: the fields of its `Outcome`. Where one device's run is
no reference, `{"broken": why}` is the only answer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import traceback

from benchmarks._common import virtual_devices


def main() -> int:
    """Answers the request."""
    virtual_devices()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    import jax

    from benchmarks.modern.cells import Cell
    from benchmarks.modern.comparing import compare, reference_of
    from benchmarks.modern.steps.catalogue import every_step

    def answer(value: object) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    request = json.loads(sys.stdin.readline())
    step = next(step for step in every_step() if step.name == request["step"])
    with jax.enable_x64(step.dtype == "float64"):
        try:
            problem = step.make(step.dtype)
            want = reference_of(step, problem)
        except Exception:
            answer({"broken": f"on one device: {traceback.format_exc()[-6000:]}"})
            return 1
        for layout in request["cells"]:
            answer(dataclasses.asdict(compare(step, problem, want, Cell(step.name, *layout))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
