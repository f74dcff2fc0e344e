"""`splitjax plan`: the plan of a model on a mesh, made from shapes alone."""

from __future__ import annotations

import dataclasses
import pathlib

from rich.console import Console

from splitjax.cli._model_command import ModelCommand
from splitjax.cli._output import write_file, write_json


@dataclasses.dataclass(frozen=True)
class ShowPlan(ModelCommand):
    """Show how a model would be laid out on a mesh, and why, without making the model."""

    json: pathlib.Path | None = dataclasses.field(default=None, kw_only=True)
    """Write the plan to this file too, for `parallelize(plan=FILE)`, which pins it; - for the standard output."""
    svg: pathlib.Path | None = None
    """Draw it to this file too: a bar a layer, for light and dark pages."""

    target: str | None = None
    """Predict how long a step takes too: on a machine such as tpu:v5e:4x4, tpu:v5p:4x4x4 or gpu:h200:2x8, whose
    published peaks make it a lower bound, or by a file that `splitjax calibrate` wrote."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        with self.busy("planning"):
            planned = self.planned()
            plan = planned.step.plan(*planned.arguments)
        self.show(console, planned, plan, "plan")
        if self.target is not None:
            time = planned.step.time(*planned.arguments, on=self.target)
            console.print(f"\ntime on {self.target}\n{time}", highlight=False, markup=False)
        write_json(self.json, plan.to_json(), console, "plan")
        if self.svg is not None:
            from splitjax.report.plan_picture import plan_svg

            write_file(self.svg, plan_svg(plan), "--svg")
            console.print(f"picture: {self.svg}", highlight=False)
        return 0
