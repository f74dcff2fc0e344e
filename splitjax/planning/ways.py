"""Says what a way to run a gradient boundary is: chosen while planning, evaluated whenever the step is traced.

A `BoundaryWay` holds everything that was found out about a boundary (a cut, a paired program, a classification), so
that its evaluation derives nothing again. Planning reads what a plan records of a way, and carries it to whoever
evaluates the step. What there is to choose from comes in as a `WayChooser`, which lowering has
(`lower.strategies.CHOOSER`); it is asked with a `DecidedStep`. A way knows no devices: they come in with the
`BoundaryCall`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from splitjax import _compat
from splitjax.errors import Refusal
from splitjax.plan import BoundaryPlan, Plan
from splitjax.planning.partial_step import PartialStep
from splitjax.planning.sites.layout import SiteLayout, StepLayout
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.primitives.interpreter import AnyJaxpr
from splitjax.primitives.walk import Site, equation_at
from splitjax.step.boundary import Twin, is_boundary
from splitjax.trace.graph import Graph

# Evaluates a jaxpr on operands, with the layout's constraints.
EvalForward = Callable[[AnyJaxpr, Sequence[Any]], list[Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class DecidedStep:
    """Holds what is known of the step around a boundary: what every choice of a way asks.

    - `graph`, `plan`: of the step.
    - `sites`: the plan's constraints and exchanges by site.
    - `twin_of`: finds a boundary in a trace with another number of examples, as `make_twin` makes it.
    """

    graph: Graph
    plan: Plan
    sites: SiteLayout
    twin_of: Twin

    @property
    def num_examples(self) -> int:
        """The step's number of examples, which it has wherever a boundary runs in a loop."""
        assert self.graph.num_examples is not None, "a step without examples was to run in microbatches"
        return self.graph.num_examples


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

    @property
    def worker_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes along which workers lie that each add up what all uses of an operand give to its
        gradient before they send it; none where adding up is left to XLA."""
        ...

    def evaluate(self, call: BoundaryCall) -> list[Any]:
        """Returns the results of the boundary `call`: value, aux leaves, gradients, in the order of
        `boundary.expand`."""
        ...


Ways = Mapping[Site, BoundaryWay]


class SumWithin(enum.Enum):
    """Says how the gradient of an operand is added up over the devices of one worker, where a worker is a group of
    them."""

    AT_ONCE = "together with those of all workers, behind the loops: each device has its own examples"
    FIRST = "before those of workers are added up: each device has its own examples"
    NEVER = "not at all: each device has the whole gradient of the worker's examples, or its part of that"


class StepWays(Protocol):
    """Holds how the boundaries of a step run, at each of its depths where workers have several."""

    @property
    def planned(self) -> Ways:
        """Returns by site what the plan records: in steps behind a warm-up, the deepest."""
        ...

    @property
    def sums_within(self) -> Mapping[str, SumWithin]:
        """Returns by parameter how its gradient is added up within a worker, where workers have depths of their own;
        nothing elsewhere."""
        ...

    @property
    def gathered(self) -> Mapping[str, tuple[str, ...]]:
        """Returns by parameter the axes along which workers have it whole in a loop of their own, where it is stored
        over these."""
        ...

    @property
    def left(self) -> frozenset[Site]:
        """Returns the sites of the boundaries in which XLA adds gradients up, those of loops among them."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class BoundaryChoices:
    """Holds what was decided of a step that bears on how its boundaries run.

    - `in_turns`: by site, the boundaries that were prepared to run in turns.
    - `tables`: the tables that are synchronised by rows; None without such.
    - `partial`: the partial backpropagation; None for full backpropagation.
    """

    in_turns: Ways = dataclasses.field(default_factory=dict)
    tables: SparseStep | None = None
    partial: PartialStep | None = None


@dataclasses.dataclass(frozen=True)
class WayChooser:
    """Chooses how gradient boundaries run, and prepares them: what lowering offers to whoever plans a step.

    - `in_turns(kind, step, jaxpr)`: by site the boundaries in which examples cross, prepared for a kind of group
      communication; a refusal where one of them cannot run so.
    - `choose(step, jaxpr, choices)`: how every boundary of a step runs. Raises the error of a boundary that cannot run
      as it is asked for.
    """

    in_turns: Callable[[str, DecidedStep, _compat.ClosedJaxpr], Ways | Refusal]
    choose: Callable[[DecidedStep, _compat.ClosedJaxpr, BoundaryChoices], StepWays]


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
