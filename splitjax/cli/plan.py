"""`splitjax plan`: the plan of a model on a mesh, made from shapes alone."""

from __future__ import annotations

import dataclasses
import math
import pathlib

from rich.console import Console

from splitjax.cli._model_command import ModelCommand
from splitjax.cli._options import OptionValueError, SizeText, parse_bytes
from splitjax.cli._output import write_file, write_json
from splitjax.machines import parse_target

# What is chosen, for a mesh and for rules.
AUTO = "auto"


@dataclasses.dataclass(frozen=True)
class ShowPlan(ModelCommand):
    """Show how a model would be laid out on a mesh, and why, without making the model."""

    json: pathlib.Path | None = dataclasses.field(default=None, kw_only=True)
    """Write the plan to this file too, for `parallelize(plan=FILE)`, which pins it; - for the standard output."""
    svg: pathlib.Path | None = None
    """Draw it to this file too: a bar a layer, for light and dark pages."""

    devices: int | None = None
    """How many devices --mesh auto may use; it chooses the mesh and, with --rules auto, the rules together."""

    target: str | None = None
    """Predict how long a step takes too: on a machine such as tpu:v5e:4x4, tpu:v5p:4x4x4 or gpu:h200:2x8, whose
    published peaks make it a lower bound, or by a file that `splitjax calibrate` wrote."""
    lock: pathlib.Path | None = None
    """Compare the plan's decisions with this file, and exit with 1 where one has changed. It outlives releases of
    JAX."""
    update_lock: bool = False
    """Write the lock, whatever has changed, or where there is none yet."""
    assert_max_memory: SizeText | None = None
    """Exit with 1 where a device may need more memory than this, such as 14GiB."""
    assert_max_collective_bytes: SizeText | None = None
    """Exit with 1 where a device sends more than this in a step, such as 2GB."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        if self.mesh == AUTO:
            return dataclasses.replace(self, mesh=self._chosen_mesh(), devices=None).run(console)
        if self.devices is not None:
            raise OptionValueError(
                "the mesh says how many devices there are",
                value=self.devices,
                place="--devices",
                remedy="leave it away, or let the mesh be chosen: --mesh auto",
            )
        most_memory = parse_bytes(self.assert_max_memory, "--assert-max-memory")
        most_sent = parse_bytes(self.assert_max_collective_bytes, "--assert-max-collective-bytes")
        if self.update_lock and self.lock is None:
            raise OptionValueError(
                "there is no lock to write anew", value=True, place="--update-lock", remedy="name it with --lock FILE"
            )
        if self.target is not None and ":" in self.target:
            parse_target(self.target, "--target")  # a mistake in it is told before anything is planned
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
        from splitjax.planning.plan_checks import against_budgets, against_lock

        checks = [against_budgets(plan, most_memory, most_sent)]
        if self.lock is not None:
            checks.append(against_lock(plan, self.lock, self.update_lock))
        for line in (line for check in checks for line in check.lines):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return int(not all(check.passed for check in checks))

    def _chosen_mesh(self) -> str:
        """Returns the mesh of `--devices` devices that is predicted to be fastest, as `--mesh` writes it."""
        if self.devices is None or self.devices < 1 or self.rules != AUTO:
            raise OptionValueError(
                "a mesh is chosen for a number of devices, together with the rules",
                value=(self.devices, self.rules),
                place="--mesh auto",
                remedy="write --mesh auto --rules auto --devices 8",
            )
        from splitjax.choosing import Prices, choose_mesh

        budget_bytes = parse_bytes(self.memory_budget, "--memory-budget")
        # What is traced depends on no mesh; rules without a budget lay it out on any.
        shown = dataclasses.replace(self, mesh=f"data={self.devices}", rules="data_parallel", memory_budget=None)
        with shown.busy("choosing a mesh for"):
            planned = shown.planned()
            graph = planned.step.graph(*planned.arguments)
            target = None if self.target is None or ":" not in self.target else parse_target(self.target, "--target")
            chosen = choose_mesh(
                graph,
                self.devices,
                lambda mesh: Prices.of_platform("cpu" if target is None else target.kind.platform),
                budget_bytes=math.inf if budget_bytes is None else budget_bytes,
            )
        return ",".join(f"{axis}={size}" for axis, size in chosen.best.mesh.axes)
