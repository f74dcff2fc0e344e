"""Tells the launcher, and the ledger, what the training loop is doing: in which step, and in which part of it.

Compilations are heard of from JAX itself (`jax.monitoring`), and plans being made from `compile.step_programs`: in
whichever step they come, and in whatever call, their time is no step's.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax

from splitjax.compile.step_programs import BUILD_EVENT, MET_EVENT, WAIT_EVENT
from splitjax.runtime.launch.deadlines import slowest
from splitjax.runtime.launch.stages import FIRST_STEP_EVENT, LOOP_EVENT
from splitjax.runtime.launch.whereabouts import APART, Place, StepRecorder
from splitjax.runtime.training.ledger import Ledger

_PLACES = {
    "input": Place.DATA,
    "compile": Place.COMPILE,
    "checkpoint": Place.CHECKPOINT,
    "evaluate": Place.EVALUATE,
}
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"  # tells that it is done, and XLA's part begins
_COMPILED = "/jax/core/compile/backend_compile_duration"
# How often the metrics have the steps' times of all processes: a look at them costs more than a step's share.
TIMES_EVERY_SECONDS = 10.0


class Tracker:
    """Tracks a loop; a context manager around it.

    **Arguments:** `ledger`: counts the times. `recorder`: says where this process is; on the launcher's board if there
    is one, if not given.
    """

    def __init__(self, ledger: Ledger, recorder: StepRecorder | None = None):
        self.ledger: Ledger = ledger
        self.recorder: StepRecorder = recorder or StepRecorder.open()
        self._before: Place | None = None
        self._is_building = False
        self._waited_from = Place.COMPILE
        self._ident = threading.get_ident()
        self._told_times = time.monotonic()

    def __enter__(self) -> Tracker:
        self._ident = threading.get_ident()
        jax.monitoring.register_event_listener(self._on_event)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.record_event(LOOP_EVENT)
        self.recorder.begin()
        self.recorder.at(Place.HOST)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_listener(self._on_event)
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        self.recorder.at(Place.OUTSIDE)

    @contextlib.contextmanager
    def during(self, part: str, step: int | None = None) -> Iterator[None]:
        """Counts a block as the `part` of the ledger, and records its place, of step number `step`. What follows it is
        host code."""
        self.recorder.at(_PLACES[part], step)
        with self.ledger.during(part):
            yield
        self.recorder.at(Place.HOST)

    def first_step_done(self) -> None:
        """Tells whoever measures starts (`launch.stages`) that the results of this start's first step are there."""
        jax.monitoring.record_event(FIRST_STEP_EVENT)

    @contextlib.contextmanager
    def dispatching(self) -> Iterator[None]:
        """Records that a block gives a step to the devices. What follows it is host code."""
        self.recorder.at(Place.DISPATCH)
        yield
        self.recorder.at(Place.HOST)

    def waiting(self, detail: str = "") -> contextlib.AbstractContextManager[None]:
        """Records that a block waits for the devices or for other processes; `detail`: for what."""
        return self.recorder.during(Place.COLLECTIVE, detail)

    def times_row(self) -> dict[str, Any]:
        """Returns, every ten seconds, what the metrics say about the last steps: `step_seconds_p50`,
        `step_seconds_p99`, and in a launched run of several processes the `slowest_rank` with its `own_seconds`;
        nothing at other times."""
        now = time.monotonic()
        if now - self._told_times < TIMES_EVERY_SECONDS:
            return {}
        self._told_times = now
        return self.last_times()

    def last_times(self) -> dict[str, Any]:
        """Returns the same at any time; nothing before the first step."""
        pages = {rank: self.recorder.read(rank) for rank in range(self.recorder.num_ranks)}
        times, slow = pages[self.recorder.rank].times, slowest(pages)
        if not times.seconds or slow is None:
            return {}
        row: dict[str, Any] = {
            "step_seconds_p50": times.quantile(0.5),
            "step_seconds_p99": times.quantile(0.99),
        }
        if len(pages) > 1:
            row |= {"slowest_rank": slow, "slowest_own_seconds": pages[slow].times.own_quantile(0.5)}
        return row

    def _on_event(self, event: str, **_: Any) -> None:
        if event == BUILD_EVENT:
            self._compiling(is_building=True)
        elif event == WAIT_EVENT and threading.get_ident() == self._ident:
            # Further than those that compile: it is they who hold up the others.
            self._waited_from = self.recorder.place
            self.recorder.at(Place.DISPATCH, detail="waits until all processes have compiled it")
        elif event == MET_EVENT and threading.get_ident() == self._ident:
            self.recorder.at(self._waited_from)

    def _on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event == _LOWERED:
            self._compiling(is_building=False)
        elif event == _COMPILED and threading.get_ident() == self._ident:
            # While a plan is made small operations are compiled too: it is over when the loop goes on.
            if self.recorder.place is Place.COMPILE and self._before is not None and not self._is_building:
                self.recorder.at(self._before)

    def _compiling(self, is_building: bool) -> None:
        place = self.recorder.place
        if threading.get_ident() == self._ident and place not in APART and place is not Place.OUTSIDE:
            self._before, self._is_building = place, is_building
            self.recorder.at(Place.COMPILE)
