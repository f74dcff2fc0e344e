"""Holds what became of a step on a machine that need not be here: predicted, compiled for it, and held against the
memory of its devices, as a value that prints and serialises."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from splitjax._plan_json import COLLECTIVE_FORM, MEMORY_FORM, MESH_FORM, PURPOSE_FORM
from splitjax.codec import Codec, Count, Form, Wording
from splitjax.display import registry
from splitjax.errors import PlanError
from splitjax.mesh import MeshShape
from splitjax.plan import Collective, Memory, Purpose
from splitjax.report.value import REPORT_FORM, CompiledMemory, Report, Total

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class CompilerRun:
    """Holds how a step was compiled for a machine.

    **Attributes:**

    - `compiler`: the package that did, with its version.
    - `seconds`: how long it took.
    - `limit_bytes`: the memory of a device that the compiler was held to; None for the memory that it has.
    - `options`: what it was given (`compiler_options` of `jax.stages.Lowered.compile`); with the same ones the same
      program is compiled where the machine is.
    - `needed_bytes`, `available_bytes`: where the compiler refused the program because it does not fit, what it said
      that it needs and that there is, to the two decimals that it prints; None where it compiled.
    """

    compiler: str
    seconds: float
    limit_bytes: Count | None = None
    options: Mapping[str, int | str] = dataclasses.field(default_factory=dict)
    needed_bytes: Count | None = None
    available_bytes: Count | None = None


@dataclasses.dataclass(frozen=True)
class TargetCheck:
    """Says whether a step fits on a machine. Print it, show it in a notebook, or keep it with `to_json`.

    **Attributes:**

    - `step`: its name. `target`: the machine, such as `tpu:v5e:4x4`. `mesh`, `rules`: how it is laid out there.
    - `budget_bytes`: what a device may need, as asked for; None for the memory that it has.
    - `device_bytes`: what a device of this kind has; 0 where that is not known, as of processors.
    - `memory`, `planned`: what is predicted of a device before anything is compiled: its memory, and what it sends.
    - `run`: how the machine's compiler did.
    - `report`: what it compiled beside the plan; None where the program did not fit.
    """

    step: str
    target: str
    mesh: MeshShape
    rules: str
    budget_bytes: Count | None
    device_bytes: Count
    memory: Memory
    planned: tuple[Collective, ...]
    run: CompilerRun
    report: Report | None

    @property
    def allowed_bytes(self) -> int | None:
        """What a device may need: the budget, and no more than it has; None where neither is known."""
        return allowed_bytes(self.budget_bytes, self.device_bytes)

    @property
    def compiled(self) -> CompiledMemory | None:
        """What the compiler set aside on a device; None where the program did not fit."""
        return None if self.report is None else self.report.memory.compiled

    @property
    def needed_bytes(self) -> int | None:
        """What the compiled step needs of a device's main memory: arguments, temporaries, and results that are not
        written over arguments; or what the compiler said where it refused. None where the backend does not say."""
        if self.run.needed_bytes is not None:
            return self.run.needed_bytes
        return None if self.compiled is None else self.compiled.total_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the compiled step needs no more than it may; None where nothing says what it may, or what it
        needs."""
        if self.run.needed_bytes is not None:
            return False
        if self.allowed_bytes is None or self.needed_bytes is None:
            return None
        return self.needed_bytes <= self.allowed_bytes

    @property
    def predicted_fits(self) -> bool | None:
        """Whether the step fits by the prediction: True where its upper bound is within what a device may need, False
        where its estimate is not; None in between, and where no bound or no limit is known."""
        return predicted_fit(self.memory, self.allowed_bytes)

    @property
    def sent(self) -> Mapping[tuple[str, str], Total]:
        """Sums up collectives by op and axis, predicted and compiled, the largest first; the compiled ones are 0 where
        the program did not fit."""
        if self.report is not None:
            return self.report.by_op
        sums: dict[tuple[str, str], tuple[int, int]] = {}
        for each in self.planned:
            count, num_bytes = sums.get((each.op, each.axis), (0, 0))
            sums[each.op, each.axis] = count + 1, num_bytes + each.bytes
        largest = sorted(sums.items(), key=lambda item: -item[1][1])
        return {kind: Total(count, num_bytes, 0, 0) for kind, (count, num_bytes) in largest}

    def to_json(self) -> str:
        """Returns the check as JSON text (ASCII), read back by `TargetCheck.from_json`. Sizes are bytes of a
        device."""
        return _JSON.text(self)

    @classmethod
    def from_json(cls, text: str) -> TargetCheck:
        """Reads `text`, what `to_json` wrote. Raises `PlanError` for anything else, with the key path of the first
        problem."""
        return _JSON.parse(text)

    def __str__(self) -> str:
        return registry.show(self)

    def __repr__(self) -> str:
        verdict = {True: "fits", False: "does not fit", None: "nothing to hold it against"}[self.fits]
        return f"<TargetCheck of {self.step} on {self.target}: {verdict}>"

    def _repr_html_(self) -> str:
        return registry.html(self)


def predicted_fit(memory: Memory, allowed_bytes: int | None) -> bool | None:
    """Returns whether a step fits by its predicted `memory`, of which a device may need `allowed_bytes`; see
    `TargetCheck.predicted_fits`."""
    if memory.bound_bytes is None or allowed_bytes is None:
        return None
    return True if memory.bound_bytes <= allowed_bytes else False if memory.peak_bytes > allowed_bytes else None


def allowed_bytes(budget_bytes: int | None, device_bytes: int) -> int | None:
    """Returns what a device may need: a budget, and no more than the `device_bytes` that it has, 0 where these are not
    known; None where neither is."""
    known = [size for size in (budget_bytes, device_bytes or None) if size is not None]
    return min(known, default=None)


def _written(check: TargetCheck) -> dict[str, Any]:
    """Gives what is written of a check: what it comes to first, for whoever reads the text."""
    fields = {field.name: getattr(check, field.name) for field in dataclasses.fields(check)}
    verdicts = {name: getattr(check, name) for name in ("fits", "predicted_fits", "needed_bytes", "allowed_bytes")}
    return {**verdicts, **fields}


_JSON = Codec(
    TargetCheck,
    PlanError,
    Wording.of_result("a check of a target", "check"),
    format=FORMAT,
    finite=True,
    forms={
        MeshShape: MESH_FORM,
        Memory: MEMORY_FORM,
        Collective: COLLECTIVE_FORM,
        Purpose: PURPOSE_FORM,
        Report: REPORT_FORM,
        TargetCheck: Form(_written, unread=("fits", "predicted_fits", "needed_bytes", "allowed_bytes")),
    },
    entries=("planned",),
)
