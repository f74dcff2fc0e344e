"""Remembers the steady rates of groups: two groups of alike jobs on alike devices go equally fast.

A group goes in, the rates that its discipline gives it come out. Measuring them runs the group's iterations until two
windows agree, far longer than an event of the simulator may take; what a group is made of is its key.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from splitjax.errors import ScheduleError
from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.discipline import Rates, get_discipline
from splitjax.schedule.model.jobs import Job
from splitjax.schedule.model.policy import Group


class SteadyRates:
    """Holds the rates of every composition of a group that was asked for.

    **Arguments:** `jobs`: all of the trace. `cluster`: the devices.
    """

    def __init__(self, jobs: Sequence[Job], cluster: Cluster):
        self._jobs, self._cluster = jobs, cluster
        numbers: dict[Any, int] = {}
        self._profile_number = [numbers.setdefault(job.profile, len(numbers)) for job in jobs]
        self._rates_of: dict[Any, Rates] = {}

    def of(self, group: Group) -> Rates:
        """Returns how fast the members of `group` go. Raises `ScheduleError` for a discipline that lets a member stand
        still."""
        per_node = self._cluster.devices_per_node
        devices = {device: index for index, device in enumerate(group.devices)}
        first = min(devices) // per_node if devices else 0
        if len(group.members) == 1 and not group.members[0].resident:
            # more workers than devices: some of these take two
            layout: Any = len(devices), len({device // per_node for device in devices})
        else:
            layout = tuple(
                tuple(
                    tuple((devices[device], device // per_node - first) for device in held)
                    for held in (member.devices, member.resident)
                )
                for member in group.members
            )
        numbers = tuple(
            (self._profile_number[member.job], self._jobs[member.job].num_workers) for member in group.members
        )
        key = (group.discipline, group.option, numbers, layout)
        if key not in self._rates_of:
            rates = get_discipline(group.discipline).rates(
                group, [self._jobs[member.job] for member in group.members], self._cluster
            )
            if not all(0 < rate < math.inf for rate in rates.iterations_per_second):
                raise ScheduleError(
                    "a discipline gives a job no progress",
                    value=rates,
                    place=f"discipline {group.discipline!r}",
                    remedy="let every job of a group come to its turn",
                )
            self._rates_of[key] = rates
        return self._rates_of[key]
