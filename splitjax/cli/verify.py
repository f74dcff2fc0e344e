"""`splitjax verify`: a model's training step under its plan against the same step on one device."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Literal

from rich.console import Console

from splitjax.cli._model_command import ModelCommand
from splitjax.cli._output import write_file

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
    json: pathlib.Path | None = None
    """Write what was found to this file too."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        planned = self.planned()
        verification = planned.step.verify(*planned.arguments, sizes=self.sizes, own_precision=self.own_precision)
        self.show(console, planned, verification, "verify")
        if self.json is not None:
            write_file(self.json, verification.to_json(), "--json")
            console.print(f"verification: {self.json}", highlight=False)
        return 0 if verification.ok else WRONG
