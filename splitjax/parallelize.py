"""The decorator: trace -> rules -> plan -> lower -> run, one line each in `ParallelStep._build`."""

from __future__ import annotations

import collections
import functools
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax

from splitjax import _compat
from splitjax.compile.entry import CompileRecord, Entry, Recipe, build_entry, trace_error
from splitjax.compile.placement import abstract_state, init_state, place_state, unshare
from splitjax.compile.programs import SignatureChanged
from splitjax.compile.session import Kept, merged
from splitjax.errors import DonatedStateError
from splitjax.lower.tables.sync_request import parse as parse_sync
from splitjax.measure.advising import advise_calls, split_request
from splitjax.measure.profiling import per_batch, profile_calls
from splitjax.mesh import MeshShape, make_mesh
from splitjax.partial.advice import Advice
from splitjax.partial.request import PartialBackprop
from splitjax.plan import Plan, SyncPlan
from splitjax.planning.carried import Carried, inputs_of
from splitjax.planning.observing import Decision, Observer, decide
from splitjax.planning.pinning import pins_tables
from splitjax.report.value import Report, make_report
from splitjax.rules import RuleSet, load_rules
from splitjax.step.arguments import Bound, Options, argument_names, bind, difference, make_options, positional
from splitjax.step.options import check_options, reject_mutating_modules, resolve_plan
from splitjax.sync.analysis import Profile
from splitjax.sync.scheme import Link

if TYPE_CHECKING:
    from splitjax.schedule.model.jobs import JobProfile
    from splitjax.verify import Verification

logger = logging.getLogger("splitjax")

# How many calls a step remembers, to name the one that consumed a state.
_REMEMBERED_CALLS = 4096
# How many leaves of a state are looked at before a call, to see whether it was consumed.
_SAMPLED_LEAVES = 24


def parallelize(
    fn: Callable | None = None,
    *,
    mesh: Any = None,
    rules: str | RuleSet = "splitbrain",
    group_comm: str = "auto",
    sync: Any = "dense",
    backprop: Any = None,
    shard_state: bool = False,
    donate: bool = True,
    plan: Plan | str | None = None,
    state_argnums: int | Sequence[int] = (0,),
    batch_argnums: int | Sequence[int] = (1,),
    state_outnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    unknown: str = "error",
    verify: str | None = None,
) -> Any:
    """Turns a training step written for the global batch into one that trains on many devices, with the same numbers.

    Bare (`@parallelize`), called (`@parallelize(mesh={"data": 2, "model": 4})`), or as a function
    (`parallelize(step)`).

    **Arguments:**

    - `fn`: the step. It takes states, batches and other arguments and returns its new states among its results.
    - `mesh`: `{"axis": size}`, a `jax.sharding.Mesh`, or None for all devices on the axis `data`.
    - `rules`: the name of a rule set, the path of a TOML file, or a `RuleSet`. It gives every parameter its sharding.
    - `donate`: whether a call consumes its states (their memory is reused for the new ones).
    - `plan`: a `Plan` or its JSON file, pinned: layouts come from it, and how tables are synchronised if it says so; a
      step that it does not fit is an error.
    - `state_argnums`: positions of the states, any pytrees. They are found again among the results by structure.
    - `batch_argnums`: positions of the batches: pytrees of arrays whose leading dim is the example dim. Everything else
      (keys, step numbers) is replicated.
    - `state_outnums`: positions of the states among the results, where structure does not tell.
    - `static_argnums`, `static_argnames`: as in `jax.jit`.
    - `unknown`: `"error"`, or `"gather"` to replicate around primitives that have no dim rule.
    - `group_comm`: how examples cross from replicated into split layers: `"gather"`, `"turns"`, `"modulo"`, or
      `"auto"`, which chooses between the first and the last by predicted memory.
    - `shard_state`: also split optimizer state and summed gradients of parameters that are whole over some axes over
      these axes; the parameters stay whole (ZeRO stages 1 and 2; docs/sharded_state.md). A pinned plan decides for
      itself.
    - `sync`: how gradients of tables with row lookups are exchanged: `"dense"`, a scheme of `splitjax.sync` or its
      name, `"auto"`, or `{parameter pattern: one of these}`; with `splitjax.sync.ByRows(scheme, lazy=True)` also where
      that changes the numbers. The first three steps are observed, then the step is compiled once more
      (docs/sparse.md).
    - `backprop`: a `splitjax.PartialBackprop`: each worker differentiates the last layers only, to a depth of its own.
      It changes the numbers (docs/partial_backpropagation.md).
    - `verify`: `"first"` compares the step with one device, at small sizes, before the first call of each signature
      (`ParallelStep.verify`), and raises `VerificationError` where its numbers differ. It takes some seconds.

    **Returns** a `ParallelStep`, called like the step itself.

    Raises typed errors (`splitjax.errors`) that name value, place and remedy; see docs/troubleshooting.md.
    """
    if fn is None:
        return functools.partial(
            parallelize,
            mesh=mesh,
            rules=rules,
            group_comm=group_comm,
            sync=sync,
            backprop=backprop,
            shard_state=shard_state,
            donate=donate,
            plan=plan,
            state_argnums=state_argnums,
            batch_argnums=batch_argnums,
            state_outnums=state_outnums,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            unknown=unknown,
            verify=verify,
        )
    check_options(
        fn,
        mesh=mesh,
        rules=rules,
        group_comm=group_comm,
        backprop=backprop,
        shard_state=shard_state,
        unknown=unknown,
        verify=verify,
    )
    options = make_options(fn, state_argnums, batch_argnums, static_argnums, static_argnames, state_outnums)
    recipe = Recipe(
        fn,
        options,
        load_rules(rules),
        resolve_plan(plan),
        donate,
        unknown,
        returns_state=True,
        group_comm=group_comm,
        shard_state=shard_state,
        sync=parse_sync(sync, f"parallelize({getattr(fn, '__name__', fn)!s})"),
        backprop=backprop,
        verify=verify,
    )
    return ParallelStep(recipe, mesh)


