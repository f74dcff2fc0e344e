"""Meshes of the devices that cells are compiled for, which need not be here."""

from __future__ import annotations

import math
from typing import Any

from benchmarks.planner.cells import GPU


def mesh_of(target: str, sizes: dict[str, int]) -> Any:
    """A mesh of these `sizes` on a target; of the CPU's the sizes themselves, for virtual devices.

    The compilers of TPUs and GPUs need no device: libtpu, or JAX's CUDA plugin with `JAX_PLATFORMS=cpu,cuda` and
    `JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1` in the environment."""
    if target.startswith("tpu:"):
        return _tpu_mesh(target.removeprefix("tpu:"), sizes)
    if target == GPU:
        from jax.sharding import AxisType, Mesh

        from tests.kernels.h200 import devices

        placed = devices(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        return Mesh(placed, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    return sizes


def _tpu_mesh(topology: str, sizes: dict[str, int]) -> Any:
    """A mesh of TPUs that need not exist, its axes placed as JAX places them on a torus."""
    from jax.experimental import mesh_utils, topologies
    from jax.sharding import AxisType, Mesh

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    arranged = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
    return Mesh(arranged, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
