"""Holds jobs as Ray actors: one process per (job, device), on this machine or on a Ray cluster. It needs `pip install
'splitjax[ray]'`.

Ray (Moritz et al., OSDI'18) starts the processes, carries commands to them and notices when one is gone; which of them
computes when is the executor's to say.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from splitjax.errors import ScheduleError
from splitjax.schedule.execution.engine import Kind, Place, Program, StepOrder, WorkerReport, WorkerTask
from splitjax.schedule.model.cluster import Cluster

LOOPBACK = "127.0.0.1"
# Ray listens on all of a machine's addresses, whatever address its node is given, unless it takes the machine for one
# that cannot be in a cluster. It looks at this variable when it is imported.
_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_STORE_BYTES = 80_000_000  # commands and metrics are all that goes through Ray; this is about the least that it takes

Environment = Mapping[str, str] | Callable[[Place], Mapping[str, str]]


@dataclasses.dataclass(frozen=True)
class RayOptions:
    """Says where Ray's processes are.

    **Attributes:**

    - `address`: of a Ray cluster to connect to, such as `"10.0.0.1:6379"` or `"auto"`. None starts Ray on this machine,
      or uses the one that this process has started.
    - `node_ip`: the address that a Ray started here has. It listens on the loopback only, unless this is another
      address.
    - `cores`: processor core of each device of a node; the device's processes are pinned to it. None leaves them alone.
    - `environment`: variables of each process, set before it imports anything, or a function of its `Place`: on GPUs
      `lambda place: {"CUDA_VISIBLE_DEVICES": str(place.local_device), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}`.
    """

    address: str | None = None
    node_ip: str = LOOPBACK
    cores: tuple[int, ...] | None = None
    environment: Environment = dataclasses.field(default_factory=dict)

    def of(self, place: Place) -> dict[str, str]:
        """Gives the environment variables of the process at `place`."""
        return dict(self.environment(place) if callable(self.environment) else self.environment)


class RayEngine:
    """Implements `Engine` with Ray. Node n of the cluster is Ray's node n by address.

    **Arguments:**

    - `cluster`: the devices that jobs are on. `options`: where Ray's processes are.

    Raises `ScheduleError` if Ray is not installed, has too few nodes, or would listen on other addresses than the
    loopback without being told to.
    """

    def __init__(self, cluster: Cluster, options: RayOptions | None = None):
        self._cluster, self._options = cluster, options or RayOptions()
        if self._options.cores is not None and len(self._options.cores) < cluster.devices_per_node:
            raise ScheduleError(
                "every device of a node needs a core",
                value=self._options.cores,
                place="RayOptions.cores",
                remedy="give as many cores as a node has devices, at least",
            )
        self._ray, self._is_ours = _connect(self._options)
        nodes = sorted((node["NodeManagerAddress"], node["NodeID"]) for node in self._ray.nodes() if node["Alive"])
        if len(nodes) < cluster.num_nodes:
            self.close()
            raise ScheduleError(
                f"Ray has {len(nodes)} nodes, the cluster {cluster.num_nodes}",
                value=str(cluster),
                place="RayEngine",
                remedy="start Ray with as many nodes, or give a cluster of the nodes that it has",
            )
        self._nodes = [node for _, node in nodes]
        self._actor = self._ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"work": 1, "watch": 1})(
            RayWorker
        )
        self._jobs: dict[int, _Started] = {}
        self._pending: dict[Any, Callable[[Any], WorkerReport | None]] = {}
        self._of: dict[Any, tuple[int, int, int]] = {}  # by pending call: job, attempt, worker
        self._reports: list[WorkerReport] = []

    def start(self, job: int, program: Program, places: tuple[Place, ...]) -> None:
        """Starts an actor for `job` at each of `places`, which meet and then begin `program` (`Engine.start`)."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        packed = self._ray.cloudpickle.dumps(program)
        actors = []
        for place in places:
            environment = self._options.of(place)
            core = None if self._options.cores is None else self._options.cores[place.local_device]
            node = NodeAffinitySchedulingStrategy(self._nodes[self._cluster.node_of(place.device)], soft=False)
            runtime = {"env_vars": environment} if environment else None
            actors.append(
                self._actor.options(scheduling_strategy=node, runtime_env=runtime).remote(place, environment, core)
            )
        held = self._jobs[job] = _Started(places[0].attempt, tuple(actors), len(actors))
        self._ask(job, 0, "meet", (packed,), lambda meeting: self._begin(job, held, packed, meeting))

    def _begin(self, job: int, held: _Started, packed: bytes, meeting: Any) -> None:
        def begun(number: int) -> WorkerReport | None:
            held.left -= 1
            return None if held.left else WorkerReport(Kind.STARTED, job, held.attempt, number=number)

        for worker in range(len(held.actors)):
            self._ask(job, worker, "begin", (packed, meeting), begun)

    def stage(self, job: int, worker: int, number: int, resource: int) -> None:
        """Sends `worker` of `job` to do `resource` of iteration `number` (`Engine.stage`)."""
        attempt = self._jobs[job].attempt
        self._ask(
            job,
            worker,
            "stage",
            (number, resource),
            lambda _: WorkerReport(Kind.STAGED, job, attempt, worker, number, resource),
        )

    def step(self, job: int, worker: int, order: StepOrder) -> None:
        """Sends `worker` of `job` the iteration that `order` names, and a second call that waits until it has computed
        (`Engine.step`)."""
        report = functools.partial(
            WorkerReport, job=job, attempt=self._jobs[job].attempt, worker=worker, number=order.number
        )
        self._ask(job, worker, "step", (order,), lambda metrics: report(Kind.FINISHED, values=metrics))
        self._ask(
            job,
            worker,
            "computed",
            (order.number,),
            lambda early: report(Kind.COMPUTED) if early else None,
            group="watch",
        )

    def save(self, job: int, number: int) -> None:
        """Sends all workers of `job` to save the state after iteration `number` (`Engine.save`)."""
        held = self._jobs[job]
        left = [len(held.actors)]

        def saved(_: Any) -> WorkerReport | None:
            left[0] -= 1
            return None if left[0] else WorkerReport(Kind.SAVED, job, held.attempt, number=number)

        for worker in range(len(held.actors)):
            self._ask(job, worker, "save", (number,), saved)

    def stop(self, job: int) -> None:
        """Kills the actors of `job`, and forgets what was asked of them (`Engine.stop`)."""
        held = self._jobs.pop(job, None)
        if held is None:
            return
        for call in [call for call, (number, _, _) in self._of.items() if number == job]:
            del self._of[call], self._pending[call]
        for actor in held.actors:
            self._ray.kill(actor, no_restart=True)

    def next(self, timeout_seconds: float) -> WorkerReport | None:
        """Waits for calls that are done, at most `timeout_seconds`, and gives the first report that comes of them; None
        if there is none (`Engine.next`)."""
        deadline = time.monotonic() + timeout_seconds
        while not self._reports:
            left = max(0.0, deadline - time.monotonic())
            if not self._pending:
                time.sleep(left)
                return None
            calls = list(self._pending)
            done, _ = self._ray.wait(calls, num_returns=1, timeout=left)
            if not done:
                return None
            if len(calls) > 1:  # all that are done, at the price of one more call
                done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
            for call in done:
                self._take(call)
        return self._reports.pop(0)

    def _take(self, call: Any) -> None:
        if call not in self._pending:
            return  # an earlier one of the same moment ended its job
        then, (job, attempt, worker) = self._pending.pop(call), self._of.pop(call)
        try:
            report = then(self._ray.get(call))
        except self._ray.exceptions.RayError as error:
            report = WorkerReport(Kind.DIED, job, attempt, worker, reason=_reason(error))
        if report is not None:
            self._reports.append(report)

    def _ask(
        self,
        job: int,
        worker: int,
        method: str,
        arguments: tuple,
        then: Callable[[Any], WorkerReport | None],
        *,
        group: str = "work",
    ) -> None:
        held = self._jobs[job]
        call = getattr(held.actors[worker], method).options(concurrency_group=group).remote(*arguments)
        self._pending[call], self._of[call] = then, (job, held.attempt, worker)

    def close(self) -> None:
        """Stops all jobs, and shuts Ray down if this engine has started it."""
        for job in list(getattr(self, "_jobs", ())):
            self.stop(job)
        if self._is_ours:
            self._is_ours = False
            self._ray.shutdown()


