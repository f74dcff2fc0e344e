"""Reads what a plan is for: a text such as `tpu:v5e:4x4` goes in, a `Target` comes out."""

from __future__ import annotations

import dataclasses
import math
import re

from splitjax._registry import near
from splitjax.errors import TargetError
from splitjax.machines import tables
from splitjax.machines.devices import DEVICES, DeviceKind
from splitjax.machines.links import Topology

FORMS = "tpu:v5e:4x4, tpu:v5p:4x4x4, tpu:v5e:2*16x16 (two slices), gpu:h200:2x8 (hosts x devices), cpu:8"
_MOST_DEVICES = 10**6
_SIZES = re.compile(r"(?:([1-9]\d{0,6})\*)?([1-9]\d{0,6}(?:x[1-9]\d{0,6})*)", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Target:
    """Says what machine a step is planned for.

    **Attributes:**

    - `kind`: of its devices.
    - `shape`: how many there are within the fast network: by axis of a torus; of others one number, the devices of a
      host or process.
    - `num_islands`: how many such networks there are, which slow links join: slices of TPUs, hosts of GPUs, processes.
    """

    kind: DeviceKind
    shape: tuple[int, ...]
    num_islands: int = 1

    @property
    def island_size(self) -> int:
        """The devices of one fast network."""
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """All devices."""
        return self.num_islands * self.island_size

    @property
    def island_bytes_per_second(self) -> float:
        """What a fast network sends to others, over the links of all its hosts."""
        is_torus = self.kind.fabric.topology is Topology.TORUS
        num_hosts = -(-self.island_size // self.kind.devices_per_host) if is_torus else 1
        return num_hosts * self.kind.fabric.host_link.bytes_per_second

    @property
    def topology_name(self) -> str:
        """What `jax.experimental.topologies.get_topology_desc` calls one fast network of it: `v5e:4x4`; hosts and
        devices for GPUs, as partitions x hosts x devices."""
        sizes = "x".join(map(str, self.shape))
        if self.kind.fabric.topology is Topology.TORUS:
            return f"{self.kind.name.partition(':')[2]}:{sizes}"
        return f"1x{self.num_islands}x{sizes}"

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        if self.kind.fabric.topology is Topology.TORUS:
            return f"{self.kind.name}:{f'{self.num_islands}*' * (self.num_islands > 1)}{sizes}"
        return f"{self.kind.name}:{f'{self.num_islands}x' * (self.num_islands > 1)}{sizes}"


def parse_target(text: str, place: str = "--target") -> Target:
    """Reads a target.

    **Arguments:**

    - `text`: a kind of device, which may be one that `register_device` or an installed package added, and how many:
      `tpu:v5e:4x4` and `tpu:v5p:4x4x4` by the axes of the torus, `tpu:v5e:2*16x16` of two slices, `gpu:h200:2x8` by
      hosts and devices of each, `gpu:h200:8` of one host, `cpu:8` of one process, `cpu:2x4` of two.
    - `place`: what an error names as its place.

    Raises `TargetError` for a kind that is not known, naming those that are, and for numbers that the kind cannot have.
    """
    name, colon, sizes = text.strip().lower().rpartition(":") if isinstance(text, str) else ("", "", "")
    if not colon:
        raise TargetError(
            "a target is a kind of device and how many there are",
            value=text,
            place=place,
            remedy=f"write it as one of {FORMS}",
        )
    if not DEVICES.knows(name):
        raise TargetError(
            f"no kind of device of this name{near(name, list(DEVICES))}",
            value=text,
            place=place,
            remedy=f"use one of {', '.join(sorted(DEVICES))}, or describe your own with"
            " splitjax.machines.register_device",
        )
    kind, match = DEVICES.find(name), _SIZES.fullmatch(sizes)
    if match is None:
        raise TargetError(
            f"how many devices there are is written as sizes, not {sizes!r}",
            value=text,
            place=place,
            remedy=f"write it as one of {FORMS}",
        )
    shape = tuple(map(int, match[2].split("x")))
    target = _of_shape(kind, shape, int(match[1] or 1), text, place)
    if target.num_devices > _MOST_DEVICES:
        raise TargetError("no machine is this large", value=text, place=place, remedy="name fewer devices")
    return target


def _of_shape(kind: DeviceKind, shape: tuple[int, ...], num_slices: int, text: str, place: str) -> Target:
    """Returns the target of a `kind` whose numbers were written as `shape`, with `num_slices` before a star."""
    fabric = kind.fabric
    if fabric.topology is Topology.TORUS:
        if len(shape) != fabric.num_dims:
            example = "x".join(["4"] * fabric.num_dims)
            raise TargetError(
                f"{kind.name} is joined along {fabric.num_dims} axes, and {len(shape)} are given",
                value=text,
                place=place,
                remedy=f"write one size for each axis, such as {kind.name}:{example}",
            )
        return Target(kind, shape, num_slices)
    if len(shape) > 2 or num_slices > 1:
        what = "processes x devices" if fabric.topology is Topology.MEMORY else "hosts x devices"
        raise TargetError(
            f"{kind.name} is written as {what}",
            value=text,
            place=place,
            remedy=f"write it as {kind.name}:2x8, or {kind.name}:8",
        )
    return Target(kind, shape[-1:], shape[0] if len(shape) == 2 else 1)


# Importing the tables is what makes the shipped kinds known.
SHIPPED = tuple(kind for kind in vars(tables).values() if isinstance(kind, DeviceKind))
