"""One signature of a step, built: traced, planned and wrapped for `jax.jit`."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from splitjax import _compat
from splitjax.compile.programs import Programs
from splitjax.cost.convolutions import derive_convolutions
from splitjax.errors import PlanError, SplitjaxError, StateError, TraceError
from splitjax.lower.partial.depth_schedule import turned
from splitjax.lower.partial.hooks import PartialHooks
from splitjax.lower.partial.lowered import Lowered
from splitjax.lower.partial.step import PartialStep, find_partial
from splitjax.lower.products.exchange import derive_exchanges, weight_uses
from splitjax.lower.products.interpret import Layout, named_sharding
from splitjax.lower.products.local_transform import derive_transforms
from splitjax.lower.products.remedies import guarded_sites, reached_suspects, rewritten_sites
from splitjax.lower.products.scatter import derive_scatters, pin_gradients
from splitjax.lower.products.sharded_dims import ShardedDims
from splitjax.lower.strategies import boundary_hook, check_turns, make_twin, resized_trace
from splitjax.lower.tables.sparse import SparseStep
from splitjax.lower.tables.sync_request import DENSE, SyncRequest
from splitjax.lower.tables.sync_request import parse as parse_sync
from splitjax.mesh import MeshShape
from splitjax.partial.request import PartialBackprop
from splitjax.plan import LeafPlan, Plan, SyncPlan
from splitjax.planning.group_comm import choose, crosses
from splitjax.planning.observing import Decision
from splitjax.planning.partial_plan import with_partial
from splitjax.planning.pinning import pins_tables, synchronised
from splitjax.planning.planning import follow_plan, make_plan, pin_plan
from splitjax.rules import RuleSet
from splitjax.step.agreement import agree, program_text
from splitjax.step.arguments import Bound, Options, abstract, call_with, keyword_only
from splitjax.step.processes import host_digests, on_mesh
from splitjax.step.states import match_states
from splitjax.trace.graph import Graph
from splitjax.trace.tracer import build_graph

logger = logging.getLogger("splitjax")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the decorator was told, checked."""

    fn: Callable
    options: Options
    rules: RuleSet
    pinned: Plan | None
    donate: bool
    unknown: str
    returns_state: bool
    group_comm: str = "auto"
    shard_state: bool = False
    sync: SyncRequest = DENSE
    backprop: PartialBackprop | None = None
    verify: str | None = None  # "first": compare with one device before the first call of a signature

    @functools.cached_property
    def request(self) -> SyncRequest:
        """How tables are synchronised: as asked for, or as the rule set says."""
        return parse_sync(self.rules.sync, f"rule set {self.rules.name!r}") if self.sync.is_dense else self.sync

    @property
    def name(self) -> str:
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @functools.cached_property
    def keywords(self) -> tuple[str, ...]:
        """The step's keyword-only parameters: they take part as last positions (`arguments.positional`)."""
        return keyword_only(self.fn)

    @property
    def first_state(self) -> int:
        return self.options.state_argnums[0] if self.options.state_argnums else 0


@dataclasses.dataclass(frozen=True)
class CompileRecord:
    """One program of a step: `reason` says why the earlier ones did not serve."""

    number: int
    reason: str
    plan_seconds: float  # trace and plan; XLA's own time is not in it

    def log(self, name: str) -> None:
        logger.info(
            "splitjax: program %d of %s (%s), planned in %.2f s", self.number, name, self.reason, self.plan_seconds
        )


