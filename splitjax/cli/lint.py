"""`splitjax lint`: what is odd about a rule set, by itself or against a model on a mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from rich.console import Console

from splitjax.cli import _session
from splitjax.cli._options import (
    CommandOptions,
    Library,
    MeshText,
    ModelName,
    ModelOption,
    OptimizerName,
    RoleTexts,
    check_positive,
    import_from_here,
    parse_mesh,
    parse_model_options,
)
from splitjax.cli._output import print_value, write_json
from splitjax.cli._waiting import waiting
from splitjax.cli.line.fields import Place, Shown
from splitjax.display.document import Column, Document, Table

if TYPE_CHECKING:
    from splitjax.rules import Finding

_SEVERITIES = ("error", "warning", "info")


@dataclasses.dataclass(frozen=True)
class Lint(CommandOptions):
    """Check a rule set; exits with 1 if it finds errors."""

    rules: Annotated[str, Shown(metavar="RULES", place=Place.POSITIONAL)]
    """A shipped rule set, one that an installed package declares, the path of a TOML file, or package.module:RULES."""
    model: ModelName | None = None
    """Check also what the rules match in this model, and on the mesh: a name, or package.module:factory, imported from
    the current folder too."""
    model_option: ModelOption = ()
    """Options of the model, such as num_layers=2, for its factory."""
    mesh: MeshText = "data=2,model=4"
    """Mesh axes and their sizes, for the check against a model."""
    role: RoleTexts = ()
    """What a mesh axis is for whose name does not tell it, as x=tensor: data, storage, tensor, expert, sequence or
    stage."""
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
        mesh = parse_mesh(self.mesh, self.role)
        options = parse_model_options(self.model_option)
        import_from_here(self.model, self.rules)
        _session.start(mesh.num_devices)
        from splitjax.rules import lint, load_rules

        rules = load_rules(self.rules)
        if self.model is None:
            findings = lint(rules)
            against = "by itself (add --model to check it against one)"
        else:
            from splitjax.cli._models import LayoutChoice, ModelChoice, planned_step

            # Traced under a set that always fits: one that does not is to give findings, not the error of planning.
            with waiting(f"tracing the step of {self.model}"):
                planned = planned_step(
                    ModelChoice(self.model, self.library, self.num_classes, self.width, options),
                    LayoutChoice(mesh, dict(mesh.said), "data_parallel"),
                    self.optimizer,
                    self.batch_size,
                )
                findings = lint(rules, planned.step.graph(*planned.arguments), mesh)
            against = f"against {self.model} on {mesh}"
        title = f"rule set {rules.name}: {len(rules.rules)} rules, checked {against}"
        print_value(lint_document(title, findings), console)
        write_json(
            self.json, {"title": title, "findings": list(map(dataclasses.asdict, findings))}, console, "findings"
        )
        return 1 if any(finding.severity == "error" for finding in findings) else 0


def lint_document(title: str, findings: Sequence[Finding]) -> Document:
    """Makes the document of the `findings` about a rule set under a `title`: a table, and how many there are of each
    severity."""
    columns = (Column("severity"), Column("rule", "code"), Column("finding"), Column("remedy"))
    rows = tuple((finding.severity, finding.rule or "(all)", finding.message, finding.remedy) for finding in findings)
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in _SEVERITIES}
    verdict = ", ".join(
        f"{count} {severity}{'' if count == 1 or severity == 'info' else 's'}" for severity, count in counts.items()
    )
    return Document(title, (Table(columns, rows),), verdict)
