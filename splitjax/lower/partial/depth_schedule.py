"""Makes the programs of a step with partial backpropagation, and says which of them runs in which step.

A lowered step and its depths go in, `ScheduledPrograms` come out. Depths change from step to step, and repeat after a
cycle; making them operands or branches of few programs keeps the number of compilations small. Spatial as branches: a
single program, with the step's number in the cycle as an operand. Spatial as programs: `workers.DispatchedStep`.
Temporal: a program per depth, or a single one with a branch per depth. The first `warmup_steps` run the program of full
backpropagation. A program is compiled when it first runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from splitjax.lower.microbatch.convolutions import with_cpu_layouts
from splitjax.lower.partial.lowered import Evaluated, Lowered
from splitjax.lower.partial.truncated import PartialWays
from splitjax.lower.partial.truncation import turns_scope
from splitjax.lower.partial.workers import DispatchedStep, JittedProgram, ProgramMaker, prepare
from splitjax.partial.request import BRANCH
from splitjax.planning.partial_step import PartialStep


@dataclasses.dataclass(frozen=True, eq=False)
class ScheduledPrograms:
    """The programs of a step, to be asked for by the step's number. Each is made when it is first asked for.

    - `step`: its depths and its workers.
    - `full`: makes the program of full backpropagation.
    - `by_slot`: temporal, makes the program of a slot's depth; None otherwise.
    - `in_cycle`: makes the program that takes the step's number in the cycle, i32[], before the step's arguments; None
      where there is none.
    """

    step: PartialStep
    full: Callable[[], JittedProgram]
    by_slot: Callable[[int], JittedProgram] | None
    in_cycle: Callable[[], JittedProgram] | None

    def name_at(self, step_number: int) -> str:
        """Returns what tells the program of step `step_number`, counted from 0, from the others."""
        number = step_number - self.step.request.warmup_steps
        if number < 0:
            return "full"
        if self.by_slot is None:
            return "cycle"
        return f"slot-{self.step.depths.slot(0, number % self.step.depths.num_cycle_steps)}"

    def at(self, step_number: int) -> JittedProgram:
        """Gives the program of step `step_number`, counted from 0 since the beginning of training. It takes the step's
        positional arguments."""
        number = step_number - self.step.request.warmup_steps
        if number < 0:
            return self.full()
        cycle_step = number % self.step.depths.num_cycle_steps
        if self.by_slot is not None:
            return self.by_slot(self.step.depths.slot(0, cycle_step))
        assert self.in_cycle is not None, "a step has programs by slot, or a program for all steps of a cycle"
        return _AtCycleStep(self.in_cycle(), cycle_step)


@dataclasses.dataclass(frozen=True, eq=False)
class _AtCycleStep:
    """A program that takes the step's number in the cycle, with this number given."""

    program: JittedProgram
    cycle_step: int
    num_before: ClassVar[int] = 1  # operands before the step's arguments

    def __call__(self, *args: Any) -> Any:
        return self.program(np.int32(self.cycle_step), *args)

    def lower(self, *args: Any) -> Any:
        return self.program.lower(np.int32(self.cycle_step), *args)

    def prepare(self, *args: Any) -> None:
        prepare(self.program, np.int32(self.cycle_step), *args)


def scheduled_programs(ways: PartialWays, lowered: Lowered, programs: ProgramMaker) -> ScheduledPrograms:
    """Gives the programs of a step.

    **Arguments:** `ways`: how its boundaries run at each depth. `lowered`: the step, ready to be evaluated. `programs`:
    makes compiled programs.
    """
    step = ways.step
    depths, kept = step.depths, step.kept_leaves(min(step.depths.first))
    everywhere = NamedSharding(lowered.mesh, PartitionSpec())
    full = functools.cache(lambda: programs.whole(functools.partial(lowered.run, ways.full)))
    in_cycle = lambda run: ScheduledPrograms(
        step, full, None, functools.cache(lambda: programs.whole(run, (everywhere,)))
    )
    if not step.is_temporal and step.request.execution == BRANCH:
        return in_cycle(
            lambda leaves, residuals, cycle_step: lowered.run_keeping(ways.apart(cycle_step), kept, leaves, residuals)
        )
    if not step.is_temporal:
        return ScheduledPrograms(
            step, full, None, functools.cache(lambda: DispatchedStep(step, ways, lowered, programs))
        )
    at_depth = {
        first: functools.partial(lowered.run_keeping, ways.together(first), step.kept_leaves(first))
        for first in depths.distinct
    }
    if step.request.execution != BRANCH:
        by_depth = functools.cache(lambda first: programs.whole(at_depth[first]))
        return ScheduledPrograms(step, full, lambda slot: by_depth(depths.first[slot]), None)

    def branched(leaves: Sequence[Any], residuals: Any, cycle_step: Any) -> Evaluated:
        distinct = list(at_depth)
        slots = [depths.slot(0, number) for number in range(depths.num_cycle_steps)]
        numbers = [distinct.index(depths.first[slot]) for slot in slots]
        with jax.named_scope(turns_scope([numbers.count(number) for number in range(len(distinct))])):
            branches = [at_depth[first] for first in distinct]
            if lowered.layout.where.platform == "cpu":
                branches = [with_cpu_layouts(branch) for branch in branches]
            return jax.lax.switch(jnp.asarray(numbers, jnp.int32)[cycle_step], branches, list(leaves), residuals)

    return in_cycle(branched)
