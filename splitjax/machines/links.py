"""Holds what a link between devices can carry, and how devices of one kind are joined."""

from __future__ import annotations

import dataclasses
import enum

from splitjax.errors import SyncError


@dataclasses.dataclass(frozen=True)
class Link:
    """A link in one direction: seconds until a small message has come, bytes a second of a large one.

    Raises `SyncError` for a rate that is not above 0, or a negative latency."""

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0 or self.latency_seconds < 0:
            raise SyncError(
                "a link needs a rate above 0 and a latency of at least 0", value=self, remedy="measure it again"
            )


class Topology(enum.Enum):
    """Names how devices that share a fast network are joined.

    - `TORUS`: each to its neighbours along two or three axes, as TPUs are.
    - `SWITCH`: each to a switch, through which it reaches every other at full rate, as GPUs of a host are.
    - `MEMORY`: they are threads of one process, as virtual CPU devices are.
    """

    TORUS = "torus"
    SWITCH = "switch"
    MEMORY = "memory"


@dataclasses.dataclass(frozen=True)
class Fabric:
    """Says how devices of a kind are joined.

    **Attributes:**

    - `topology`: within the fast network.
    - `link`: one link of the fast network, in one direction.
    - `num_dims`: of a torus, its axes; two links of a device run along each. 1 for other topologies.
    - `wraps_every`: of a torus, an axis closes to a ring where its size is a multiple of this; 0 where none does.
    - `host_link`: what a host sends to other hosts, all of its devices together, in one direction.
    """

    topology: Topology
    link: Link
    host_link: Link
    num_dims: int = 1
    wraps_every: int = 0

    def closes(self, size: int) -> bool:
        """Returns whether a torus axis of `size` devices is a ring."""
        return self.wraps_every > 0 and size % self.wraps_every == 0
