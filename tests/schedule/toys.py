"""Programs that train nothing, for executors: they wait, meet their fellows at a barrier as an exchange does, and keep
checkpoints in memory."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping

from splitjax.schedule import Depth, Job, JobProfile, Place, StepOrder

PROFILE = JobProfile("toy", 0.004, (Depth(1.0, 0.008), Depth(0.5, 0.004)), exposed_seconds=0.004, state_bytes=1)


def job(
    name: str,
    num_workers: int = 2,
    num_iterations: int = 6,
    arrival_seconds: float = 0.0,
    profile: JobProfile = PROFILE,
) -> Job:
    return Job(name, arrival_seconds, num_workers, num_iterations, profile)


@dataclasses.dataclass(eq=False)
class Toy:
    """One job.

    - `seconds`: of an iteration at full depth. `exchange_seconds`: of what follows. `overlap`: whether, or by which
      workers, the device is given back before the exchange.
    - `dies`: {(attempt, worker): number of the iteration in which it raises}. `hangs`: the same, and it never answers.
    - `saved`: iterations of every checkpoint; `log`: what ran.
    """

    seconds: float = 0.01
    exchange_seconds: float = 0.0
    overlap: bool | tuple[int, ...] = True
    patience_seconds: float = 20.0
    dies: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    hangs: Mapping[tuple[int, int], int] = dataclasses.field(default_factory=dict)
    saved: list[int] = dataclasses.field(default_factory=list)
    log: list[tuple[int, int, int, tuple[float, ...]]] = dataclasses.field(default_factory=list)
    stages: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    places: list[Place] = dataclasses.field(default_factory=list)

    def meet(self, place: Place) -> tuple[threading.Barrier, None]:
        return threading.Barrier(place.num_workers), None

    def begin(self, place: Place) -> ToyTask:
        self.places.append(place)
        return ToyTask(self, place)


class ToyTask:
    def __init__(self, toy: Toy, place: Place):
        self.toy, self.place, self.loss = toy, place, 0.0

    def restore(self) -> int:
        done = self.toy.saved[-1] if self.toy.saved else 0
        self.loss = float(sum(range(done + 1)))
        return done

    def stage(self, number: int, resource: int) -> None:
        self.toy.stages.append((self.place.worker, number, resource))

    def step(self, order: StepOrder, computed: Callable[[], None]) -> Mapping[str, float]:
        toy, place = self.toy, self.place
        where = (place.attempt, place.worker)
        time.sleep(toy.seconds * order.depths[place.worker])
        if toy.dies.get(where) == order.number:
            raise RuntimeError("killed by the test")
        if toy.hangs.get(where) == order.number:
            threading.Event().wait(60)
        if toy.overlap is True or (toy.overlap and place.worker in toy.overlap):
            computed()
        place.meeting.wait(toy.patience_seconds)
        time.sleep(toy.exchange_seconds)
        self.loss += order.number
        toy.log.append((place.attempt, place.worker, order.number, order.depths))
        return {"loss": self.loss}

    def save(self, number: int) -> None:
        if self.place.worker == 0:
            self.toy.saved.append(number)
        self.place.meeting.wait(self.toy.patience_seconds)
