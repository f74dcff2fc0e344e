"""A process of two: measures the link between them and what memory costs here, then steps of cells. `splitjax launch`
starts it.

    python -m benchmarks.planner.speed_worker SETTINGS

SETTINGS is JSON: the calibration of operations, the cells, the link's name, rounds, and the file to write."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
from typing import Any


def with_own_memory(operations: Any, timer: Any, *, quick: bool = False) -> Any:
    """Returns a calibration with what memory costs in this process: workers of `splitjax launch` keep it from step to
    step, and the process that calibrated the operations does not. `timer`, `quick`: as of `new_memory_curve`."""
    from splitjax.measure.calibrating.calibrating import new_memory_curve

    own = new_memory_curve(timer, quick=quick)
    others = tuple(curve for curve in operations.curves if curve.kind is not own.kind)
    return dataclasses.replace(operations, curves=(*others, own))


def main(settings: dict[str, Any]) -> int:
    import jax

    import splitjax  # joins the run  # noqa: F401
    from benchmarks.planner.speed_cells import NUM_DEVICES, SpeedCell, made, run
    from splitjax.machines.calibration import Calibration
    from splitjax.measure.calibrating.collectives import collective_times
    from splitjax.measure.calibrating.timing import Timer
    from splitjax.sync.link import of_process_0

    devices = tuple(sorted(jax.devices(), key=lambda device: device.process_index))
    timer = Timer(devices, "wall", enough_seconds=0.05, rounds=5)
    operations = with_own_memory(Calibration.load(settings["calibration"]), timer)
    calibration = dataclasses.replace(
        operations, num_processes=NUM_DEVICES, devices_per_process=1,
        collectives=tuple(collective_times(timer, NUM_DEVICES)),
    )  # fmt: skip
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
        links = [dataclasses.asdict(each) for each in calibration.collectives]
        pathlib.Path(settings["file"]).write_text(json.dumps({"cells": found, "links": links}))
    return 0


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
