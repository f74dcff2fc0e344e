"""Builds a signature of a step: traces it, plans it and wraps it for `jax.jit`.

A `Recipe` (what the decorator was told), a mesh and a call taken apart come in; a `CompiledEntry` comes out, which
holds the trace, the plan and the program. It is where the rooms below meet: tracing, planning, lowering and programs
each know nothing of the order in which they run.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from splitjax import _compat
from splitjax.compile.programs import Programs, StepProgram
from splitjax.cost.convolutions import derive_convolutions
from splitjax.cost.transforms import derive_transforms
from splitjax.errors import PlanError, SplitjaxError, StateError, TraceError
from splitjax.lower.partial.depth_schedule import ScheduledPrograms, scheduled_programs
from splitjax.lower.partial.lowered import Lowered
from splitjax.lower.partial.step import PartialStep, find_partial
from splitjax.lower.products.exchange import derive_exchanges, weight_uses
from splitjax.lower.products.layout import SiteDecisions, StepLayout, named_sharding
from splitjax.lower.products.remedies import guarded_sites, reached_suspects, rewritten_sites
from splitjax.lower.products.scatter import derive_scatters, pin_gradients
from splitjax.lower.products.sharded_dims import ShardedDims
from splitjax.lower.strategies import BoundaryChoices, choose_ways
from splitjax.lower.tables.sparse_step import SparseStep
from splitjax.lower.tables.sync_request import DENSE, SyncRequest
from splitjax.lower.tables.sync_request import parse as parse_sync
from splitjax.lower.turns.in_turns import InTurns, boundaries_in_turns
from splitjax.lower.way import LoweredStep, make_twin, planned_boundaries
from splitjax.mesh import MeshShape
from splitjax.partial.request import PartialBackprop
from splitjax.plan import LeafPlan, Plan, Spec, SyncPlan
from splitjax.planning.group_comm import choose, crosses
from splitjax.planning.observing import TableDecision
from splitjax.planning.partial_plan import with_partial
from splitjax.planning.pinning import pins_tables, synchronised
from splitjax.planning.planning import follow_plan, make_plan, pin_plan
from splitjax.rules import RuleSet
from splitjax.step.agreement import agree, program_text
from splitjax.step.arguments import Bound, abstract
from splitjax.step.positions import ArgumentRoles, call_with, keyword_only
from splitjax.step.processes import host_digests, on_mesh
from splitjax.step.resized import resized_trace
from splitjax.step.states import match_states
from splitjax.trace.graph import Graph
from splitjax.trace.sites import Site
from splitjax.trace.tracer import build_graph

logger: logging.Logger = logging.getLogger("splitjax")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Holds what the decorator was told, checked. See `splitjax.parallelize` for the options.

    **Attributes:**

    - `fn`: the step as the user wrote it. `options`: which of its arguments are state, batch and static.
    - `rules`: the rule set that splits its parameters. `pinned`: the plan that is used instead; None for none.
    - `donate`: whether a call consumes its states.
    - `unknown`: `error` or `gather`, for operations without dim rule.
    - `returns_state`: whether the step returns its states; False for an evaluation.
    - `group_comm`, `shard_state`, `sync`, `backprop`: the options of these names.
    - `verify`: `first` to compare with one device before the first call of a signature; None to leave that away.
    """

    fn: Callable[..., Any]
    options: ArgumentRoles
    rules: RuleSet
    pinned: Plan | None
    donate: bool
    unknown: str
    returns_state: bool
    group_comm: str = "auto"
    shard_state: bool = False
    sync: SyncRequest = DENSE
    backprop: PartialBackprop | None = None
    verify: str | None = None

    @functools.cached_property
    def request(self) -> SyncRequest:
        """Returns how tables are to be synchronised: as asked for, or as the rule set says."""
        return parse_sync(self.rules.sync, f"rule set {self.rules.name!r}") if self.sync.is_dense else self.sync

    @property
    def name(self) -> str:
        """Returns the name of the step, for programs and messages."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @functools.cached_property
    def keywords(self) -> tuple[str, ...]:
        """Returns the step's keyword-only parameters: they take part as last positions (`arguments.positional`)."""
        return keyword_only(self.fn)


