"""The training jobs of real execution (`jigsaw.real`), and processes that are started once for all runs."""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from splitjax.schedule import Job, Place, RayEngine
from splitjax.schedule.execution.engine import Kind, Program, StepOrder, WorkerReport
from splitjax.schedule.model.jobs import STORAGE


@dataclasses.dataclass(frozen=True)
class Model:
    """What a job trains, and for how long: of digits or, by characters, of this project's documentation.
    `num_iterations`: no job shall be much longer than another."""

    family: str
    options: Mapping[str, Any]
    batch_size: int
    num_iterations: int

    @property
    def reads_text(self) -> bool:
        return self.family in ("transformer", "lstm")


_SEQ_LEN, _VOCABULARY = 63, 96
MODELS = {
    "vgg": Model("vgg11", {"width": 0.25, "head_features": (256, 256), "image_size": 32, "channels": 1}, 256, 28),
    "transformer": Model(
        "transformer",
        {"num_layers": 4, "d_model": 192, "num_heads": 4, "max_len": _SEQ_LEN + 1, "vocab_size": _VOCABULARY},
        64,
        16,
    ),
    "mlp": Model("mlp", {"features": (1024,) * 4, "input_shape": (32, 32, 1)}, 1024, 44),
    "lstm": Model(
        "lstm",
        {"num_layers": 2, "hidden_width": 384, "embedding_width": 192, "max_len": _SEQ_LEN, "vocab_size": _VOCABULARY},
        64,
        16,
    ),
}


@dataclasses.dataclass
class Batches:
    """`Training.batch`: examples drawn by `seed` and the number of the iteration."""

    data: Any
    batch_size: int
    seed: int = 0

    def __call__(self, number: int) -> Any:
        import numpy as np

        rows = np.random.default_rng((self.seed, number)).integers(0, self.data.num_train, self.batch_size)
        batch = {key: values[rows] for key, values in self.data.train.items()}
        return self.data.transform(batch) if self.data.transform else batch


def build(name: str, place: Place) -> Any:
    """A `Training`."""
    import jax
    import optax

    import splitjax
    from splitjax.runtime.scheduled import Training, partial_steps

    model = MODELS[name]
    spec = splitjax.models.build(model.family, **model.options)
    loss = "cross_entropy" if model.family == "lstm" else None
    init_fn, train_step, _ = splitjax.models.make_step(
        spec, optax.adam(1e-3), loss=loss, value_and_grad=splitjax.value_and_grad
    )
    data = _text() if model.reads_text else splitjax.data.load_digits(image_size=32, channels=1)
    decorate = lambda backprop: splitjax.parallelize(
        train_step, mesh={"data": place.num_workers}, rules="data_parallel", backprop=backprop
    )
    step, at_depths, warm_up = partial_steps(decorate, place.num_workers)
    return Training(
        step, init_fn, jax.random.key(0), Batches(data, model.batch_size), at_depths=at_depths, warm_up=warm_up
    )


def _text() -> Any:
    import splitjax

    root = pathlib.Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "docs.txt"
        file.write_text(
            "\n".join(one.read_text(encoding="utf-8") for one in sorted(root.glob("docs/*.md"))), encoding="utf-8"
        )
        return splitjax.data.load_text(file, seq_len=_SEQ_LEN, vocab_size=_VOCABULARY, level="char")


# Processes that outlast a run

_BEFORE_ALL = -1  # the iteration of what a process is asked for between runs: below it, -1 - seed


@dataclasses.dataclass(frozen=True)
class Lasting:
    """A `DecoratedJob` whose tasks go back to the beginning, or to their checkpoint, when they are asked for `STORAGE`
    of iteration -1 - seed, and to another processor core when they are asked for resource -1 - core."""

    job: Any

    def meet(self, place: Place) -> tuple[Any, Any]:
        return self.job.meet(place)

    def begin(self, place: Place) -> LastingTask:
        return LastingTask(self.job.begin(place))


class LastingTask:
    def __init__(self, task: Any):
        self._task = task

    def restore(self) -> int:
        return self._task.restore()

    def stage(self, number: int, resource: int) -> None:
        if resource < 0:
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), {-1 - resource})
        elif number < 0:
            self._task.training.batch.seed = -1 - number
            self._task.restore()
        else:
            self._task.stage(number, resource)

    def step(self, order: StepOrder, computed: Any) -> Mapping[str, float]:
        return self._task.step(order, computed)

    def save(self, number: int) -> None:
        self._task.save(number)


