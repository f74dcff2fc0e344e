"""`splitjax plan`: the plan of a model on a mesh, made from shapes alone."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from rich.console import Console

from splitjax import display
from splitjax.auto_mesh import AUTO
from splitjax.cli._model_command import ModelCommand, Page
from splitjax.cli._options import OptionValueError, SizeText, TargetTexts, parse_bytes
from splitjax.cli._output import print_value, write_file, write_json, write_page
from splitjax.cli._waiting import waiting
from splitjax.machines import Target, parse_target

if TYPE_CHECKING:
    from splitjax.choosing import Choice


@dataclasses.dataclass(frozen=True)
class ShowPlan(ModelCommand):
    """Show how a model would be laid out on a mesh, and why, without making the model."""

    json: pathlib.Path | None = dataclasses.field(default=None, kw_only=True)
    """Write the plan to this file too, for `parallelize(plan=FILE)`, which pins it; - for the standard output."""
    svg: pathlib.Path | None = None
    """Draw it to this file too: a bar a layer, for light and dark pages."""

    memory_timeline: bool = False
    """Also show what a device stores at each moment of the step, and which arrays of which layers at the peak."""

    target: str | None = None
    """Plan for a machine such as tpu:v5e:4x4, tpu:v5p:4x4x4 or gpu:h200:2x8, and predict how long a step takes there,
    as a lower bound by its published peaks; or how long it takes here, by a file that `splitjax calibrate` wrote. Auto
    chooses by the same figures."""
    pareto: TargetTexts = ()
    """Compare these machines instead, such as tpu:v5e:2x4 tpu:v5e:4x4 gpu:h200:1x8: time of a step against memory of a
    device, for the rules that are named, on the meshes that auto chooses. --memory-budget says what has to fit."""
    explain: str | None = None
    """Explain one layer, or the layer of one array, such as params/dense1, instead of showing the whole plan: why it
    lies so, and what each other layout of it would cost, on --target where that is a machine's name."""
    lock: pathlib.Path | None = None
    """Compare the plan's decisions with this file, and exit with 1 where one has changed. It outlives releases of
    JAX."""
    update_lock: bool = False
    """Write the lock, whatever has changed, or where there is none yet."""
    assert_max_memory: SizeText | None = None
    """Exit with 1 where a device may need more memory than this, such as 14GiB."""
    assert_max_collective_bytes: SizeText | None = None
    """Exit with 1 where a device sends more than this in a step, such as 2GB."""

    @property
    def machine(self) -> str | None:
        """The target that the step is planned for; None for this machine."""
        return self.target if self.target is not None and ":" in self.target else None

    @property
    def chosen_for(self) -> str | pathlib.Path | None:
        """The machine by whose figures auto chooses."""
        return self.machine if self.machine is not None or self.target is None else pathlib.Path(self.target)

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        most_memory = parse_bytes(self.assert_max_memory, "--assert-max-memory")
        most_sent = parse_bytes(self.assert_max_collective_bytes, "--assert-max-collective-bytes")
        if self.update_lock and self.lock is None:
            raise OptionValueError(
                "there is no lock to write anew", value=True, place="--update-lock", remedy="name it with --lock FILE"
            )
        if self.pareto:
            return self._compare(console)
        if self.machine is not None:
            parse_target(self.machine, "--target")  # a mistake in it is told before anything is planned
        with self.busy("planning"):
            planned = self.planned()
            plan = planned.step.plan(*planned.arguments)
            shown = plan if self.explain is None else plan.explain(self.explain, self.machine)
            asked = self.memory_timeline and self.explain is None
            also: list[Page] = [planned.step.memory_timeline(*planned.arguments, compiled=False)] if asked else []
            if self.target is not None and self.explain is None:
                time = display.document(planned.step.time(*planned.arguments, on=self.target))
                assert time is not None, "predicted times are registered"
                also.append(display.Shown(dataclasses.replace(time, title=f"time on {self.target}")))
        self.show(console, planned, shown, "plan", also)
        write_json(self.json, plan.to_json(), console, "plan")
        if self.svg is not None:
            from splitjax.report.plan.picture import plan_svg

            write_file(self.svg, plan_svg(plan), "--svg")
            console.print(f"picture: {self.svg}", highlight=False)
        from splitjax.planning.plan_checks import against_budgets, against_lock

        checks = [against_budgets(plan, most_memory, most_sent)]
        if self.lock is not None:
            checks.append(against_lock(plan, self.lock, self.update_lock))
        for line in (line for check in checks for line in check.lines):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        return int(not all(check.passed for check in checks))

    def _compare(self, console: Console) -> int:
        """Shows what the step would take on each machine of `--pareto`."""
        from splitjax.choosing.trade_off import trade_off

        for option, value in (("--target", self.target), ("--devices", self.devices)):
            if value is not None:
                raise OptionValueError(
                    "the machines that are compared say what and how many devices there are",
                    value=value,
                    place=option,
                    remedy="leave it away, or name the machine with --pareto too",
                )
        of_a_plan = {
            "--explain": self.explain, "--memory-timeline": self.memory_timeline or None, "--json": self.json,
            "--svg": self.svg, "--lock": self.lock, "--assert-max-memory": self.assert_max_memory,
            "--assert-max-collective-bytes": self.assert_max_collective_bytes,
        }  # fmt: skip
        for option, value in of_a_plan.items():
            if value is not None:
                raise OptionValueError(
                    "this is of one plan, and --pareto compares many",
                    value=str(value),
                    place=option,
                    remedy="leave it away, or plan for one of the machines: --target MACHINE",
                )
        targets = [parse_target(each, "--pareto") for each in self.pareto]
        budget = parse_bytes(self.memory_budget, "--memory-budget")
        titles: list[str] = []

        def choose(target: Target, allowed: int | None) -> Choice:
            within = None if allowed is None else f"{allowed}B"
            asked = dataclasses.replace(self, mesh=AUTO, devices=None, target=str(target), memory_budget=within)
            planned = asked.planned(is_first=not titles)
            planned.step.plan(*planned.arguments)
            titles.append(planned.title)
            return planned.step.choice

        with waiting(f"comparing {len(targets)} machines for the step of {self.model}"):
            compared = trade_off(choose, targets, budget)
        console.print(f"{titles[0]}, {self.batch_size} examples", highlight=False)
        print_value(compared, console)
        if self.html is not None:
            write_page(self.html, compared._repr_html_(), "splitjax plan --pareto")
            console.print(f"page: {self.html}", highlight=False)
        return int(compared.fewest is None)
