"""Holds what a launcher is told: how many processes to start, and how long to wait for what. Whoever starts workers,
and whoever watches them, reads it."""

from __future__ import annotations

import dataclasses
import pathlib

from splitjax.errors import LaunchError
from splitjax.runtime.launch.deadlines import DEFAULT_COMPILE_SECONDS, DEFAULT_SAVE_SECONDS, Deadlines
from splitjax.runtime.launch.variables import DEFAULT_HEARTBEAT_SECONDS


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Says what to start, and how long to wait for what.

    **Arguments:**

    - `num_processes`: how many workers.
    - `restarts`: how many times all workers are started again after a failure.
    - `threads`: threads of each worker's XLA on CPU; as many as there are cores if not given.
    - `devices_per_process`: virtual CPU devices of each worker.
    - `gpus_per_process`: worker `r` sees the GPUs from number `r * gpus_per_process` on; all of them if not given.
    - `log_dir`: a folder for one file per worker and attempt.
    - `grace_seconds`: how long the other workers may go on after a failure, to say what they saw.
    - `stop_timeout_seconds`: how long workers may take to save and exit when asked to stop.
    - `exit_timeout_seconds`: how long workers may go on after the first has ended well; for ever if not given.
    - `step_timeout_seconds`, `compile_timeout_seconds`, `save_timeout_seconds`: how long a worker may go without
      completing a step, as `deadlines.Deadlines` has it; the run then ends, or starts again.
    - `heartbeat_seconds`: a worker that cannot reach the coordinator for so long ends itself; one that gives the
      launcher no sign of life for so long is killed.
    - `rejoin_timeout_seconds`: how long a worker that failed may take to complete a step again, while all are started
      again and again; then the run goes on without it, on a smaller mesh. For ever if not given.
    - `least_processes`: fewest workers with which the run goes on.
    - `standby`: whether a process is started ahead, from which the workers of the next attempt are forked.
    - `keep_memory`: whether workers keep the memory of a step for the next (`kept_memory`), where it is known that they
      compute on CPUs alone: by `threads`, `devices_per_process` or `JAX_PLATFORMS=cpu`.
    - `bandwidth`: the rate of each worker's link, such as `200mbit`, in a network of its own; the machine's loopback if
      not given.

    Raises `LaunchError` for a number that is too small.
    """

    num_processes: int = 1
    restarts: int = 0
    threads: int | None = None
    devices_per_process: int | None = None
    gpus_per_process: int | None = None
    log_dir: pathlib.Path | None = None
    grace_seconds: float = 2.0
    stop_timeout_seconds: float = 120.0
    exit_timeout_seconds: float | None = None
    step_timeout_seconds: float | None = None
    compile_timeout_seconds: float = DEFAULT_COMPILE_SECONDS
    save_timeout_seconds: float = DEFAULT_SAVE_SECONDS
    heartbeat_seconds: int = DEFAULT_HEARTBEAT_SECONDS
    rejoin_timeout_seconds: float | None = None
    least_processes: int = 1
    standby: bool = True
    keep_memory: bool = True
    bandwidth: str | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("num_processes", 1),
            ("restarts", 0),
            ("threads", 1),
            ("devices_per_process", 1),
            ("gpus_per_process", 1),
            ("grace_seconds", 0),
            ("stop_timeout_seconds", 0),
            ("exit_timeout_seconds", 0),
            ("heartbeat_seconds", 1),
            ("rejoin_timeout_seconds", 0),
            ("least_processes", 1),
        ):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise LaunchError(
                    f"{name} must be at least {least}", value=value, place=name, remedy="give a larger number"
                )
        if self.rejoin_timeout_seconds and not self.restarts:
            raise LaunchError(
                "a worker can come back only where workers are started again",
                value=self.rejoin_timeout_seconds,
                place="rejoin_timeout_seconds",
                remedy="give --restarts too, or --rejoin-timeout-seconds 0 to go on without it at once",
            )
        _ = self.deadlines

    @property
    def starts_again(self) -> bool:
        """Returns whether workers may be started more than once."""
        return self.restarts > 0 or self.rejoin_timeout_seconds is not None

    @property
    def deadlines(self) -> Deadlines:
        """Returns how long a worker may go without completing a step. Raises `LaunchError` for times that cannot
        be."""
        return Deadlines(self.step_timeout_seconds, self.compile_timeout_seconds, self.save_timeout_seconds)
