"""Sets JAX up as the command line wants it, before JAX starts a backend: devices, compile cache, a quiet start."""

from __future__ import annotations

import os
import pathlib

import jax

from splitjax.runtime.launch import compiled

DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"
# XLA's CPU compiler favours speed over memory unless told otherwise, and its memory figures are then not
# those of an accelerator's schedule.
MEMORY_FLAG = "--xla_cpu_scheduler_type"
# Compiling less than this is not worth a file in the cache.
MIN_COMPILE_SECONDS = 0.5
THREADS = 32
_GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA, AMD, and Windows' own under WSL
_GOOGLE_PCI_VENDOR = "0x1ae0"


def start(num_devices: int, *, platform: str = "cpu") -> None:
    """Prepares JAX, which must not have started a backend yet.

    **Arguments:**

    - `num_devices`: how many virtual devices a CPU shall show. What is set in `XLA_FLAGS` or `JAX_NUM_CPU_DEVICES`
      stands.
    - `platform`: `"cpu"`, or `"auto"` for what JAX finds.
    """
    if platform == "cpu" or not has_accelerator():
        jax.config.update("jax_platforms", "cpu")
    quiet_absent_tpu()
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags and "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", num_devices)
    if num_devices > 1:
        # All virtual devices share one pool of threads, by default as many as there are cores or devices: steps in
        # flight can take all of them and wait for each other forever. From twice as many threads as devices on that was
        # not seen.
        os.environ.setdefault("NPROC", str(max(THREADS, 4 * num_devices)))
    if MEMORY_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {MEMORY_FLAG}=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED".strip()
    if not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", str(cache_dir()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_SECONDS)


def cache_dir() -> pathlib.Path:
    """Returns the folder where compiled programs are kept between runs: `JAX_COMPILATION_CACHE_DIR`, `SPLITJAX_CACHE`,
    or a folder in the user's cache directory (XDG base directory specification)."""
    return compiled.cache_dir(os.environ)


def has_accelerator() -> bool:
    """Returns whether this machine shows a TPU, or a GPU's driver. Where there is none, JAX need not search: libtpu,
    installed for its compiler alone, is loud about it."""
    return _has_tpu() or any(os.path.exists(file) for file in _GPU_FILES) or bool(os.environ.get("JAX_PLATFORMS"))


def _has_tpu() -> bool:
    return any(
        _GOOGLE_PCI_VENDOR in vendor.read_text() for vendor in pathlib.Path("/sys/bus/pci/devices").glob("*/vendor")
    )


def quiet_absent_tpu() -> None:
    """Keeps libtpu, where it is installed for its compiler alone, from searching for a TPU host's metadata."""
    if _has_tpu():
        return
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
