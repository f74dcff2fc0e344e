"""A decorated step: the table of contents of splitjax.

A `Recipe` (the step and its checked options) comes in; calls, and the plan, the report and the measurements of the step
go out. Each method says in a few lines which rooms it goes through: arguments (`splitjax.step`), programs by signature
(`splitjax.compile`), time and noise (`splitjax.measure`), the comparison with one device (`splitjax.verify`).
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar, TypeVarTuple, overload

import jax

from splitjax import _compat
from splitjax._measured_step import MeasuredStep
from splitjax.choosing import AutoMesh, mesh_asked_for
from splitjax.compile.entry import CompiledEntry, CompileRecord, Recipe
from splitjax.compile.misplaced import is_of_placement, misplaced
from splitjax.compile.placement import abstract_state, init_state, place_state, unshare
from splitjax.compile.programs import SignatureChanged
from splitjax.compile.step_programs import StepPrograms
from splitjax.errors import SplitjaxError, StateError
from splitjax.mesh import MeshSizes, check_mesh, with_devices
from splitjax.plan import Plan
from splitjax.planning.carried import Carried
from splitjax.rules import RuleSet
from splitjax.step.consumed import GivenStates
from splitjax.step.keywords import Positions, VerifySizes
from splitjax.step.methods import Methods
from splitjax.step.positions import ArgumentRoles, make_options, positional
from splitjax.step.words import step_words

if TYPE_CHECKING:
    from splitjax.compile.time import On
    from splitjax.cost.memory.lifetimes import ProgramMemory
    from splitjax.cost.time import StepTime
    from splitjax.report.blame.remedies import Remedies
    from splitjax.report.memory.value import MemoryTimelines
    from splitjax.report.value import Report
    from splitjax.trace.graph import Graph
    from splitjax.verify import Verification

logger: logging.Logger = logging.getLogger("splitjax")

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")
States = TypeVarTuple("States")


class ParallelStep(MeasuredStep, Generic[P, R]):
    """A decorated step. Call it like the function it wraps; the methods show, place, compile and reuse its plan.

    **Arguments:**

    - `recipe`: the step and its checked options.
    - `mesh`: as `splitjax.parallelize` takes it; a `MeshError` says what is wrong with it.
    - `parent`: the training step whose mesh and layouts this one follows, if `like` made it.
    - `decorate`: decorates another function with the same options, so that the step of a class is one of its objects.
    """

    __name__: str
    __wrapped__: Callable[P, R]

    def __init__(
        self,
        recipe: Recipe,
        mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | MeshSizes | AutoMesh | Literal["auto"] | None,
        parent: ParallelStep[..., Any] | None = None,
        decorate: Callable[[Callable[..., Any]], ParallelStep[..., Any]] | None = None,
    ) -> None:
        functools.update_wrapper(self, recipe.fn)
        asked = mesh_asked_for(mesh)
        if asked is not None and not isinstance(asked, AutoMesh):
            check_mesh(asked)  # a malformed mesh fails here, not at the first call; devices are looked at later
        self._recipe = recipe
        self._programs = StepPrograms(recipe, asked, None if parent is None else parent._programs)
        self._verified: set[Any] = set()  # signatures that were compared with one device, and the ids of their entries
        self._states = GivenStates(recipe.name, recipe.options, recipe.donate)
        self._spans_processes: bool | None = None  # until the mesh was seen to have devices
        self._methods = Methods(recipe.fn, decorate)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> ParallelStep[P, R]: ...
    @overload
    def __get__(
        self: ParallelStep[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> ParallelStep[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Returns the step of an object whose class has it as a method: `self.step(state, batch)`. The positions of
        arguments count without `self`, which is part of the program, as what a step closes over is."""
        return self._methods.of(self, instance, owner)

    @property
    def options(self) -> ArgumentRoles:
        """Says which arguments are states, batches and static, and which results are states."""
        return self._recipe.options

    @property
    def rules(self) -> RuleSet:
        """The rule set of the step; what `rules="auto"` chose is there once a call was planned."""
        return self._programs.recipe.rules

    @property
    def compiles(self) -> tuple[CompileRecord, ...]:
        """Every program this step was planned for, in order, each with the reason why the earlier ones did not
        serve."""
        return tuple(self._programs.compiles)

    def __repr__(self) -> str:
        return step_words(self._recipe.name, self._programs.asked_mesh, self.rules, len(self.compiles))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(args, kwargs, sys._getframe(1))

    @_compat.outside_mesh
    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType) -> Any:
        """Runs one call, made in `frame`."""
        if kwargs or self._recipe.keywords:
            args = positional(self._recipe.fn, args, kwargs)
        if self._spans_processes is None:  # said before the batch is held against the mesh
            self._programs.decide(args)
            self._spans_processes = with_devices(self.mesh, f"call of {self._recipe.name}").is_multi_process
        entry = self._programs.settled(self._programs.last or self._programs.entry(args))
        if self._recipe.donate and self._states.check(args):  # before the call: see `compile.placement.unshare`
            args = unshare(args, self._recipe.options.state_argnums)
        if self._spans_processes:
            args, entry = self._programs.across_processes(args)
        try:
            try:
                result = self._run(entry, args)
            except SignatureChanged:
                fitting = self._programs.settled(self._programs.entry(args))
                result = self._run(fitting, fitting.laid_out(self._recipe, args))
            except (TypeError, ValueError):
                # jax.jit looks at leaves, structure and shardings of the arguments before it traces
                fitting = self._programs.settled(self._programs.entry(args))
                placed = fitting.laid_out(self._recipe, args)
                if fitting is entry and placed is args:
                    raise
                result = self._run(fitting, placed)
        except (RuntimeError, ValueError) as error:
            raise self._explain(error, args) from error
        self._states.called(args, frame)
        return result

    @overload
    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan: ...
    @overload
    def plan(self, *args: Any, **kwargs: Any) -> Plan: ...
    @_compat.outside_mesh
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or `ShapeDtypeStruct`s): prints as a table, renders in Jupyter."""
        return self._programs.entry(positional(self._recipe.fn, args, kwargs)).plan

    @_compat.outside_mesh
    def shardings(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The `NamedSharding` of every array of these arguments (arrays or `ShapeDtypeStruct`s): one pytree per
        argument, None for a static one. `shardings(state, batch)[1]` is where batches go."""
        return self._programs.entry(positional(self._recipe.fn, args, kwargs)).argument_shardings(self._recipe)

    @_compat.outside_mesh
    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The traced `splitjax.trace.graph.Graph` that the plan was made from."""
        return self._programs.entry(positional(self._recipe.fn, args, kwargs)).graph

    @overload
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def lower(self, *args: Any, **kwargs: Any) -> Any: ...
    @_compat.outside_mesh
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step for these arguments as `jax.jit(fn).lower` does: `.compile()`, `.as_text()`,
        `.compile().memory_analysis()`. With another `sync` than `"dense"` the program returns `(result, observed)`, and
        where values are rounded it also takes and returns residuals (docs/sparse.md)."""
        args = positional(self._recipe.fn, args, kwargs)
        entry = self._programs.entry(args)
        return entry.program(self._programs.kept.num_steps).lower(*entry.lowered_operands(args))

    @overload
    def memory(self, *args: P.args, **kwargs: P.kwargs) -> ProgramMemory: ...
    @overload
    def memory(self, *args: Any, **kwargs: Any) -> ProgramMemory: ...
    @_compat.outside_mesh
    def memory(self, *args: Any, **kwargs: Any) -> ProgramMemory:
        """What the step needs of a device's memory for these arguments (arrays or `ShapeDtypeStruct`s), predicted by
        how long its arrays live: an estimate, an upper bound, and the largest arrays at the peak. The step is traced,
        not compiled; `plan(...).memory` has the same figures. Of a step with partial backpropagation what runs first
        after the warm-up. Raises `UnavailableError` where workers run programs of their own (docs/reports.md)."""
        from splitjax.compile.memory import program_memory  # it is loaded when it is first used

        return program_memory(self._recipe, self._programs.entry(positional(self._recipe.fn, args, kwargs)))

    @_compat.outside_mesh
    def memory_timeline(self, *args: Any, compiled: bool = True, **kwargs: Any) -> MemoryTimelines:
        """What a device stores at each moment of the step for these arguments (arrays or `ShapeDtypeStruct`s), as
        predicted and as XLA compiles it: which arrays, of which layers. Raises what `memory` raises.

        **Arguments:** `compiled`: whether to compile the step, too; it is not run (docs/reports.md)."""
        from splitjax.compile.timeline import step_timelines  # it is loaded when it is first used

        args = positional(self._recipe.fn, args, kwargs)
        if not compiled:
            return step_timelines(self._recipe, self._programs.entry(args))
        self._programs.decide(args)
        mesh = with_devices(self.mesh, f"{self._recipe.name}.memory_timeline", runs=False)
        return step_timelines(self._recipe, self._programs.entry(args), args, mesh.devices.flat[0])

    @_compat.outside_mesh
    def time(self, *args: Any, on: On, **kwargs: Any) -> StepTime:
        """How long the step takes for these arguments (arrays or `ShapeDtypeStruct`s), predicted before it is compiled:
        in all, by operation and collective, with what of these goes on while the devices compute, and by layer, beside
        the bytes that a device holds for each.

        **Arguments:** `on`: the machine: what `splitjax calibrate` wrote (a `Calibration`, or the path of its file), or
        a target (`"tpu:v5e:4x4"`), whose published peaks make it a lower bound rather than an estimate (docs/time.md).

        Raises `CalibrationError` and `TargetError` for what is no machine for this mesh, `UnavailableError` where
        workers run programs of their own (docs/reports.md)."""
        from splitjax.compile.time import program_time  # it is loaded when it is first used

        args = positional(self._recipe.fn, args, kwargs)
        return program_time(self._recipe, self._programs.observed(args), on, layered=True)

    @overload
    def report(self, *args: P.args, **kwargs: P.kwargs) -> Report: ...
    @overload
    def report(self, *args: Any, **kwargs: Any) -> Report: ...
    @_compat.outside_mesh
    def report(self, *args: Any, **kwargs: Any) -> Report:
        """The plan for these arguments (arrays or `ShapeDtypeStruct`s) against what XLA compiles: memory, and every
        collective with layer, source line and cause. Compiles the step; runs nothing. Of a step with partial
        backpropagation what runs first after the warm-up."""
        from splitjax.compile.reporting import step_report  # it is loaded when it is first used

        args = positional(self._recipe.fn, args, kwargs)
        self._programs.decide(args)
        mesh = with_devices(self.mesh, f"{self._recipe.name}.report", runs=False)
        return step_report(self._recipe, self._programs.entry(args), args, mesh.devices.flat[0])

    @_compat.outside_mesh
    def remedies(self, *args: Any, on: str | None = None, most: int = 4, **kwargs: Any) -> Remedies:
        """What removes the arrays that XLA gathers whole to keep a part of (its *involuntary full rematerialisations*):
        changes of the layout of a layer, or of a sharding constraint in the step, each compiled, with what it then
        sends, stores and gathers. Runs nothing (docs/reports.md).

        **Arguments:** `args`: of the step, arrays or `ShapeDtypeStruct`s. `on`: a target such as `"tpu:v5e:2x4"`, by
        whose published figures changes are compared. `most`: how many changes are compiled for each array.

        Raises `UnavailableError` for a step made by `like`."""
        from splitjax.compile.remedies import step_remedies  # it is loaded when it is first used

        args = positional(self._recipe.fn, args, kwargs)
        entry = self._programs.entry(args)  # which decides what was left to be chosen
        mesh = with_devices(self.mesh, f"{self._recipe.name}.remedies", runs=False)
        return step_remedies(self._programs.recipe, mesh, entry, mesh.devices.flat[0], on, most)

    @_compat.outside_mesh
    def verify(
        self, *args: Any, sizes: VerifySizes = "shrunken", own_precision: bool = False, **kwargs: Any
    ) -> Verification:
        """Compares the step with one device: loss, auxiliary values, every gradient and every new state leaf, in
        float64.

        `step.verify(state, batch)`: arrays or `ShapeDtypeStruct`s; no state is consumed. The step runs under its plan
        and on one device of the mesh without any plan. A difference beyond 1e-9 of a value's largest entry is an error,
        of XLA's partitioner or of splitjax, and the first operation that has it is named with layer, line and layout.

        **Arguments:**

        - `sizes`: `"shrunken"`: axes keep their sizes, dims become the smallest that divide as the given ones do.
          `"given"`, or `"both"`.
        - `own_precision`: also compare in the precision that the step has, which shows what rounding does.

        **Returns** a `Verification`: prints as a table, `.ok`, `.findings`, `to_json()`, `raise_if_wrong()`
        (docs/verify.md).

        Raises `OptionError` for other `sizes`, `DonatedStateError` for a state that is gone.
        """
        return self._verification(positional(self._recipe.fn, args, kwargs), sizes, own_precision)

    @_compat.outside_mesh
    def init(self, init_fn: Callable[..., S], *init_args: Any, example: Sequence[Any]) -> S:
        """Creates the states already sharded: `init_fn(*init_args)` is compiled with the plan's shardings as its
        results', so that no device ever holds the whole.

        **Arguments:**

        - `init_fn`: `init_fn(key)` returns the state, or the states in `state_argnums` order.
        - `example`: all non-state arguments of the step, in order: arrays or `ShapeDtypeStruct`s.
        """
        return init_state(self._programs, init_fn, init_args, example)

    @overload
    def place(self, state: S, /, *, example: Sequence[Any]) -> S: ...
    @overload
    def place(self, *states: *States, example: Sequence[Any]) -> tuple[*States]: ...
    @_compat.outside_mesh
    def place(self, *states: Any, example: Sequence[Any]) -> Any:
        """Puts existing `states` onto the plan (copies: the originals stay usable). `example`: all other arguments of
        the step, in order. Returns one state, or a tuple of them."""
        return place_state(self._programs, states, example)

    @overload
    def logical(self, state: S, /) -> S: ...
    @overload
    def logical(self, *states: *States) -> tuple[*States]: ...
    @_compat.outside_mesh
    def logical(self, *states: Any) -> Any:
        """Returns `states`, in `state_argnums` order, without the padding that `uneven="pad"` stores them with: in the
        sizes that the step knows, for checkpoints and tools of one's own. Other leaves are handed on as they are;
        descriptions (`abstract_state`) serve too. `stored` is the way back, and the step itself takes both. Returns one
        state, or a tuple of them.

        Raises `StateError` where they are not as many as the step takes."""
        return self._each_state("logical", self._programs.logical, states)

    @overload
    def stored(self, state: S, /) -> S: ...
    @overload
    def stored(self, *states: *States) -> tuple[*States]: ...
    @_compat.outside_mesh
    def stored(self, *states: Any) -> Any:
        """Returns `states`, in `state_argnums` order, with the padding that `uneven="pad"` stores them with, laid out
        as the plan says: the inverse of `logical`. Other leaves are handed on as they are. Returns one state, or a
        tuple of them.

        Raises `StateError` where they are not as many as the step takes."""
        return self._each_state("stored", self._programs.stored, states)

    def _each_state(self, name: str, change: Callable[[int, Any], Any], states: tuple[Any, ...]) -> Any:
        """Changes each of the states by its position, for the method called `name`."""
        numbers = self._recipe.options.state_argnums
        if len(states) != len(numbers):
            raise StateError(
                f"{name} got {len(states)} states, the step has {len(numbers)}",
                value=numbers,
                place=f"{self._recipe.name}.{name}",
                remedy="pass one state per state argument, in state_argnums order",
            )
        changed = tuple(change(number, state) for number, state in zip(numbers, states, strict=True))
        return changed[0] if len(changed) == 1 else changed

    @_compat.outside_mesh
    def abstract_state(self, init_fn: Callable[..., Any], *init_args: Any, example: Sequence[Any]) -> Any:
        """Describes the states that `init_fn(*init_args)` makes as `ShapeDtypeStruct`s with their shardings, for one's
        own orbax restore. `example`: all other arguments of the step, in order. Nothing is computed."""
        return abstract_state(self._programs, init_fn, init_args, example)

    def like(
        self,
        fn: Callable[Q, S],
        *,
        state_argnums: Positions | None = None,
        batch_argnums: Positions | None = None,
        static_argnums: Positions = (),
        static_argnames: str | Sequence[str] = (),
    ) -> ParallelStep[Q, S]:
        """Makes a step of `fn` on the same mesh and layouts that returns no state (evaluation, prediction). Nothing is
        donated. `state_argnums` and `batch_argnums` are this step's unless given; `static_argnums` and
        `static_argnames` are as in `jax.jit`. The layouts are those of the plan that this step used last."""
        mine = self._recipe.options
        options = make_options(
            fn,
            mine.state_argnums if state_argnums is None else state_argnums,
            mine.batch_argnums if batch_argnums is None else batch_argnums,
            static_argnums,
            static_argnames,
            None,
        )
        told = self._recipe
        recipe = Recipe(fn, options, told.rules, None, False, told.unknown, returns_state=False, roles=told.roles)
        return ParallelStep(recipe, None, parent=self)

    @_compat.outside_mesh
    def carried(self) -> Carried:
        """Returns what the step keeps between its calls besides its states: how tables are synchronised, what was seen
        of them, what rounding on the wire took away, and where partial backpropagation stands in its depth schedule
        (docs/checkpoints.md). Waits for the last call. In a run of several processes all of them ask."""
        return self._programs.carried()

    @_compat.outside_mesh
    def resume(self, carried: Carried | None) -> None:
        """Puts back what `carried` gave, in another run of the same program perhaps: the step goes on as the one that
        gave it. On another mesh, or with another `sync`, tables are observed anew. In a run of several processes all of
        them do so.

        Raises `SyncError` at the next call for residuals of other tables."""
        self._programs.resume(carried)

    def _run(self, entry: CompiledEntry, args: tuple[Any, ...]) -> Any:
        if self._recipe.verify is not None and id(entry) not in self._verified:
            self._verify_first(args)
        return self._programs.run(entry, args)

    def _verification(
        self, args: tuple[Any, ...], sizes: VerifySizes = "shrunken", own_precision: bool = False
    ) -> Verification:
        """What `verify` returns, for arguments by position."""
        from splitjax.verify import verify_step  # it is loaded when it is first used

        self._states.check(args)
        entry = self._programs.entry(args)  # which decides rules that were left to be chosen
        return verify_step(self._programs.recipe, self._programs.inside, entry, sizes, own_precision)

    def _verify_first(self, args: tuple) -> None:
        """Verifies a call's signature once. Raises `VerificationError`."""
        entry = self._programs.entry(args)
        if entry.bound.signature not in self._verified:
            logger.info("%s", self._verification(args).raise_if_wrong())
        self._verified |= {entry.bound.signature, id(entry)}

    @property
    def _last(self) -> CompiledEntry | None:
        """The plan and program used last."""
        return self._programs.last

    def _explain(self, error: Exception, args: tuple) -> Exception:
        """The typed error behind one of JAX's, or the error itself."""
        if "deleted" in str(error) and self._recipe.donate:
            return self._states.error(args)
        if isinstance(error, SplitjaxError) or not is_of_placement(error):
            return error
        return misplaced(self._recipe, self._programs.entry(args), args, error)
