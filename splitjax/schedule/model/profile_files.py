"""Reads and writes what iterations of jobs cost: profiles of one's own, and Gavel's table of throughputs.

Paths of JSON files come in, plain or gzip; profiles by name, or `Throughputs`, come out. What is malformed is an error
that names file, entry and field.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from splitjax._files import write_atomically
from splitjax.errors import ScheduleError, TraceFileError
from splitjax.schedule.model.jobs import PROFILE_JSON, JobProfile
from splitjax.schedule.model.text_files import read_text

# A file that is no JSON at all is said as a file's error.
_FILE_JSON = dataclasses.replace(PROFILE_JSON, error=TraceFileError)


def read_profiles(path: str | pathlib.Path) -> dict[str, JobProfile]:
    """Reads name -> profile from the JSON file at `path`, of one profile or a list of them, such as `write_profiles`
    and `splitjax profile --job` write; plain or gzip.

    Raises `TraceFileError`, whose place is the file, the entry (from 0) and the field.
    """
    path = pathlib.Path(path)
    values = _FILE_JSON.loads(read_text(path), str(path))
    profiles: dict[str, JobProfile] = {}
    for number, entry in enumerate(values if isinstance(values, list) else [values]):
        try:
            profile = JobProfile.from_json(entry)
        except ScheduleError as error:
            raise TraceFileError(
                f"not a job profile: {error.message}",
                value=error.value,
                place=f"{path}, entry {number}, {error.place}",
                remedy=error.remedy or "mend it, or write profiles with write_profiles or splitjax profile --job",
            ) from error
        if profile.name in profiles:
            raise TraceFileError(
                "two profiles of one name",
                value=profile.name,
                place=f"{path}, entry {number}, name",
                remedy="give each a name of its own",
            )
        profiles[profile.name] = profile
    if not profiles:
        raise TraceFileError(
            "no profile is in it",
            value=values,
            place=str(path),
            remedy="write profiles with write_profiles, or splitjax profile --job",
        )
    return profiles


def write_profiles(path: str | pathlib.Path, profiles: Sequence[JobProfile]) -> None:
    """Writes `profiles` as JSON to `path`. Raises `OSError`."""
    write_atomically(pathlib.Path(path), profiles_text(profiles))


def profiles_text(profiles: Sequence[JobProfile]) -> str:
    """Returns the JSON text of a file of `profiles`."""
    return json.dumps([profile.to_json() for profile in profiles], indent=1) + "\n"


@dataclasses.dataclass(frozen=True)
class Throughputs:
    """Holds Gavel's measured throughputs (Narayanan et al., OSDI'20), iterations a second of each job. A job is (model
    with batch size, number of workers).

    **Attributes:**

    - `alone`: device kind -> job -> throughput.
    - `pairs`: device kind -> (job, other job) -> their throughputs on one device that both share; 0 where they did not
      fit.
    """

    alone: Mapping[str, Mapping[tuple[str, int], float]]
    pairs: Mapping[str, Mapping[tuple[tuple[str, int], tuple[str, int]], tuple[float, float]]]

    def profile(self, kind: str, job: tuple[str, int]) -> JobProfile:
        """Makes a profile of equal layers with the iteration time of `job` measured alone on a device of this `kind`.
        Raises `TraceFileError` where there is none."""
        rate = self.alone.get(kind, {}).get(job, 0.0)
        if not rate > 0:
            raise TraceFileError(
                "no throughput was measured", value=(kind, job), remedy="see Throughputs.alone for what was"
            )
        return JobProfile.uniform(job[0], 1 / rate)


def read_gavel(path: str | pathlib.Path) -> Throughputs:
    """Reads Gavel's table of throughputs from `path`, JSON, plain or gzip: device kind -> "('MODEL', workers)" ->
    {"null": alone, "('OTHER', workers)": [it, other]}.

    Raises `TraceFileError`, which names the entry.
    """
    path = pathlib.Path(path)
    try:
        table = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError alone
        where = f":{error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise TraceFileError(
            f"not JSON: {getattr(error, 'msg', error)}",
            place=f"{path}{where}",
            remedy="give a file that splitjax profile --job --json wrote",
        ) from error
    alone: dict[str, dict[tuple[str, int], float]] = {}
    pairs: dict[str, dict[tuple[tuple[str, int], tuple[str, int]], tuple[float, float]]] = {}
    place = ""
    try:
        for kind, jobs in table.items():
            alone[kind], pairs[kind] = {}, {}
            for text, partners in jobs.items():
                place = f"{kind}, {text}"
                job = _gavel_job(text)
                for partner, value in partners.items():
                    place = f"{kind}, {text}, {partner}"
                    if partner == "null":
                        alone[kind][job] = _rate(value)
                    else:
                        first, second = value
                        pairs[kind][job, _gavel_job(partner)] = _rate(first), _rate(second)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise TraceFileError(
            f"not a table of throughputs: {error}",
            place=f"{path}, {place}",
            remedy="give the table of throughputs as Gavel publishes it",
        ) from error
    return Throughputs(alone, pairs)


def _rate(value: Any) -> float:
    rate = float(value)
    if not 0 <= rate < math.inf:
        raise ValueError(f"not a throughput: {str(value)[:40]}")
    return rate


def _gavel_job(text: str) -> tuple[str, int]:
    # "('ResNet-18 (batch size 16)', 1)"
    name, _, count = text.strip().removeprefix("(").removesuffix(")").rpartition(",")
    if not name.strip("'\" ") or not count.strip().isdigit():
        raise ValueError(f"not a job: {text!r}")
    return name.strip().strip("'\""), int(count)
