"""Reads the compiled programs that make a step: executables go in, the modules of each program come out, with what a
report needs to know of it.

As a rule a step is a single program. Partial backpropagation with a program for each worker has a program that runs
before the workers' own, theirs, and those that run behind.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax

from splitjax import _compat
from splitjax.mesh import MeshShape
from splitjax.plan import Plan
from splitjax.report.hlo import CompiledCollective, read_collectives
from splitjax.report.wire import Module, read_module

_ARGUMENT = re.compile(r"args\[(\d+)\]")


@dataclasses.dataclass(frozen=True)
class StepPart:
    """Describes one program of a step.

    **Attributes:**

    - `modules`: what XLA compiled, as typed values.
    - `argument_names`: JAX's name of every array among the step's arguments -> its path in the plan.
    - `mesh`: the axes and sizes of the mesh of the devices that run it.
    - `worker`: the worker whose program it is; None for a program of all devices.
    - `share`: the share of the devices that run it, from 0 to 1.
    """

    modules: tuple[Module, ...]
    argument_names: Mapping[str, str]
    mesh: MeshShape
    worker: int | None = None
    share: float = 1.0

    def collectives(self, module: Module) -> tuple[CompiledCollective, ...]:
        """Returns the collectives of `module`, which is in `modules`; those of a worker's program count for the share
        of the devices that run it."""
        collectives = read_collectives(module, self.mesh)
        if self.worker is None:
            return collectives
        return tuple(
            dataclasses.replace(
                collective,
                bytes=round(collective.bytes * self.share),
                share=collective.share * self.share,
                branch=f"worker {self.worker}",
            )
            for collective in collectives
        )


@runtime_checkable
class CompiledWorkers(Protocol):
    """Stands for `lower.partial.workers.CompiledPrograms`: partial backpropagation with a program for each worker."""

    @property
    def parts(self) -> Mapping[str, jax.stages.Compiled]:
        """The programs by name: what runs before the workers' own (`before`), theirs (`worker 0`), and the rest."""
        ...

    def memory_analysis(self) -> Any:
        """Returns XLA's figures of the program that needs most memory."""
        ...


def read_parts(
    compiled: jax.stages.Compiled | CompiledWorkers, plan: Plan, argument_names: Mapping[str, str]
) -> tuple[StepPart, ...]:
    """Reads the programs of a step.

    **Arguments:**

    - `compiled`: what `step.lower(...).compile()` gives: a program, or the programs of several workers.
    - `plan`: of the step.
    - `argument_names`: JAX's name of every array among the step's arguments -> its path in the plan. Of several
      programs the names are those of a program with a further operand, the step of the cycle, before the step's
      arguments.

    Raises `report.protobuf.WireError` where the modules cannot be read.
    """
    if not isinstance(compiled, CompiledWorkers):
        return (StepPart(_modules(compiled), argument_names, plan.mesh),)
    assert plan.partial is not None, "several programs make a step of a plan without partial backpropagation"
    workers = plan.partial.axis.split("+")
    row = MeshShape(tuple((name, 1 if name in workers else size) for name, size in plan.mesh.axes))
    parts = []
    for name, program in compiled.parts.items():
        if name.startswith("worker "):
            parts.append(
                StepPart(_modules(program), {}, row, int(name.removeprefix("worker ")), 1 / len(plan.partial.first))
            )
        else:  # before the workers' there is no step of the cycle, behind them there are also their sums
            parts.append(StepPart(_modules(program), _moved(argument_names, -1 if name == "before" else 1), plan.mesh))
    return tuple(parts)


def _modules(program: jax.stages.Compiled) -> tuple[Module, ...]:
    return tuple(read_module(data) for data in _compat.serialized_modules(program))


def _moved(names: Mapping[str, str], by: int) -> dict[str, str]:
    """Returns the `names` of arguments that stand `by` positions further behind, with the same paths."""
    return {
        _ARGUMENT.sub(lambda match: f"args[{int(match.group(1)) + by}]", name, count=1): path
        for name, path in names.items()
    }
