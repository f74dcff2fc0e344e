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
from splitjax.cli._checks import Check, check_collectives, check_folder
from splitjax.cli._options import CommandOptions
from splitjax.cli._output import print_value, write_json
from splitjax.cli._waiting import waiting
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


# Devices that are shown where there is no accelerator: enough for a mesh of two axes.
VIRTUAL_DEVICES = 8
FAILED = 1


@dataclasses.dataclass(frozen=True)
class Doctor(CommandOptions):
    """Show versions, devices and settings of this machine, try its collectives and a folder for checkpoints, and give
    advice. Exits with 1 if a try fails."""

    checkpoint_dir: pathlib.Path = pathlib.Path()
    """Folder that is tried for checkpoints."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        flags = os.environ.get("XLA_FLAGS", "")
        _session.start(VIRTUAL_DEVICES, platform="auto")
        with waiting("starting the devices") as say:
            import jax

            devices = jax.devices()
            say(f"compiling and running collectives over {len(devices)} devices")
            checks = [check_collectives(devices)]
            say(f"writing to {self.checkpoint_dir.absolute()}")
            checks.append(check_folder(self.checkpoint_dir))
        known = facts(devices, flags)
        print_value(doctor_document(known, checks, advice(devices)), console)
        found = {"facts": dict(known), "checks": list(map(dataclasses.asdict, checks))}
        write_json(self.json, {**found, "advice": advice(devices)}, console)
        return 0 if all(check.passed for check in checks) else FAILED


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


def doctor_document(known: Sequence[tuple[str, str]], checks: Sequence[Check], advices: Sequence[str]) -> Document:
    """Makes the document of this machine: what is `known` of it, what the `checks` found, what to do (`advices`)."""
    pairs = Pairs(tuple((name, (value,)) for name, value in known))
    tried = tuple(
        (check.name, (f"{'good' if check.passed else 'FAILED'}: {check.found} ({check.seconds:.1f} s)",))
        for check in checks
    )
    remedies = [f"{check.name}: {check.remedy}" for check in checks if check.remedy]
    parts = (
        Section("this machine", (pairs,)),
        Section("tried", (Pairs(tried),)),
        Section("advice", tuple(map(Paragraph, [*remedies, *advices]))),
    )
    return Document("", parts)


def facts(devices: Sequence[MachineDevice], flags: str = "") -> list[tuple[str, str]]:
    """Returns name and value of everything that decides how splitjax runs here, with these `devices`, and the user's
    `flags` for XLA."""
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
        ("XLA_FLAGS", flags or "not set"),
        ("compile cache", f"{_session.cache_dir()} ({_size_of(_session.cache_dir())})"),
    ]
    return rows


def advice(devices: Sequence[MachineDevice]) -> list[str]:
    """Returns what to do about what is missing, beside these `devices`; empty for a machine that has everything."""
    lines = []
    if devices[0].platform == "cpu":
        lines.append(
            "no accelerator: the devices are virtual, on this machine's processor, for trying meshes and not for speed."
            " The commands of splitjax make them themselves; in your own script call"
            f' jax.config.update("jax_num_cpu_devices", {VIRTUAL_DEVICES}) before anything runs.'
        )
    elif len(devices) == 1:
        lines.append(
            f"one accelerator: meshes can be tried on virtual devices of the processor (--mesh data=2,model=4 of the"
            f" commands; in your own script JAX_PLATFORMS=cpu and jax_num_cpu_devices={VIRTUAL_DEVICES})"
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
