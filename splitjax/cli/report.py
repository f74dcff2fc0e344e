"""`splitjax report`: the plan of a model on a mesh against what XLA compiles for it."""

from __future__ import annotations

import dataclasses

from rich.console import Console

from splitjax.cli._model_command import ModelCommand
from splitjax.cli._options import ModelName
from splitjax.cli._output import write_file


@dataclasses.dataclass(frozen=True)
class ShowReport(ModelCommand):
    """Compile a model's training step, and show its memory and every collective beside what the plan predicts."""

    model: ModelName = "vgg11"
    """Which model."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        planned = self.planned()
        report = planned.step.report(*planned.arguments)
        self.show(console, planned, report, "report")
        if self.json is not None:
            write_file(self.json, report.to_json(), "--json")
            console.print(f"report: {self.json}", highlight=False)
        return 0
