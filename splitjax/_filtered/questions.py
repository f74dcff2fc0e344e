"""What a step over objects answers about a call without running it: plan, shardings, memory, time, report, and what is
measured on it.

Each question takes the arguments of a call, which may be abstract, apart as a call does, and asks the plain step."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, overload

from splitjax._filtered.call import Call
from splitjax.errors import DonatedStateError, PartialError, ProfileError
from splitjax.machines.targets import Target
from splitjax.partial.request import PartialBackprop
from splitjax.plan import Plan
from splitjax.step.keywords import VerifySizes
from splitjax.step.positions import positional
from splitjax.sync.costs.schemes import Link

if TYPE_CHECKING:
    from splitjax.compile.time import On
    from splitjax.cost.memory.lifetimes import ProgramMemory
    from splitjax.cost.time import StepTime
    from splitjax.partial.advice import Advice
    from splitjax.report.blame.remedies import Remedies
    from splitjax.report.memory.value import MemoryTimelines
    from splitjax.report.target.value import TargetCheck
    from splitjax.report.value import Report
    from splitjax.schedule.model.jobs import JobProfile
    from splitjax.sync.analysis import Profile
    from splitjax.trace.graph import Graph
    from splitjax.verify import Verification

P = ParamSpec("P")
R = TypeVar("R")


class AskedStep(abc.ABC, Generic[P, R]):
    """A step that answers questions about calls of a function over objects.

    - `_fn`: that function. `_name`: its name, for errors. `_keywords`: what it was decorated with.
    """

    _fn: Callable[..., Any]
    _name: str
    _keywords: dict[str, Any]

    @overload
    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan: ...
    @overload
    def plan(self, *args: Any, **kwargs: Any) -> Plan: ...
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments (abstract ones will do): prints as a table, renders in Jupyter."""
        call = self._pack(positional(self._fn, args, kwargs))
        return call.step.plan(*call.args)

    def shardings(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The `NamedSharding` of every array of these arguments (abstract ones will do): one pytree per argument, an
        `nnx.State` in place of each NNX object, None in place of what is static."""
        call = self._pack(positional(self._fn, args, kwargs))
        return self._arranged(call, call.step.shardings(*call.args))

    def graph(self, *args: Any, **kwargs: Any) -> Graph:
        """The traced `splitjax.trace.graph.Graph` that the plan was made from."""
        call = self._pack(positional(self._fn, args, kwargs))
        return call.step.graph(*call.args)

    @overload
    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Any: ...
    @overload
    def lower(self, *args: Any, **kwargs: Any) -> Any: ...
    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers the step for these arguments as `jax.jit(fn).lower` does: `.compile()`, `.as_text()`,
        `.compile().memory_analysis()`."""
        call = self._pack(positional(self._fn, args, kwargs))
        return call.step.lower(*call.args)

    def memory(self, *args: Any, **kwargs: Any) -> ProgramMemory:
        """What the step needs of a device's memory for these arguments (abstract ones will do), predicted before it is
        compiled: an estimate and an upper bound; see `ParallelStep.memory`."""
        call = self._pack(positional(self._fn, args, kwargs))
        return call.step.memory(*call.args)

    def memory_timeline(self, *args: Any, compiled: bool = True, **kwargs: Any) -> MemoryTimelines:
        """What a device stores at each moment of the step for these arguments (abstract ones will do), predicted and,
        where it is to be `compiled`, as XLA compiles it; see `ParallelStep.memory_timeline`."""
        call = self._pack(positional(self._fn, args, kwargs))
        return call.step.memory_timeline(*call.args, compiled=compiled)

    def time(self, *args: Any, on: On, **kwargs: Any) -> StepTime:
        """How long the step takes for these arguments (abstract ones will do) on a machine, predicted before it is
        compiled; see `ParallelStep.time`."""
        call = self._pack(positional(self._fn, args, kwargs))
        return call.step.time(*call.args, on=on)

    @overload
    def report(self, *args: P.args, **kwargs: P.kwargs) -> Report: ...
    @overload
    def report(self, *args: Any, **kwargs: Any) -> Report: ...
    def report(self, *args: Any, **kwargs: Any) -> Report:
        """The plan for these arguments (abstract ones will do) against what XLA compiles: memory, and every collective
        with layer, source line and cause. Compiles the step; runs nothing."""
        call = self._pack(positional(self._fn, args, kwargs))
        return call.step.report(*call.args)

    def remedies(self, *args: Any, on: str | None = None, most: int = 4, **kwargs: Any) -> Remedies:
        """What removes the arrays that XLA gathers whole to keep a part of, for these arguments (abstract ones will
        do): changes that were compiled. `on`, `most`: as of `ParallelStep.remedies`."""
        call = self._pack(positional(self._fn, args, kwargs))
        return call.step.remedies(*call.args, on=on, most=most)

    def check_target(
        self, *args: Any, on: str | Target | None = None, memory_budget: int | str | None = None, **kwargs: Any
    ) -> TargetCheck:
        """Whether the step fits on a machine that need not be here, for these arguments (abstract ones will do), by the
        prediction and by that machine's own compiler. `on`, `memory_budget`, and what is raised: as of
        `ParallelStep.check_target`."""
        call = self._pack(positional(self._fn, args, kwargs))
        return call.step.check_target(*call.args, on=on, memory_budget=memory_budget)

    def verify(
        self, *args: Any, sizes: VerifySizes = "shrunken", own_precision: bool = False, **kwargs: Any
    ) -> Verification:
        """Compares the step with one device, from arguments that may be abstract. Nothing is updated. `sizes` and
        `own_precision`, what is returned and what is raised: as of `ParallelStep.verify`."""
        args = positional(self._fn, args, kwargs)
        call = self._pack(args)
        try:
            return call.step.verify(*call.args, sizes=sizes, own_precision=own_precision)
        except DonatedStateError as error:
            raise self._donated(args, call) from error

    def profile(self, *args: Any, num_workers: int | None = None, **kwargs: Any) -> Profile:
        """Measures how sparse every gradient is over `num_workers` workers, from the step's arguments with an iterable
        of batches in place of each batch; see `ParallelStep.profile`. Nothing is updated."""
        from splitjax.measure.profiling import per_batch  # what measures is loaded when it is first used

        args = positional(self._fn, args, kwargs)
        calls = (self._pack(arguments) for arguments in per_batch(args, self._batch_positions(args), self._name))
        first = next(calls, None)
        if first is None:
            raise ProfileError(
                "there is no batch to profile", place=f"{self._name}.profile", remedy="pass at least one batch"
            )
        try:
            return first.step._profile((call.args for call in itertools.chain((first,), calls)), num_workers)
        except DonatedStateError as error:
            raise self._donated(args, first) from error

    def advise(
        self, *args: Any, backprop: PartialBackprop | None = None, link: Link | None = None, **kwargs: Any
    ) -> Advice:
        """Measures what `backprop` would save and cost on this step, from its arguments with an iterable of batches in
        place of each batch. Nothing is updated. `link`, what is returned and what is raised: as of
        `ParallelStep.advise`."""
        from splitjax.measure.advising import split_request
        from splitjax.measure.profiling import per_batch

        given, wanted = split_request(args, backprop, self._keywords["backprop"])
        given = positional(self._fn, given, kwargs)
        positions = self._batch_positions(given)
        calls = (self._pack(arguments) for arguments in per_batch(given, positions, self._name, "advise"))
        first = next(calls, None)
        if first is None:
            raise PartialError(
                "there is no batch to measure", place=f"{self._name}.advise", remedy="pass at least one batch"
            )
        try:
            return first.step._advise((call.args for call in itertools.chain((first,), calls)), wanted, link)
        except DonatedStateError as error:
            raise self._donated(given, first) from error

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
        """Measures what one iteration costs each worker, as a profile for `splitjax.schedule`. Nothing is updated.
        `name`, `num_workers`, `link`, `input_seconds` and `stages`, what is returned and what is raised: as of
        `ParallelStep.job_profile`."""
        args = positional(self._fn, args, kwargs)
        call = self._pack(args)
        told = {
            "name": name or self._name,
            "num_workers": num_workers,
            "link": link,
            "input_seconds": input_seconds,
            "stages": stages,
        }
        try:
            return call.step.job_profile(*call.args, **told)
        except DonatedStateError as error:
            raise self._donated(args, call) from error

    @abc.abstractmethod
    def _pack(self, args: tuple) -> Call:
        """Takes a call's arguments apart."""

    @abc.abstractmethod
    def _arranged(self, call: Call, shardings: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arranges the plain step's shardings by the user's arguments."""

    @abc.abstractmethod
    def _batch_positions(self, args: tuple) -> tuple[int, ...]:
        """Returns which arguments are batches."""

    @abc.abstractmethod
    def _donated(self, args: tuple, call: Call) -> DonatedStateError:
        """The plain step's error, said of the user's own arguments."""
