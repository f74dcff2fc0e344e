"""Keeps the queues for the one token of each device, and of each further resource of it: who may use it now, and who
after that.

The tokens of an iteration are granted all at once: every device gets the iteration's claim at the end of its queue in
the same instant, so queues of any two devices hold the iterations that they share in the same order. The iteration
granted longest ago is then first in all of its queues, and runs to its end even if its workers wait for each other
while they hold their tokens. Were each device to decide by itself, a job that holds device 0 could wait in its exchange
for its worker on device 1, where another job's waits for device 0.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterable, Iterator

from splitjax.schedule.execution.engine import StepOrder
from splitjax.schedule.model.discipline import Iteration, Task


@dataclasses.dataclass(eq=False)
class Claim:
    """Holds a task's claim on one resource of one device.

    **Attributes:**

    - `grant`: the iteration that it belongs to. `task`: what it does.
    - `started`, `ended`: it has the token from when, in seconds, until when; None before.
    """

    grant: Grant
    task: Task
    started: float | None = None
    ended: float | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Names its queue: device and resource."""
        return self.task.device, self.task.resource

    @property
    def seconds(self) -> float:
        """Gives the time that it had the token. Only a claim that has ended can say."""
        assert self.started is not None and self.ended is not None, "only a claim that has ended has a length"
        return self.ended - self.started


@dataclasses.dataclass(eq=False)
class Grant:
    """Holds an iteration of a job that was granted its tokens.

    **Attributes:**

    - `job`, `group`: numbers of the job and of the group that it is in.
    - `order`: what its workers are told. `iteration`: what the discipline answered. `granted`: when, in seconds.
    - `claims`: by worker, in the order in which its stages follow each other.
    - `finished`: workers that are done. `metrics`: worker 0's.
    """

    job: int
    group: int
    order: StepOrder
    iteration: Iteration
    granted: float
    claims: tuple[tuple[Claim, ...], ...] = ()
    finished: set[int] = dataclasses.field(default_factory=set)
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        by_worker: dict[int, list[Claim]] = {}
        for task in sorted(
            self.iteration.tasks, key=lambda task: (task.start_seconds, task.end_seconds, task.resource)
        ):
            by_worker.setdefault(task.worker, []).append(Claim(self, task))
        self.claims = tuple(tuple(by_worker[worker]) for worker in sorted(by_worker))

    def all_claims(self) -> Iterator[Claim]:
        """Yields the claims of all workers."""
        for claims in self.claims:
            yield from claims

    @property
    def has_started(self) -> bool:
        """Tells whether any of its tasks has begun."""
        return any(claim.started is not None for claim in self.all_claims())

    @property
    def silent_since(self) -> float:
        """Gives the time at which the first of its tasks that run began; if all are computed and the exchange is not
        over, that at which the last was. Infinite before."""
        running = [claim.started for claim in self.all_claims() if claim.started is not None and claim.ended is None]
        ended = [claim.ended for claim in self.all_claims() if claim.ended is not None]
        if running or len(ended) < sum(map(len, self.claims)):
            return min(running, default=math.inf)
        return max(ended)

    @property
    def is_over(self) -> bool:
        """Tells whether all workers are done."""
        return len(self.finished) == len(self.claims)


class Tokens:
    """Keeps the queues. The first claim of a queue has its token, whether its worker can use it yet or not: nobody
    overtakes."""

    def __init__(self) -> None:
        self._queues: dict[tuple[int, int], collections.deque[Claim]] = {}

    def grant(self, grant: Grant) -> None:
        """Appends the claims of `grant`, an iteration, to all of its queues."""
        for claim in grant.all_claims():
            self._queues.setdefault(claim.place, collections.deque()).append(claim)

    def is_free(self, claim: Claim) -> bool:
        """Tells whether nobody has, or waits for, the token that `claim` needs."""
        return not self._queues.get(claim.place)

    def holders(self) -> Iterable[Claim]:
        """Lists the first claim of every queue."""
        return [queue[0] for queue in self._queues.values() if queue]

    def give_back(self, claim: Claim) -> None:
        """Takes `claim` out of its queue, if it is still there."""
        queue = self._queues.get(claim.place)
        if queue is not None and claim in queue:
            queue.remove(claim)

    def cancel(self, grant: Grant) -> None:
        """Takes the whole iteration of `grant` back."""
        for claim in grant.all_claims():
            self.give_back(claim)