@dataclasses.dataclass(eq=False)
class _Started:
    """Holds the actors of a job.

    **Attributes:**

    - `attempt`: that of their places. `actors`: by worker.
    - `left`: how many have not begun.
    """

    attempt: int
    actors: tuple[Any, ...]
    left: int


class RayWorker:
    """Runs in an actor: one worker of one job.

    **Arguments:**

    - `place`: where it is. `environment`: variables to set.
    - `core`: processor core to which its threads are pinned; None leaves them alone.
    """

    def __init__(self, place: Place, environment: Mapping[str, str], core: int | None):
        os.environ.update(environment)  # again: Ray sets some itself, such as the visible GPUs
        if core is not None:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), {core})
        self._place = place
        self._task: WorkerTask | None = None
        self._kept: Any = None
        self._lock = threading.Lock()
        self._ends: dict[int, _End] = {}

    def meet(self, packed: bytes) -> Any:
        """Calls `Program.meet` of the `packed` program, keeps what is to be kept, and returns the rest."""
        meeting, self._kept = self._unpacked(packed).meet(self._place)
        return meeting

    def begin(self, packed: bytes, meeting: Any) -> int:
        """Makes the task of the `packed` program with the `meeting` of all workers, and restores it. Returns how many
        iterations are done."""
        self._task = self._unpacked(packed).begin(dataclasses.replace(self._place, meeting=meeting))
        return self._task.restore()

    def stage(self, number: int, resource: int) -> None:
        """Calls `WorkerTask.stage` with `number` and `resource`."""
        self._known.stage(number, resource)

    def step(self, order: StepOrder) -> dict[str, float]:
        """Does the iteration that `order` names, and returns its metrics."""
        end = self._end(order.number)
        try:
            return dict(self._known.step(order, lambda: end.set(True)))
        finally:
            end.set(False)

    def computed(self, number: int) -> bool:
        """Blocks until iteration `number` has computed; False if it is then done altogether."""
        end = self._end(number)
        end.event.wait()
        with self._lock:
            self._ends.pop(number, None)
        return end.is_early

    def save(self, number: int) -> None:
        """Writes a checkpoint of the state after iteration `number`."""
        self._known.save(number)

    @property
    def _known(self) -> WorkerTask:
        assert self._task is not None
        return self._task

    def _end(self, number: int) -> _End:
        with self._lock:
            return self._ends.setdefault(number, _End())

    @staticmethod
    def _unpacked(packed: bytes) -> Program:
        import ray.cloudpickle

        return ray.cloudpickle.loads(packed)


