"""Holds a step as its decorator was told it, and a signature of it with its plan and its program.

`compile.recipes` makes a `Recipe` of options, `compile.building` a `CompiledEntry` of a recipe, a mesh and a traced
call; everything that runs, measures, verifies or reports a step reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.compile.programs import StepProgram
from splitjax.lower.partial.depth_schedule import ScheduledPrograms
from splitjax.machines.calibration import Calibration
from splitjax.machines.targets import Target
from splitjax.mesh import MeshShape, has_devices_here
from splitjax.partial.request import PartialBackprop
from splitjax.plan import Memory, Plan, spec_axes
from splitjax.planning.partial_step import PartialStep
from splitjax.planning.sites.layout import named_sharding
from splitjax.planning.tables.sparse_step import SparseStep
from splitjax.planning.tables.sync_request import DENSE, SyncRequest
from splitjax.planning.tables.sync_request import parse as parse_sync
from splitjax.roles import Role
from splitjax.rules import RuleSet
from splitjax.rules.ruleset import TO_BE_CHOSEN
from splitjax.step.agreement import agree, program_text
from splitjax.step.arguments import Bound, abstract
from splitjax.step.padding.stored import stored_array
from splitjax.step.positions import ArgumentRoles, keyword_only
from splitjax.step.processes import host_digests, on_mesh
from splitjax.step.remat.rematerialising import Remat
from splitjax.step.traced import Traced
from splitjax.trace.graph import Graph

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
    - `microbatches`: in how many its gradients are taken, where it does not say so itself; None for whole.
    - `remat`: which repeated blocks are computed again in the backward pass, where it does not say so itself.
    - `chooses_state`, `chooses_microbatches`, `chooses_remat`: whether `shard_state`, `microbatches` and `remat` are
      still to be chosen.
    - `roles`: what the user said that mesh axes are for.
    - `uneven`: `error` or `pad`, for sizes that do not divide.
    - `memory_budget_bytes`: what a device may need where the rules are chosen; infinity without a budget.
    - `target`: the machine that it is for; None for the one that JAX sees.
    - `calibration`: what was measured of the machine that it is for; None where nothing was, or is not told.
    - `compile_best`: how many candidates at most are compiled for `target` before one is chosen.
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
    microbatches: int | None = None
    chooses_state: bool = False
    chooses_microbatches: bool = False
    remat: Remat = ()
    chooses_remat: bool = False
    sync: SyncRequest = DENSE
    backprop: PartialBackprop | None = None
    verify: str | None = None
    roles: Mapping[str, Role] = dataclasses.field(default_factory=dict)
    uneven: str = "error"
    memory_budget_bytes: float = math.inf
    target: Target | None = None
    calibration: Calibration | None = None
    compile_best: int = 0

    @property
    def is_open(self) -> bool:
        """Returns whether something of it but its mesh is left to be chosen. A pinned plan decides for itself."""
        chooses = self.chooses_state or self.chooses_microbatches or self.chooses_remat
        return (self.rules == TO_BE_CHOSEN or chooses) and self.pinned is None

    @functools.cached_property
    def request(self) -> SyncRequest:
        """Returns how tables are to be synchronised: as asked for, or as the rule set says."""
        return parse_sync(self.rules.sync, f"rule set {self.rules.name!r}") if self.sync.is_dense else self.sync

    @property
    def name(self) -> str:
        """Returns the name of the step, for programs and messages."""
        return getattr(self.fn, "__name__", type(self.fn).__name__)

    @property
    def unpadded(self) -> Recipe:
        """Returns the recipe of the same step with leaves of the sizes that it knows, for measurements of one worker:
        where layers lie does not matter to these."""
        pads = self.pinned is not None and any(leaf.logical is not None for leaf in self.pinned.leaves)
        if self.uneven == "error" and not pads:
            return self
        return dataclasses.replace(self, uneven="error", pinned=None if pads else self.pinned)

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

    - `traced`: the call that it was built for, traced. `mesh`: the user's, on which arrays come and go.
    - `plan`: the plan of the step. `summed`: its memory as a quick sum of all arrays, which knows no lifetimes.
    - `jitted`: the program, which takes the step's positional arguments; with partial backpropagation, the programs by
      number of the step.
    - `sparse`: the tables that are synchronised by rows; then programs return the step's result and what was observed.
    - `observes`: whether it is the program of the first steps: see `planning.observing`.
    - `is_decided`: whether schemes and capacities of its tables are known.
    - `residual_shardings`: by table that is rounded on the wire, the sharding of its residual; programs then take and
      return residuals too.
    - `partial`: the partial backpropagation of the step; None for full backpropagation.
    """

    traced: Traced
    plan: Plan
    summed: Memory
    jitted: StepProgram | ScheduledPrograms
    mesh: Mesh | AbstractMesh
    sparse: SparseStep | None = None
    observes: bool = False
    is_decided: bool = False
    residual_shardings: Mapping[str, NamedSharding] = dataclasses.field(default_factory=dict)
    partial: PartialStep | None = None

    @property
    def bound(self) -> Bound:
        """Returns the call that the entry was built for, taken apart, with leaves as they are stored."""
        return self.traced.bound

    @property
    def call(self) -> Bound:
        """Returns the call that the entry was built for, taken apart, with leaves of the sizes that the step knows."""
        return self.traced.call

    @property
    def graph(self) -> Graph:
        """Returns the traced step."""
        return self.traced.graph

    @property
    def jaxpr(self) -> _compat.ClosedJaxpr:
        """Returns the traced step as JAX has it."""
        return self.traced.jaxpr

    @property
    def matched(self) -> Mapping[int, int]:
        """Returns flat argument of a state leaf -> its flat result."""
        return self.traced.matched

    @property
    def result(self) -> Any:
        """Returns the step's result, as a pytree of `ShapeDtypeStruct`s."""
        return self.traced.result

    def program(self, step_number: int) -> StepProgram:
        """Returns the program of a step, which takes `operands`. `step_number`: the number of the step since the
        beginning of training, counted from 0."""
        return self.jitted.at(step_number) if isinstance(self.jitted, ScheduledPrograms) else self.jitted

    def program_name(self, step_number: int) -> str:
        """Returns what tells the program of a step from the others of this entry; `step_number`: as in `program`."""
        return self.jitted.name_at(step_number) if isinstance(self.jitted, ScheduledPrograms) else "full"

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

    @functools.cached_property
    def known_residuals(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Describes `residuals` in the sizes that the step knows: without the padding of tables that are stored padded,
        in which nothing was rounded away."""
        by_path = {plan.path: plan.logical for plan in self.plan.leaves}
        found = {}
        for param, stored in self.residuals.items():
            shape, where = (stored.shape[0], *(by_path.get(param) or stored.shape[1:])), self.residual_shardings[param]
            mesh = MeshShape.of(where.mesh)
            spec = (
                entry if size % mesh.size(spec_axes((entry,))) == 0 else None
                for size, entry in zip(shape, where.spec, strict=True)
            )
            sharding = where.update(spec=PartitionSpec(*spec))
            found[param] = jax.ShapeDtypeStruct(shape, stored.dtype, sharding=sharding)
        return found

    def operands(self, args: tuple[Any, ...], residuals: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the operands of a program for the step's positional arguments `args` and its `residuals`, by
        table."""
        args, _ = self.stored(args)
        return (dict(residuals), *args) if self.residuals else args

    def lowered_operands(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the operands with which a program is lowered for the step's positional arguments `args`: their shapes
        where the devices of the mesh are not here, for arrays then lie on others."""
        return self.operands(args if has_devices_here(self.mesh) else self.abstract_args, self.residuals)

    @functools.cached_property
    def shardings(self) -> tuple[NamedSharding, ...]:
        """Returns the sharding of every leaf of the arguments that are not static, in order."""
        return tuple(named_sharding(self.mesh, leaf.spec) for leaf in self.plan.leaves)

    @functools.cached_property
    def described(self) -> list[jax.ShapeDtypeStruct]:
        """Describes every leaf of the arguments that are not static, as it is stored."""
        return abstract(self.bound.leaves, self.bound.signature.avals)

    @property
    def abstract_args(self) -> tuple[Any, ...]:
        """Returns the positional arguments of the call that it was built for, arrays as `ShapeDtypeStruct`s without a
        sharding: the arrays themselves may be gone by now, consumed by a call."""
        bound, leaves = self.bound, self.described
        static = dict(bound.signature.static)
        return tuple(
            static[number] if number in static else jax.tree.unflatten(jax.tree.structure(arg), leaves[slice(*span)])
            for number, (arg, span) in enumerate(zip(bound.args, bound.spans, strict=True))
        )

    def argument_shardings(self, recipe: Recipe) -> tuple[Any, ...]:
        """Returns the shardings as a pytree per argument of the step that `recipe` describes; None for static
        arguments."""
        return tuple(
            None
            if number in recipe.options.static_argnums
            else jax.tree.unflatten(jax.tree.structure(arg), self.shardings[slice(*self.bound.spans[number])])
            for number, arg in enumerate(self.bound.args)
        )

    def laid_out(self, recipe: Recipe, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the positional arguments `args` of the step that `recipe` describes with those arrays where the plan
        has them that lie whole on every device of its mesh, be it by another mesh over these. Such an array was put
        there by no one who wanted it split: `jax.set_mesh` does so to whatever is made under it. Arrays that the plan
        stores padded are padded. They are `args` themselves where there is none."""
        args, moved = self.stored(args)

        def put(leaf: Any, where: NamedSharding) -> Any:
            nonlocal moved
            lies = getattr(leaf, "sharding", None)  # a value that is being traced has none
            if not isinstance(leaf, jax.Array) or not isinstance(lies, jax.sharding.Sharding) or not leaf.committed:
                return leaf
            if not lies.is_fully_replicated or lies.device_set != where.device_set:
                return leaf
            if lies.is_equivalent_to(where, leaf.ndim):
                return leaf
            moved = True
            return jax.device_put(leaf, where)

        placed = tuple(
            arg if where is None else jax.tree.map(put, arg, where)
            for arg, where in zip(args, self.argument_shardings(recipe), strict=True)
        )
        return placed if moved else args

    def stored(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], bool]:
        """Returns the positional arguments `args` of the step as they are stored: with those leaves padded that are not
        yet. Also whether there were such."""
        if self.traced.known is None:
            return args, False
        static = dict(self.bound.signature.static)
        dynamic = [number for number in range(len(args)) if number not in static]
        leaves, tree = jax.tree.flatten([args[number] for number in dynamic])
        changed = [
            stored_array(leaf, plan.shape, where)
            if plan.logical is not None and tuple(jax.numpy.shape(leaf)) == plan.logical
            else leaf
            for leaf, plan, where in zip(leaves, self.plan.leaves, self.shardings, strict=True)
        ]
        if all(new is old for new, old in zip(changed, leaves, strict=True)):
            return args, False
        placed = dict(zip(dynamic, jax.tree.unflatten(tree, changed), strict=True))
        return tuple(placed.get(number, arg) for number, arg in enumerate(args)), True

    def meet_processes(self, recipe: Recipe, args: tuple[Any, ...]) -> str:
        """Compares, in all processes, what they are about to do with the arguments `args` of a call of the step that
        `recipe` describes, and returns where they met (`step.agreement.agree`). Raises `ProcessError` where that
        differs."""
        dynamic = [arg for number, arg in enumerate(args) if number not in recipe.options.static_argnums]
        values = host_digests(jax.tree.leaves(dynamic), [leaf.path for leaf in self.plan.leaves])
        # What lifetimes say of the memory follows from the rest, and takes its time.
        plan = dataclasses.replace(self.plan, memory=self.summed)
        return agree(recipe.name, plan, program_text(self.jaxpr), values)

    def across_processes(self, recipe: Recipe, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the positional arguments `args` of the step that `recipe` describes as global arrays."""
        args, _ = self.stored(args)
        dynamic = [number for number in range(len(args)) if number not in recipe.options.static_argnums]
        leaves, tree = jax.tree.flatten([args[number] for number in dynamic])
        placed = dict(zip(dynamic, jax.tree.unflatten(tree, on_mesh(leaves, self.shardings)), strict=True))
        return tuple(placed.get(number, arg) for number, arg in enumerate(args))
