"""Axis names and mesh arithmetic: the shape of a mesh, the mesh itself, and the order of its devices."""

from splitjax.mesh.meshes import (
    MeshShape,
    MeshSizes,
    abstract_mesh,
    check_mesh,
    device_kind_of,
    has_devices_here,
    inside_mesh,
    make_mesh,
    platform_of,
    shape_over,
    with_devices,
)

__all__ = [
    "MeshShape",
    "MeshSizes",
    "abstract_mesh",
    "check_mesh",
    "device_kind_of",
    "has_devices_here",
    "inside_mesh",
    "make_mesh",
    "platform_of",
    "shape_over",
    "with_devices",
]
