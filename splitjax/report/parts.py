"""The programs that make a step: one as a rule; of partial backpropagation with a program per worker, one before the
workers', theirs, and one behind."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from splitjax import _compat
from splitjax.mesh import MeshShape
from splitjax.plan import Plan
from splitjax.report.hlo import CompiledCollective, read_collectives
from splitjax.report.wire import Module, read_module

_ARGUMENT = re.compile(r"args\[(\d+)\]")


@dataclasses.dataclass(frozen=True)
class Part:
    """One program.

    - `argument_names`: as for `report.attribute`. `mesh`: of its devices.
    - `worker`: whose it is; None for one of all devices. `share`: of the devices that run it.
    """

    modules: tuple[Module, ...]
    argument_names: Mapping[str, str]
    mesh: MeshShape
    worker: int | None = None
    share: float = 1.0

    def collectives(self, module: Module) -> tuple[CompiledCollective, ...]:
        """Of one of its modules; those of a worker's program count for the share of the devices that run it."""
        found = read_collectives(module, self.mesh)
        if self.worker is None:
            return found
        return tuple(
            dataclasses.replace(
                one, bytes=round(one.bytes * self.share), share=one.share * self.share, branch=f"worker {self.worker}"
            )
            for one in found
        )


def read_parts(compiled: Any, plan: Plan, argument_names: Mapping[str, str]) -> tuple[Part, ...]:
    """Of a `jax.stages.Compiled`, or of `lower.partial.workers.CompiledPrograms`, of which `argument_names` is as for a
    program with one operand (the turn) before the step's arguments."""
    modules = lambda program: tuple(read_module(data) for data in _compat.serialized_modules(program))
    if not hasattr(compiled, "parts"):
        return (Part(modules(compiled), argument_names, plan.mesh),)
    assert plan.partial is not None
    workers = plan.partial.axis.split("+")
    row = MeshShape(tuple((name, 1 if name in workers else size) for name, size in plan.mesh.axes))
    parts = []
    for name, program in compiled.parts.items():
        if name.startswith("worker "):
            parts.append(
                Part(modules(program), {}, row, int(name.removeprefix("worker ")), 1 / len(plan.partial.first))
            )
        else:  # in front of the workers' there is no turn, behind them there are also their sums
            parts.append(Part(modules(program), _moved(argument_names, -1 if name == "before" else 1), plan.mesh))
    return tuple(parts)


def _moved(names: Mapping[str, str], by: int) -> dict[str, str]:
    """Names of arguments that stand so many places further behind."""
    return {
        _ARGUMENT.sub(lambda found: f"args[{int(found.group(1)) + by}]", name, count=1): path
        for name, path in names.items()
    }
