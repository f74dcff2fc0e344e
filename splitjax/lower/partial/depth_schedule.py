"""The programs of a step with partial backpropagation, and which one runs when.

Spatial as branches: one program, with the number of the turn as an operand. Temporal: a program per depth, or one with
a branch per depth. The first `warmup_steps` run the program of full backpropagation. A program is compiled when it
first runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from splitjax.lower.partial.hooks import PartialHooks
from splitjax.lower.partial.lowered import Evaluated, Lowered
from splitjax.lower.partial.step import PartialStep
from splitjax.lower.partial.truncation import turns_scope
from splitjax.lower.partial.workers import WorkerPrograms
from splitjax.partial.request import BRANCH


@dataclasses.dataclass(frozen=True, eq=False)
class Turned:
    """What a step runs, by its number since the beginning of training."""

    step: PartialStep
    full: Callable[[], Any]  # the program of full backpropagation
    by_slot: Callable[[int], Any] | None  # temporal: the program of a slot's depth
    with_turn: Callable[[], Any] | None  # one program, which takes the number of the turn

    def at(self, step_number: int) -> Any:
        """The program of a step: takes its positional arguments, and has `lower`."""
        number = step_number - self.step.request.warmup_steps
        if number < 0:
            return self.full()
        turn = number % self.step.depths.num_turns
        if self.by_slot is not None:
            return self.by_slot(self.step.depths.slot(0, turn))
        assert self.with_turn is not None
        return _WithTurn(self.with_turn(), turn)


@dataclasses.dataclass(frozen=True, eq=False)
class _WithTurn:
    program: Any
    turn: int
    num_before = 1  # operands before the step's arguments

    def __call__(self, *args: Any) -> Any:
        return self.program(np.int32(self.turn), *args)

    def lower(self, *args: Any) -> Any:
        return self.program.lower(np.int32(self.turn), *args)


def turned(step: PartialStep, hooks: PartialHooks, lowered: Lowered, programs: Any) -> Turned:
    """The programs of a step. `programs`: `entry.Programs`, which makes them."""
    depths, kept = step.depths, step.kept_leaves(min(step.depths.first))
    everywhere = NamedSharding(hooks.mesh, PartitionSpec())
    full = functools.cache(lambda: programs.whole(functools.partial(lowered.run, hooks.hook)))
    with_turn = lambda run: Turned(step, full, None, functools.cache(lambda: programs.whole(run, (everywhere,))))
    if not step.is_temporal and step.request.execution == BRANCH:
        return with_turn(
            lambda leaves, residuals, turn: lowered.run_keeping(hooks.apart(turn), kept, leaves, residuals)
        )
    if not step.is_temporal:
        return Turned(step, full, None, functools.cache(lambda: WorkerPrograms(step, hooks, lowered, programs)))
    at_depth = {
        first: functools.partial(lowered.run_keeping, hooks.together(first), step.kept_leaves(first))
        for first in depths.distinct
    }
    if step.request.execution != BRANCH:
        by_depth = functools.cache(lambda first: programs.whole(at_depth[first]))
        return Turned(step, full, lambda slot: by_depth(depths.first[slot]), None)

    def branched(leaves: Sequence[Any], residuals: Any, turn: Any) -> Evaluated:
        distinct = list(at_depth)
        slots = [depths.slot(0, number) for number in range(depths.num_turns)]
        numbers = [distinct.index(depths.first[slot]) for slot in slots]
        with jax.named_scope(turns_scope([numbers.count(number) for number in range(len(distinct))])):
            branches = [at_depth[first] for first in distinct]
            return jax.lax.switch(jnp.asarray(numbers, jnp.int32)[turn], branches, list(leaves), residuals)

    return with_turn(branched)
