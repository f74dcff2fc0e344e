"""`splitjax launch` as a library: start the processes of a run, watch them, end them, start them again.

```
run = launch.start(LaunchConfig(num_processes=4, restarts=2), ["python", "train.py"])
outcome = run.wait()
```
"""

from __future__ import annotations

import dataclasses
import os
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from signal import SIGKILL, SIGTERM

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
from splitjax.runtime.launch.rejoining import Absence, absence
from splitjax.runtime.launch.shrinking import RunLayout, SmallerMesh, layout_environment, smaller_mesh
from splitjax.runtime.launch.stages import Recovery, recovery
from splitjax.runtime.launch.starting import AttemptStart, Starter
from splitjax.runtime.launch.watch import Event, Watch
from splitjax.runtime.launch.whereabouts import Board, shared_file
from splitjax.runtime.launch.workers import Seat, Worker
from splitjax.runtime.network import Network, parse_bandwidth

LOOPBACK = "127.0.0.1"
# How often the launcher looks at its clock; ends of workers wake it at once.
_TICK_SECONDS = 0.05
# How long the output of killed processes is waited for.
_DRAIN_SECONDS = 2.0
# How long the launcher rests where a worker that is waited for has failed at once, again.
_REST_SECONDS = 1.0


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
        # By rank, the numbers of the workers that take part, and the mesh that was chosen for them once some were left
        # out; who is waited for.
        self._taking_part: tuple[int, ...] = tuple(range(config.num_processes))
        self._smaller: SmallerMesh | None = None
        self._layout: RunLayout | None = None
        self._away: Absence | None = None
        self._restarts = 0
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
        starter: Starter | None = None
        attempts: list[LaunchAttempt] = []
        try:
            guard = processes.Guard()
            starter = Starter(
                self.config, self._command, self._base, network=self.network, guard=guard, say=self._console.say
            )
            while True:
                attempts.append(
                    self._attempt(len(attempts), guard, starter, attempts[-1].failed_unix_seconds if attempts else None)
                )
                if not self._again(attempts[-1]):
                    break
            self._outcome = LaunchOutcome(
                tuple(attempts), self._stop_signal, self.network.traffic() if self.network else ()
            )
        except BaseException as error:  # handed to whoever waits
            self._error = error
        finally:
            if starter is not None:
                starter.close()
            if guard is not None:
                guard.close()
            if self.network is not None:
                self.network.close()
            self._started.set()

    def _again(self, attempt: LaunchAttempt) -> bool:
        """Decides whether to start the workers once more, and which; says why. Raises `LaunchError` where a worker is
        gone and the others cannot go on without it."""
        say, config = self._console.say, self.config
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
        if attempt.status == 0:
            return False
        if attempt.ended_by_clock:
            say("starting all workers again: a clock that is set back is not counted as a restart")
            return True
        if self._goes_on_without(attempt):
            return True
        if self._restarts == config.restarts:
            if config.restarts:
                say(f"all {config.restarts} restarts are used up")
            return False
        self._restarts += 1
        say(f"starting all workers again: restart {self._restarts} of {config.restarts}")
        return True

    def _goes_on_without(self, attempt: LaunchAttempt) -> bool:
        """Decides, where workers may be left out, whether the one that failed is waited for or left out: then the run
        goes on, and no restart is counted. A first failure is a restart as any other."""
        timeout, before = self.config.rejoin_timeout_seconds, self._away
        if timeout is None or self._layout is None:
            return False
        now = time.monotonic()
        self._away = away = absence(before, attempt, self._taking_part, now)
        if away is None:
            return False
        if away.is_over(now, timeout):
            self._leave_out(away.worker)
            return True
        if away is not before:
            return False
        self._console.say(
            f"starting all workers again: worker {away.worker} is away for {now - away.since:.0f} s; after"
            f" {timeout:g} s the others go on without it"
        )
        self._rest(_REST_SECONDS)
        return True

    def _leave_out(self, worker: int) -> None:
        assert self._layout is not None and self.config.rejoin_timeout_seconds is not None
        left = tuple(number for number in self._taking_part if number != worker)
        self._smaller = smaller_mesh(self._layout, len(left), least=self.config.least_processes)
        self._taking_part, self._away = left[: self._smaller.num_processes], None
        self._console.say(
            f"worker {worker} did not come back within {self.config.rejoin_timeout_seconds:g} s: going on without it"
            f" from the newest checkpoint, {self._smaller.reason}"
        )

    def _rest(self, seconds: float) -> None:
        """Waits; not longer than until somebody asks for a stop."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and self._stop_signal is None:
            time.sleep(_TICK_SECONDS)

    def _attempt(
        self, number: int, guard: processes.Guard, starter: Starter, failed_unix_seconds: float | None
    ) -> LaunchAttempt:
        config, ranks = self.config, self._taking_part
        coordinator = self._coordinator()
        output = Output(self._console, config.log_dir, number)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        board = Board(len(ranks))
        watch = Watch(config, output, board)
        mesh = {} if self._smaller is None else layout_environment(self._smaller)
        attempt = AttemptStart(number, coordinator.address, failed_unix_seconds, mesh)
        workers: list[Worker] = []
        back: Recovery | None = None
        clock_began = _clock_offset_seconds()
        try:
            starter.begin(failed_unix_seconds, lambda: self._stop_signal is not None)
            for rank, worker_number in enumerate(ranks):
                seat = Seat(rank, worker_number, len(ranks))
                workers.append(self._spawn(seat, attempt, starter, output, events, board))
            output.start()
            watch.start(workers)
            self.workers = tuple(workers)
            self._started.set()
            started_unix_seconds = time.time()
            for worker in workers:
                threading.Thread(target=_report_end, args=(worker, events), daemon=True).start()
            while watch.is_running:
                try:
                    watch.take(events.get(timeout=_TICK_SECONDS))
                except queue.Empty:
                    pass
                if failed_unix_seconds is not None and back is None:
                    back = recovery(
                        board,
                        len(ranks),
                        failed_unix_seconds=failed_unix_seconds,
                        started_unix_seconds=started_unix_seconds,
                        ahead=starter.is_ahead,
                    )
                    if back is not None:
                        self._console.say(str(back))
                self._give_up_missing(watch, board)
                starter.look_ahead(board, len(ranks))
                watch.tick(stop=self._stop_signal is not None, kill=self._killed)
        finally:
            for worker in workers:
                worker.signal_group(SIGKILL)
                guard.forget(worker.pid)
            self._layout = RunLayout.read(board, 0) or self._layout
            output.finish(_DRAIN_SECONDS)
            coordinator.close()
            watch.close()
            for worker in workers:
                worker.close()
        done = watch.attempt(number, stopped=self._stop_signal is not None)
        set_back = max(0.0, clock_began - _clock_offset_seconds())
        return dataclasses.replace(done, workers=ranks, recovery=back, clock_set_back_seconds=set_back)

    def _give_up_missing(self, watch: Watch, board: Board) -> None:
        """Ends the attempt where the worker that is waited for has not even joined when its time is over."""
        timeout, away = self.config.rejoin_timeout_seconds, self._away
        if timeout is None or away is None or not away.is_over(time.monotonic(), timeout):
            return
        rank = self._taking_part.index(away.worker)
        if not board.read(rank).pid:
            watch.give_up(rank, f"it did not join within {timeout:g} s of its failure")

    def _coordinator(self) -> processes.Coordinator:
        network, first, count = self.network, self._taking_part[0], len(self._taking_part)
        # The service measures silence by the clock that can be set: an hour forward, and all workers count as gone.
        # Here the watch hears of silent workers, and a worker that is cut off notices that by itself.
        listen = lambda host: processes.Coordinator(host, count, processes.NEVER_SECONDS)
        return listen(LOOPBACK) if network is None else network.call(first, lambda: listen(network.address(first)))

    def _spawn(
        self,
        seat: Seat,
        attempt: AttemptStart,
        starter: Starter,
        output: Output,
        events: queue.SimpleQueue[Event],
        board: Board,
    ) -> Worker:
        exit_reader, exit_writer = os.pipe()
        files = processes.WorkerFiles(exit_writer, board.file, shared_file("splitjax-stacks"))
        output.add_notices(exit_reader, lambda said, now: events.put(Event.noticed(seat.rank, said, now)))
        try:
            worker = starter.start(seat, attempt, files)
        except BaseException:
            os.close(files.stacks)
            raise
        finally:
            os.close(exit_writer)
        output.add(seat.rank, worker.out, worker.err)
        return worker


def _clock_offset_seconds() -> float:
    """How far the clock that can be set is ahead of the one that cannot."""
    return time.time() - time.monotonic()


def _report_end(worker: Worker, events: queue.SimpleQueue[Event]) -> None:
    code = worker.wait()
    events.put(Event(worker.rank, time.monotonic(), code))
