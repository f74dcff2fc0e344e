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
    """Which model: vgg11, vgg16, resnet18, resnet50, mobilenet_v2, mobilenet_v3_large, mobilenet_v3_small,
    efficientnet_b0, convnext_tiny, mlp, transformer, lstm, deepfm, dlrm; a name that an installed package declares; or
    package.module:factory, imported from the current folder too."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        planned = self.planned()
        report = planned.step.report(*planned.arguments)
        self.show(console, planned, report, "report")
        if self.json is not None:
            write_file(self.json, report.to_json(), "--json")
            console.print(f"report: {self.json}", highlight=False)
        return 0
