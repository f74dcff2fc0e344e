"""`splitjax doctor`: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import sys
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console

import splitjax
from splitjax.cli import _session
from splitjax.cli._options import Traceback
from splitjax.cli._output import print_value
from splitjax.display.document import Document, Pairs, Paragraph, Section

PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "numpy",
    "orbax-checkpoint",
    "libtpu",
    "scikit-learn",
    "matplotlib",
    "treescope",
)
_CUDA_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")


@dataclasses.dataclass(frozen=True)
class Doctor(Traceback):
    """Show versions, devices and settings of this machine, with advice."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        _session.quiet_absent_tpu()
        import jax

        devices = jax.devices()
        print_value(doctor_document(devices), console)
        return 0


class MachineDevice(Protocol):
    """Says what a device is, as a `jax.Device` does."""

    @property
    def platform(self) -> str:
        """Returns the platform, such as `cpu`."""
        ...

    @property
    def device_kind(self) -> str:
        """Returns the name of the hardware."""
        ...


def doctor_document(devices: Sequence[MachineDevice]) -> Document:
    """Makes the document of this machine with these `devices`: what there is, then what to do."""
    pairs = Pairs(tuple((name, (value,)) for name, value in facts(devices)))
    return Document("", (Section("this machine", (pairs,)), Section("advice", tuple(map(Paragraph, advice(devices))))))


def facts(devices: Sequence[MachineDevice]) -> list[tuple[str, str]]:
    """Returns name and value of everything that decides how splitjax runs here, with these `devices`."""
    kinds = sorted({f"{device.platform} ({device.device_kind})" for device in devices})
    rows = [
        ("system", platform.platform()),
        ("cores", str(_num_cores())),
        ("splitjax", splitjax.__version__),
        ("Python", f"{platform.python_version()} at {sys.executable}"),
    ]
    rows += [(package, _version(package) or "not installed") for package in PACKAGES]
    rows += [
        (
            "CUDA plugin",
            ", ".join(f"{name} {_version(name)}" for name in _CUDA_PLUGINS if _version(name)) or "not installed",
        ),
        ("devices", f"{len(devices)} x {', '.join(kinds)}"),
        ("virtual CPU devices", str(len(devices)) if _is_virtual(devices) else "none"),
        ("XLA_FLAGS", os.environ.get("XLA_FLAGS") or "not set"),
        ("compile cache", f"{_session.cache_dir()} ({_size_of(_session.cache_dir())})"),
    ]
    return rows


def advice(devices: Sequence[MachineDevice]) -> list[str]:
    """Returns what to do about what is missing, beside these `devices`; empty for a machine that has everything."""
    lines = []
    if len(devices) == 1:
        lines.append(
            "one device: a mesh of 8 can be tried on virtual CPU devices. `splitjax demo` sets them up itself; in your"
            f" own script set XLA_FLAGS={_session.DEVICE_COUNT_FLAG}=8 before JAX starts."
        )
    if _version("scikit-learn") is None or _version("matplotlib") is None:
        lines.append(
            "the demo needs scikit-learn for its images and matplotlib for its plots: pip install 'splitjax[demo]'"
        )
    if _version("libtpu") is None:
        lines.append(
            "libtpu is absent: with it plans for TPU pods can be compiled here, without a TPU: pip install"
            " 'splitjax[tpu]'"
        )
    if devices[0].platform == "cpu" and os.path.exists("/dev/nvidiactl"):
        lines.append(
            "there is an NVIDIA GPU, and JAX does not use it: pip install 'splitjax[gpu]', and unset JAX_PLATFORMS"
        )
    if not lines:
        lines.append("nothing is missing")
    return lines


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_virtual(devices: Sequence[MachineDevice]) -> bool:
    return devices[0].platform == "cpu" and len(devices) > 1


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _size_of(folder: pathlib.Path) -> str:
    if not folder.is_dir():
        return "empty"
    files = [file for file in folder.iterdir() if file.is_file()]
    return f"{len(files)} files, {sum(file.stat().st_size for file in files) / 2**20:.1f} MiB"
