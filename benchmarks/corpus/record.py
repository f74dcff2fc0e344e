"""Records the corpus with the splitjax of one checkout: plans by unit, programs by cell, each in a file of its own, so
that a run that was ended goes on where it was."""

from __future__ import annotations

import dataclasses
import gzip
import importlib.metadata
import json
import pathlib
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.corpus.cells import GUARDS, Cell, Unit, compiles, units
from benchmarks.corpus.cover import cover, pairs_of
from benchmarks.corpus.worker import LIMIT_SECONDS, Worker

LIMIT = 400  # programs at most
Asked = Callable[[Worker], None]


class RecordError(RuntimeError):
    """A folder holds the recording of something else."""


@dataclasses.dataclass(frozen=True)
class Recording:
    """A folder with what was recorded. `package`: the checkout whose splitjax is recorded; None to read only."""

    folder: pathlib.Path
    package: pathlib.Path | None = None

    def prepare(self) -> None:
        """Makes the folder and notes what it is of. Raises `RecordError` where it is of another commit or release of
        JAX."""
        assert self.package is not None
        about = about_package(self.package)
        if self.folder.exists() and (file := self.folder / "about.json").exists():
            before = {name: value for name, value in json.loads(file.read_text()).items() if name in about}
            if before != about:
                raise RecordError(
                    f"{self.folder} was recorded with {before}, and this is {about}: give another --output"
                )
            return
        for part in ("plans", "programs"):
            (self.folder / part).mkdir(parents=True, exist_ok=True)
        self.note(**about)

    def note(self, **values: Any) -> None:
        """Adds to what is known of the recording."""
        file = self.folder / "about.json"
        file.write_text(json.dumps({**self.about(), **values}, indent=1) + "\n", encoding="utf-8")

    def about(self) -> dict[str, Any]:
        """What was noted."""
        file = self.folder / "about.json"
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}

    def plan_file(self, unit: Unit) -> pathlib.Path:
        """Where a unit's plans are."""
        return self.folder / "plans" / f"{unit.file}.json.gz"

    def program_file(self, cell: Cell) -> pathlib.Path:
        """Where a cell's programs are."""
        return self.folder / "programs" / f"{cell.file}.json.gz"

    def plans(self) -> dict[str, dict[str, Any]]:
        """By the name of a cell what was recorded of its plan."""
        files = [self.plan_file(unit) for unit in units()]
        return {record["cell"]: record for file in files if file.exists() for record in read(file)}

    def programs(self) -> dict[str, dict[str, Any]]:
        """By the name of a cell what was recorded of its programs."""
        return {
            record["cell"]: record
            for file in sorted((self.folder / "programs").glob("*.json.gz"))
            for record in [read(file)]
        }


def read(file: pathlib.Path) -> Any:
    """The values of a compressed JSON file."""
    with gzip.open(file, "rt", encoding="utf-8") as opened:
        return json.load(opened)


def write(file: pathlib.Path, value: Any) -> None:
    """Writes such a file."""
    with gzip.open(file, "wt", encoding="utf-8", compresslevel=5) as opened:
        json.dump(value, opened)


def about_package(package: pathlib.Path) -> dict[str, str]:
    """The commit of a checkout, and the releases of what plans and compiles."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=package, capture_output=True, text=True, check=False
        ).stdout.strip()

    changed = git("status", "--porcelain", "--", "splitjax", "sharding_rules")
    # That of the package, not of the checkout: commits that leave it alone are the same recording.
    commit = git("log", "-1", "--format=%h", "--", "splitjax", "sharding_rules")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "optax")}
    return {"commit": f"{commit}{' with changes' if changed else ''}", **versions}


def record_plans(recording: Recording, chosen: Sequence[Unit], num_jobs: int, hash_seed: str = "random") -> float:
    """Plans the cells of the units that are not there yet; returns the seconds that it took."""
    todo = [unit for unit in chosen if not recording.plan_file(unit).exists()]

    def plan(unit: Unit) -> Asked:
        def ask(worker: Worker) -> None:
            file = recording.plan_file(unit)
            died = worker.ask({"kind": "plans", "unit": dataclasses.astuple(unit), "only": [], "file": str(file)})
            if died:
                raise RecordError(f"planning {unit.name} ended: {died}")
            statuses = [record["status"] for record in read(file)]
            print(f"{unit.name}: {len(statuses)} cells, {statuses.count('ok')} planned", flush=True)

        return ask

    return _together(recording, [plan(unit) for unit in todo], num_jobs, hash_seed)


def record_programs(recording: Recording, cells: Sequence[Cell], num_jobs: int, hash_seed: str = "random") -> float:
    """Compiles the cells that are not there yet; returns the seconds that it took."""
    todo = [cell for cell in cells if not recording.program_file(cell).exists()]
    left = iter(range(len(todo), 0, -1))

    def compile_one(cell: Cell) -> Asked:
        def ask(worker: Worker) -> None:
            file, started = recording.program_file(cell), time.perf_counter()
            died = worker.ask({"kind": "program", "cell": cell.name, "file": str(file)}, LIMIT_SECONDS)
            if died:
                write(file, {"cell": cell.name, "status": "died", "error": died, "cpu_seconds": 0.0})
            record = read(file)
            status = record["status"] + (f" {record['error']}" if record["status"] != "ok" else "")
            print(f"{next(left):4} {time.perf_counter() - started:6.1f} s  {status:8} {cell.name}", flush=True)

        return ask

    return _together(recording, [compile_one(cell) for cell in todo], num_jobs, hash_seed)


def record_cover(recording: Recording, limit: int, num_jobs: int, hash_seed: str = "random") -> float:
    """Compiles a cover of the cells that were planned. A cell that does not compile covers nothing: others are taken in
    its place until every pair that can be compiled is. Returns the seconds that it took."""
    planned = (
        name for name, record in recording.plans().items() if record["status"] == "ok" and record["takes_effect"]
    )
    candidates = [cell for cell in map(Cell.parse, planned) if compiles(cell)]
    seconds, failed = 0.0, set[Cell]()
    taken = tuple(cell for cell in GUARDS if cell in set(candidates))
    while True:
        able = [cell for cell in candidates if cell not in failed]
        kept = [cell for cell in taken if cell not in failed]
        taken = (*kept, *cover(able, limit - len(failed), kept))
        seconds += record_programs(recording, taken, num_jobs, hash_seed)
        new = {cell for cell in taken if read(recording.program_file(cell))["status"] != "ok"} - failed
        failed |= new
        if not new or pairs_of(taken) <= pairs_of(cell for cell in taken if cell not in failed):
            return seconds


def _together(recording: Recording, tasks: Sequence[Asked], num_jobs: int, hash_seed: str) -> float:
    """Does tasks in order, so many at once, each job with a worker of its own. The first error ends all."""
    assert recording.package is not None
    waiting: queue.SimpleQueue[Asked] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    errors: list[BaseException] = []

    def work() -> None:
        worker = Worker(recording.package, hash_seed)
        try:
            while not errors:
                waiting.get_nowait()(worker)
        except queue.Empty:
            pass
        except BaseException as error:
            errors.append(error)
        finally:
            worker.close()

    started = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(min(num_jobs, len(tasks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - started
