"""Workers in processes of Ray: the engine's promises, with programs that need no JAX, and a decorated step whose
process is killed."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import pathlib
import signal
import socket
import time

import pytest

from splitjax.schedule import Cluster, Depth, ExecutionOptions, Job, JobProfile, Place, RayEngine, RayOptions, execute

TWO = Cluster(1, 2)
PROFILE = JobProfile("counted", 0.01, (Depth(1.0, 0.02),))
# Ray leaves sockets and processes to the interpreter's end, and warns of its own future.
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'splitjax[ray]'"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@dataclasses.dataclass(frozen=True)
class Counted:
    """Adds up the numbers of its iterations, in a file; on its first start worker `kills` ends itself in iteration
    `at`."""

    folder: pathlib.Path
    kills: int = -1
    at: int = 0

    def meet(self, place):
        return f"{place.job}-{place.attempt}", None

    def begin(self, place):
        assert place.meeting == f"{place.job}-{place.attempt}"
        return CountedTask(self, place)


class CountedTask:
    def __init__(self, program, place):
        self.program, self.place, self.total = program, place, 0
        self.file = program.folder / f"{place.job}-{place.worker}"
        (program.folder / f"{place.job}-{place.worker}.pid").write_text(str(os.getpid()))

    def restore(self):
        if not self.file.exists():
            return 0
        done, self.total = map(int, self.file.read_text().split())
        return done

    def step(self, order, computed):
        time.sleep(0.01)
        computed()
        if (self.place.attempt, self.place.worker, order.number) == (0, self.program.kills, self.program.at):
            os.kill(os.getpid(), signal.SIGKILL)
        self.total += order.number
        cores = sorted(os.sched_getaffinity(0))
        return {"loss": self.total, "core": cores[0], "num_cores": len(cores), "marked": float(os.environ["MARK"])}

    def save(self, number):
        self.file.write_text(f"{number} {self.total}")


@pytest.fixture(scope="module")
def ray_started():
    """Ray for all tests here: their own engines find it and leave it alone."""
    engine = RayEngine(TWO)
    yield
    engine.close()


def descendants() -> set[int]:
    """Processes that this one has started, and those that they have."""
    parents = {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            pass  # it has ended
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {os.getpid()}


def listening(pids: set[int]) -> set[str]:
    """Addresses, in hexadecimal as the kernel has them, on which these processes listen."""
    sockets = set()
    for pid in pids:
        for file in pathlib.Path(f"/proc/{pid}/fd").glob("*"):
            try:
                sockets.add(os.readlink(file))
            except OSError:
                pass
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in pathlib.Path(file).read_text().splitlines()[1:]:
            _, local, _, state, _, _, _, _, _, inode, *_ = line.split()
            if state == "0A" and f"socket:[{inode}]" in sockets:
                found.add(local.split(":")[0])
    return found


def test_processes_are_pinned_and_one_that_is_killed_harms_nobody_else(ray_started, tmp_path) -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    cores = cores if len(cores) == 2 else cores * 2
    jobs = [Job("killed", 0.0, 1, 30, PROFILE), Job("other", 0.0, 1, 30, PROFILE)]
    programs = {"killed": Counted(tmp_path, 0, 20), "other": Counted(tmp_path)}
    engine = RayEngine(TWO, RayOptions(cores=cores, environment=lambda place: {"MARK": str(place.device)}))
    addresses = listening(descendants())
    execution = execute(jobs, programs, TWO, "gang-fifo", engine, ExecutionOptions(checkpoint_every_seconds=0.1))
    addresses |= listening(descendants())
    assert not execution.failed and execution.restarts == {"killed": 1, "other": 0}
    devices = {one.job: one.device for one in execution.tasks}
    for job in jobs:
        assert execution.metrics[job.name] == {
            "loss": 465.0,
            "core": cores[devices[job.name]],
            "num_cores": 1,
            "marked": devices[job.name],
        }
    records = {record.name: record for record in execution.result.records}
    assert records["killed"].num_starts == 2 and records["other"].num_starts == 1
    # On the loopback only: 127.0.0.1 or ::1, or the former as the latter's kind of address.
    loopback = {
        socket.inet_aton("127.0.0.1")[::-1].hex().upper(),
        "00000000000000000000000001000000",
        "0000000000000000FFFF00000100007F",
    }
    assert addresses and addresses <= loopback


@dataclasses.dataclass(frozen=True)
class Killing:
    """A program whose worker 1 ends itself in an iteration of its first start."""

    program: object
    at: int

    def meet(self, place):
        return self.program.meet(place)

    def begin(self, place):
        task = self.program.begin(place)
        step = task.step

        def killing(order, computed):
            if (place.attempt, place.worker, order.number) == (0, 1, self.at):
                os.kill(os.getpid(), signal.SIGKILL)
            return step(order, computed)

        task.step = killing
        return task


def build(place):
    import jax
    import jax.numpy as jnp
    import numpy as np

    import splitjax
    from splitjax.runtime.scheduled import Training

    def train_step(state, batch):
        loss, grads = splitjax.value_and_grad(
            lambda w: jnp.square(jnp.tanh(batch["x"] @ w["a"]) @ w["b"] - batch["y"]).mean()
        )(state)
        return jax.tree.map(lambda w, g: w - 0.1 * g, state, grads), {"loss": loss}

    def batch(number):
        random = np.random.default_rng(number)
        return {"x": random.normal(size=(8, 4)).astype(np.float32), "y": random.normal(size=(8, 2)).astype(np.float32)}

    init = lambda key: {"a": jax.random.normal(key, (4, 16)), "b": jnp.ones((16, 2)) * 0.1}
    return Training(
        splitjax.parallelize(train_step, mesh={"data": place.num_workers}, rules="data_parallel"),
        init,
        jax.random.key(0),
        batch,
    )


@pytest.mark.slow  # JAX starts and compiles in four processes
def test_a_decorated_step_in_two_processes_survives_one_of_them(ray_started, tmp_path) -> None:
    import jax

    from splitjax.runtime.scheduled import DecoratedJob, one_core_environment

    environment = {**one_core_environment(), "JAX_PLATFORMS": "cpu"}
    job = Job("trained", 0.0, 2, 12, PROFILE)
    program = Killing(DecoratedJob(build, tmp_path / "trained"), at=9)
    engine = RayEngine(TWO, RayOptions(environment=environment))
    execution = execute(
        [job], {"trained": program}, TWO, "gang-fifo", engine, ExecutionOptions(checkpoint_every_seconds=0.001)
    )
    assert execution.restarts == {"trained": 1} and not execution.failed
    training = build(Place("trained", 0, 1, 0, 0))
    state = training.init_fn(jax.random.key(0))
    for number in range(1, 13):
        state, metrics = training.step(state, training.batch(number))
    assert execution.metrics["trained"]["loss"] == pytest.approx(float(metrics["loss"]), rel=1e-5)
    redone = [one.number for one in execution.tasks if one.worker == 0]
    assert len(redone) < 12 + 9  # from its checkpoint, not from the beginning
