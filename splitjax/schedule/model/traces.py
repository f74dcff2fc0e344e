"""Reads public traces, and jobs of one's own.

Paths of files come in, plain or gzip; a `Trace` of jobs comes out. A malformed row is an error that names file and
line, or is left out and listed if asked.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import itertools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from splitjax.errors import TraceFileError
from splitjax.schedule.model.jobs import Job, JobProfile, Stages
from splitjax.schedule.model.text_files import read_text

PHILLY_COLUMNS = ("timestamp", "duration", "num_gpus", "cluster")
MURI_COLUMNS = ("job_id", "num_gpu", "submit_time", "iterations", "model_name", "iteration_time")
_MOST: dict[str, int] = {column: 1_000_000 for column in ("num_workers", "num_gpus", "num_gpu")}
JOB_COLUMNS = ("name", "arrival_seconds", "num_workers", "num_iterations", "profile")


@dataclasses.dataclass(frozen=True)
class Trace:
    """Holds the jobs of a file.

    **Attributes:**

    - `jobs`: in order of arrival.
    - `skipped`: (line number, why) of rows that were left out.
    """

    jobs: tuple[Job, ...]
    skipped: tuple[tuple[int, str], ...] = ()

    def only(self, *, tags: Iterable[str] = (), min_workers: int = 1, max_workers: int | None = None) -> Trace:
        """Keeps the jobs with one of these `tags` (any, if none is given) and from `min_workers` to `max_workers`
        workers (None: any number)."""
        wanted = set(tags)
        limit = math.inf if max_workers is None else max_workers
        jobs = tuple(
            job for job in self.jobs if (not wanted or job.tag in wanted) and min_workers <= job.num_workers <= limit
        )
        return dataclasses.replace(self, jobs=jobs)


def read_trace(
    path: str | pathlib.Path, *, profiles: Mapping[str, JobProfile] | None = None, skip_malformed: bool = False
) -> Trace:
    """Reads a trace of any kind, told by its header.

    **Arguments:**

    - `path`: the file, a CSV, plain or gzip.
    - `profiles`: by name, such as `read_profiles` reads. Jobs of Philly's tables, which say nothing of their models,
      get them in turn; Muri's and one's own the one of their model.
    - `skip_malformed`: leave malformed rows out and list them, instead of an error.

    Raises `TraceFileError` for a file that cannot be read, of another kind, or with a malformed row.
    """
    _, header = next(_rows(pathlib.Path(path)), (1, []))
    if profiles is not None and not profiles:
        raise TraceFileError(
            "there is no profile to give to its jobs",
            value={},
            place=str(path),
            remedy="leave profiles out, or give one",
        )
    if set(PHILLY_COLUMNS) <= set(header):
        endless = itertools.cycle(profiles.values()) if profiles else None
        return read_philly(
            path, profile=None if endless is None else lambda num_workers: next(endless), skip_malformed=skip_malformed
        )
    if set(MURI_COLUMNS) <= set(header):
        return read_muri(path, profiles=profiles, skip_malformed=skip_malformed)
    if set(JOB_COLUMNS) <= set(header):
        if profiles is None:
            raise TraceFileError(
                "its jobs name profiles, and none are given",
                place=f"{path}:1",
                remedy="give the profiles that it names (profiles=, --profiles)",
            )
        return read_jobs(path, profiles, skip_malformed=skip_malformed)
    raise TraceFileError(
        "this is a trace of a kind that is not known",
        value=header,
        place=f"{path}:1",
        remedy=(
            "its first line names its columns, with commas between; these are known:"
            f" {','.join(PHILLY_COLUMNS)} (Philly); {','.join(MURI_COLUMNS)} (Muri); {','.join(JOB_COLUMNS)} (jobs of"
            " your own)"
        ),
    )


def read_jobs(path: str | pathlib.Path, profiles: Mapping[str, JobProfile], *, skip_malformed: bool = False) -> Trace:
    """Reads jobs of one's own from the CSV at `path`, plain or gzip. Its columns are `name` (unique),
    `arrival_seconds`, `num_workers`, `num_iterations`, `profile` (a name in `profiles`), and, if one likes, `tag`. With
    `skip_malformed`, malformed rows are left out and listed; else they raise `TraceFileError`, as what cannot be read
    does."""
    seen: set[str] = set()

    def parse(row: Mapping[str, str], line: int) -> Job:
        if row["name"] in seen:
            raise ValueError(f"a second job {row['name']!r}")
        job = Job(
            row["name"],
            float(row["arrival_seconds"]),
            _count(row["num_workers"], "num_workers"),
            _count(row["num_iterations"], "num_iterations"),
            _profile_named(row["profile"], profiles),
            row.get("tag", ""),
        )
        seen.add(row["name"])
        return job

    return _read(pathlib.Path(path), JOB_COLUMNS, parse, skip_malformed, from_zero=False)


def _profile_named(name: str, profiles: Mapping[str, JobProfile]) -> JobProfile:
    if name not in profiles:
        raise ValueError(f"no profile {name!r}; there are {', '.join(map(repr, profiles))}")
    return profiles[name]


def read_philly(
    path: str | pathlib.Path,
    *,
    profile: Callable[[int], JobProfile] | None = None,
    iteration_seconds: float = 0.5,
    skip_malformed: bool = False,
) -> Trace:
    """Reads job tables of Microsoft's Philly trace (Jeon et al., ATC'19), a CSV, plain or gzip: `timestamp` (ISO 8601),
    `duration` (seconds), `num_gpus`, `cluster`.

    The trace says how long a job ran, not what it computed: its iterations are its duration over that of one iteration.

    **Arguments:**

    - `path`: the file.
    - `profile`: number of workers -> profile; by default equal layers, a backward pass of twice the forward pass,
      `iteration_seconds` each.
    - `skip_malformed`: leave malformed rows out and list them, instead of an error.

    Raises `TraceFileError` for a file that cannot be read, lacks a column, or has a malformed row.
    """
    common = JobProfile.uniform("philly", iteration_seconds)
    profile = profile or (lambda num_workers: common)
    tags: dict[str, str] = {}

    def parse(row: Mapping[str, str], line: int) -> Job:
        moment = datetime.datetime.fromisoformat(row["timestamp"]).replace(tzinfo=datetime.UTC).timestamp()
        duration, num_workers = float(row["duration"]), _count(row["num_gpus"], "num_gpus")
        if not 0 <= duration < math.inf:
            raise ValueError(f"a duration of {row['duration']!r} seconds")
        if num_workers < 1:
            raise ValueError(f"{num_workers} GPUs")
        chosen = profile(num_workers)
        tag = tags.setdefault(row["cluster"], row["cluster"])
        return Job(f"{line}", moment, num_workers, max(1, round(duration / chosen.iteration_seconds)), chosen, tag)

    return _read(pathlib.Path(path), PHILLY_COLUMNS, parse, skip_malformed)


def read_muri(
    path: str | pathlib.Path,
    *,
    stages: bool = True,
    exposed_fraction: float = 0.0,
    profiles: Mapping[str, JobProfile] | None = None,
    skip_malformed: bool = False,
) -> Trace:
    """Reads traces of Muri (Zhao et al., SIGCOMM'22): `job_id`, `num_gpu`, `iterations`, `model_name`; milliseconds in
    `submit_time`, `iteration_time` and `resource_time_0..`, which are input (storage and CPU in one), device and
    network, or those four apart.

    `iterations` x `iteration_time` is the job, not the column `duration`, which is that of the trace it was made from.

    **Arguments:**

    - `path`: the file, a CSV, plain or gzip.
    - `stages`: an iteration computes for its time on the device and waits for the rest; without, it computes all the
      time but `exposed_fraction` of it.
    - `profiles`: by `model_name`, what an iteration costs, instead of the trace's times.
    - `skip_malformed`: leave malformed rows out and list them, instead of an error.

    Raises `TraceFileError` for a file that cannot be read, lacks a column, or has a malformed row.
    """
    known: dict[tuple[str, float, tuple[float, ...]], JobProfile] = {}

    def parse(row: Mapping[str, str], line: int) -> Job:
        seconds = float(row["iteration_time"]) / 1e3
        names = sorted(
            (name for name in row if name.startswith("resource_time_")), key=lambda name: int(name.rpartition("_")[2])
        )
        resources = tuple(float(row[name]) / 1e3 for name in names) if stages else ()
        if resources and len(resources) not in (3, 4):
            raise ValueError(f"{len(resources)} resources; 3 or 4 are known")
        if not all(0 <= value < math.inf for value in (seconds, *resources)) or seconds == 0:
            raise ValueError("times that are no times")
        key = (row["model_name"], seconds, resources)
        if key not in known:
            known[key] = (
                _profile_named(key[0], profiles)
                if profiles is not None
                else _muri_profile(key[0], seconds, resources, exposed_fraction)
            )
        moment = float(row["submit_time"]) / 1e3
        if not 0 <= moment < math.inf:
            raise ValueError(f"a submit_time of {row['submit_time']!r}")
        return Job(
            row["job_id"],
            moment,
            _count(row["num_gpu"], "num_gpu"),
            _count(row["iterations"], "iterations"),
            known[key],
            row["model_name"],
        )

    return _read(pathlib.Path(path), MURI_COLUMNS, parse, skip_malformed, from_zero=False)


def _muri_profile(name: str, seconds: float, resources: tuple[float, ...], exposed_fraction: float) -> JobProfile:
    if not resources:
        return JobProfile.uniform(name, seconds, exposed_fraction=exposed_fraction)
    stages = Stages(*resources) if len(resources) == 4 else Stages(0.0, *resources)
    return JobProfile.uniform(
        name, seconds, exposed_fraction=max(0.0, 1 - stages.device_seconds / seconds), stages=stages
    )


def _count(text: str, column: str) -> int:
    value = float(text)
    if not value.is_integer() or value > _MOST.get(column, math.inf):
        raise ValueError(f"{text[:40]!r} is no number of {column}")
    return int(value)


def _read(
    path: pathlib.Path,
    columns: Sequence[str],
    parse: Callable[[Mapping[str, str], int], Job],
    skip_malformed: bool,
    from_zero: bool = True,
) -> Trace:
    rows = _rows(path)
    header = next(rows, (1, []))[1]
    if missing := [column for column in columns if column not in header]:
        raise TraceFileError(
            "columns are missing",
            value=missing,
            place=f"{path}:1",
            remedy=f"the first line names the columns {', '.join(columns)}",
        )
    raw: list[tuple[int, Job]] = []
    skipped: list[tuple[int, str]] = []
    for line, cells in rows:
        try:
            if len(cells) != len(header):
                raise ValueError(f"{len(cells)} cells under {len(header)} columns")
            raw.append((line, parse(dict(zip(header, cells)), line)))
        except (ValueError, OverflowError) as error:
            why = str(error).splitlines()[0]
            if not skip_malformed:
                raise TraceFileError(
                    f"a malformed row: {why}",
                    value=",".join(cells),
                    place=f"{path}:{line}",
                    remedy="mend it, or skip malformed rows (skip_malformed)",
                ) from error
            skipped.append((line, why))
    first = min((job.arrival_seconds for _, job in raw), default=0.0) if from_zero else 0.0
    jobs = (
        [dataclasses.replace(job, arrival_seconds=job.arrival_seconds - first) for _, job in raw]
        if from_zero
        else [job for _, job in raw]
    )
    return Trace(tuple(sorted(jobs, key=lambda job: job.arrival_seconds)), tuple(skipped))


def _rows(path: pathlib.Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of the lines that are not empty, the header first."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""))
    try:
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise TraceFileError(
            f"not CSV: {error}",
            place=f"{path}:{reader.line_num}",
            remedy="give a table with a line of names, and commas between its fields",
        ) from error
