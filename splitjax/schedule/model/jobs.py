"""Describes training jobs as values: what one iteration of each worker costs, how many are wanted, and when the job
arrives.

Times are those of one worker on one device. *Depth*: how far back from the loss a worker differentiates. Structured
partial backpropagation (Kumar et al., arXiv 2111.10672) gives worker i of N the last (N-i)/N of the model, the
assignment rotating from step to step. Measured times, or those of a trace, come in; policies, disciplines and the
simulator read the checked values.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax.codec import Codec, Wording
from splitjax.errors import ScheduleError

RESOURCES = ("storage", "cpu", "device", "network")
STORAGE, CPU, DEVICE, NETWORK = range(4)


@dataclasses.dataclass(frozen=True)
class Depth:
    """Describes one place at which the backward pass can end.

    **Attributes:**

    - `fraction`: share of the model that is differentiated, in (0, 1]; 1 is full backpropagation.
    - `backward_seconds`: the backward pass down to here.
    - `memory_bytes`: what a worker needs resident while it trains at this depth (parameters, optimizer state,
      activations).
    - `gradient_bytes`: bytes of the gradients that it makes, before any exchange.
    - `layer`: name of the layer at which the backward pass ends, where known.
    """

    fraction: float
    backward_seconds: float
    memory_bytes: int = 0
    gradient_bytes: int = 0
    layer: str = ""


@dataclasses.dataclass(frozen=True)
class Stages:
    """Splits one iteration by resource, as Muri does (Zhao et al., SIGCOMM'22, section 3). The seconds need not add up
    to the iteration's time: a job alone may overlap some of its stages.

    **Attributes:**

    - `storage_seconds`: reads of the batch.
    - `cpu_seconds`: its preprocessing on the CPU.
    - `device_seconds`: computing.
    - `network_seconds`: the exchange of gradients.
    """

    storage_seconds: float = 0.0
    cpu_seconds: float = 0.0
    device_seconds: float = 0.0
    network_seconds: float = 0.0

    @property
    def seconds(self) -> tuple[float, float, float, float]:
        """Lists the four times in the order of `RESOURCES`."""
        return self.storage_seconds, self.cpu_seconds, self.device_seconds, self.network_seconds


@dataclasses.dataclass(frozen=True)
class JobProfile:
    """Tells what one iteration costs each worker.

    **Attributes:**

    - `name`: name of the model.
    - `forward_seconds`: the forward pass.
    - `depths`: where the backward pass can end, full backpropagation first, ever shallower.
    - `exposed_seconds`: time of an iteration, job alone, in which the device waits: input and all-reduce that computing
      does not hide.
    - `state_bytes`: of `Depth.memory_bytes`, what stays on a device while other jobs compute there (parameters,
      optimizer state).
    - `stages`: time on each resource, where known.
    - `update_seconds`: the update of the parameters, which every worker computes at whatever depth.
    - `switch_seconds`: what a device loses when it goes from another job's task to one of this job: until caches, or
      the device's memory, hold the job's weights again, and the job's process runs.

    Raises `ScheduleError` for times, fractions or sizes that cannot be.
    """

    name: str
    forward_seconds: float
    depths: tuple[Depth, ...]
    exposed_seconds: float = 0.0
    state_bytes: int = 0
    stages: Stages | None = None
    update_seconds: float = 0.0
    switch_seconds: float = 0.0

    def __post_init__(self) -> None:
        times = [
            self.forward_seconds,
            self.exposed_seconds,
            self.update_seconds,
            self.switch_seconds,
            *(depth.backward_seconds for depth in self.depths),
            *(self.stages.seconds if self.stages else ()),
        ]
        fractions = [depth.fraction for depth in self.depths]
        if (
            not self.depths
            or fractions[0] != 1
            or not all(deep > shallow for deep, shallow in zip(fractions, [*fractions[1:], 0.0]))
        ):
            raise ScheduleError(
                "depths have to fall from 1, full backpropagation, and stay above 0",
                value=fractions,
                place=f"profile {self.name!r}",
                remedy="list the depths from 1.0 downwards",
            )
        if not all(math.isfinite(time) and time >= 0 for time in times) or self.iteration_seconds <= 0:
            raise ScheduleError(
                "an iteration takes time, and no part of it less than none",
                value=times,
                place=f"profile {self.name!r}",
                remedy="give seconds of 0 or more, and more than 0 in all",
            )
        sizes = [
            self.state_bytes,
            *(depth.memory_bytes for depth in self.depths),
            *(depth.gradient_bytes for depth in self.depths),
        ]
        if min(sizes) < 0:
            raise ScheduleError(
                "nothing needs less memory than none",
                value=min(sizes),
                place=f"profile {self.name!r}",
                remedy="give bytes of 0 or more",
            )

    @property
    def iteration_seconds(self) -> float:
        """Gives the time of one iteration of the job alone, with full backpropagation."""
        return self.task_seconds(0) + self.exposed_seconds

    def task_seconds(self, depth: int) -> float:
        """Adds up forward pass, backward pass down to depth number `depth`, and update: how long the iteration keeps a
        device computing."""
        return self.forward_seconds + self.depths[depth].backward_seconds + self.update_seconds

    def depth_at(self, fraction: float) -> int:
        """Gives the number of the shallowest depth that covers `fraction` of the model: wanted depths are rounded up to
        real ones, never down."""
        return max(number for number, depth in enumerate(self.depths) if depth.fraction >= fraction - 1e-9)

    def partial_depths(self, num_workers: int) -> tuple[int, ...]:
        """Gives the depth numbers that the `num_workers` workers of one iteration of structured partial backpropagation
        have between them, deepest first."""
        return _partial_depths(self, num_workers)

    def partial_seconds(self, num_workers: int) -> float:
        """Averages `task_seconds` over `partial_depths`: what an iteration costs each of `num_workers` workers on
        average."""
        return _partial_seconds(self, num_workers)

    def phi(self, num_workers: int) -> float:
        """Divides the device time that an iteration of `num_workers` workers takes with perfect packing by its
        full-backpropagation time. That is (2 + 1/N)/3 where the backward pass takes twice the forward pass, can end
        anywhere, and hides what is exposed only if there is any."""
        return self.partial_seconds(num_workers) / self.iteration_seconds

    def resource_seconds(self, num_workers: int) -> tuple[float, float, float, float]:
        """Gives the least time that an iteration of `num_workers` workers under partial backpropagation takes of each
        of a worker's resources, in the order of `RESOURCES`. Without stages, what is exposed is waiting of which nobody
        knows for what: any number of jobs may wait at a time."""
        compute = self.partial_seconds(num_workers)
        if self.stages is None:
            return 0.0, 0.0, compute, 0.0
        # Stages are measured apart: one can be said to take longer than the iteration that it is part of.
        storage, cpu, _, network = (min(seconds, self.iteration_seconds) for seconds in self.stages.seconds)
        return storage, cpu, compute, network

    def to_json(self) -> dict[str, Any]:
        """Gives the profile as JSON values."""
        return PROFILE_JSON.values(self)

    @staticmethod
    def from_json(values: Any) -> JobProfile:
        """Makes a profile of the `values` that `to_json` wrote. Raises `ScheduleError` for anything else; its place
        says where in `values`."""
        return PROFILE_JSON.read(values)

    @staticmethod
    def uniform(
        name: str,
        iteration_seconds: float,
        *,
        num_depths: int = 32,
        forward_fraction: float = 1 / 3,
        exposed_fraction: float = 0.0,
        memory_bytes: int = 0,
        fixed_memory_fraction: float = 0.5,
        gradient_bytes: int = 0,
        stages: Stages | None = None,
    ) -> JobProfile:
        """Makes the profile of a model of equal layers: backward time, activations and gradients are in proportion to
        depth.

        **Arguments:**

        - `name`: name of the model.
        - `iteration_seconds`: one iteration of the job alone, with full backpropagation.
        - `num_depths`: after how many layers, evenly spaced, the backward pass can end.
        - `forward_fraction`: the forward pass's share of computing; a third is a backward pass of twice its time.
        - `exposed_fraction`: share of `iteration_seconds` in which the device waits.
        - `memory_bytes`: at full depth, of which `fixed_memory_fraction` is state and does not depend on depth.
        - `gradient_bytes`: bytes of the gradients at full depth.
        - `stages`: time on each resource, where known.
        """
        compute = iteration_seconds * (1 - exposed_fraction)
        backward, fixed = compute * (1 - forward_fraction), memory_bytes * fixed_memory_fraction
        depths = tuple(
            Depth(part, backward * part, round(fixed + (memory_bytes - fixed) * part), round(gradient_bytes * part))
            for part in ((num_depths - index) / num_depths for index in range(num_depths))
        )
        return JobProfile(
            name, compute * forward_fraction, depths, iteration_seconds * exposed_fraction, round(fixed), stages
        )


class _ProfileWords(Wording):
    """Names the field that is wrong: a profile is written by hand, without splitjax at hand."""

    def needs_object(self, kind: type) -> str:
        return f"{kind.__name__} is a JSON object"

    def unknown(self, kind: type) -> str:
        return f"{kind.__name__} has no such field"

    def missing(self, kind: type) -> str:
        return "a field is missing"

    def wrong(self, name: str, words: str) -> str:
        return f"{name} {'are' if words == 'a list' else 'is'} {words}"


PROFILE_JSON: Codec[JobProfile] = Codec(
    JobProfile,
    ScheduleError,
    _ProfileWords(
        "a job profile",
        "write profiles with write_profiles, or splitjax profile --job",
        remake="mend the file, or make it anew",
        whole="the whole",
    ),
    finite=True,
    unless_empty=("switch_seconds",),
)


def resident_bytes(profiles: Iterable[JobProfile]) -> int:
    """Gives the memory that a device needs for jobs of these `profiles` that take turns on it: the state of all, and of
    one at a time the rest, at full depth."""
    known = list(profiles)
    return sum(profile.state_bytes for profile in known) + max(
        (profile.depths[0].memory_bytes - profile.state_bytes for profile in known), default=0
    )


@functools.lru_cache(maxsize=65536)
def _partial_depths(profile: JobProfile, num_workers: int) -> tuple[int, ...]:
    fractions = -np.array([depth.fraction for depth in profile.depths])
    wanted = np.arange(num_workers, 0, -1) / num_workers
    return tuple((np.searchsorted(fractions, -wanted + 1e-9, side="right") - 1).tolist())


@functools.lru_cache(maxsize=65536)
def _partial_seconds(profile: JobProfile, num_workers: int) -> float:
    return sum(profile.task_seconds(depth) for depth in _partial_depths(profile, num_workers)) / num_workers


_MAX_COUNT = 2**53


@dataclasses.dataclass(frozen=True)
class Job:
    """Describes a data-parallel training job.

    **Attributes:**

    - `name`: unique in its trace.
    - `arrival_seconds`: when it is submitted.
    - `num_workers`: devices that it wants, one worker each, all at once.
    - `num_iterations`: after which it is done.
    - `profile`: what an iteration costs.
    - `tag`: whatever the trace groups jobs by (a virtual cluster, a user).

    Raises `ScheduleError` for counts below 1 or above 2**53, which no float counts, or a time before 0.
    """

    name: str
    arrival_seconds: float
    num_workers: int
    num_iterations: int
    profile: JobProfile
    tag: str = ""

    def __post_init__(self) -> None:
        counts = (self.num_workers, self.num_iterations)
        if not all(1 <= count <= _MAX_COUNT for count in counts) or not 0 <= self.arrival_seconds < math.inf:
            raise ScheduleError(
                "a job arrives at 0 or later, with a worker and an iteration at least",
                value=(self.arrival_seconds, self.num_workers, self.num_iterations),
                place=f"job {self.name!r}",
                remedy="give an arrival of 0 or later, and numbers above 0",
            )

    @property
    def exclusive_seconds(self) -> float:
        """Gives the time that the job takes alone, with full backpropagation."""
        return self.num_iterations * self.profile.iteration_seconds

    @property
    def device_seconds(self) -> float:
        """Gives the job's full-backpropagation device time: what it is worth in every measure of efficiency."""
        return self.exclusive_seconds * self.num_workers


@dataclasses.dataclass(frozen=True)
class JobColumns:
    """Holds what is constant about many jobs, as read-only arrays of one entry per job.

    **Attributes:**

    - `arrival_seconds`: f64[jobs]. `iteration_seconds`: f64[jobs], alone and with full backpropagation.
    - `num_workers`, `num_iterations`: i64[jobs].
    - `resource_seconds`: f64[jobs, 4], device-seconds of an iteration of all workers (`JobProfile.resource_seconds`).
    """

    arrival_seconds: NDArray[np.float64]
    iteration_seconds: NDArray[np.float64]
    num_workers: NDArray[np.int64]
    num_iterations: NDArray[np.int64]
    resource_seconds: NDArray[np.float64]

    @staticmethod
    def of(jobs: Sequence[Job]) -> JobColumns:
        """Makes the columns of `jobs`, in their order."""
        columns = JobColumns(
            np.array([job.arrival_seconds for job in jobs], np.float64),
            np.array([job.profile.iteration_seconds for job in jobs], np.float64),
            np.array([job.num_workers for job in jobs], np.int64),
            np.array([job.num_iterations for job in jobs], np.int64),
            np.array(
                [np.multiply(job.profile.resource_seconds(job.num_workers), job.num_workers) for job in jobs],
                np.float64,
            ).reshape(-1, 4),
        )
        for field in dataclasses.fields(columns):
            getattr(columns, field.name).setflags(write=False)
        return columns
