"""The protocol of policies: a pure function from what is known at one moment (`View`) to what changes (`Assignment`).

A policy decides which jobs share which devices (`Group`), whenever a job arrives or finishes, and at times that it asks
for. How the jobs of a group take turns from iteration to iteration is its *discipline* (`schedule.discipline`), a pure
function too. The simulator and executors ask both.

A new policy is one function:

```python
@register("my-order", paper="...")
def my_order(view: View) -> Assignment:
    return gang(view, view.remaining_iterations)      # schedule.gang: whole devices, smallest key first
```
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from splitjax._registry import NamedRegistry
from splitjax.errors import ScheduleError
from splitjax.schedule.model.cluster import Cluster
from splitjax.schedule.model.jobs import Job, JobColumns


@dataclasses.dataclass(frozen=True)
class Member:
    """Places a job in a group.

    **Attributes:**

    - `job`: its number in `View.jobs`.
    - `devices`: the devices that hold it, one per worker.
    - `resident`: further devices of the group that hold its workers' states, where a discipline moves tasks about.
    """

    job: int
    devices: tuple[int, ...]
    resident: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Group:
    """Names jobs that share devices, and how. No device is in two groups.

    **Attributes:**

    - `members`: the jobs, each with its devices.
    - `discipline`: name of the registered discipline by which they take turns.
    - `option`: a hashable value that the discipline may read.
    """

    members: tuple[Member, ...]
    discipline: str = "gang"
    option: Any = None

    @property
    def devices(self) -> tuple[int, ...]:
        """Lists all devices of the group, ascending."""
        if len(self.members) == 1 and not self.members[0].resident:
            return tuple(sorted(set(self.members[0].devices)))
        return tuple(sorted({device for member in self.members for device in (*member.devices, *member.resident)}))

    @property
    def computing_devices(self) -> tuple[int, ...]:
        """Lists the devices that a chart draws the group on, ascending: all while jobs share them, and of a job that is
        left alone its workers' own, one each. On the further ones it is only resident, until the policy is asked
        again."""
        return tuple(sorted(set(self.members[0].devices))) if len(self.members) == 1 else self.devices


@dataclasses.dataclass(frozen=True)
class View:
    """Tells a policy what is known at one moment. Arrays are read-only; those marked [active] have one entry per job in
    `active`.

    **Attributes:**

    - `now_seconds`: the moment. `cluster`: the devices there are.
    - `jobs`, `columns`: all jobs of the trace and their constants; numbers of jobs index both. Those that have not
      arrived are none of a policy's business.
    - `active`: i64, numbers of the jobs that have arrived and are not done, in order of arrival.
    - `remaining_iterations`: f64[active], fractions of an iteration included.
    - `attained_seconds`: f64[active], how long it has held devices. `attained_device_seconds`: f64[active], the same
      times devices, shared devices counted by the share that it computed.
    - `fair_seconds`: f64[active], time since arrival, each moment multiplied by how many times over its devices the
      cluster was asked for (at least 1).
    - `group_of`: i64[active], id of the group that it is in, -1 while it waits.
    - `groups`: id -> group, of those that run.
    - `free`: bool[num_devices], devices in no group.
    - `memory`: what this policy's last `Assignment` remembered; None at the start.
    """

    now_seconds: float
    cluster: Cluster
    jobs: Sequence[Job]
    columns: JobColumns
    active: NDArray[np.int64]
    remaining_iterations: NDArray[np.float64]
    attained_seconds: NDArray[np.float64]
    attained_device_seconds: NDArray[np.float64]
    fair_seconds: NDArray[np.float64]
    group_of: NDArray[np.int64]
    groups: Mapping[int, Group]
    free: NDArray[np.bool_]
    memory: Any = None

    @property
    def num_workers(self) -> NDArray[np.int64]:
        """Gives the workers that each job wants, i64[active]."""
        return self.columns.num_workers[self.active]

    @property
    def arrival_seconds(self) -> NDArray[np.float64]:
        """Gives the time at which each job arrived, f64[active]."""
        return self.columns.arrival_seconds[self.active]

    @property
    def remaining_seconds(self) -> NDArray[np.float64]:
        """Gives the time that each job still takes alone and with full backpropagation, f64[active]."""
        return self.remaining_iterations * self.columns.iteration_seconds[self.active]


@dataclasses.dataclass(frozen=True)
class Assignment:
    """Says what a policy changes. Groups that it does not name go on as they are.

    **Attributes:**

    - `stop`: ids of groups that end. A job of theirs that a started group holds on the same devices goes on without a
      restart; others are preempted (checkpointed) and wait, or move.
    - `start`: groups that begin, on devices that are free once the others have ended.
    - `wake_seconds`: ask again then, though no job has arrived or finished (a demotion, the end of a round).
    - `memory`: an immutable value that comes back as `View.memory`.
    """

    stop: tuple[int, ...] = ()
    start: tuple[Group, ...] = ()
    wake_seconds: float = math.inf
    memory: Any = None


Decide = Callable[[View], Assignment]


@dataclasses.dataclass(frozen=True)
class Policy:
    """Holds a registered policy.

    **Attributes:**

    - `name`: what it is chosen by. `decide`: the pure function.
    - `paper`: where it is from. `summary`: first paragraph of its docstring.
    - `order`: name of the order in which it serves jobs. `baseline`: the gang policy of that order, which efficiencies
      are relative to.
    """

    name: str
    decide: Decide
    paper: str
    summary: str
    order: str
    baseline: str


def _accept(name: str, loaded: Any) -> None:
    """Refuses what an entry point called `name` has loaded without registering that policy."""
    raise TypeError(f"importing {loaded!r} registers no policy {name!r}: decorate it with schedule.register({name!r})")


_POLICIES: NamedRegistry[Policy] = NamedRegistry(
    "policy",
    group="splitjax.policies",
    error=ScheduleError,
    register="splitjax.schedule.register",
    accept=_accept,
)


def _summary(decide: Decide) -> str:
    """The first paragraph of the docstring, in one line."""
    return " ".join((decide.__doc__ or "").split("\n\n")[0].split())


def register(name: str, *, paper: str, order: str = "", baseline: str = "") -> Callable[[Decide], Decide]:
    """Decorates a function `View -> Assignment`, and so makes it the policy called `name`. `paper` says where it is
    from; `order` defaults to the name without `gang-`, `baseline` to `gang-ORDER` (`Policy`). Raises `ScheduleError` if
    the name is taken."""

    def add(decide: Decide) -> Decide:
        served = order or name.removeprefix("gang-")
        policy = Policy(name, decide, paper, _summary(decide), served, baseline or f"gang-{served}")
        _POLICIES.add(name, policy, same=lambda known, again: known.decide is again.decide)
        return decide

    return add


def unregister(name: str) -> None:
    """Takes out the policy called `name`, if there is one, as tests do with theirs."""
    _POLICIES.remove(name)


def get(name: str) -> Policy:
    """Gives the policy called `name`, of splitjax, registered, or declared by an installed package. Raises
    `ScheduleError`, which lists the names there are, and `ExtensionError` for a package that cannot be loaded."""
    return _POLICIES.find(name)


def names() -> list[str]:
    """Lists the names of all policies, sorted. Raises `ExtensionError` for a declared one that cannot be loaded."""
    _POLICIES.load_all()
    return sorted(_POLICIES)