@dataclasses.dataclass(frozen=True)
class CompileRecord:
    """Records that a program of a step was planned.

    **Attributes:** `number`: which program of the step it is, counted from 1. `reason`: why the earlier programs did
    not serve. `plan_seconds`: the time to trace and plan it; XLA's own time is not in it.
    """

    number: int
    reason: str
    plan_seconds: float

    def log(self, name: str) -> None:
        """Writes the record to the log `splitjax`. `name`: of the step."""
        logger.info(
            "splitjax: program %d of %s (%s), planned in %.2f s", self.number, name, self.reason, self.plan_seconds
        )


@dataclasses.dataclass(frozen=True)
class CompiledEntry:
    """Holds a signature of a step, with its plan and its program.

    **Attributes:**

    - `bound`: the call that it was built for, taken apart. `mesh`: the devices.
    - `graph`: the traced step. `jaxpr`: the same as JAX has it. `result`: its result, as a pytree of
      `ShapeDtypeStruct`s.
    - `trace`: gives the step's closed jaxpr for other flat arguments (`ShapeDtypeStruct`s).
    - `plan`: the plan of the step.
    - `jitted`: the program, which takes the step's positional arguments; with partial backpropagation, the programs by
      number of the step.
    - `sparse`: the tables that are synchronised by rows; then programs return the step's result and what was observed.
    - `observes`: whether it is the program of the first steps: see `planning.observing`.
    - `is_decided`: whether schemes and capacities of its tables are known.
    - `residual_shardings`: by table that is rounded on the wire, the sharding of its residual; programs then take and
      return residuals too.
    - `partial`: the partial backpropagation of the step; None for full backpropagation.
    - `matched`: flat argument of a state leaf -> its flat result.
    """

    bound: Bound
    graph: Graph
    plan: Plan
    jitted: StepProgram | ScheduledPrograms
    mesh: Mesh
    jaxpr: _compat.ClosedJaxpr
    trace: Callable[[list[jax.ShapeDtypeStruct]], _compat.ClosedJaxpr]
    sparse: SparseStep | None = None
    observes: bool = False
    is_decided: bool = False
    residual_shardings: Mapping[str, NamedSharding] = dataclasses.field(default_factory=dict)
    partial: PartialStep | None = None
    matched: Mapping[int, int] = dataclasses.field(default_factory=dict)
    result: Any = None

    def program(self, step_number: int) -> StepProgram:
        """Returns the program of a step, which takes `operands`. `step_number`: the number of the step since the
        beginning of training, counted from 0."""
        return self.jitted.at(step_number) if isinstance(self.jitted, ScheduledPrograms) else self.jitted

    @functools.cached_property
    def residuals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Describes what rounding took away, by table that is rounded on the wire: the first operand of a program, and
        its last result."""
        tables = () if self.sparse is None else self.sparse.rounded
        return {
            table.param: jax.ShapeDtypeStruct(
                table.residual_shape, table.dtype, sharding=self.residual_shardings[table.param]
            )
            for table in tables
        }

    def operands(self, args: tuple[Any, ...], residuals: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the operands of a program for the step's positional arguments `args` and its `residuals`, by
        table."""
        return (dict(residuals), *args) if self.residuals else args

    @functools.cached_property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """Returns the sharding of every leaf of the arguments that are not static, in order."""
        return tuple(named_sharding(self.mesh, leaf.spec) for leaf in self.plan.leaves)

    def argument_shardings(self, recipe: Recipe) -> tuple[Any, ...]:
        """Returns the shardings as a pytree per argument of the step that `recipe` describes; None for static
        arguments."""
        return tuple(
            None
            if number in recipe.options.static_argnums
            else jax.tree.unflatten(jax.tree.structure(arg), self.shardings[slice(*self.bound.spans[number])])
            for number, arg in enumerate(self.bound.args)
        )

    def across_processes(self, recipe: Recipe, args: tuple[Any, ...], first: bool) -> tuple[Any, ...]:
        """Returns the positional arguments `args` of the step that `recipe` describes as global arrays. At the `first`
        call all processes compare what they are about to do, and raise `ProcessError` where that differs."""
        dynamic = [number for number in range(len(args)) if number not in recipe.options.static_argnums]
        leaves, tree = jax.tree.flatten([args[number] for number in dynamic])
        if first:
            values = host_digests(leaves, [leaf.path for leaf in self.plan.leaves])
            agree(recipe.name, self.plan, program_text(self.jaxpr), values)
        placed = dict(zip(dynamic, jax.tree.unflatten(tree, on_mesh(leaves, self.shardings)), strict=True))
        return tuple(placed.get(number, arg) for number, arg in enumerate(args))


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


