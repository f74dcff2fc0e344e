"""`splitjax launch` as a library: start the processes of a run, watch them, end them, start them again.

```
run = launch.start(LaunchConfig(num_processes=4, restarts=2), ["python", "train.py"])
outcome = run.wait()
```
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from signal import SIGKILL, SIGTERM
from typing import Any

from splitjax.runtime.launch import workers as processes
from splitjax.runtime.launch.config import LaunchConfig
from splitjax.runtime.launch.outcome import (
    LEFT_ON_SIGTERM,
    LaunchAttempt,
    LaunchOutcome,
    failure_text,
    signal_name,
    unusual_text,
)
from splitjax.runtime.launch.output import Console, Output, make_log_dir
from splitjax.runtime.launch.variables import NETWORK_DEVICE
from splitjax.runtime.launch.watch import Event, Watch
from splitjax.runtime.launch.whereabouts import Board, shared_file
from splitjax.runtime.launch.workers import Worker
from splitjax.runtime.network import DEVICE, Network, parse_bandwidth

LOOPBACK = "127.0.0.1"
# How often the launcher looks at its clock; ends of workers wake it at once.
_TICK_SECONDS = 0.05
# How long the output of killed processes is waited for.
_DRAIN_SECONDS = 2.0


def start(
    config: LaunchConfig,
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    console: Console | None = None,
) -> Run:
    """Starts the workers and returns at once.

    **Arguments:**

    - `config`: how many workers, and how long to wait for what.
    - `command`: the program and its arguments, the same for all workers.
    - `environment`: what the workers' environment is made from; this process's if not given.
    - `console`: where their output goes; this process's standard output and error if not given.

    **Raises:** `LaunchError` if the command cannot be started, the logs not written, or the network not made.
    """
    base = dict(os.environ if environment is None else environment)
    processes.check_command(command, base)
    if config.log_dir is not None:
        make_log_dir(config.log_dir)
    return Run(config, tuple(command), base, console or Console(sys.stdout, sys.stderr))


class Run:
    """Processes that were started, and the thread that watches them.

    - `workers`: those of the attempt that runs; `workers[i].pid`.
    - `network`: theirs, in runs with a bandwidth: `network.set_link(i, up=False)` cuts worker `i` off.
    """

    def __init__(self, config: LaunchConfig, command: tuple[str, ...], base: Mapping[str, str], console: Console):
        self.config: LaunchConfig = config
        self.workers: tuple[Worker, ...] = ()
        self._command, self._base, self._console = command, base, console
        self._stop_signal: int | None = None
        self._killed = False
        self._outcome: LaunchOutcome | None = None
        self._error: BaseException | None = None
        self._started = threading.Event()
        # One thread starts all workers of all attempts: the kernel kills a worker with the thread that started it.
        self._thread = threading.Thread(target=self._main, name="splitjax-launch", daemon=True)
        self.network: Network | None = (
            None if config.bandwidth is None else Network(config.num_processes, parse_bandwidth(config.bandwidth))
        )
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            self.wait()

    def stop(self, signal_number: int = SIGTERM) -> None:
        """Asks all workers to save and exit, by SIGTERM; kills them `stop_timeout_seconds` later. `signal_number`: what
        the launcher itself was asked with, which decides its exit status."""
        if self._stop_signal is None:
            self._stop_signal = signal_number

    def kill(self) -> None:
        """Kills all workers now, and starts none again."""
        self._killed = True
        self.stop()

    def wait(self, timeout_seconds: float | None = None) -> LaunchOutcome | None:
        """Blocks until the run is over and returns how it went; None if it still goes on after `timeout_seconds`."""
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            return None
        if self._error is not None:
            raise self._error
        return self._outcome

    def _main(self) -> None:
        guard: processes.Guard | None = None
        attempts: list[LaunchAttempt] = []
        try:
            guard = processes.Guard()
            while True:
                attempts.append(
                    self._attempt(len(attempts), guard, attempts[-1].failed_unix_seconds if attempts else None)
                )
                if not self._again(attempts[-1]):
                    break
            self._outcome = LaunchOutcome(
                tuple(attempts), self._stop_signal, self.network.traffic() if self.network else ()
            )
        except BaseException as error:  # handed to whoever waits
            self._error = error
        finally:
            if guard is not None:
                guard.close()
            if self.network is not None:
                self.network.close()
            self._started.set()

    def _again(self, attempt: LaunchAttempt) -> bool:
        """Decides whether to start all workers once more; says why."""
        say, restarts = self._console.say, self.config.restarts
        if attempt.step_times:
            say(attempt.step_times)
        if attempt.failed is not None:
            say(failure_text(attempt))
        elif attempt.reason:
            say("\n".join((attempt.reason, *attempt.findings)))
        if self._stop_signal is not None:
            for line in unusual_text(attempt):
                say(line)
            say(f"stopped by {signal_name(self._stop_signal)}")
            return False
        if attempt.failed is None and attempt.left_on_sigterm is not None:
            say(
                f"worker {attempt.left_on_sigterm.rank} left with exit code {LEFT_ON_SIGTERM}: a SIGTERM from outside"
                " stopped the run"
            )
            return False
        if attempt.status == 0 or attempt.number == restarts:
            if attempt.status and restarts:
                say(f"all {restarts} restarts are used up")
            return False
        say(f"starting all workers again: restart {attempt.number + 1} of {restarts}")
        return True

    def _attempt(self, number: int, guard: processes.Guard, failed_unix_seconds: float | None) -> LaunchAttempt:
        config = self.config
        coordinator = self._coordinator()
        output = Output(self._console, config.log_dir, number)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        board = Board(config.num_processes)
        watch = Watch(config, output, board)
        workers: list[Worker] = []
        try:
            for rank in range(config.num_processes):
                worker = self._spawn(rank, coordinator, number, failed_unix_seconds, output, events, board)
                workers.append(worker)
                guard.watch(worker)
            output.start()
            watch.start(workers)
            self.workers = tuple(workers)
            self._started.set()
            for worker in workers:
                threading.Thread(target=_report_end, args=(worker, events), daemon=True).start()
            while watch.is_running:
                try:
                    watch.take(events.get(timeout=_TICK_SECONDS))
                except queue.Empty:
                    pass
                watch.tick(stop=self._stop_signal is not None, kill=self._killed)
        finally:
            for worker in workers:
                worker.signal_group(SIGKILL)
                guard.forget(worker)
            output.finish(_DRAIN_SECONDS)
            coordinator.close()
            watch.close()
            for worker in workers:
                worker.close()
        return watch.attempt(number, stopped=self._stop_signal is not None)

    def _coordinator(self) -> processes.Coordinator:
        config, network = self.config, self.network
        listen = lambda host: processes.Coordinator(host, config.num_processes, config.heartbeat_seconds)
        return listen(LOOPBACK) if network is None else network.call(0, lambda: listen(network.address(0)))

    def _spawn(
        self,
        rank: int,
        coordinator: processes.Coordinator,
        attempt: int,
        failed_unix_seconds: float | None,
        output: Output,
        events: queue.SimpleQueue[Event],
        board: Board,
    ) -> Worker:
        exit_reader, exit_writer = os.pipe()
        files = processes.WorkerFiles(exit_writer, board.file, shared_file("splitjax-stacks"))
        output.add_notices(exit_reader, lambda said, now: events.put(Event.noticed(rank, said, now)))
        values = processes.environment(
            self.config,
            rank,
            coordinator=coordinator.address,
            attempt=attempt,
            failed_unix_seconds=failed_unix_seconds,
            files=files,
            base=self._base,
        )
        inside: dict[str, Any] = {}
        if self.network is not None:
            values[NETWORK_DEVICE] = DEVICE
            inside = {
                "enter": self.network.enter(rank),
                "enter_files": [self.network.file(rank)],
                "address": self.network.address(rank),
            }
        try:
            worker = processes.spawn(rank, self._command, values, files=files, **inside)
        except BaseException:
            os.close(files.stacks)
            raise
        finally:
            os.close(exit_writer)
        output.add(rank, worker.out, worker.err)
        return worker


def _report_end(worker: Worker, events: queue.SimpleQueue[Event]) -> None:
    code = worker.wait()
    events.put(Event(worker.rank, time.monotonic(), code))
