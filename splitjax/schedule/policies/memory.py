"""Carries what a policy remembers of jobs from one decision to the next: arrays of one entry per job that was active,
in order of arrival."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax.schedule.model.policy import View


def carry(view: View, memory: Mapping[str, NDArray[Any]] | None, **defaults: float) -> dict[str, NDArray[Any]]:
    """Gives the remembered arrays named in `defaults`, one entry per job that is active in `view`: those of jobs that
    are gone are left out, and new jobs have the default.

    **Arguments:**

    - `view`: what is known.
    - `memory`: `{"jobs": view.active as it was, name: array of as many entries, ...}`, or None for nothing.
    - `defaults`: name of an array -> value for new jobs.
    """
    if memory is None:
        return {name: np.full(len(view.active), value) for name, value in defaults.items()}
    there = np.zeros(len(view.jobs), bool)  # sorting, as np.isin does, costs ten times as much
    there[view.active] = True
    left = np.flatnonzero(there[memory["jobs"]])
    carried = {}
    for name, value in defaults.items():
        kept = memory[name][left]
        carried[name] = np.concatenate([kept, np.full(len(view.active) - len(kept), value, kept.dtype)])
    return carried