class _End:
    """Says how an iteration's computing ended; the first word counts."""

    def __init__(self) -> None:
        self.event, self.is_early = threading.Event(), False

    def set(self, is_early: bool) -> None:
        if not self.event.is_set():
            self.is_early = is_early
            self.event.set()


def _connect(options: RayOptions) -> tuple[Any, bool]:
    """Gives Ray, and whether it is ours to shut down."""
    is_local = options.address is None
    if is_local and options.node_ip == LOOPBACK:
        os.environ.setdefault(_CLUSTER, "0")
    try:
        import ray
    except ImportError as error:
        raise ScheduleError("Ray is not installed", place="RayEngine", remedy="pip install 'splitjax[ray]'") from error
    if ray.is_initialized():
        return ray, False  # whoever started it decided where it listens
    if not is_local:
        ray.init(address=options.address, log_to_driver=False, configure_logging=False)
        return ray, True
    if options.node_ip == LOOPBACK and (address := ray.util.get_node_ip_address()) != LOOPBACK:
        raise ScheduleError(
            f"Ray would listen on {address}, not on the loopback only",
            value=os.environ.get(_CLUSTER),
            place=_CLUSTER,
            remedy=(
                f"make the engine before anything imports ray, with {_CLUSTER} unset or 0; or give the address as"
                " node_ip"
            ),
        )
    ray.init(
        address="local",
        include_dashboard=False,
        _node_ip_address=options.node_ip,
        num_cpus=os.cpu_count(),
        object_store_memory=_STORE_BYTES,
        # Ray's workers give way to everything else otherwise, and tokens would be held by processes that do not run
        _system_config={"worker_niceness": 0},
        log_to_driver=False,
        configure_logging=False,
    )
    return ray, True


def _reason(error: Exception) -> str:
    """Gives the last words of an error in one line."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {' '.join(lines)[:300]}" if lines else type(cause).__name__
