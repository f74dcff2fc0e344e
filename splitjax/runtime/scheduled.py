"""Decorated training steps as jobs of `splitjax.schedule`: the adapter between its executor and JAX.

```python
def build(place):                                        # in every worker's process
    step = splitjax.parallelize(train_step, mesh={"data": place.num_workers}, rules="data_parallel")
    return Training(step, init_fn, jax.random.key(0), batches)

jobs, programs = [Job("mine", 0.0, 2, 1000, profile)], {"mine": DecoratedJob(build, folder)}
execute(jobs, programs, cluster, "jigsaw", RayEngine(cluster))
```

The processes of a job's workers join one run of JAX's distributed runtime, so the step is written for the global batch
as ever. A batch belongs to the number of its iteration, so a job that is preempted, moved or restarted trains on what
it would have trained on, and ends with the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from splitjax.errors import TrainingError
from splitjax.parallelize import ParallelStep
from splitjax.partial import PartialBackprop
from splitjax.partial.request import BRANCH, PROGRAM, SPATIAL
from splitjax.planning.carried import Carried
from splitjax.runtime.checkpoint.checkpoints import Checkpoints
from splitjax.runtime.checkpoint.options import CheckpointOptions
from splitjax.runtime.launch import variables
from splitjax.runtime.launch.initialize import initialize
from splitjax.runtime.launch.workers import Coordinator, one_core_variables
from splitjax.runtime.training.idle import noticing_idle
from splitjax.runtime.training.stepping import restore, stored_state
from splitjax.schedule.execution.engine import Place, StepOrder
from splitjax.schedule.model.jobs import STORAGE

_HEARTBEAT_SECONDS = 100


@dataclasses.dataclass(frozen=True)
class Training:
    """Says what a job trains.

    **Attributes:**

    - `step`: decorated, `step(state, batch) -> (state, {"loss": f32[], ...})`, over a mesh of one device per worker.
    - `init_fn`, `key`: `init_fn(key)` is the state that it begins with.
    - `batch`: `batch(number)`: the global batch of iteration `number` (from 1 on), host arrays, the same in every
      process.
    - `read`: what of `batch` is input: `read(number)` comes first, and `batch` is called with its result too,
      `batch(number, read)`. Disciplines that give storage turns of its own call it in those.
    - `at_depths`: for jobs that train partially: `at_depths(depths)` is the step that differentiates, on worker w, at
      least the share `depths[w]` of the model (`partial_steps` makes it for `splitjax.PartialBackprop`). None: `step`
      itself, which does more than it is asked for.
    - `warm_up`: depths of the programs that are compiled before the job counts as started, by running them once on a
      state that is thrown away. None: full backpropagation; what is missing is compiled while the job holds its
      devices.
    """

    step: Any
    init_fn: Callable[[Any], Any]
    key: Any
    batch: Callable[..., Any]
    read: Callable[[int], Any] | None = None
    at_depths: Callable[[tuple[float, ...]], Callable[[Any, Any], Any]] | None = None
    warm_up: Sequence[tuple[float, ...]] | None = None


@dataclasses.dataclass(frozen=True)
class DecoratedJob:
    """Runs a decorated step as a job of a cluster: the `schedule.Program` of a decorated step.

    **Attributes:**

    - `build`: `build(place) -> Training`, called in every worker's process once it has joined the others; picklable (a
      function of a module, or one that cloudpickle takes).
    - `directory`: of its checkpoints, on a file system that all its processes share. A job whose folder has a
      checkpoint goes on from it.
    - `host`: address on which worker 0's process listens for the others.
    - `release_early`: gives the device to others while the step only waits for its exchange. Noticed on processors
      under Linux; elsewhere a step keeps its device until it is done.
    """

    build: Callable[[Place], Training]
    directory: Path | str
    host: str = "127.0.0.1"
    release_early: bool = True

    def meet(self, place: Place) -> tuple[str | None, Any]:
        """Starts the coordination service of JAX's distributed runtime in the process of worker 0, at its `place`, and
        returns its address and what keeps it alive; None and None for a job of one worker."""
        if place.num_workers == 1:
            return None, None
        coordinator = Coordinator(self.host, place.num_workers, _HEARTBEAT_SECONDS)
        return coordinator.address, coordinator

    def begin(self, place: Place) -> DecoratedTask:
        """Joins the job's other workers and returns the task of the worker at `place`."""
        if place.num_workers > 1:
            os.environ |= {
                variables.COORDINATOR: place.meeting,
                variables.NUM_PROCESSES: str(place.num_workers),
                variables.PROCESS_ID: str(place.worker),
                variables.HEARTBEAT_SECONDS: str(_HEARTBEAT_SECONDS),
                variables.ATTEMPT: str(place.attempt),
            }
            for name in variables.OF_ONE_WORKER:
                os.environ.pop(name, None)
            initialize()
        return DecoratedTask(self.build(place), place, Path(self.directory), self.release_early)