class LastingEngine:
    """An `Engine` whose processes are started, and their programs compiled, before the first run, and stay from run to
    run: a run's time has no starts in it. A job that is stopped and started again within a run does go back to its
    checkpoint. It is for one set of jobs, whose processes begin on the devices 0 to N-1, and go to the core of another
    one where a policy puts a worker there.

    **Arguments:** `inner`: starts the processes. `jobs`, `programs`, `folders`: what they run, and where each keeps its
    checkpoints. `cores`: the processor core of each device.
    """

    def __init__(
        self,
        inner: RayEngine,
        jobs: Sequence[Job],
        programs: Mapping[str, Program],
        folders: Mapping[str, pathlib.Path],
        cores: Sequence[int],
    ):
        self._inner, self._numbers, self._folders = (
            inner,
            {job.name: number for number, job in enumerate(jobs)},
            folders,
        )
        self._workers = {number: job.num_workers for number, job in enumerate(jobs)}
        self._cores = tuple(cores)
        # by process (job, worker), the device on whose core it is
        self._devices = {
            (number, worker): worker for number, job in enumerate(jobs) for worker in range(job.num_workers)
        }
        self._reports: collections.deque[WorkerReport] = collections.deque()
        self._seed = 0
        # of the run's numbers, the numbers of the processes; they differ where a run has another order
        self._job_of: dict[int, int] = {}
        for number, job in enumerate(jobs):
            inner.start(
                number,
                programs[job.name],
                tuple(Place(job.name, worker, job.num_workers, worker, worker) for worker in range(job.num_workers)),
            )
        self._await(Kind.STARTED, len(jobs))

    def rewind(self, jobs: Sequence[Job], seed: int) -> None:
        """Before every run: all of `jobs`, in their order, at the beginning."""
        self._reports.clear()
        self._seed, self._job_of = seed, {number: self._numbers[job.name] for number, job in enumerate(jobs)}
        self._attempt: dict[int, int] = {}
        self._saved = dict.fromkeys(self._job_of, 0)
        for folder in self._folders.values():
            for checkpoint in folder.glob("*"):
                shutil.rmtree(checkpoint) if checkpoint.is_dir() else checkpoint.unlink()
        for inner in self._job_of.values():
            self._restore(inner)
        self._await(Kind.STAGED, sum(self._workers[inner] for inner in self._job_of.values()))

    def _restore(self, inner: int) -> None:
        for worker in range(self._workers[inner]):
            self._inner.stage(inner, worker, -1 - self._seed, STORAGE)

    def _await(self, kind: Kind, count: int) -> None:
        """Answers of processes that begin, go back or move; what others report meanwhile is kept."""
        while count:
            report = self._inner.next(600.0)
            if report is None or report.kind is Kind.DIED:
                raise RuntimeError(f"a process does not start: {report}")
            if report.kind is kind and (report.number < 0 or kind is Kind.STARTED):
                count -= 1
            else:
                self._reports.append(self._of_run(report))

    def _of_run(self, report: WorkerReport) -> WorkerReport:
        job = next(job for job, inner in self._job_of.items() if inner == report.job)
        return dataclasses.replace(report, job=job, attempt=self._attempt[job])

    def start(self, job: int, program: Program, places: tuple[Place, ...]) -> None:
        inner = self._job_of[job]
        self._move(inner, places)
        if job in self._attempt:
            self._restore(inner)
            self._await(Kind.STAGED, self._workers[inner])
        self._attempt[job] = places[0].attempt
        self._reports.append(WorkerReport(Kind.STARTED, job, places[0].attempt, number=self._saved[job]))

    def _move(self, inner: int, places: Sequence[Place]) -> None:
        """Sends the processes of a job to the cores of the devices on which they are to be."""
        moved = [(worker, place.device) for worker, place in enumerate(places)]
        moved = [(worker, device) for worker, device in moved if self._devices[inner, worker] != device]
        for worker, device in moved:
            self._devices[inner, worker] = device
            self._inner.stage(inner, worker, _BEFORE_ALL, -1 - self._cores[device])
        self._await(Kind.STAGED, len(moved))

    def stage(self, job: int, worker: int, number: int, resource: int) -> None:
        self._inner.stage(self._job_of[job], worker, number, resource)

    def step(self, job: int, worker: int, order: StepOrder) -> None:
        self._inner.step(self._job_of[job], worker, order)

    def save(self, job: int, number: int) -> None:
        self._saved[job] = number
        self._inner.save(self._job_of[job], number)

    def stop(self, job: int) -> None:
        pass  # its processes stay, idle

    def next(self, timeout_seconds: float) -> WorkerReport | None:
        if self._reports:
            return self._reports.popleft()
        report = self._inner.next(timeout_seconds)
        return None if report is None else self._of_run(report)

    def close(self) -> None:
        pass  # `execute` closes it after every run

    def end(self) -> None:
        self._inner.close()


def processor_seconds() -> tuple[float, float]:
    """Used so far by the processes of jobs, and by what runs them: this process and Ray's own."""
    parents, used, names = {}, {}, {}
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            names[int(folder.name)] = (folder / "cmdline").read_text()
        except OSError:
            continue  # it has ended
        parents[int(folder.name)], used[int(folder.name)] = (
            int(fields[1]),
            (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
        )
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    jobs = sum(used[pid] for pid in ours if names.get(pid, "").startswith("ray::"))
    return jobs, sum(used[pid] for pid in ours) - jobs
