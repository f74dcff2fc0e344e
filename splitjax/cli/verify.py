"""`splitjax verify`: a model's training step under its plan against the same step on one device."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rich.console import Console

from splitjax.cli._model_command import ModelCommand
from splitjax.cli._output import write_json

WRONG = 1


@dataclasses.dataclass(frozen=True)
class Verify(ModelCommand):
    """Compare a model's training step on a mesh with one device: loss, every gradient, every new state leaf. Exits with
    1 if any differs."""

    sizes: Literal["shrunken", "given", "both"] = "shrunken"
    """Sizes to compare at: the smallest that divide as the model's own do, or the model's own (which are then
    allocated)."""
    own_precision: bool = False
    """Also compare in the model's own precision, which shows what rounding does."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        with self.busy("compiling and running") as say:
            planned = self.planned()
            say(f"compiling and running the step of {self.model}, split and on one device")
            verification = planned.step.verify(*planned.arguments, sizes=self.sizes, own_precision=self.own_precision)
        self.show(console, planned, verification, "verify")
        write_json(self.json, verification.to_json(), console, "verification")
        return 0 if verification.ok else WRONG