class DecoratedTask:
    """Runs a worker of a `DecoratedJob`, as a `schedule.WorkerTask`.

    **Arguments:** `training`: what it trains. `place`: the worker's. `directory`: of the checkpoints. `release_early`:
    as of `DecoratedJob`.
    """

    def __init__(self, training: Training, place: Place, directory: Path, release_early: bool):
        self.training: Training = training
        self._place, self._release_early = place, release_early
        self._checkpoints = Checkpoints(CheckpointOptions(directory, keep_last=2, keep_best=0))
        self._read: dict[int, Any] = {}
        self._state: Any = None

    @property
    def state(self) -> Any:
        """Gives the state after the last iteration; None before `restore`."""
        return self._state

    def restore(self) -> int:
        """Compiles the step, reads the newest good checkpoint, and returns its step number; 0 without one."""
        training = self.training
        example = (self._batch(1),)
        begin = lambda: training.step.init(training.init_fn, training.key, example=example)
        for depths in [(1.0,) * self._place.num_workers] if training.warm_up is None else training.warm_up:
            jax.block_until_ready(self._step_at(depths)(begin(), *example))
        training.step.resume(None)  # as if it had not been called
        if self._checkpoints.newest_good() is None:
            self._state = begin()
            return 0
        restored = restore(self._checkpoints, training.step, training.init_fn, training.key, example=example)
        self._state = restored.state
        return restored.step

    def stage(self, number: int, resource: int) -> None:
        """Reads the input of iteration `number` if `resource` is the storage."""
        if resource == STORAGE and self.training.read is not None:
            self._read[number] = self.training.read(number)

    def step(self, order: StepOrder, computed: Callable[[], None]) -> Mapping[str, float]:
        """Does the iteration that `order` asks for, calls `computed` once the device is idle, and returns the metrics.
        Raises `TrainingError` for metrics without a loss."""
        batch = self._batch(order.number)
        step = self._step_at(order.depths)
        watched = self._release_early and self._place.num_workers > 1
        with noticing_idle(computed) if watched else contextlib.nullcontext():
            self._state, metrics = step(self._state, batch)
            jax.block_until_ready((self._state, metrics))
        if "loss" not in metrics:
            raise TrainingError(
                "the step's metrics have no loss",
                value=sorted(metrics),
                place=f"job {self._place.job!r}",
                remedy='return {"loss": ...}',
            )
        return {name: float(value) for name, value in metrics.items()}

    def save(self, number: int) -> None:
        """Saves the state after iteration `number`, and waits for it."""
        step = self.training.step
        self._checkpoints.save(number, stored_state(step, self._state), carried=step.carried(), wait=True)

    def _step_at(self, depths: tuple[float, ...]) -> Callable[[Any, Any], Any]:
        return self.training.step if self.training.at_depths is None else self.training.at_depths(depths)

    def _batch(self, number: int) -> Any:
        if self.training.read is None:
            return self.training.batch(number)
        if number not in self._read:
            self._read[number] = self.training.read(number)
        return self.training.batch(number, self._read.pop(number))


def one_core_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the variables for processes that have a processor core each (`RayOptions.environment`): one thread, one
    device. `base`: variables that they are added to, this process's if not given."""
    return one_core_variables(os.environ if base is None else base)


def partial_steps(
    decorate: Callable[[PartialBackprop | None], ParallelStep[..., Any]],
    num_workers: int,
    estimator: str = "count",
    assignment: str = SPATIAL,
) -> tuple[
    ParallelStep[..., Any], Callable[[tuple[float, ...]], Callable[[Any, Any], Any]], tuple[tuple[float, ...], ...]
]:
    """Returns `step`, `at_depths` and `warm_up` of a `Training` whose workers differentiate to the depths that a
    discipline hands out.

    **Arguments:**

    - `decorate`: `decorate(backprop)` is the step with that `backprop`. It is called with None and with linear depths
      that rotate.
    - `num_workers`: of the job.
    - `estimator`: as in `PartialBackprop`.
    - `assignment`: as in `PartialBackprop`: `"spatial"` for disciplines that give every worker a depth of its own
      (`jigsaw`, `spb`), `"temporal"` for those that give all workers one (`temporal-spb`). In a temporal assignment
      full depth on all workers is a turn like the others, with gradients divided by the share of steps that compute
      them. Each depth is a program of its own, so that no convolution is in a branch, where XLA has slow kernels on
      CPUs.

    Depths that no turn covers are rounded up to full backpropagation. For steps whose gradients are exchanged densely:
    what a step with `sync=` has seen of its tables is not carried from one of the two to the other.
    """
    full = decorate(None)
    every = (1.0,) * num_workers
    if num_workers == 1:
        return full, lambda depths: full, (every,)
    is_spatial = assignment == SPATIAL
    execution = BRANCH if is_spatial else PROGRAM
    partial = decorate(PartialBackprop(assignment=assignment, estimator=estimator, execution=execution, warmup_steps=0))
    turns = [
        tuple((((worker if is_spatial else 0) + turn) % num_workers + 1) / num_workers for worker in range(num_workers))
        for turn in range(num_workers)
    ]

    def at_depths(depths: tuple[float, ...]) -> Callable[[Any, Any], Any]:
        for turn, covered in enumerate(turns):
            if all(has >= wanted - 1e-6 for has, wanted in zip(covered, depths, strict=True)):
                # the number of a job's iteration decides, not how often this process has called the step
                partial.resume(Carried(num_steps=turn))
                return partial
        return full

    return full, at_depths, (every, turns[0]) if is_spatial else tuple(turns)
