"""`splitjax report`: the plan of a model on a mesh against what XLA compiles for it."""

from __future__ import annotations

import dataclasses
import pathlib

from rich.console import Console

from splitjax.cli._model_command import ModelCommand, Page
from splitjax.cli._options import OptionValueError
from splitjax.cli._output import write_json, write_picture


@dataclasses.dataclass(frozen=True)
class ShowReport(ModelCommand):
    """Compile a model's training step, and show its memory and every collective beside what the plan predicts."""

    memory_timeline: bool = dataclasses.field(default=False, kw_only=True)
    """Also show what a device stores at each moment of the step, predicted and compiled, and which arrays of which
    layers at the peaks."""
    svg: pathlib.Path | None = dataclasses.field(default=None, kw_only=True)
    """Draw what --memory-timeline shows to this file too, for light and dark pages; - for the standard output."""

    remedies: bool = dataclasses.field(default=False, kw_only=True)
    """Also compile what may remove the arrays that are gathered whole to keep a part of (involuntary full
    rematerialisations), and show what the step then sends, stores and gathers."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        if self.svg is not None and not self.memory_timeline:
            raise OptionValueError(
                "a report has a picture of what is stored when, and of nothing else",
                value=str(self.svg),
                place="--svg",
                remedy="add --memory-timeline, or draw the plan: splitjax plan --svg FILE",
            )
        with self.busy("planning") as say:
            planned = self.planned()
            planned.step.plan(*planned.arguments)
            say(f"compiling the step of {self.model} for {self.where}")
            report = planned.step.report(*planned.arguments)
            timelines = planned.step.memory_timeline(*planned.arguments) if self.memory_timeline else None
            also: list[Page] = [] if timelines is None else [timelines]
            if self.remedies:
                say(f"compiling what may remove {len(report.rematerialised)} arrays that are gathered whole")
                also.append(planned.step.remedies(*planned.arguments))
        self.show(console, planned, report, "report", also)
        write_json(self.json, report.to_json(), console, "report")
        if timelines is not None:
            write_picture(self.svg, timelines.svg(), console)
        return 0