class ParallelStep:
    """A decorated step. Call it like the function it wraps; the methods show, place, compile and reuse its plan."""

    def __init__(self, recipe: Recipe, mesh: Any, parent: ParallelStep | None = None) -> None:
        functools.update_wrapper(self, recipe.fn)
        if mesh is not None:
            MeshShape.of(mesh)  # a malformed mesh fails here, not at the first call; devices are looked at later
        self._recipe = recipe
        self._mesh_request = mesh
        self._parent = parent
        self._entries: dict[Any, Entry] = {}
        self._compiles: list[CompileRecord] = []
        self._last: Entry | None = None
        self._agreed: set[int] = set()  # programs that all processes were found to share
        self._observers: dict[Any, Observer] = {}  # by signature, where tables are synchronised by rows
        self._kept = Kept()
        self._first: dict[Any, Entry] = {}  # the programs of their first steps
        self._verified: set[Any] = set()  # signatures that were compared with one device, and the ids of their entries
        self._num_calls = 0
        self._calls: collections.deque[tuple[int, int, Any, int]] = collections.deque(maxlen=_REMEMBERED_CALLS)

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """The mesh, made when it is first needed."""
        return self._parent.mesh if self._parent is not None else make_mesh(self._mesh_request)

    @property
    def options(self) -> Options:
        """Which arguments are states, batches and static, and which results are states."""
        return self._recipe.options

    @property
    def compiles(self) -> tuple[CompileRecord, ...]:
        """Every program this step was planned for, in order, each with the reason why the earlier ones did not
        serve."""
        return tuple(self._compiles)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or self._recipe.keywords:
            args = positional(self._recipe.fn, args, kwargs)
        frame = sys._getframe(1)
        entry = self._last
        if entry is None:
            entry = self._entry(args)
        entry = self._settled(entry)
        if self._recipe.donate:
            args = self._own_states(args)
        if self.mesh.is_multi_process:
            args, entry = self._across_processes(args)
        try:
            try:
                result = self._run(entry, args)
            except SignatureChanged:
                result = self._run(self._settled(self._entry(args)), args)
            except (TypeError, ValueError):
                # jax.jit looks at leaves and structure of the arguments before it traces
                other = self._settled(self._entry(args))
                if other is entry:
                    raise
                result = self._run(other, args)
        except (RuntimeError, ValueError) as error:
            raise self._explain(error, args) from error
        self._num_calls += 1
        if self._recipe.donate:
            self._calls.append((id(args[self._recipe.first_state]), self._num_calls, frame.f_code, frame.f_lineno))
        return result

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (arrays or `ShapeDtypeStruct`s): prints as a table, renders in Jupyter."""
        return self._entry(positional(self._recipe.fn, args, kwargs)).plan

    def shardings(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The `NamedSharding` of every array of these arguments (arrays or `ShapeDtypeStruct`s): one pytree per
        argument, None for a static one. `shardings(state, batch)[1]` is where batches go."""
        return self._entry(positional(self._recipe.fn, args, kwargs)).argument_shardings(self._recipe)

    def graph(self, *args: Any, **kwargs: Any) -> Any:
        """The traced `splitjax.trace.graph.Graph` that the plan was made from."""
        return self._entry(positional(self._recipe.fn, args, kwargs)).graph

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit(fn).lower`: `.compile()`, `.as_text()`, `.compile().memory_analysis()`. With another `sync` than
        `"dense"` the program returns `(result, observed)`, and where values are rounded it also takes and returns
        residuals (docs/sparse.md)."""
        args = positional(self._recipe.fn, args, kwargs)
        entry = self._entry(args)
        return entry.program(self._kept.num_steps).lower(*entry.operands(args, entry.residuals))

    def report(self, *args: Any, **kwargs: Any) -> Report:
        """The plan for these arguments (arrays or `ShapeDtypeStruct`s) against what XLA compiles: memory, and every
        collective with layer, source line and cause. Compiles the step; runs nothing. Of a step with partial
        backpropagation what runs first after the warm-up."""
        args = positional(self._recipe.fn, args, kwargs)
        entry = self._entry(args)
        program = entry.program(0 if self._recipe.backprop is None else self._recipe.backprop.warmup_steps)
        with _compat.metadata_in_cache_key():
            compiled = program.lower(*entry.operands(args, entry.residuals)).compile()
        names = argument_names(entry.bound, getattr(program, "num_before", 0))
        return make_report(
            compiled,
            entry.plan,
            entry.graph,
            names,
            step=self._recipe.name,
            platform=self.mesh.devices.flat[0].platform,
        )

    def verify(self, *args: Any, sizes: str = "shrunken", own_precision: bool = False, **kwargs: Any) -> Verification:
        """Whether the step computes the numbers of one device: loss, auxiliary values, every gradient and every new
        state leaf, in float64.

        `step.verify(state, batch)`: arrays or `ShapeDtypeStruct`s; no state is consumed. The step runs under its plan
        and on one device of the mesh without any plan. A difference beyond 1e-9 of a value's largest entry is an error,
        of XLA's partitioner or of splitjax, and the first operation that has it is named with layer, line and layout.

        **Arguments:**

        - `sizes`: `"shrunken"`: axes keep their sizes, dims become the smallest that divide as the given ones do.
          `"given"`, or `"both"`.
        - `own_precision`: also compare in the precision that the step has, which shows what rounding does.

        **Returns** a `Verification`: prints as a table, `.ok`, `.findings`, `to_json()`, `raise_if_wrong()`
        (docs/verify.md).

        Raises `OptionError` for other `sizes`, `DonatedStateError` for a state that is gone."""
        from splitjax.verify import verify_step  # it is loaded when it is first used

        args = positional(self._recipe.fn, args, kwargs)
        if self._recipe.donate:
            self._own_states(args)
        return verify_step(self._recipe, self.mesh, self._entry(args), sizes, own_precision)

    def profile(self, *args: Any, num_workers: int | None = None, **kwargs: Any) -> Profile:
        """How sparse every gradient is over the workers: density, overlap, densification, skewness (Zen, arXiv
        2309.13254, section 2).

        `step.profile(state, batches)`: the step's arguments with an iterable of batches (values, not shapes) in place
        of each batch. Nothing is updated, and no state is consumed. Every batch is cut into `num_workers` equal slices,
        by default one for each of the plan's workers; there may be more of them than devices, as one device evaluates
        them in turn. A worker's gradient is its summand of the global batch's. In a run of several processes all of
        them make the call together, and get the same profile.

        **Returns** a `Profile`: prints as a table, renders in Jupyter, `to_json()`, `plot()`, `sparsity(path)`.

        Raises `ProfileError`, `BatchError` (no gradient boundary, no batch, a batch that does not divide); see
        docs/sparse.md.
        """
        args = positional(self._recipe.fn, args, kwargs)
        return self._profile(per_batch(args, self._recipe.options.batch_argnums, self._recipe.name), num_workers)

    def advise(
        self, *args: Any, backprop: PartialBackprop | None = None, link: Link | None = None, **kwargs: Any
    ) -> Advice:
        """What partial backpropagation would save and cost on this step, beside a smaller batch of equal cost; it says
        which to use.

        `step.advise(state, batches, backprop)`: the step's arguments with an iterable of batches (values, not shapes)
        in place of each batch, then what is asked about (by default what the step was decorated with). Measures on one
        device, with one worker's share of the batch: seconds and compiled bytes of up to 8 truncated programs, and over
        all batches how much the workers' gradients differ, layer by layer. Nothing is updated, and no state is
        consumed. `link`: between the workers, a `splitjax.sync.Link`; by default that of the mesh is measured.

        **Returns** an `Advice`: prints as a table, renders in Jupyter, `to_json()`, `.recommendation`, `.measured` for
        `PartialBackprop(measured=...)`.

        Raises `PartialError` for no batch, one worker, a step without gradient boundary or without a legal cut;
        `BatchError` for batches that do not divide; see docs/partial_backpropagation.md.
        """
        given, wanted = split_request(args, backprop, self._recipe.backprop)
        given = positional(self._recipe.fn, given, kwargs)
        return self._advise(
            per_batch(given, self._recipe.options.batch_argnums, self._recipe.name, "advise"), wanted, link
        )

    def job_profile(
        self,
        *args: Any,
        name: str | None = None,
        num_workers: int | None = None,
        link: Link | None = None,
        input_seconds: float = 0.0,
        stages: bool | None = None,
        **kwargs: Any,
    ) -> JobProfile:
        """What one iteration of this step costs each worker, measured, as a profile for `splitjax.schedule`: forward
        seconds, backward seconds, memory and gradient bytes of every depth at which its backward pass can end, the
        update, and the exchange.

        `step.job_profile(state, batch)`: the step's arguments, values and not shapes. Measures on one device, with one
        worker's share of the batch: up to 9 truncated programs, with the time between two of them divided by predicted
        time. Nothing is updated, and no state is consumed.

        **Arguments:**

        - `name`: of the profile; the step's if not given.
        - `num_workers`: among which the batch is divided; by default the plan's.
        - `link`: between the workers, a `splitjax.sync.Link`, for the time that they wait for their exchange; by
          default the mesh's is measured. Where the mesh has one worker, and no link is given, nothing is waited for.
        - `input_seconds`: that one worker's share of the input takes the processor, if it is to be known; it hides
          behind the rest of the iteration as far as it can.
        - `stages`: whether to give the seconds on each resource, for policies that share links and processors too
          (simulations with them take much longer); by default where the device is not what an iteration with partial
          backpropagation needs most.

        Raises `ProfileError` for a step without one gradient boundary or with layers that are split over devices;
        `BatchError` for a batch that does not divide; see docs/scheduler.md.
        """
        args = positional(self._recipe.fn, args, kwargs)
        from splitjax.measure.job_profiling import profile_job  # the scheduler is loaded when it is first used

        check = lambda call: self._own_states(call) if self._recipe.donate else None
        return profile_job(
            self._recipe,
            self.mesh,
            check,
            args,
            name=name,
            num_workers=num_workers,
            link=link,
            input_seconds=input_seconds,
            stages=stages,
        )

    def _advise(self, calls: Iterable[tuple], backprop: PartialBackprop, link: Link | None) -> Advice:
        """The advice from calls given by their arguments."""
        check = lambda call: self._own_states(call) if self._recipe.donate else None
        return advise_calls(self._recipe, self.mesh, check, calls, backprop, link)

    def _profile(self, calls: Iterable[tuple], num_workers: int | None) -> Profile:
        """The profile of calls given by their arguments."""

        def entry_of(args: tuple) -> Entry:
            if self._recipe.donate:
                self._own_states(args)  # an error for a consumed state
            return self._entry(args)

        return profile_calls(self._recipe, self.mesh, entry_of, calls, num_workers)

    def init(self, init_fn: Callable, *init_args: Any, example: Sequence[Any]) -> Any:
        """Creates the states already sharded: `init_fn(*init_args)` is compiled with the plan's shardings as its
        results', so that no device ever holds the whole.

        **Arguments:**

        - `init_fn`: `init_fn(key)` returns the state, or the states in `state_argnums` order.
        - `example`: all non-state arguments of the step, in order: arrays or `ShapeDtypeStruct`s.
        """
        return init_state(self._entry, self._recipe, self.mesh, init_fn, init_args, example)

    def place(self, *states: Any, example: Sequence[Any]) -> Any:
        """Puts existing states onto the plan (copies: the originals stay usable). Returns one state, or a tuple of
        them."""
        return place_state(self._entry, self._recipe, self.mesh, states, example)

    def abstract_state(self, init_fn: Callable, *init_args: Any, example: Sequence[Any]) -> Any:
        """The states as `ShapeDtypeStruct`s with their shardings, for one's own orbax restore; nothing is computed."""
        return abstract_state(self._entry, self._recipe, self.mesh, init_fn, init_args, example)

    def like(
        self,
        fn: Callable,
        *,
        state_argnums: int | Sequence[int] | None = None,
        batch_argnums: int | Sequence[int] | None = None,
        static_argnums: int | Sequence[int] = (),
        static_argnames: str | Sequence[str] = (),
    ) -> ParallelStep:
        """A step on the same mesh and layouts that returns no state (evaluation, prediction). Nothing is donated. State
        and batch positions are this step's unless given. The layouts are those of the plan that this step used last."""
        mine = self._recipe.options
        options = make_options(
            fn,
            mine.state_argnums if state_argnums is None else state_argnums,
            mine.batch_argnums if batch_argnums is None else batch_argnums,
            static_argnums,
            static_argnames,
            None,
        )
        recipe = Recipe(fn, options, self._recipe.rules, None, False, self._recipe.unknown, returns_state=False)
        return ParallelStep(recipe, None, parent=self)

    def carried(self) -> Carried:
        """What the step keeps between its calls besides its states: how tables are synchronised, what was seen of them,
        what rounding on the wire took away, and whose turn it is in partial backpropagation (docs/checkpoints.md).
        Waits for the last call. In a run of several processes all of them ask."""
        return Carried(
            merged(self._kept.resumed, self._entries, self._observers), dict(self._kept.residuals), self._kept.num_steps
        )

    def resume(self, carried: Carried | None) -> None:
        """Puts back what `carried` gave, in another run of the same program perhaps: the step goes on as the one that
        gave it. On another mesh, or with another `sync`, tables are observed anew. In a run of several processes all of
        them do so.

        Raises `SyncError` at the next call for residuals of other tables."""
        carried = carried or Carried()
        self._kept.residuals, self._kept.resumed, self._kept.num_steps = (
            dict(carried.residuals),
            dict(carried.seen),
            carried.num_steps,
        )
        self._observers = {}
        for signature, entry in self._entries.items():
            if entry.sparse is None:
                continue
            seen = carried.seen.get(inputs_of(entry.bound, entry.mesh))
            if seen is not None and seen.syncs and seen.syncs != entry.plan.syncs:
                new = self._build(entry.bound, carried=seen.syncs, reason="a run is resumed")
            elif (seen is None or not seen.syncs) and entry.is_decided and not pins_tables(self._recipe.pinned):
                new = self._observing(entry)
            else:
                continue
            self._entries[signature] = new
            if self._last is entry:
                self._last = new

    def _run(self, entry: Entry, args: tuple) -> Any:
        if self._recipe.verify is not None and id(entry) not in self._verified:
            self._verify_first(args)
        program = entry.program(self._kept.num_steps)
        if entry.sparse is None:
            result = program(*args)
            self._kept.num_steps += entry.partial is not None
            return result
        result, observed, *residuals = program(*entry.operands(args, self._kept.residuals_of(entry)))
        self._kept.num_steps += entry.partial is not None
        if residuals:
            self._kept.residuals = dict(residuals[0])
        if entry.bound.signature not in self._observers:
            self._observers[entry.bound.signature] = self._kept.observer(entry)
        self._observers[entry.bound.signature].note(observed)
        return result

    def _settled(self, entry: Entry) -> Entry:
        """The program that a signature runs from now on: another one, once its tables' first steps were observed."""
        if entry.sparse is None:
            return entry
        signature = entry.bound.signature
        if signature not in self._observers and self._kept.resumed:
            self._observers[signature] = self._kept.observer(entry)
        observer = self._observers.get(signature)
        if observer is None or not observer.is_ready(entry.observes):
            return entry
        if entry.observes:
            self._first.setdefault(signature, entry)
            decision = decide(entry.sparse, self._recipe.request, observer.take_samples(), self.mesh)
            entry = self._build(entry.bound, decision, "its tables were observed")
        elif observer.overflows():
            if pins_tables(self._recipe.pinned):
                logger.warning(
                    "splitjax: more rows than the pinned plan has room for are exchanged whole, step after step: %s;"
                    " make the plan anew",
                    ", ".join(one.param for one in entry.sparse.tables),
                )
                return entry
            entry = self._observing(entry)
        self._entries[signature] = self._last = entry
        return entry

    def _verify_first(self, args: tuple) -> None:
        """Verifies a call's signature once. Raises `VerificationError`."""
        entry = self._entry(args)
        if entry.bound.signature not in self._verified:
            logger.info("%s", self.verify(*args).raise_if_wrong())
        self._verified |= {entry.bound.signature, id(entry)}

    def _observing(self, entry: Entry) -> Entry:
        """The program of an entry's first steps."""
        signature = entry.bound.signature
        if signature not in self._first:
            self._first[signature] = self._build(entry.bound, observes=True, reason="its tables are observed anew")
        return self._first[signature]

    def _entry(self, args: tuple) -> Entry:
        """The plan and program for a call's signature, made when it is new."""
        reject_mutating_modules(args, self._recipe.name)
        bound = bind(self._recipe.fn, self._recipe.options, args)
        entry = self._entries.get(bound.signature)
        if entry is None:
            seen = self._kept.resumed.get(inputs_of(bound, self.mesh))
            entry = self._build(bound, carried=() if seen is None else seen.syncs)
            self._entries[bound.signature] = entry
        self._last = entry
        return entry

    def _across_processes(self, args: tuple) -> tuple[tuple, Entry]:
        """Arguments and program of a call in a run of several processes, where `jax.jit` takes global arrays only."""
        entry = self._settled(self._entry(args))
        first = id(entry) not in self._agreed
        args = entry.across_processes(self._recipe, args, first)
        self._agreed.add(id(entry))
        return args, entry

    def _build(
        self,
        bound: Bound,
        decision: Decision | None = None,
        reason: str = "",
        *,
        carried: Sequence[SyncPlan] = (),
        observes: bool = False,
    ) -> Entry:
        started = time.perf_counter()
        layouts = self._parent._layouts() if self._parent is not None else None
        entry = build_entry(self._recipe, self.mesh, bound, layouts, decision, carried, observes)
        if not reason:
            others = [difference(bound, old.bound) for old in self._entries.values()]
            reason = min(others)[1] if others else "first call"
        self._compiles.append(CompileRecord(len(self._compiles) + 1, reason, time.perf_counter() - started))
        self._compiles[-1].log(self._recipe.name)
        return entry

    def _layouts(self) -> Mapping[str, Any]:
        """Path -> spec of every state leaf of the plan used last, for steps made by `like`."""
        return {} if self._last is None else {leaf.path: leaf for leaf in self._last.plan.leaves if leaf.is_state}

    def _own_states(self, args: tuple) -> tuple:
        """The arguments with states that can be given away. Raises `DonatedStateError` for a state that an earlier call
        consumed; copies an array that stands in the states twice. Both before the call, because jax 0.10 can crash the
        process on them (seen on virtual CPU devices). A sample of the leaves keeps the first check far below dispatch
        time."""
        seen: set[int] = set()
        count = 0
        for number in self._recipe.options.state_argnums:
            leaves = jax.tree.leaves(args[number])
            for leaf in leaves[:: len(leaves) // _SAMPLED_LEAVES + 1] + leaves[-1:]:
                if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted():
                    raise self._donated(args, number)
            count += len(leaves)
            seen.update(map(id, leaves))
        return args if len(seen) == count else unshare(args, self._recipe.options.state_argnums)

    def _explain(self, error: Exception, args: tuple) -> Exception:
        """The typed error behind one of JAX's, or the error itself."""
        if "deleted" in str(error) and self._recipe.donate:
            return self._donated(args, self._recipe.first_state)
        return trace_error(error, self._recipe, self.mesh, args)

    def _donated(self, args: tuple, number: int) -> DonatedStateError:
        where = "an earlier call"
        wanted = id(args[self._recipe.first_state])
        for seen, count, code, line in reversed(self._calls):
            if seen == wanted:
                where = f"call {count} of the step, at {code.co_filename}:{line}"
                break
        name = self._recipe.options.names[number] if number < len(self._recipe.options.names) else f"argument {number}"
        return DonatedStateError(
            f"the state {name!r} was consumed by {where}; its arrays are gone",
            value=name,
            place=f"call of {self._recipe.name}",
            remedy=(
                f"use the state that the call returned ({name} = step({name}, ...)), or pass donate=False to keep the"
                " old one"
            ),
        )
