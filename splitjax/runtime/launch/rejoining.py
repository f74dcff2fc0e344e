"""Decides whether a worker that failed is waited for, counted as a restart, or given up."""

from __future__ import annotations

import dataclasses

from splitjax.runtime.launch.outcome import LaunchAttempt

# With this the package's own commands say that the user made a mistake, which fewer workers would make as well.
_MISTAKE = 2


@dataclasses.dataclass(frozen=True)
class Absence:
    """Holds which worker is waited for.

    - `worker`: its number, of those that the run began with.
    - `since`: when its failure was noticed, by `time.monotonic`.
    """

    worker: int
    since: float

    def is_over(self, now: float, timeout_seconds: float) -> bool:
        """Returns whether at the time `now` the worker has been away for `timeout_seconds`."""
        return now - self.since >= timeout_seconds


def absence(before: Absence | None, attempt: LaunchAttempt, workers: tuple[int, ...], now: float) -> Absence | None:
    """Returns which worker is away after an `attempt`, and since when; None where no worker is to be waited for.

    A worker is away from its failure on until the run completes a step with it. One that fails again before is still
    away; if another fails instead, that is the one.

    **Arguments:** `before`: who was away during the attempt. `workers`: by rank, the numbers of its workers. `now`: by
    `time.monotonic`.
    """
    failed = attempt.failed
    if failed is None or failed.code == _MISTAKE:
        return None
    worker = workers[failed.rank]
    if before is not None and before.worker == worker and not attempt.completed_step:
        return before
    return Absence(worker, now)
