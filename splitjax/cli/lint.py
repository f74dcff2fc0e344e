"""`splitjax lint`: what is odd about a rule set, by itself or against a model on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from splitjax.cli import _session
from splitjax.cli._options import Library, MeshText, ModelName, OptimizerName, Traceback, check_positive, parse_mesh

if TYPE_CHECKING:
    from splitjax.rules import Finding

_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}


@dataclasses.dataclass(frozen=True)
class Lint(Traceback):
    """Check a rule set; exits with 1 if it finds errors."""

    rules: Annotated[str, tyro.conf.Positional]
    """A shipped rule set, or the path of a TOML file."""
    model: ModelName | None = None
    """Check also what the rules match in this model, and on the mesh."""
    mesh: MeshText = "data=2,model=4"
    """Mesh axes and their sizes, for the check against a model."""
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

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        check_positive(batch_size=self.batch_size, num_classes=self.num_classes, width=self.width)
        mesh = parse_mesh(self.mesh)
        _session.start(mesh.num_devices)
        from splitjax.rules import lint, load_rules

        rules = load_rules(self.rules)
        if self.model is None:
            findings = lint(rules)
            against = "by itself (add --model to check it against one)"
        else:
            from splitjax.cli._models import LayoutChoice, ModelChoice, planned_step

            # Traced under a set that always fits: one that does not is to give findings, not the error of planning.
            planned = planned_step(
                ModelChoice(self.model, self.library, self.num_classes, self.width),
                LayoutChoice(mesh, "data_parallel"),
                self.optimizer,
                self.batch_size,
            )
            findings = lint(rules, planned.step.graph(*planned.arguments), mesh)
            against = f"against {self.model} on {mesh}"
        console.print(f"rule set {rules.name}: {len(rules.rules)} rules, checked {against}", highlight=False)
        show(findings, console)
        return 1 if any(finding.severity == "error" for finding in findings) else 0


def show(findings: Sequence[Finding], console: Console) -> None:
    """Prints the `findings` on a `console`, as a table, worst first, and their count."""
    if findings:
        table = Table("", "rule", "finding", "remedy", title_justify="left", show_lines=False)
        for finding in findings:
            table.add_row(
                Text(finding.severity, _STYLES[finding.severity]),
                finding.rule or "(all)",
                finding.message,
                finding.remedy,
            )
        console.print(table, highlight=False)
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in _STYLES}
    console.print(
        ", ".join(
            f"{count} {severity}{'' if count == 1 or severity == 'info' else 's'}" for severity, count in counts.items()
        )
    )
