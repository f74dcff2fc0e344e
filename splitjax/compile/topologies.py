"""Finds the devices of a target for its own compiler, which needs none of them to be here.

A `Target` comes in; the devices of a topology description come out (`jax.experimental.topologies`), for which programs
are compiled and on which none can run: of a TPU by libtpu, of a GPU by JAX's CUDA plugin. A target of processors has
the virtual devices of this process.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from splitjax.errors import CompilerError
from splitjax.machines.targets import Target
from splitjax.mesh import MeshShape
from splitjax.mesh.device_order import arrange

LIMIT_UNIT = 2**20  # in which a TPU's compiler is told what memory it may use
# What keeps libtpu from looking for a TPU's host, and from refusing to be loaded by two processes at once.
_WITHOUT_TPU = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
_PACKAGES = {"tpu": ("libtpu",), "cpu": ("jaxlib",), "gpu": ("jax-cuda13-plugin", "jax-cuda12-plugin")}
_REMEDIES = {
    "tpu": "pip install libtpu, which needs no TPU (it comes with splitjax[tpu])",
    "gpu": 'pip install "jax[cuda13]", which needs no GPU (it comes with splitjax[gpu])',
}
# XLA's name of the platform, where it is not JAX's.
_XLA_PLATFORMS = {"gpu": "cuda"}


def compiler_version(target: Target) -> str:
    """Returns the package that compiles for a `target`, with its version: `libtpu 0.0.42.1`. Raises `CompilerError`
    where it is not installed."""
    for package in _PACKAGES.get(target.kind.platform, ()):
        try:
            return f"{package} {importlib.metadata.version(package)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise _absent(target)


def target_mesh(target: Target, shape: MeshShape, axis_types: Sequence[AxisType]) -> Mesh:
    """Makes a mesh of the devices of a `target`, in the order in which they would make one there.

    **Arguments:** `target`: the machine. `shape`: of the mesh, which has as many devices. `axis_types`: of its axes.

    Raises `CompilerError` where the compiler of such devices is not installed, where it refuses the target's topology,
    and for a kind of GPU of which XLA knows too little."""
    compiler_version(target)
    devices = {"tpu": _tpus, "gpu": _gpus, "cpu": _processors}[target.kind.platform](target)
    return Mesh(
        arrange(devices, {axis: (1, size) for axis, size in shape.axes}), shape.names, axis_types=tuple(axis_types)
    )


def compiler_options(target: Target, limit_bytes: int | None) -> dict[str, int | str]:
    """Returns the options that a step is compiled with for a `target`.

    A TPU's memory is limited to `limit_bytes` (whole `LIMIT_UNIT`s; None for what it has), by which its compiler also
    decides what to compute again. A CPU's compiler is asked to save memory, as one does who is short of it. That of a
    GPU tries no kernels, for there is none to try them on."""
    if target.kind.platform == "tpu":
        return {} if limit_bytes is None else {"xla_tpu_max_hbm_size_mib": limit_bytes // LIMIT_UNIT}
    if target.kind.platform == "gpu":
        return {"xla_gpu_autotune_level": 0}
    return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def _tpus(target: Target) -> list[Any]:
    more: dict[str, Any] = {} if target.num_islands == 1 else {"num_slices": target.num_islands}
    if any(size % 2 for size in target.shape[:2]):  # hosts of four chips make no such slice, single chips do
        more["chips_per_host_bounds"] = (1, 1, 1)
    added = {name: value for name, value in _WITHOUT_TPU.items() if name not in os.environ}
    os.environ.update(added)
    try:
        return _described(target, target.topology_name, more)
    finally:
        for name in added:
            del os.environ[name]


def _gpus(target: Target) -> list[Any]:
    if not target.kind.xla_config:
        raise CompilerError(
            f"what XLA has to know of {target.kind.name} to compile for it is not known",
            value=str(target),
            place="target",
            remedy="give its DeviceKind an xla_config: the text of a GpuTargetConfigProto, such as XLA keeps for many"
            " GPUs under xla/backends/gpu/target_config/specs",
        )
    more = {"topology": target.topology_name, "target_config": target.kind.xla_config}
    return _described(target, target.kind.name.partition(":")[2], more)


def _processors(target: Target) -> list[Any]:
    try:
        devices = jax.devices("cpu")
    except RuntimeError as error:
        raise CompilerError(
            "JAX has no devices of the platform cpu here",
            value=str(target),
            place="target",
            remedy="let JAX_PLATFORMS name cpu too",
        ) from error
    if len(devices) < target.num_devices:
        raise CompilerError(
            f"{target} needs {target.num_devices} virtual devices, and this process has {len(devices)}",
            value=str(target),
            place="target",
            remedy=f"set XLA_FLAGS=--xla_force_host_platform_device_count={target.num_devices} before JAX starts",
        )
    return devices[: target.num_devices]


def _described(target: Target, name: str, more: Mapping[str, Any]) -> list[Any]:
    """Returns the devices of a topology description. `name`, `more`: what the compiler calls it."""
    platform = target.kind.platform
    try:
        return list(topologies.get_topology_desc(name, _XLA_PLATFORMS.get(platform, platform), **more).devices)
    except NotImplementedError as error:  # what JAX says of a plugin that is not there
        raise _absent(target) from error
    except jax.errors.JaxRuntimeError as error:
        raise CompilerError(
            f"the compiler of {target.kind.name} refuses this topology: {str(error).splitlines()[0][:300]}",
            value=str(target),
            place="target",
            remedy="name a slice that there is: the sizes of a TPU's are in its documentation"
            if platform == "tpu"
            else "name as many hosts and devices as there can be",
        ) from error
    except RuntimeError as error:  # "JAX TPU support not installed", "Unknown backend"
        raise _absent(target) from error


def _absent(target: Target) -> CompilerError:
    return CompilerError(
        f"the compiler of {target.kind.name} is not installed",
        value=str(target),
        place="target",
        remedy=_REMEDIES.get(target.kind.platform, "use a target of the platform tpu, gpu or cpu"),
    )
