"""What a decorated step finds out about itself: whether another machine's compiler makes it fit there, and what is
measured of gradients, partial backpropagation and what an iteration costs a worker.

Each method says in a few lines what `splitjax.compile` or `splitjax.measure` is asked, which are loaded when they are
first used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax

from splitjax import _compat
from splitjax.choosing import Choice
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.compile.recipes import target_and_budget
from splitjax.compile.step_programs import StepPrograms
from splitjax.machines.targets import Target
from splitjax.mesh import with_devices
from splitjax.partial.request import PartialBackprop
from splitjax.roles import Role
from splitjax.step.consumed import GivenStates
from splitjax.step.positions import positional
from splitjax.sync.costs.schemes import Link

if TYPE_CHECKING:
    from splitjax.partial.advice import Advice
    from splitjax.report.target.value import TargetCheck
    from splitjax.schedule.model.jobs import JobProfile
    from splitjax.sync.analysis import Profile


class MeasuredStep:
    """What a step finds out about itself that has a recipe, programs by signature, and states that are looked after."""

    _recipe: Recipe
    _programs: StepPrograms
    _states: GivenStates

    @property
    def mesh(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
        """The mesh as it was given, or made of its sizes when it is first needed. What `mesh="auto"` chose is there
        once a call was planned; before that it is a `MeshError`."""
        return self._programs.mesh

    @property
    def choice(self) -> Choice | None:
        """How `rules="auto"` or `mesh="auto"` chose: what was compared, with seconds and bytes, and why each was taken
        or not. It prints as a table. None where nothing was left to be chosen, and before a call was planned."""
        return self._programs.choice

    @property
    def roles(self) -> Mapping[str, Role]:
        """Says what mesh axes are for, as far as the user said so."""
        return self._recipe.roles

    @_compat.outside_mesh
    def check_target(
        self, *args: Any, on: str | Target | None = None, memory_budget: int | str | None = None, **kwargs: Any
    ) -> TargetCheck:
        """Whether the step fits on a machine that need not be here, for these arguments (arrays or
        `ShapeDtypeStruct`s): it is compiled for it by its own compiler, and memory, collectives and what is gathered
        for nothing are put beside the prediction. Runs nothing (docs/planning.md).

        **Arguments:**

        - `on`: the machine, such as `"tpu:v5e:4x4"`, `"gpu:h200:2x8"` or `"cpu:8"`; by default the step's `target`.
        - `memory_budget`: what a device may need, such as `"14GiB"`; by default the step's own, or what a device has.
          A TPU's compiler is held to it.

        Raises `TargetError` and `BudgetError` for what is no machine for this mesh, and no size, and `CompilerError`
        where the machine's compiler is not installed, or refuses its topology.
        """
        from splitjax.compile.target_check import check_on_target  # it is loaded when it is first used

        place = f"{self._recipe.name}.check_target"
        target, budget = target_and_budget(self._recipe, on, memory_budget, place)
        entry = self._programs.entry(positional(self._recipe.fn, args, kwargs))
        return check_on_target(self._programs.recipe, entry, target, budget, self._programs.followed())

    def profile(self, *args: Any, num_workers: int | None = None, **kwargs: Any) -> Profile:
        """Measures how sparse every gradient is over the workers: density, overlap, densification, skewness (Zen, arXiv
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
        from splitjax.measure.profiling import per_batch  # what measures is loaded when it is first used

        args = positional(self._recipe.fn, args, kwargs)
        return self._profile(per_batch(args, self._recipe.options.batch_argnums, self._recipe.name), num_workers)

    def advise(
        self, *args: Any, backprop: PartialBackprop | None = None, link: Link | None = None, **kwargs: Any
    ) -> Advice:
        """Measures what partial backpropagation would save and cost on this step, beside a smaller batch of equal cost;
        it says which to use.

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
        from splitjax.measure.advising import split_request
        from splitjax.measure.profiling import per_batch

        given, wanted = split_request(args, backprop, self._recipe.backprop)
        given = positional(self._recipe.fn, given, kwargs)
        return self._advise(
            per_batch(given, self._recipe.options.batch_argnums, self._recipe.name, "advise"), wanted, link
        )

    @_compat.outside_mesh
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
        """Measures what one iteration of this step costs each worker, as a profile for `splitjax.schedule`: forward
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
        # The scheduler is loaded when it is first used.
        from splitjax.measure.job_profiling import JobRequest, profile_job

        request = JobRequest(name, num_workers, link, input_seconds, stages)
        self._programs.decide(args)
        mesh = with_devices(self.mesh, f"{self._recipe.name}.job_profile")
        args = self._programs.logical_arguments(args)
        return profile_job(self._recipe.unpadded, mesh, self._states.check, args, request)

    @_compat.outside_mesh
    def _advise(self, calls: Iterable[tuple], backprop: PartialBackprop, link: Link | None) -> Advice:
        """The advice from calls given by their arguments."""
        from splitjax.measure.advising import advise_calls

        mesh = with_devices(self.mesh, f"{self._recipe.name}.advise")
        calls = map(self._programs.logical_arguments, calls)
        return advise_calls(self._recipe.unpadded, mesh, self._states.check, calls, backprop, link)

    @_compat.outside_mesh
    def _profile(self, calls: Iterable[tuple], num_workers: int | None) -> Profile:
        """The profile of calls given by their arguments."""
        from splitjax.measure.profiling import profile_calls

        def entry_of(args: tuple) -> CompiledEntry:
            self._states.check(args)
            return self._programs.entry(args)

        return profile_calls(self._recipe, self._programs.inside, entry_of, calls, num_workers)