def build_entry(
    recipe: Recipe,
    mesh: Mesh,
    bound: Bound,
    layouts: Mapping[str, LeafPlan] | None,
    tables: KnownTables | None = None,
    matched: Mapping[int, int] | None = None,
) -> CompiledEntry:
    """Builds the entry of a call: traces the step, matches its states, makes the graph and the plan, wraps it for
    `jax.jit`.

    **Arguments:**

    - `recipe`: the step. `mesh`: its devices. `bound`: the call, taken apart.
    - `layouts`: by path, the layout of the training step that an evaluation follows; None for a training step.
    - `tables`: what is known of how tables are synchronised; None for nothing.
    - `matched`: flat argument of a state leaf -> its flat result, where the caller knows; None to find out.

    Raises what tracing, planning and lowering raise: typed errors that name value, place and remedy."""
    tables = tables or KnownTables()
    jaxpr, result = _trace(recipe, bound)
    if matched is None:
        matched = match_states(recipe.options, bound, result) if recipe.returns_state else {}
    graph = build_graph(jaxpr, bound.arguments, matched)
    plan = _plan(recipe, MeshShape.of(mesh), graph, layouts)
    layout = _layout(mesh, plan, graph)
    trace = lambda leaves: _trace(recipe, bound, leaves)[0]
    twin_of = make_twin(graph, resized_trace(bound, trace))
    in_turns: Mapping[Site, InTurns] = {}
    if recipe.returns_state:
        lowered_step = LoweredStep(graph, mesh, plan, layout, twin_of)
        plan, in_turns = choose(
            recipe.group_comm if recipe.pinned is None else recipe.pinned.group_comm,
            plan,
            graph,
            lambda kind: boundaries_in_turns(kind, lowered_step, jaxpr),
            crosses(graph, plan),
        )
    partial, pinned_depths = None, None if recipe.pinned is None else recipe.pinned.partial
    if recipe.returns_state:
        partial = find_partial(
            recipe.backprop, pinned_depths, graph, jaxpr, plan, f"parallelize({recipe.name}), backprop"
        )
    if partial is not None:
        plan = with_partial(plan, partial, mesh.devices.flat[0].platform, pinned_depths)
    sparse, decision = None, tables.decision
    pinned = None if tables.observes else recipe.pinned
    if recipe.returns_state and (pins_tables(pinned) or not recipe.request.is_dense):
        sparse, plan, decision = synchronised(
            graph,
            jaxpr,
            plan,
            recipe.request,
            pinned=pinned,
            carried=() if tables.observes else tables.carried,
            decision=decision,
        )
        twin_of = sparse.twin_of(twin_of)
    lowered_step = LoweredStep(graph, mesh, plan, layout, twin_of)
    ways = choose_ways(lowered_step, jaxpr, BoundaryChoices(in_turns, sparse, partial))
    plan = dataclasses.replace(plan, boundaries=planned_boundaries(ways.planned, jaxpr))
    rounded = () if sparse is None else sparse.rounded
    residual_shardings = {table.param: NamedSharding(mesh, table.residual_spec) for table in rounded}
    lowered = Lowered(layout, jaxpr, matched, sparse)
    programs = Programs(recipe, mesh, bound, plan, jaxpr, result, matched, sparse is not None, residual_shardings)
    if ways.partial is None:
        jitted = programs.whole(functools.partial(lowered.run, ways.full))
    else:
        jitted = scheduled_programs(ways.partial, lowered, programs)
    observing = sparse is not None and bool(sparse.tables) and decision is None
    return CompiledEntry(
        bound,
        graph,
        plan,
        jitted,
        mesh,
        jaxpr,
        trace,
        sparse=sparse,
        observes=observing,
        is_decided=decision is not None,
        residual_shardings=residual_shardings,
        partial=partial,
        matched=matched,
        result=result,
    )


