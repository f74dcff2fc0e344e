"""Jobs for tests."""

from __future__ import annotations

from splitjax.schedule import Job, JobProfile

ONE = JobProfile.uniform("one", 1.0, num_depths=4)  # an iteration a second


def job(name: str, arrival: float, workers: int, iterations: int, profile: JobProfile = ONE, tag: str = "") -> Job:
    return Job(name, arrival, workers, iterations, profile, tag)


def finishes(result) -> dict[str, float]:
    return {record.name: round(record.finish_seconds, 6) for record in result.records}