@dataclasses.dataclass(frozen=True)
class Entry:
    """A plan with its program. `jitted` takes the step's positional arguments."""

    bound: Bound
    graph: Graph
    plan: Plan
    jitted: Any
    mesh: Mesh
    jaxpr: Any
    trace: Callable[[list[Any]], Any]  # the step's closed jaxpr for other flat arguments (`ShapeDtypeStruct`s)
    # tables synchronised by rows: then `jitted` returns the step's result and what was observed
    sparse: SparseStep | None = None
    observes: bool = False  # it is the program of the first steps: see `observing`
    is_decided: bool = False  # schemes and capacities of its tables are known
    # by table: then `jitted` takes and returns them too
    residual_shardings: Mapping[str, NamedSharding] = dataclasses.field(default_factory=dict)
    # then `jitted` is `depth_schedule.Turned`: another program, or another operand, by step
    partial: PartialStep | None = None
    # flat argument of a state leaf -> its flat result
    matched: Mapping[int, int] = dataclasses.field(default_factory=dict)
    result: Any = None  # the step's, as a pytree of `ShapeDtypeStruct`s

    def program(self, step_number: int) -> Any:
        """The program of a step, by its number since the beginning of training: takes `operands`, and has `lower`."""
        return self.jitted if self.partial is None else self.jitted.at(step_number)

    @functools.cached_property
    def residuals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What rounding took away, by table that is rounded on the wire: the first operand of a program, and its last
        result."""
        tables = () if self.sparse is None else self.sparse.rounded
        return {
            one.param: jax.ShapeDtypeStruct(one.residual_shape, one.dtype, sharding=self.residual_shardings[one.param])
            for one in tables
        }

    def operands(self, args: tuple, residuals: Mapping[str, Any]) -> tuple:
        """What a program takes."""
        return (dict(residuals), *args) if self.residuals else args

    @functools.cached_property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """Of every leaf of the arguments that are not static, in order."""
        return tuple(named_sharding(self.mesh, leaf.spec) for leaf in self.plan.leaves)

    def argument_shardings(self, recipe: Recipe) -> tuple[Any, ...]:
        """The same, as one pytree per argument; None for static ones."""
        return tuple(
            None
            if number in recipe.options.static_argnums
            else jax.tree.unflatten(jax.tree.structure(arg), self.shardings[slice(*self.bound.spans[number])])
            for number, arg in enumerate(self.bound.args)
        )

    def across_processes(self, recipe: Recipe, args: tuple, first: bool) -> tuple:
        """The arguments as global arrays. At the `first` call all processes compare what they are about to do:
        `ProcessError`."""
        dynamic = [number for number in range(len(args)) if number not in recipe.options.static_argnums]
        leaves, tree = jax.tree.flatten([args[number] for number in dynamic])
        if first:
            values = host_digests(leaves, [leaf.path for leaf in self.plan.leaves])
            agree(recipe.name, self.plan, program_text(self.jaxpr), values)
        placed = dict(zip(dynamic, jax.tree.unflatten(tree, on_mesh(leaves, self.shardings)), strict=True))
        return tuple(placed.get(number, arg) for number, arg in enumerate(args))


def build_entry(
    recipe: Recipe,
    mesh: Mesh,
    bound: Bound,
    layouts: Mapping[str, LeafPlan] | None,
    decision: Decision | None = None,
    carried: Sequence[SyncPlan] = (),
    observes: bool = False,
    matched: Mapping[int, int] | None = None,
) -> Entry:
    """trace -> match states -> graph -> plan -> jit.

    **Arguments:** `decision`: how tables are synchronised, once their steps were observed; `carried`: what a run knew
    that is resumed. `observes`: build the program of the first steps, whatever is known. `matched`: flat argument of a
    state leaf -> its flat result, where the caller knows."""
    jaxpr, result = _trace(recipe, bound)
    if matched is None:
        matched = match_states(recipe.options, bound, result) if recipe.returns_state else {}
    graph = build_graph(jaxpr, bound.arguments, matched)
    plan = _plan(recipe, MeshShape.of(mesh), graph, layouts)
    layout = _layout(mesh, plan, graph)
    trace = lambda leaves: _trace(recipe, bound, leaves)[0]
    twin_of = make_twin(graph, resized_trace(bound, trace))
    if recipe.returns_state:
        check = lambda kind: check_turns(kind, graph, mesh, plan, layout, jaxpr, twin_of)
        plan = choose(
            recipe.group_comm if recipe.pinned is None else recipe.pinned.group_comm,
            plan,
            graph,
            check,
            crosses(graph, plan),
        )
    partial, pinned_depths = None, None if recipe.pinned is None else recipe.pinned.partial
    if recipe.returns_state:
        partial = find_partial(
            recipe.backprop, pinned_depths, graph, jaxpr, plan, f"parallelize({recipe.name}), backprop"
        )
    if partial is not None:
        plan = with_partial(plan, partial, mesh.devices.flat[0].platform, pinned_depths)
    sparse = None
    pinned = None if observes else recipe.pinned
    if recipe.returns_state and (pins_tables(pinned) or not recipe.request.is_dense):
        sparse, plan, decision = synchronised(
            graph, jaxpr, plan, recipe.request, pinned=pinned, carried=() if observes else carried, decision=decision
        )
        twin_of = sparse.twin_of(twin_of)
    hook = boundary_hook(graph, mesh, plan, layout, twin_of, None if sparse is None else sparse.pulled_at)
    kept = {} if sparse is None else {one.param: NamedSharding(mesh, one.residual_spec) for one in sparse.rounded}
    lowered = Lowered(mesh, layout, jaxpr, matched, sparse)
    programs = Programs(recipe, mesh, bound, plan, jaxpr, result, matched, sparse is not None, kept)
    if partial is None:
        jitted = programs.whole(functools.partial(lowered.run, hook))
    else:
        jitted = turned(
            partial, PartialHooks(partial, jaxpr, mesh, plan, layout, twin_of, sparse, hook), lowered, programs
        )
    observing = sparse is not None and bool(sparse.tables) and decision is None
    return Entry(
        bound,
        graph,
        plan,
        jitted,
        mesh,
        jaxpr,
        trace,
        sparse,
        observing,
        decision is not None,
        kept,
        partial,
        matched,
        result,
    )


def _trace(recipe: Recipe, bound: Bound, leaves: list[jax.ShapeDtypeStruct] | None = None) -> tuple[Any, Any]:
    """The step's closed jaxpr over its flat arguments, and its result as `ShapeDtypeStruct`s."""
    static = dict(bound.signature.static)

    def flat(*values):
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


def _follow(graph: Graph, layouts: Mapping[str, LeafPlan]) -> dict[str, Any]:
    """Specs for an evaluation's state leaves: by path, or by a path ending that fits exactly one planned leaf of that
    shape."""
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


def _layout(mesh: Mesh, plan: Plan, graph: Graph) -> Layout:
    arguments = graph, plan.leaves, plan.mesh, plan.batch_axes, plan.replicated_batch
    exchanges = derive_exchanges(*arguments)
    sums = derive_scatters(*arguments, exchanges)
    convolutions = derive_convolutions(*arguments)
    sharded = ShardedDims.of(graph, plan.leaves, plan.batch_axes)
    reached = reached_suspects(graph, plan.mesh, sharded, convolutions)
    return Layout.of(
        mesh,
        (*plan.constraints, *pin_gradients(graph, plan.leaves)),
        sums,
        weight_uses(*arguments),
        names={use.site: use.layer for use in graph.uses},
        convolutions=convolutions,
        rewrites=rewritten_sites(graph, plan.mesh),
        guarded=guarded_sites(reached),
        transforms=derive_transforms([one for several in reached.values() for one in several], sharded),
    )


def trace_error(error: Exception, recipe: Recipe, mesh: Mesh, args: tuple) -> Exception:
    """The typed error for what `jax.jit` says when arguments live where the plan does not want them; else the error
    itself."""
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
