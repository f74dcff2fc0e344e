"""`splitjax report`: the plan of a model on a mesh against what XLA compiles for it."""

from __future__ import annotations

import dataclasses
import pathlib

from rich.console import Console

from splitjax.cli import _session
from splitjax.cli._options import Library, MeshText, ModelName, OptimizerName, Traceback, check_positive, parse_mesh
from splitjax.cli.plan import write_file, write_page


@dataclasses.dataclass(frozen=True)
class ShowReport(Traceback):
    """Compile a model's training step, and show its memory and every collective beside what the plan predicts."""

    model: ModelName = "vgg11"
    """Which model."""
    mesh: MeshText = "data=2,model=4"
    """Mesh axes and their sizes."""
    rules: str = "splitbrain"
    """A shipped rule set (splitbrain, megatron, fsdp, data_parallel) or the path of a TOML file."""
    library: Library = "linen"
    """Which of the two Flax libraries the model is written in."""
    optimizer: OptimizerName = "adam"
    """Its state follows the parameters."""
    batch_size: int = 64
    """Examples in the global batch."""
    num_classes: int | None = None
    """Width of the last layer; the model's own default if not given."""
    width: float | None = None
    """Multiplies the channels of convolutions, for models that have such an option."""
    json: pathlib.Path | None = None
    """Write the report to this file too."""
    html: pathlib.Path | None = None
    """Write the report as a page to this file too."""

    def run(self, console: Console) -> int:
        check_positive(batch_size=self.batch_size, num_classes=self.num_classes, width=self.width)
        mesh = parse_mesh(self.mesh)
        _session.start(mesh.num_devices)
        from splitjax.cli._models import planned_step

        planned = planned_step(
            self.model, self.library, mesh=mesh, rules=self.rules, optimizer=self.optimizer, batch_size=self.batch_size,
            num_classes=self.num_classes, width=self.width,
        )
        report = planned.step.report(*planned.arguments)
        console.print(
            f"{self.model} ({self.library}, {planned.num_params:,} parameters), {self.optimizer}, "
            f"{self.batch_size} examples on {mesh}", highlight=False,
        )
        # A report lays out its own lines: wrapping or markup would break its tables.
        console.print(str(report), soft_wrap=True, markup=False, highlight=False)
        if self.json is not None:
            write_file(self.json, report.to_json(), "--json")
            console.print(f"report: {self.json}", highlight=False)
        if self.html is not None:
            write_page(self.html, report._repr_html_(), "splitjax report")
            console.print(f"page: {self.html}", highlight=False)
        return 0
