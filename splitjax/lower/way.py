"""Says what a way to run a gradient boundary is: chosen while planning, evaluated whenever the step is traced.

A `BoundaryWay` holds everything that was found out about a boundary (a cut, a paired program, a classification), so
that its evaluation derives nothing again. `strategies.choose_ways` chooses one for each boundary of a step from a
`LoweredStep`; `hook_of` makes of them what the interpreter calls. `Whole` is the plainest of them; the rooms
`microbatch`, `turns`, `partial` and `tables` have the others. A way knows no devices: they come in with the
`BoundaryCall`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jax.sharding import Mesh

from splitjax import _compat
from splitjax.errors import Refusal
from splitjax.lower.boundary import Twin, expand, is_boundary
from splitjax.lower.products.interpret import BoundaryHook, EvalForward
from splitjax.lower.products.layout import StepLayout
from splitjax.plan import BoundaryPlan, Plan
from splitjax.primitives.walk import Site, equation_at
from splitjax.trace.graph import Graph


@dataclasses.dataclass(frozen=True, eq=False)
class LoweredStep:
    """Holds what is known of the step around a boundary: what every choice of a way asks.

    - `graph`, `plan`: of the step. `mesh`: the mesh that the plan is for.
    - `layout`: the plan's constraints and exchanges by site.
    - `twin_of`: finds a boundary in a trace with another number of examples, as `make_twin` makes it.
    """

    graph: Graph
    mesh: Mesh
    plan: Plan
    layout: StepLayout
    twin_of: Twin

    @property
    def num_examples(self) -> int:
        """The step's number of examples, which it has wherever a boundary runs in a loop."""
        assert self.graph.num_examples is not None, "a step without examples was to run in microbatches"
        return self.graph.num_examples


class SumWithin(enum.Enum):
    """Says how the gradient of an operand is added up over the devices of one worker, where a worker is a group of
    them."""

    AT_ONCE = "together with those of all workers, behind the loops: each device has its own examples"
    FIRST = "before those of workers are added up: each device has its own examples"
    NEVER = "not at all: each device has the whole gradient of the worker's examples, or its part of that"


class RowExchanges(Protocol):
    """Pulls and pushes rows of tables around a boundary, in one evaluation of a step."""

    def pull(self, edit: Any, operands: Sequence[Any]) -> list[Any]:
        """Returns what the lookups of an edited boundary are differentiated by: `operands` are the boundary's own,
        `edit` says which of them are tables."""
        ...

    def push(self, edit: Any, eqn: Any, results: Sequence[Any]) -> list[Any]:
        """Exchanges the rows among the `results` of the edited boundary; returns the results of the boundary `eqn`."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class BoundaryCall:
    """Holds a boundary that is to be evaluated.

    - `eqn`: its equation. `operands`: the values of its operands. `site`: where it stands in the step.
    - `forward(jaxpr, operands)`: evaluates its forward where it runs whole.
    - `layout`: the step's layout on the mesh of this evaluation.
    - `rows`: exchanges the rows of tables; None in a step without such.
    """

    eqn: Any
    operands: Sequence[Any]
    site: Site
    forward: EvalForward
    layout: StepLayout
    rows: RowExchanges | None = None


class BoundaryWay(Protocol):
    """Runs a gradient boundary in one way, which was chosen and prepared while the step was planned."""

    @property
    def how(self) -> str:
        """Returns the name of the way, one of `BoundaryPlan.how`."""
        ...

    @property
    def num_parts(self) -> int:
        """Returns the number of microbatches, turns or depths in which it runs; 1 for whole."""
        ...

    @property
    def why(self) -> str:
        """Returns the reason for the choice, as a clause; empty where it is the usual way."""
        ...

    def evaluate(self, call: BoundaryCall) -> list[Any]:
        """Returns the results of the boundary `call`: value, aux leaves, gradients, in the order of
        `boundary.expand`."""
        ...


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


Ways = Mapping[Site, BoundaryWay]


@dataclasses.dataclass(frozen=True)
class Whole:
    """Evaluates a boundary with all examples at once, and leaves it to XLA to add gradients up.

    `why`: why it is not run in another way, as a clause.
    """

    why: str = ""
    how: str = dataclasses.field(default="whole", init=False)
    num_parts: int = dataclasses.field(default=1, init=False)

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


def planned_boundaries(ways: Ways, jaxpr: _compat.ClosedJaxpr) -> tuple[BoundaryPlan, ...]:
    """Returns what a plan records of the `ways` of a step, whose closed jaxpr is `jaxpr`, in the order of sites."""
    return tuple(
        BoundaryPlan(site, equation_at(jaxpr, site).params["label"], way.how, way.num_parts, way.why)
        for site, way in sorted(ways.items())
    )


def make_twin(graph: Graph, resized: Callable[[int], _compat.ClosedJaxpr | Refusal]) -> Twin:
    """Returns a function that finds a step's boundary in a trace with another number of examples.

    **Arguments:**

    - `graph`: of the step.
    - `resized`: number of examples -> closed jaxpr, or why the step cannot be traced so.

    The function returns a refusal where the other trace has no such boundary at the same site.
    """

    def twin_of(eqn: Any, site: Site, num_examples: int) -> Any:
        jaxpr = resized(num_examples)
        if isinstance(jaxpr, Refusal):
            return jaxpr
        twin = equation_at(jaxpr, site)
        if twin is None or not is_boundary(twin) or len(twin.invars) != len(eqn.invars):
            return Refusal(
                f"{eqn.params['label']}: the step is another program for {num_examples} examples than for"
                f" {graph.num_examples}",
                value=num_examples,
                place=eqn.params["label"],
                remedy="do not let the program depend on the batch size, or use microbatches=None",
            )
        return twin

    return twin_of


def example_dim(whole: Sequence[int], part: Sequence[int]) -> int | None:
    """Returns the dim whose size differs between two traces of an array, of shapes `whole` and `part`; None where the
    shapes are the same."""
    return next((d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b), None)
