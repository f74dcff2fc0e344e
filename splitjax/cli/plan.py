"""`splitjax plan`: the plan of a model on a mesh, made from shapes alone, and what the compiler of a machine makes of
it."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Literal

from rich.console import Console

from splitjax import display
from splitjax.auto_mesh import AUTO
from splitjax.cli._model_command import ModelCommand, Page
from splitjax.cli._options import OptionValueError, SizeText, TargetTexts, parse_bytes
from splitjax.cli._output import print_value, write_json, write_page, write_picture
from splitjax.cli._waiting import Say, waiting
from splitjax.compile.topologies import compiler_version
from splitjax.errors import CompilerError
from splitjax.machines import Target, parse_target
from splitjax.mesh import MeshShape
from splitjax.report.target.document import predicted_verdict
from splitjax.report.target.value import TargetCheck, allowed_bytes

if TYPE_CHECKING:
    from splitjax.choosing import Choice
    from splitjax.cli._models import Planned


@dataclasses.dataclass(frozen=True)
class ShowPlan(ModelCommand):
    """Show how a model would be laid out on a mesh, and why, without making the model."""

    json: pathlib.Path | None = dataclasses.field(default=None, kw_only=True)
    """Write the plan to this file too, for `parallelize(plan=FILE)`, which pins it; - for the standard output."""
    svg: pathlib.Path | None = None
    """Draw it to this file too: a bar a layer, or what --memory-timeline shows, for light and dark pages."""

    memory_timeline: bool = False
    """Also show what a device stores at each moment of the step, and which arrays of which layers at the peak."""

    target: str | None = None
    """Plan for a machine such as tpu:v5e:4x4, tpu:v5p:4x4x4 or gpu:h200:2x8, and predict how long a step takes there,
    as a lower bound by its published peaks; or how long it takes here, by a file that `splitjax calibrate` wrote. Auto
    chooses by the same figures."""
    compile: Literal["auto", "always", "never"] = "auto"
    """Compile the step for the machine of --target with its own compiler, which needs no such device, and show what a
    device needs and sends beside the prediction; exits with 1 where it does not fit into --memory-budget, or into what
    a device has. auto does so where that compiler is installed."""
    compile_best: int = 0
    """Where auto chooses for --target: compile so many of the best layouts at most with its compiler before one is
    taken. The next one is compiled only where the one before does not fit, or sends so much more than planned that it
    may be slower."""
    compiled_json: pathlib.Path | None = None
    """Write what the compiler made of it to this file too."""
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

    @property
    def num_compiled(self) -> int:
        """How many layouts at most are compiled for the target before one is chosen."""
        return self.compile_best

    @property
    def compiles(self) -> bool:
        """Whether the step is to be compiled for a machine, if its compiler is there."""
        return self.compile != "never" and self.machine is not None and self.explain is None

    @property
    def layout_budget(self) -> int | None:
        """As of every command that looks at a model; but where rules and mesh are said, what is compiled is held
        against the budget."""
        budget = super().layout_budget
        is_said = self.rules != AUTO and isinstance(self.asked_mesh(), MeshShape) and not self.choose_state
        return None if is_said and self.compiles else budget

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
        target = None if self.machine is None else parse_target(self.machine, "--target")  # told before planning
        self._check_compiling(target)
        with self.busy("planning") as say:
            planned = self.planned()
            plan = planned.step.plan(*planned.arguments)
            shown = plan if self.explain is None else plan.explain(self.explain, self.machine)
            asked = self.memory_timeline and self.explain is None
            timelines = planned.step.memory_timeline(*planned.arguments, compiled=False) if asked else None
            also: list[Page] = [] if timelines is None else [timelines]
            if self.target is not None and self.explain is None and (target is None or target.kind.peak_flops):
                time = display.document(planned.step.time(*planned.arguments, on=self.target))
                assert time is not None, "predicted times are registered"
                also.append(display.Shown(dataclasses.replace(time, title=f"time on {self.target}")))
            checked = self._checked(planned, say) if target is not None and self.compiles else None
        if isinstance(checked, TargetCheck):
            also.append(checked)
            write_json(self.compiled_json, checked.to_json(), console, "compiled")
        self.show(console, planned, shown, "plan", also)
        write_json(self.json, plan.to_json(), console, "plan")
        if self.svg is not None:
            from splitjax.report.plan.picture import plan_svg

            write_picture(self.svg, plan_svg(plan) if timelines is None else timelines.svg(), console)
        from splitjax.planning.plan_checks import against_budgets, against_lock

        checks = [against_budgets(plan, most_memory, most_sent)]
        if self.lock is not None:
            checks.append(against_lock(plan, self.lock, self.update_lock))
        for line in (line for check in checks for line in check.lines):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if isinstance(checked, CompilerError) and target is not None:
            allowed = allowed_bytes(parse_bytes(self.memory_budget, "--memory-budget"), target.kind.memory_bytes)
            line = f"not compiled: {checked.message} ({checked.remedy}); by the prediction"
            line += f" {predicted_verdict(plan.memory, allowed)}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        does_not_fit = isinstance(checked, TargetCheck) and checked.fits is False
        return int(does_not_fit or not all(check.passed for check in checks))

    def _check_compiling(self, target: Target | None) -> None:
        """Raises `OptionValueError` for options about compiling where nothing is compiled for a machine, and
        `CompilerError` where the compiler of the `target` is asked for and not installed."""
        asked = {
            "--compile": "always" if self.compile == "always" else None,
            "--compiled-json": None if self.compiled_json is None else str(self.compiled_json),
        }
        for option, value in asked.items():
            if value is not None and not self.compiles:
                raise OptionValueError(
                    "there is no machine to compile for",
                    value=value,
                    place=option,
                    remedy="name one: --target tpu:v5e:4x4; or use `splitjax report`, which compiles for this machine",
                )
        if target is not None and (self.compile == "always" or self.compiled_json is not None):
            compiler_version(target)

    def _checked(self, planned: Planned, say: Say) -> TargetCheck | CompilerError:
        """Returns what the compiler of the machine makes of a planned step; the error where it is not there and need
        not be. Raises it where it has to."""
        say(f"compiling the step of {self.model} for {self.machine} (--compile never leaves that away)")
        try:
            # The budget as the user wrote it; the step's own is infinite where rules and mesh are said.
            return planned.step.check_target(*planned.arguments, on=self.machine, memory_budget=self.memory_budget)
        except CompilerError as error:
            if self.compile == "always" or self.compiled_json is not None:
                raise
            return error

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
            "--assert-max-collective-bytes": self.assert_max_collective_bytes, "--compiled-json": self.compiled_json,
            "--compile": self.compile if self.compile == "always" else None,
            "--compile-best": self.compile_best or None,
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
