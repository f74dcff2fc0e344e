"""Fits by how much cycles of interleaved jobs take longer than their stages say (Muri, SIGCOMM'22), for
`jigsaw.fidelity`: one constant, to what a testbed measured under Muri-S alone. Which jobs share devices, and how long a
cycle should take, is what the package's `muri-s-testbed` says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from splitjax.schedule import Job, SimulationResult
from splitjax.schedule.policies.muri_testbed import Overhead

# What a fitted constant may mean: (in words, its unit, the largest that is looked at, constant -> Overhead).
FORMS: dict[str, tuple[str, float, Callable[[float], Overhead]]] = {
    "a time for each job of a cycle": ("{:.3f} s", 0.15, lambda value: Overhead(job_seconds=value)),
    "a share of the cycle": ("{:.1%}", 0.5, lambda value: Overhead(share=value)),
    "a share, beside what stages leave unexplained": (
        "{:.1%}",
        0.5,
        lambda value: Overhead(share=value, unexplained=True),
    ),
}
_HALVINGS = 8


@dataclasses.dataclass(frozen=True)
class Fit:
    """A form's constant at which device time is as measured, and how far the device time of each model then is from
    what was measured: root mean square of the relative errors' logarithms."""

    form: str
    constant: float
    off: float

    @property
    def overhead(self) -> Overhead:
        """What it says of cycles."""
        return FORMS[self.form][2](self.constant)

    def __str__(self) -> str:
        return FORMS[self.form][0].format(self.constant)


def fit(
    form: str, jobs: Sequence[Job], running_seconds: np.ndarray, replayed: Callable[[Overhead], SimulationResult]
) -> Fit:
    """One constant by halving, from `running_seconds` (f64[jobs]), how long each job held devices."""
    width, models = np.array([job.num_workers for job in jobs]), np.array([job.tag for job in jobs])

    def ratios(constant: float) -> tuple[float, float]:
        found = np.array([record.running_seconds for record in replayed(FORMS[form][2](constant)).records]) * width
        apart = [
            np.log(found[models == model].sum() / (running_seconds * width)[models == model].sum())
            for model in sorted(set(models))
        ]
        return found.sum() / (running_seconds * width).sum(), float(np.sqrt(np.mean(np.square(apart))))

    low, high = 0.0, FORMS[form][1]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if ratios(middle)[0] < 1 else (low, middle)
    return Fit(form, middle, ratios(middle)[1])
