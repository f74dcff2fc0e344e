"""`splitjax calibrate`: measures this machine, or the cluster of a launched run, for predictions of step times."""

from __future__ import annotations

import dataclasses
import pathlib

from rich.console import Console

from splitjax.cli import _session
from splitjax.cli._options import CommandOptions, check_positive
from splitjax.cli._output import write_json
from splitjax.cli._waiting import waiting
from splitjax.errors import CalibrationError
from splitjax.measure.calibrating.timing import Clock


@dataclasses.dataclass(frozen=True)
class Calibrate(CommandOptions):
    """Measure this machine in about a minute: operations by kind and size, collectives by kind and participants.

    With `splitjax launch -n 2 -- splitjax calibrate` the links between processes are measured too."""

    json: pathlib.Path | None = dataclasses.field(default=pathlib.Path("calibration.json"), kw_only=True)
    """File to write, for `step.time(..., on=FILE)`; - for the standard output."""
    devices: int = 1
    """Virtual devices of each process on a CPU: as many as steps will use."""
    clock: Clock = "wall"
    """`processor` counts processor time instead, for a machine that is busy with other work."""
    quick: bool = False
    """A few small sizes in some seconds, to try it out."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        check_positive(devices=self.devices)
        if self.json is not None and not self.json.resolve().parent.is_dir():
            raise CalibrationError(
                "there is no such folder", value=str(self.json), place="--json", remedy="name a file in a folder"
            )
        _session.start(self.devices, platform="auto")
        import jax

        from splitjax.measure.calibrating import calibrate

        is_first = jax.process_index() == 0
        with waiting("measuring") as say:
            calibration = calibrate(self.clock, quick=self.quick, told=say)
        if is_first:
            console.print(str(calibration), highlight=False, markup=False)
            write_json(self.json, calibration.to_json(), console, "calibration")
        return 0
