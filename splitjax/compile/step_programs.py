"""The programs of one step: an entry for every signature, made when a call first needs it, and made anew when its
tables were observed.

A call's arguments come in; the entry that serves them comes out, and the step's result when it is run. What a step
keeps between its calls (what was seen of its tables, what rounding took away, which step of the depth schedule of
partial backpropagation is next) is here too, because it decides which program runs.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
import weakref
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from splitjax.choosing import AutoMesh, Choice
from splitjax.compile.building import begin, compile_draft
from splitjax.compile.choosing import build_chosen, mesh_not_chosen, nameable_mesh
from splitjax.compile.devices import mesh_for
from splitjax.compile.entry import CompiledEntry, CompileRecord, Recipe
from splitjax.compile.observed_entry import observed_entry
from splitjax.compile.programs import StepProgram
from splitjax.compile.session import Session, merged
from splitjax.lower.partial.workers import prepare
from splitjax.mesh import MeshShape, MeshSizes, inside_mesh, with_devices
from splitjax.partitioner import check_partitioner
from splitjax.plan import LeafPlan
from splitjax.planning.carried import Carried, inputs_of
from splitjax.planning.draft import Draft, KnownTables
from splitjax.planning.observing import TableObserver, axes_to_measure, decide
from splitjax.planning.padding import logical_spec, matching
from splitjax.planning.passes import with_tables
from splitjax.planning.pinning import pins_tables
from splitjax.planning.sites.layout import named_sharding
from splitjax.rules.ruleset import TO_BE_CHOSEN
from splitjax.rules.writing import write_rules
from splitjax.step.agreement import agree_on_choice, wait_for_compiled
from splitjax.step.arguments import Bound, Signature, bind, difference, leaf_path
from splitjax.step.options import reject_mutating_modules
from splitjax.step.padding.stored import logical_array, logical_bound, stored_array
from splitjax.step.traced import Traced, trace_step
from splitjax.sync.link import measure_link
from splitjax.trace.collecting import uncollected

# What `jax.monitoring` is told when a plan begins to be made: whoever watches a run knows that it takes a while.
BUILD_EVENT = "/splitjax/build"
BUILT_EVENT = "/splitjax/build_duration"  # and how long it took
# That a process has compiled a program and waits for those that have not, and that it goes on.
WAIT_EVENT, MET_EVENT = "/splitjax/waits_for_compilations", "/splitjax/all_have_compiled"

logger: logging.Logger = logging.getLogger("splitjax")


class StepPrograms:
    """Builds, keeps and runs the programs of a step.

    **Arguments:**

    - `recipe`: the step and its checked options.
    - `mesh`: as `splitjax.parallelize` takes it; the mesh itself is made when it is first needed, and chosen, where an
      `AutoMesh` asks for that, when the first call is planned.
    - `training`: the programs of the training step whose mesh and layouts these follow, for a step made by `like`.

    **Attributes:** `last`: the entry used last; `compiles`: a record of every program, in order; `kept`: what the step
    keeps between its calls; `choice`: how its rules or its mesh were chosen; None where nothing was.
    """

    def __init__(
        self,
        recipe: Recipe,
        mesh: Mesh | AbstractMesh | MeshSizes | AutoMesh | None,
        training: StepPrograms | None = None,
    ) -> None:
        if isinstance(mesh, AutoMesh) and recipe.pinned is not None:
            mesh = dict(recipe.pinned.mesh.axes)  # a pinned plan is for its own mesh
        self._recipe = recipe
        self._mesh_request = mesh
        self._mesh: Mesh | AbstractMesh | None = None  # until it is first needed
        self._training = training
        self.choice: Choice | None = None
        self._agreed = False  # whether all processes were seen to have chosen alike
        self.last: CompiledEntry | None = None
        self.compiles: list[CompileRecord] = []
        self.kept: Session = Session()
        self._entries: dict[Signature, CompiledEntry] = {}  # by the signature of the call as the step knows it
        # By path of a leaf that is stored padded: the shape that it is stored with -> the one that the step knows.
        self._padded: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        self._drafts: dict[Signature, Draft] = {}  # of each, all that does not hang on what is known of its tables
        # Of each, the entry that `observed` was asked for, and what it returned.
        self._supposed: dict[Signature, tuple[CompiledEntry, CompiledEntry]] = {}
        # Where the processes met that were found to share an entry, by the id of the entry.
        self._meetings: dict[int, tuple[weakref.ref[CompiledEntry], str]] = {}
        self._compiled: set[str] = set()  # programs that all processes have compiled, by meeting and name
        self._observers: dict[Signature, TableObserver] = {}  # where tables are synchronised by rows
        self._first: dict[Signature, CompiledEntry] = {}  # the programs of their first steps

    @property
    def recipe(self) -> Recipe:
        """The step and its options; rules that were left to be chosen are there once a call was planned."""
        return self._recipe

    @property
    def asked_mesh(self) -> Mesh | AbstractMesh | MeshSizes | AutoMesh | None:
        """The mesh as it was asked for, or the one that was chosen: no device is looked at."""
        if self._training is not None:
            return self._training.asked_mesh
        return self._mesh_request if self._mesh is None else self._mesh

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """The mesh on which arrays come and go, made when it is first needed. Raises `MeshError` where it is to be
        chosen, and no call was planned yet."""
        if self._training is not None:
            return self._training.mesh
        if self._mesh is None:
            if isinstance(self._mesh_request, AutoMesh):
                raise mesh_not_chosen(self._recipe.name)
            self._mesh = mesh_for(self._mesh_request, self._recipe.target)
        return self._mesh

    @property
    def nameable(self) -> Mesh | AbstractMesh:
        """A mesh whose axes functions may name that make states: the step's own, or one device with the axes of the
        one that is to be chosen."""
        asked = self._open_mesh
        return self.mesh if asked is None else nameable_mesh(asked)

    @property
    def _open_mesh(self) -> AutoMesh | None:
        """What is asked for as a mesh as long as it is not chosen; None for a mesh that is known."""
        if self._training is not None or self._mesh is not None:
            return None
        return self._mesh_request if isinstance(self._mesh_request, AutoMesh) else None

    def decide(self, args: tuple[Any, ...]) -> None:
        """Chooses the mesh by a call with `args`, where it is left to be chosen. Raises what planning raises."""
        if self._open_mesh is not None:
            self.entry(args)

    @functools.cached_property
    def inside(self) -> Mesh:
        """The same devices with axes of type Auto: the mesh within programs, and of what is measured on its devices.
        Raises `MeshError` for an abstract mesh."""
        return inside_mesh(with_devices(self.mesh, f"call of {self._recipe.name}"))

    def entry(self, args: tuple[Any, ...]) -> CompiledEntry:
        """Returns plan and program for the signature of a call with `args`, built when it is new. Raises what tracing
        and planning raise."""
        reject_mutating_modules(args, self._recipe.name)
        bound = self._as_known(bind(self._recipe.fn, self._recipe.options, args))
        entry = self._entries.get(bound.signature)
        if entry is None:
            entry = self._build(bound)
            self._entries[bound.signature] = entry
            for leaf in entry.plan.leaves:
                if leaf.logical is not None:
                    self._padded.setdefault(leaf.path, {})[leaf.shape] = leaf.logical
        self.last = entry
        return entry

    def observed(self, args: tuple[Any, ...]) -> CompiledEntry:
        """Returns the entry of a call with `args`, with the program that runs once its tables were observed; what is
        not known of them yet is supposed (`observed_entry`)."""
        entry = self.entry(args)
        signature = entry.call.signature
        before, found = self._supposed.get(signature, (None, entry))
        if before is not entry:
            found = observed_entry(self._recipe, self.mesh, self._drafts[signature], entry)
            self._supposed[signature] = entry, found
        return found

    def _as_known(self, bound: Bound) -> Bound:
        """Returns a call with leaves of the sizes that the step knows: some of them may come as they are stored."""
        padded: Mapping[str, Mapping[tuple[int, ...], tuple[int, ...]]] = self._padded
        if self._training is not None:
            known = [leaf for leaf in self._training.layouts().values() if leaf.logical is not None]
            found: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
            for argument, (shape, _, _) in zip(bound.arguments, bound.signature.avals, strict=True) if known else ():
                leaf = matching(known, argument.path, shape, is_stored=True) if argument.is_state else None
                if leaf is not None and leaf.logical is not None:
                    found[argument.path] = {shape: leaf.logical}
            padded = found
        return logical_bound(bound, padded) if padded else bound

    def logical(self, number: int, state: Any) -> Any:
        """Returns the state at position `number` without padding: leaves that the step stores padded, in the sizes that
        it knows, laid out over the same devices as far as these divide them."""
        planned = {(leaf.path, leaf.shape): leaf for leaf in self._padded_leaves()}

        def cut(path: Any, leaf: Any) -> Any:
            plan = planned.get((leaf_path(self._recipe.options, number, path), tuple(getattr(leaf, "shape", ()))))
            if plan is None or plan.logical is None:
                return leaf
            where = NamedSharding(self.mesh, PartitionSpec(*logical_spec(plan, MeshShape.of(self.mesh))))
            return logical_array(leaf, plan.logical, where)

        return jax.tree_util.tree_map_with_path(cut, state) if planned else state

    def stored(self, number: int, state: Any) -> Any:
        """Returns the state at position `number` as it is stored: the inverse of `logical`."""
        planned = {(leaf.path, leaf.logical): leaf for leaf in self._padded_leaves()}

        def grow(path: Any, leaf: Any) -> Any:
            plan = planned.get((leaf_path(self._recipe.options, number, path), tuple(getattr(leaf, "shape", ()))))
            return leaf if plan is None else stored_array(leaf, plan.shape, named_sharding(self.mesh, plan.spec))

        return jax.tree_util.tree_map_with_path(grow, state) if planned else state

    def logical_arguments(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Returns the positional arguments of a call with states as the step knows them."""
        states = self._recipe.options.state_argnums
        return tuple(self.logical(number, arg) if number in states else arg for number, arg in enumerate(args))

    def _padded_leaves(self) -> list[LeafPlan]:
        return [leaf for entry in self._entries.values() for leaf in entry.plan.leaves if leaf.logical is not None]

    def settled(self, entry: CompiledEntry) -> CompiledEntry:
        """Returns the entry that the signature of `entry` runs from now on: a new one, once the first steps of its
        tables were observed."""
        if entry.sparse is None:
            return entry
        signature = entry.call.signature
        if signature not in self._observers and self.kept.resumed:
            self._observers[signature] = self.kept.observer(entry)
        observer = self._observers.get(signature)
        if observer is None or not observer.is_ready(entry.observes):
            return entry
        if entry.observes:
            self._first.setdefault(signature, entry)
            request, samples = self._recipe.request, observer.take_samples()
            links = {axes: measure_link(self.inside, axes) for axes in axes_to_measure(entry.sparse, request)}
            decision = decide(entry.sparse, request, samples, links)
            entry = self._build(entry.call, KnownTables(decision), "its tables were observed")
        elif observer.overflows():
            if pins_tables(self._recipe.pinned):
                logger.warning(
                    "splitjax: more rows than the pinned plan has room for are exchanged whole, step after step: %s;"
                    " make the plan anew",
                    ", ".join(table.param for table in entry.sparse.tables),
                )
                return entry
            entry = self._observing(entry)
        self._entries[signature] = self.last = entry
        return entry

    def run(self, entry: CompiledEntry, args: tuple[Any, ...]) -> Any:
        """Runs the program that `entry` has for the next step on the arguments `args` of a call, and keeps what it
        observed and what rounding took away. Returns the step's result. Raises `SignatureChanged` where the arguments
        are not the entry's."""
        program = entry.program(self.kept.num_steps)
        operands = args if entry.sparse is None else entry.operands(args, self.kept.residuals_of(entry))
        if self._meetings:
            self._compile_everywhere(entry, program, operands)
        if entry.sparse is None:
            result = program(*operands)
            self.kept.num_steps += entry.partial is not None
            return result
        result, observed, *residuals = program(*operands)
        self.kept.num_steps += entry.partial is not None
        if residuals:
            self.kept.residuals = dict(residuals[0])
        if entry.call.signature not in self._observers:
            self._observers[entry.call.signature] = self.kept.observer(entry)
        self._observers[entry.call.signature].note(observed)
        return result

    def across_processes(self, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], CompiledEntry]:
        """Returns `args` as global arrays, and the entry that takes them, for a call in a run of several processes.
        Raises `ProcessError` where they are about to do different things."""
        entry = self.settled(self.entry(args))
        self.agree_on_choice()
        if self._meeting(entry) is None:
            self._meetings[id(entry)] = weakref.ref(entry), entry.meet_processes(self._recipe, args)
        return entry.across_processes(self._recipe, args), entry

    def agree_on_choice(self) -> None:
        """Compares, before anything runs on a mesh of several processes, what each of them chose for the step, once.
        Raises `ProcessError` where that differs."""
        chooser = self if self._training is None else self._training
        if chooser.choice is None or chooser._agreed or not with_devices(self.mesh, self._recipe.name).is_multi_process:
            return
        chosen = chooser.choice
        text = f"{chosen.mesh}, {chosen.best.name}\n{write_rules(chosen.rules)}"
        agree_on_choice(chooser.recipe.name, text)
        chooser._agreed = True

    def _meeting(self, entry: CompiledEntry) -> str | None:
        """Where the processes met about `entry`; None where they have not."""
        known, meeting = self._meetings.get(id(entry), (None, ""))
        return meeting if known is not None and known() is entry else None

    def _compile_everywhere(self, entry: CompiledEntry, program: StepProgram, operands: tuple[Any, ...]) -> None:
        """Waits, before `program` of `entry` first runs on `operands`, until all processes have compiled it."""
        meeting, name = self._meeting(entry), entry.program_name(self.kept.num_steps)
        if not meeting or f"{meeting}{name}" in self._compiled:
            return
        prepare(program, *operands)
        jax.monitoring.record_event(WAIT_EVENT)
        wait_for_compiled(meeting, self._recipe.name, name)
        jax.monitoring.record_event(MET_EVENT)
        self._compiled.add(f"{meeting}{name}")

    def carried(self) -> Carried:
        """Returns what is kept between calls, as a value; see `ParallelStep.carried`."""
        residuals = self.kept.known_residuals(self._entries.values())
        return Carried(merged(self.kept.resumed, self._entries, self._observers), residuals, self.kept.num_steps)

    def resume(self, carried: Carried | None) -> None:
        """Puts back what `carried` gave; see `ParallelStep.resume`. Entries about which it decides differently are
        built anew."""
        carried = carried or Carried()
        self.kept.residuals, self.kept.resumed, self.kept.num_steps = (
            dict(carried.residuals),
            dict(carried.seen),
            carried.num_steps,
        )
        self._observers = {}
        for signature, entry in self._entries.items():
            if entry.sparse is None:
                continue
            seen = carried.seen.get(inputs_of(entry.call, entry.mesh))
            if seen is not None and seen.syncs and seen.syncs != entry.plan.syncs:
                new = self._build(entry.call, KnownTables(carried=seen.syncs), "a run is resumed")
            elif (seen is None or not seen.syncs) and entry.is_decided and not pins_tables(self._recipe.pinned):
                new = self._observing(entry)
            else:
                continue
            self._entries[signature] = new
            if self.last is entry:
                self.last = new

    def layouts(self) -> Mapping[str, LeafPlan]:
        """Returns path -> plan of every state leaf of the plan used last, for steps made by `like`."""
        return {} if self.last is None else {leaf.path: leaf for leaf in self.last.plan.leaves if leaf.is_state}

    def followed(self) -> Mapping[str, LeafPlan] | None:
        """Returns the layouts of the training step that these follow; None for a training step's own programs."""
        return None if self._training is None else self._training.layouts()

    def _observing(self, entry: CompiledEntry) -> CompiledEntry:
        """The program of an entry's first steps."""
        signature = entry.call.signature
        if signature not in self._first:
            self._first[signature] = self._build(entry.call, KnownTables(observes=True), "its tables are observed anew")
        return self._first[signature]

    def _build(self, bound: Bound, known: KnownTables | None = None, reason: str = "") -> CompiledEntry:
        """Builds the entry for a signature, and records why. `known`: of its tables; None for what a resumed run knew
        of them. The step is traced and laid out for the first entry of a signature alone."""
        jax.monitoring.record_event(BUILD_EVENT)
        started = time.perf_counter()
        with uncollected():
            draft = self._drafts.get(bound.signature)
            if draft is not None:
                tables = known or self._resumed(bound, self.mesh)
                entry = compile_draft(self._recipe, self.mesh, with_tables(draft, tables))
            elif self._training is None and (self._open_mesh is not None or self._recipe.is_open):
                draft, entry = self._choose(bound)
            else:
                draft, entry = self._begin(bound, known)
        self._drafts[bound.signature] = draft  # of a step that can be planned: one that cannot is traced anew
        if not reason:
            differences = [difference(bound, old.call) for old in self._entries.values()]
            reason = min(differences)[1] if differences else "first call"
        seconds = time.perf_counter() - started
        jax.monitoring.record_event_duration_secs(BUILT_EVENT, seconds)
        self.compiles.append(CompileRecord(len(self.compiles) + 1, reason, seconds))
        self.compiles[-1].log(self._recipe.name)
        return entry

    def _resumed(self, bound: Bound, mesh: Mesh | AbstractMesh) -> KnownTables:
        """What the resumed run knew of the tables of a call on a mesh."""
        seen = self.kept.resumed.get(inputs_of(bound, mesh))
        return KnownTables(carried=() if seen is None else seen.syncs)

    def _begin(self, bound: Bound, known: KnownTables | None) -> tuple[Draft, CompiledEntry]:
        """Traces and lays out the first entry of a signature of which nothing is left to be chosen."""
        check_partitioner(self.mesh.size, f"parallelize({self._recipe.name})")
        if self._training is not None and self._recipe.rules == TO_BE_CHOSEN:
            self._recipe = dataclasses.replace(self._recipe, rules=self._training.recipe.rules)
        draft = begin(self._recipe, self.mesh, trace_step(self._recipe, bound, mesh=self.mesh), self.followed())
        tables = known or self._resumed(bound, self.mesh)
        return draft, compile_draft(self._recipe, self.mesh, with_tables(draft, tables))

    def _choose(self, bound: Bound) -> tuple[Draft, CompiledEntry]:
        """Chooses what the step leaves open by the call that is planned first, and keeps it from now on."""

        def build(
            recipe: Recipe, mesh: Mesh | AbstractMesh, traced: Traced, notes: tuple[str, ...]
        ) -> tuple[Draft, CompiledEntry]:
            check_partitioner(mesh.size, f"parallelize({recipe.name})")
            draft = begin(recipe, mesh, traced).noting(*notes)
            return draft, compile_draft(recipe, mesh, with_tables(draft, self._resumed(bound, mesh)))

        decided = build_chosen(self._recipe, self._open_mesh or self.mesh, bound, build)
        self._recipe, self._mesh, self.choice = decided.recipe, decided.mesh, decided.choice
        return decided.draft, decided.entry
