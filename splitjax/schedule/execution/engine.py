"""Defines what real execution is made of: programs of jobs, tasks of their workers, and engines, which hold a process
for each (job, device).

A `Program` is what a job trains, as a value that travels to other processes. `begin` makes of it, in the process of one
worker, a `WorkerTask`, which advances by one iteration per `step`. An `Engine` starts these processes, hands them
commands, and reports what became of them. Nothing here knows JAX: `splitjax.runtime.scheduled` makes programs of
decorated training steps.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True)
class Place:
    """Says where a worker is.

    **Attributes:**

    - `job`: name of the job. `worker`, `num_workers`: which of its workers this is, of how many.
    - `device`: number of its device in the cluster; `local_device` of those on its node.
    - `attempt`: how many times the job's processes were started before.
    - `meeting`: what `Program.meet` in worker 0's process has for all.
    """

    job: str
    worker: int
    num_workers: int
    device: int
    local_device: int
    attempt: int = 0
    meeting: Any = None


@dataclasses.dataclass(frozen=True)
class StepOrder:
    """Orders one iteration.

    **Attributes:**

    - `number`: of the iteration, counted from 1 over all starts of the job.
    - `depths`: for every worker the share of the model that it is to differentiate, each in (0, 1]; all 1 is full
      backpropagation.
    """

    number: int
    depths: tuple[float, ...]


class WorkerTask(Protocol):
    """Describes one worker of a job, in its process. Methods are called one after the other, `restore` first, always in
    the same thread."""

    def restore(self) -> int:
        """Continues from the job's newest checkpoint, or begins anew. **Returns:** how many iterations are done; the
        same in all workers."""
        ...

    def stage(self, number: int, resource: int) -> None:
        """Does what iteration `number` needs of the given `resource`, `STORAGE` (read its batch) or `CPU` (preprocess
        it), ahead of `step`, if a discipline gives these times of their own. `step` does what was not done ahead; a
        task without such stages does nothing here."""
        ...

    def step(self, order: StepOrder, computed: Callable[[], None]) -> Mapping[str, float]:
        """Does the iteration that `order` names, with the exchange of gradients that it needs. `computed` may be
        called, from any thread, once this worker's device has nothing left to compute but waits for the exchange:
        others may compute on it from then on. **Returns** metrics, such as the loss."""
        ...

    def save(self, number: int) -> None:
        """Writes a checkpoint of the state after iteration `number`, and returns when it is safe."""
        ...


class Program(Protocol):
    """Describes what a job trains. It has to be picklable if its engine uses processes."""

    def meet(self, place: Place) -> tuple[Any, Any]:
        """Prepares the meeting of all workers: it is called in worker 0's process, at `place`, before any worker
        begins. **Returns** what all need to find each other, such as an address, and what is to be kept as long as that
        process is there, such as the service that listens on it; None for nothing."""
        ...

    def begin(self, place: Place) -> WorkerTask:
        """Makes the task of the worker at `place`; it is called in every worker's process."""
        ...


class Kind(enum.Enum):
    """Lists the kinds of reports.

    **Attributes:**

    - `STARTED`: all workers have restored; `number` is how many iterations are done.
    - `STAGED`: a worker has done `resource` of iteration `number`.
    - `COMPUTED`: a worker waits for its exchange only.
    - `FINISHED`: a worker has done the iteration; `values` are its metrics.
    - `SAVED`: all workers have saved.
    - `DIED`: a worker failed or its process is gone, `reason` says how.
    """

    STARTED = "started"
    STAGED = "staged"
    COMPUTED = "computed"
    FINISHED = "finished"
    SAVED = "saved"
    DIED = "died"


@dataclasses.dataclass(frozen=True)
class WorkerReport:
    """Tells what became of a command.

    **Attributes:**

    - `kind`: what happened. `job`: number of the job.
    - `attempt`: tells reports about processes that were since stopped from later ones.
    - `worker`: number of the worker. `number`: of the iteration. `resource`: a number in `RESOURCES`.
    - `values`: metrics. `reason`: why a worker died.
    """

    kind: Kind
    job: int
    attempt: int
    worker: int = 0
    number: int = 0
    resource: int = 0
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reason: str = ""


class Engine(Protocol):
    """Holds the processes of jobs, which it knows by number. No method but `next` and `close` blocks for long; what
    becomes of a command is reported."""

    def start(self, job: int, program: Program, places: tuple[Place, ...]) -> None:
        """Starts the processes of job number `job`, which trains `program`: one at each of `places`. Reports `STARTED`
        or `DIED`."""
        ...

    def stage(self, job: int, worker: int, number: int, resource: int) -> None:
        """Lets `worker` of `job` do its part of iteration `number` on `resource` (`WorkerTask.stage`). Reports
        `STAGED`, `DIED`."""
        ...

    def step(self, job: int, worker: int, order: StepOrder) -> None:
        """Lets `worker` of `job` do the iteration that `order` names. Reports `COMPUTED`, unless the iteration is done
        before, `FINISHED`, `DIED`."""
        ...

    def save(self, job: int, number: int) -> None:
        """Lets all workers of `job` write a checkpoint of the state after iteration `number`. Reports `SAVED`,
        `DIED`."""
        ...

    def stop(self, job: int) -> None:
        """Ends the processes of `job`, whatever they do. A job without processes is left alone."""
        ...

    def next(self, timeout_seconds: float) -> WorkerReport | None:
        """Waits for the next report, and gives it; None if there is none within `timeout_seconds`."""
        ...

    def close(self) -> None:
        """Ends everything."""
        ...
