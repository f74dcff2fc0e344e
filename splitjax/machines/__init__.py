"""Describes the machines that steps are planned for: kinds of devices, how they are joined, and what was measured.

A text such as `tpu:v5e:4x4` comes in, a `Target` comes out (`targets`), whose `DeviceKind` has the figures that the
vendor published (`devices`, `tables`), and whose links carry the axes of a mesh (`routes`). What `splitjax calibrate`
measured of a machine is a `Calibration` (`calibration`). Nothing here looks at a device.
"""

from splitjax.machines.devices import DeviceKind, register_device
from splitjax.machines.links import Fabric, Link
from splitjax.machines.targets import Target, parse_target

__all__ = ["DeviceKind", "Fabric", "Link", "Target", "parse_target", "register_device"]
