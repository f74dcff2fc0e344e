"""Holds a step while it is planned: what was asked for, what is known, and every decision so far, as one value.

A traced call, a mesh and a `PlanRequest` come in as an empty `Draft`; the passes of `planning.passes` each return it
with one more decision; `planning.predict` makes the `Plan` of it. Nothing in it is predicted, so that no later decision
has to mend what an earlier one predicted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh

from splitjax.cost.flow import WeightFlow
from splitjax.mesh import MeshShape
from splitjax.partial.request import PartialBackprop
from splitjax.plan import Constraint, LeafPlan, Memory, Plan, SyncPlan
from splitjax.planning.observing import TableDecision
from splitjax.planning.partial_step import PartialStep
from splitjax.planning.sites.layout import SiteLayout
from splitjax.planning.tables.finding import TableFinder
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.planning.tables.sync_request import SyncRequest
from splitjax.planning.ways import DecidedStep, StepWays, WayChooser, Ways, make_twin
from splitjax.roles import Role
from splitjax.rules import RuleSet
from splitjax.rules.assign import Assignment
from splitjax.rules.pins import Pins, resolve
from splitjax.step.boundary import Twin
from splitjax.step.traced import Traced
from splitjax.trace.graph import Graph

_NOTHING = Assignment("", "all", (), (), (), (), ())


@dataclasses.dataclass(frozen=True)
class PlanRequest:
    """Holds what a plan is asked to be.

    **Attributes:**

    - `name`: of the step, for messages. `returns_state`: whether it returns its states; False for an evaluation.
    - `rules`: the rule set that splits its parameters. `roles`: what was said of mesh axes. `pinned`: the plan
      whose decisions are taken over instead; None for none.
    - `followed`: by path, the layout of the training step that an evaluation follows; None for a training step.
    - `unknown`: `error` or `gather`, for operations without dim rule.
    - `uneven`: `error` or `pad`, for sizes that do not divide.
    - `group_comm`, `shard_state`, `backprop`: the options of these names. `sync`: how tables are synchronised.
    - `platform`: of the devices, such as `cpu`.
    """

    name: str
    returns_state: bool
    rules: RuleSet
    roles: Mapping[str, Role]
    pinned: Plan | None
    followed: Mapping[str, LeafPlan] | None
    unknown: str
    group_comm: str
    shard_state: bool
    sync: SyncRequest
    backprop: PartialBackprop | None
    platform: str
    uneven: str = "error"


@dataclasses.dataclass(frozen=True)
class KnownTables:
    """Holds what is known of how a step's tables are synchronised before its program is built.

    - `decision`: how they are, once their steps were observed.
    - `carried`: how the run that is resumed synchronised them.
    - `observes`: whether to build the program of the first steps, whatever is known.
    """

    decision: TableDecision | None = None
    carried: Sequence[SyncPlan] = ()
    observes: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Draft:
    """Holds a traced step with what was decided about it so far.

    **Attributes:**

    - `traced`: the step. `mesh`: its mesh, with devices or abstract: planning looks at axes and sizes alone.
    - `request`: what is asked for. `chooser`: chooses how its gradient boundaries run.
    - `shape`: the shape of the mesh, with the roles that were said of its axes, by the user or by a pinned plan.
    - `simulator`: predicts the memory of the step under a draft by the lifetimes of its arrays, which takes as long as
      tracing it; None where a sum has to do. `known`: what is known of its tables.
    - `layout`: where every leaf lives. `notes`: what to know besides.
    - `constraints`: the shardings that lowering pins inside the step. `gathered`: unknown operations that run
      replicated. `sites`: what these and the layout mean for each operation; None before that is derived.
    - `flows`: how activations flow through the layers under the layout.
    - `group_comm`: how examples cross into split layers. `in_turns`: the boundaries that are prepared to cross in
      turns, by site.
    - `partial`: how far back workers differentiate; None for full backpropagation.
    - `tables`: those that are synchronised by rows; None where the dense exchange alone is asked for. `finder`: finds
      them again under another layout. `decision`: their exchanges; None while the first steps are observed.
    - `ways`: how each gradient boundary runs, prepared; None before that is chosen.
    """

    traced: Traced
    mesh: Mesh | AbstractMesh
    request: PlanRequest
    chooser: WayChooser
    shape: MeshShape
    simulator: Callable[[Draft], Memory] | None = None
    known: KnownTables = dataclasses.field(default_factory=KnownTables)
    layout: Assignment = _NOTHING
    notes: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    gathered: tuple[str, ...] = ()
    flows: tuple[WeightFlow, ...] = ()
    sites: SiteLayout | None = None
    group_comm: str = "gather"
    in_turns: Ways = dataclasses.field(default_factory=dict)
    partial: PartialStep | None = None
    tables: SparseStep | None = None
    finder: TableFinder | None = None
    decision: TableDecision | None = None
    ways: StepWays | None = None

    @classmethod
    def of(
        cls,
        traced: Traced,
        mesh: Mesh | AbstractMesh,
        request: PlanRequest,
        chooser: WayChooser,
        simulator: Callable[[Draft], Memory] | None = None,
    ) -> Draft:
        """Returns the draft of a step about which nothing is decided; the arguments are its attributes. Raises
        `MeshError` for a role of an axis that the mesh lacks."""
        shape, pinned, said = MeshShape.of(mesh), request.pinned, request.roles
        if pinned is not None and not said:
            said = {axis: role for axis, role in pinned.mesh.said if axis in shape.names}
        return cls(traced, mesh, request, chooser, shape.with_roles(said), simulator)

    @property
    def graph(self) -> Graph:
        """Returns the traced step, analysed."""
        return self.traced.graph

    @property
    def takes_gradient(self) -> bool:
        """Returns whether the step takes a gradient and returns its states; False for an evaluation."""
        return self.request.returns_state

    @functools.cached_property
    def pins(self) -> Pins:
        """Where the user pinned arguments; nothing where a pinned plan, or the training step of an evaluation, says all
        of it. Raises `PinError` for what cannot be."""
        if self.request.pinned is not None or self.request.followed is not None:
            return Pins()
        return resolve(self.traced.said, self.graph, self.shape)

    @functools.cached_property
    def saving_axes(self) -> tuple[str, ...]:
        """The axes over which inputs of rematerialised layers are kept in parts, where they can be; none for a step
        without a backward pass."""
        if not self.takes_gradient:
            return ()
        pinned = self.request.pinned
        return self.request.rules.saving_axes(self.shape) if pinned is None else pinned.saved

    @functools.cached_property
    def decided(self) -> Plan:
        """The plan with the layout, the constraints and the group communication that are decided so far, and with
        nothing predicted."""
        return Plan(
            mesh=self.shape,
            rules=self.layout.rules,
            replicated_batch=self.layout.replicated_batch,
            batch_axes=self.layout.batch_axes,
            leaves=self.layout.leaves,
            layers=self.layout.layers,
            constraints=self.constraints,
            gathered=self.gathered,
            notes=self.notes,
            group_comm=self.group_comm,
            remat=self.traced.remat,
            saved=() if self.sites is None else self.sites.saved_over(self.shape.names),
        )

    @functools.cached_property
    def decided_step(self) -> DecidedStep:
        """The step as those see it who choose how its gradient boundaries run."""
        assert self.sites is not None, "boundaries are looked at once the layout and its constraints are decided"
        return DecidedStep(self.graph, self.decided, self.sites, self.twin_of)

    @functools.cached_property
    def twin_of(self) -> Twin:
        """Finds a boundary in a trace with another number of examples, as `ways.make_twin` says; with edited
        lookups where tables are synchronised by rows."""
        twin_of = make_twin(self.graph, self.traced.resized)
        return twin_of if self.tables is None else self.tables.twin_of(twin_of)

    def laid_out(self, leaves: Sequence[LeafPlan]) -> Draft:
        """Returns the draft with all of its leaves laid out as `leaves`, in flat order, and with its tables found
        again. Who the workers of partial backpropagation are, and what was decided about boundaries, stays."""
        layout = dataclasses.replace(self.layout, leaves=tuple(leaves))
        tables = None if self.finder is None else self.finder.sparse_step(self.finder.find(leaves))
        return dataclasses.replace(self, layout=layout, tables=tables)

    def noting(self, *notes: str) -> Draft:
        """Returns the draft with further `notes`."""
        return dataclasses.replace(self, notes=(*self.notes, *notes))