def _trace(
    recipe: Recipe, bound: Bound, leaves: list[jax.ShapeDtypeStruct] | None = None
) -> tuple[_compat.ClosedJaxpr, Any]:
    """Traces the step for flat `leaves` (None: those of the call). Returns its closed jaxpr, and its result as a pytree
    of `ShapeDtypeStruct`s."""
    static = dict(bound.signature.static)

    def flat(*values: Any) -> Any:
        dynamic = iter(jax.tree.unflatten(bound.signature.tree, values))
        args = [static[n] if n in static else next(dynamic) for n in range(len(bound.args))]
        return call_with(recipe.fn, recipe.keywords, args)

    flat.__name__ = recipe.name
    try:
        return _compat.trace(flat, *(abstract(bound.leaves, bound.signature.avals) if leaves is None else leaves))
    except SplitjaxError:
        raise
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise TraceError(
            f"the step uses a collective over an axis that only exists under pmap or shard_map ({error})",
            place=f"trace of {recipe.name}",
            remedy=(
                "a parallel step is written for the global batch: take out pmean, psum and axis_name; the mean over the"
                " batch is already the mean over all devices"
            ),
        ) from error


def _plan(recipe: Recipe, shape: MeshShape, graph: Graph, layouts: Mapping[str, LeafPlan] | None) -> Plan:
    """Plans the step: after the training step's `layouts`, a pinned plan, or rules."""
    if layouts is not None:
        if not layouts:
            raise PlanError(
                "the training step has no plan yet, so there is nothing to be like",
                place=f"{recipe.name}, made by like()",
                remedy="call init, place, plan or the training step itself first",
            )
        return follow_plan(graph, recipe.rules, shape, _follow(graph, layouts), recipe.unknown)
    if recipe.pinned is not None:
        return pin_plan(graph, recipe.pinned, shape, recipe.unknown)
    return make_plan(graph, recipe.rules, shape, recipe.unknown, recipe.shard_state)


def _follow(graph: Graph, layouts: Mapping[str, LeafPlan]) -> dict[str, Spec]:
    """Returns specs for an evaluation's state leaves, found by path, or by a path ending that fits exactly one planned
    leaf of that shape."""
    specs = {}
    for leaf in graph.leaves:
        if not leaf.is_state:
            continue
        known = layouts.get(leaf.path)
        if known is None or known.shape != leaf.shape:
            ends = [p for p in layouts.values() if p.shape == leaf.shape and p.path.endswith("/" + leaf.path)]
            params = [p for p in ends if p.role == "param"]
            known = ends[0] if len(ends) == 1 else params[0] if len(params) == 1 else None
        if known is not None:
            specs[leaf.path] = known.spec
    return specs


def _layout(mesh: Mesh, plan: Plan, graph: Graph) -> StepLayout:
    """Derives from a plan what evaluation does at each site: constraints, exchanges, rewrites."""
    arguments = graph, plan.leaves, plan.mesh, plan.batch_axes, plan.replicated_batch
    exchanges = derive_exchanges(*arguments)
    sums = derive_scatters(*arguments, exchanges)
    convolutions = derive_convolutions(*arguments)
    sharded = ShardedDims.of(graph, plan.leaves, plan.batch_axes)
    reached = reached_suspects(graph, plan.mesh, sharded, convolutions)
    split_sites = {suspect.site for suspects in reached.values() for suspect in suspects}
    return StepLayout.of(
        mesh,
        (*plan.constraints, *pin_gradients(graph, plan.leaves)),
        SiteDecisions(
            sums,
            weight_uses(*arguments),
            names={use.site: use.layer for use in graph.uses},
            convolutions=convolutions,
            transforms=[transform for transform in derive_transforms(*arguments) if transform.site in split_sites],
            rewrites=rewritten_sites(graph, plan.mesh),
            guarded=guarded_sites(reached),
        ),
    )


def trace_error(error: Exception, recipe: Recipe, mesh: Mesh, args: tuple[Any, ...]) -> Exception:
    """Returns the typed error for what `jax.jit` says where arguments live where the plan does not want them; any other
    `error` as it is. `recipe`, `mesh`: the step that was called; `args`: its arguments, which do not matter."""
    text = str(error)
    if isinstance(error, SplitjaxError) or not any(
        part in text for part in ("does not match the sharding", "incompatible devices")
    ):
        return error
    return StateError(
        "an argument already lives on devices or in a sharding other than the plan's: " + text.splitlines()[0][:300],
        place=f"call of {recipe.name} on mesh {MeshShape.of(mesh)}",
        remedy=(
            "create the state with step.init(...), or move it with step.place(state, example=...); leave a batch as"
            " NumPy arrays, or put it on the step's mesh by plan.spec(path of the array)"
        ),
    )
