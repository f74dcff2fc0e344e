"""Evaluates gradient boundaries in the ways that were chosen for them while the step was planned.

`planning.ways` says what a `BoundaryWay` is, `strategies.choose_ways` chooses one for each boundary of a step, and
`hook_of` makes of them what the interpreter calls. `Whole` is the plainest of them; the rooms `microbatch`, `turns`,
`partial` and `tables` have the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from splitjax.lower.products.interpret import BoundaryHook
from splitjax.planning.sites.layout import StepLayout
from splitjax.planning.ways import BoundaryCall, BoundaryWay, EvalForward, RowExchanges, SumWithin, Ways
from splitjax.primitives.walk import Site
from splitjax.step.boundary import expand


@dataclasses.dataclass(frozen=True, eq=False)
class Wrapping:
    """Is the base of ways that run a boundary in the way of another, changed before or after: plans name the inner one.

    `inner`: how the changed boundary runs.
    """

    inner: BoundaryWay

    @property
    def how(self) -> str:
        """The name of the inner way."""
        return self.inner.how

    @property
    def num_parts(self) -> int:
        """The number of parts of the inner way."""
        return self.inner.num_parts

    @property
    def why(self) -> str:
        """The reason for the inner way."""
        return self.inner.why

    @property
    def worker_axes(self) -> tuple[str, ...]:
        """The axes of the workers of the inner way."""
        return self.inner.worker_axes


@dataclasses.dataclass(frozen=True)
class Whole:
    """Evaluates a boundary with all examples at once, and leaves it to XLA to add gradients up.

    `why`: why it is not run in another way, as a clause.
    """

    why: str = ""
    how: str = dataclasses.field(default="whole", init=False)
    num_parts: int = dataclasses.field(default=1, init=False)
    worker_axes: tuple[str, ...] = dataclasses.field(default=(), init=False)

    def evaluate(self, call: BoundaryCall) -> list[Any]:
        """Returns the results of the boundary `call`."""
        return expand(call.eqn.params, call.operands, call.forward)

    def sum_within(self, position: int) -> SumWithin:
        """Returns how the gradient of the operand at `position` is added up within a worker."""
        return SumWithin.AT_ONCE

    def run(self, call: BoundaryCall, runner: Any) -> list[Any]:
        """Returns the results of the boundary `call`; there are no loops that `runner` could run."""
        return self.evaluate(call)


def hook_of(ways: Ways, layout: StepLayout, rows: RowExchanges | None = None) -> BoundaryHook:
    """Returns the evaluator of the gradient boundaries of a step.

    **Arguments:** `ways`: by site, how each boundary runs. `layout`, `rows`: as in `BoundaryCall`.
    """

    def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: EvalForward) -> list[Any]:
        return ways[site].evaluate(BoundaryCall(eqn, operands, site, forward, layout, rows))

    return hook
