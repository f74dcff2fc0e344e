"""Describes a cluster as a value: nodes of equal devices, numbered through, node by node.

Counts and rates come in, or a text such as `"16x8"`; a `Cluster` comes out, which policies place jobs on.
"""

from __future__ import annotations

import dataclasses
import re

from splitjax.errors import ScheduleError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Describes `num_nodes` nodes of `devices_per_node` devices; device d is on node d // devices_per_node.

    **Attributes:**

    - `num_nodes`, `devices_per_node`: how many there are, 1 or more.
    - `memory_bytes`: memory of each device; 0 for memory that is not looked at.
    - `node_bytes_per_second`, `network_bytes_per_second`: rate of a device's link within its node and between nodes
      (`links.exchange_seconds`); 0 for links that take no time beyond what profiles say.

    Raises `ScheduleError` for a cluster without devices.
    """

    num_nodes: int
    devices_per_node: int
    memory_bytes: int = 0
    node_bytes_per_second: float = 0.0
    network_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        if (
            self.num_nodes < 1
            or self.devices_per_node < 1
            or min(self.memory_bytes, self.node_bytes_per_second, self.network_bytes_per_second) < 0
        ):
            raise ScheduleError(
                "a cluster has a node and a device at least, and nothing less than none",
                value=self,
                remedy="give numbers above 0 for nodes and devices, and memory and rates of 0 or more",
            )

    @property
    def num_devices(self) -> int:
        """Counts the devices of all nodes."""
        return self.num_nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """Gives the number of the node that holds `device`."""
        return device // self.devices_per_node

    @staticmethod
    def parse(
        text: str, *, memory_bytes: int = 0, node_bytes_per_second: float = 0.0, network_bytes_per_second: float = 0.0
    ) -> Cluster:
        """Reads a cluster from `text`: `"16x8"` is 16 nodes of 8 devices. `memory_bytes`, `node_bytes_per_second` and
        `network_bytes_per_second` are those of `Cluster`. Raises `ScheduleError` for any other text."""
        match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip())
        if match is None:
            raise ScheduleError(
                "a cluster is given as nodes x devices per node",
                value=text,
                place="cluster",
                remedy='write "16x8" for 16 nodes of 8 devices',
            )
        return Cluster(int(match[1]), int(match[2]), memory_bytes, node_bytes_per_second, network_bytes_per_second)

    def __str__(self) -> str:
        return f"{self.num_nodes}x{self.devices_per_node}"
