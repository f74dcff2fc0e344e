"""The programs of a step with partial backpropagation, and which one runs when.

Spatial as branches: one program, with the number of the turn as an operand. Temporal: a program per depth, or one with a branch per depth. The first
`warmup_steps` run the program of full backpropagation. A program is compiled when it first runs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from splitjax.lower.layout import BoundaryHook, Hooks, Layout, evaluate
from splitjax.lower.partial_hooks import PartialHooks
from splitjax.lower.partial_step import PartialStep
from splitjax.lower.sparse import SparseStep, evaluate_sparse
from splitjax.partial.request import BRANCH

# (evaluator of the step, scalars before its arguments) -> its program.
Make = Callable[..., Any]


@dataclasses.dataclass(frozen=True, eq=False)
class Lowered:
    """A step ready to be evaluated. `matched`: flat argument of a state leaf -> its flat result."""

    mesh: Mesh
    layout: Layout
    jaxpr: Any
    matched: Mapping[int, int]
    sparse: SparseStep | None

    def run(self, hook: BoundaryHook, leaves: Sequence[Any]) -> tuple[list[Any], Any]:
        """Flat arguments -> flat results, and by table what was observed."""
        if self.sparse is None:
            return evaluate(self.layout, self.jaxpr, leaves, Hooks(hook)), None
        return evaluate_sparse(self.sparse, self.mesh, self.layout, leaves, hook, self.matched)

    def run_keeping(self, hook: BoundaryHook, kept: Sequence[int], leaves: Sequence[Any]) -> tuple[list[Any], Any]:
        """The same, where some flat arguments stay what they are."""
        results, observed = self.run(hook, leaves)
        for leaf in kept:
            results[self.matched[leaf]] = jnp.asarray(leaves[leaf])
        return results, observed


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

    def __call__(self, *args: Any) -> Any:
        return self.program(np.int32(self.turn), *args)

    def lower(self, *args: Any) -> Any:
        return self.program.lower(np.int32(self.turn), *args)


def turned(step: PartialStep, hooks: PartialHooks, lowered: Lowered, make: Make) -> Turned:
    """The programs of a step. `make`: see `Make`."""
    depths, deepest = step.depths, min(step.depths.first)
    full = functools.cache(lambda: make(functools.partial(lowered.run, hooks.hook)))
    if not step.is_temporal:
        kept = step.kept_leaves(deepest)
        run = lambda leaves, turn: lowered.run_keeping(hooks.apart(turn), kept, leaves)
        return Turned(step, full, None, functools.cache(lambda: make(run, 1)))
    at_depth = {first: functools.partial(lowered.run_keeping, hooks.together(first), step.kept_leaves(first)) for first in depths.distinct}
    if step.request.execution != BRANCH:
        programs = functools.cache(lambda first: make(at_depth[first]))
        return Turned(step, full, lambda slot: programs(depths.first[slot]), None)

    def branched(leaves: Sequence[Any], turn: Any) -> tuple[list[Any], Any]:
        distinct = list(at_depth)
        slots = [depths.slot(0, number) for number in range(depths.num_turns)]
        table = jnp.asarray([distinct.index(depths.first[slot]) for slot in slots], jnp.int32)
        results, observed = jax.lax.switch(table[turn], [at_depth[first] for first in distinct], list(leaves))
        return list(results), observed

    return Turned(step, full, None, functools.cache(lambda: make(branched, 1)))
