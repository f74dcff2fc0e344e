"""A process of several: calibrates all of them and the links between them, then predicts and times steps of cells.
`splitjax launch` starts it.

    python -m benchmarks.planner.speed_worker SETTINGS

SETTINGS is JSON: the cells, rounds, whether the calibration is a quick one, and the file to write."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any


def main(settings: dict[str, Any]) -> int:
    import jax

    import splitjax  # joins the run  # noqa: F401
    from benchmarks.planner.speed_cells import SpeedCell, made, run
    from splitjax.measure.calibrating import calibrate
    from splitjax.sync.link import of_process_0

    # As `splitjax launch -n N -- splitjax calibrate` does: each computes while the others do.
    calibration = calibrate("wall", quick=settings["quick"])
    found = []
    for cell in (SpeedCell(*each) for each in settings["cells"]):
        step, init, batch = made(cell)
        state = jax.eval_shape(init, jax.random.key(0))
        predicted = step.time(state, batch, on=calibration)
        measured = run(cell, settings["rounds"], processor=False)
        seconds, *halves = of_process_0([measured.seconds, *measured.halves])
        found.append({
            "cell": cell.name, "held_out": cell.is_held_out, "predicted": predicted.seconds, "measured": seconds,
            "halves": halves, "sending": predicted.sending_seconds, "load": measured.others,
        })  # fmt: skip
        if jax.process_index() == 0:
            print(cell.name, f"{predicted.seconds:.4f} s predicted, {seconds:.4f} s measured", flush=True)
        jax.clear_caches()
    if jax.process_index() == 0:
        pathlib.Path(settings["file"]).write_text(json.dumps({"cells": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
