"""Describes kinds of devices, and holds those that are known: shipped ones (`tables`), and what others register."""

from __future__ import annotations

import dataclasses
from typing import Any

from splitjax._registry import NamedRegistry
from splitjax.errors import TargetError
from splitjax.machines.links import Fabric


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """Holds what a vendor says of a kind of device; 0 stands for a figure that nobody published.

    **Attributes:**

    - `name`: how targets name it, such as `tpu:v5e`. `platform`: JAX's name of its platform.
    - `peak_flops`: (dtype, flops a second of dense products in it), a multiply-add being two. A dtype that is absent
      is taken to run as fast as the first.
    - `memory_bytes`, `memory_bytes_per_second`: of its main memory (HBM).
    - `fast_memory_bytes`: of the memory that a program manages on the chip: a TPU's VMEM, a GPU's shared memory.
    - `devices_per_host`: in the vendor's own systems.
    - `fabric`: how devices are joined.
    - `sources`: where the figures were read; of those of the shipped kinds that were not, it is said there.
    - `xla_config`: of a GPU, the text of XLA's `GpuTargetConfigProto`, by which it compiles for a device that is not
      here; empty where there is none.
    """

    name: str
    platform: str
    peak_flops: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bytes_per_second: float
    fast_memory_bytes: int
    devices_per_host: int
    fabric: Fabric
    sources: tuple[str, ...]
    xla_config: str = ""

    def flops_per_second(self, dtype: str) -> float:
        """Returns the peak of products in `dtype`. Raises `TargetError` for a kind without any published peak."""
        peaks = dict(self.peak_flops)
        if not peaks:
            raise TargetError(
                f"no peak of {self.name} is published: what it computes has to be measured",
                value=self.name,
                place="flops_per_second",
                remedy="run `splitjax calibrate` there, and give the calibration",
            )
        return peaks.get(dtype, self.peak_flops[0][1])


_REGISTER = "splitjax.machines.register_device(DeviceKind(...))"


def _accept(name: str, found: Any) -> None:
    if not isinstance(found, DeviceKind):
        raise TypeError(f"{found!r} is no DeviceKind")
    if name not in DEVICES:
        DEVICES.add(name, found)


DEVICES: NamedRegistry[DeviceKind] = NamedRegistry(
    "kind of device", group="splitjax.devices", error=TargetError, register=_REGISTER, accept=_accept
)


def register_device(kind: DeviceKind) -> DeviceKind:
    """Makes a `kind` of device known under its name, and returns it. Raises `TargetError` for a name that is taken by
    another kind."""
    DEVICES.add(kind.name, kind, same=lambda old, new: old == new)
    return kind
