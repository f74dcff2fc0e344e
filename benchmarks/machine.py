"""What a figure was measured on and with: the header of every result page."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess

PACKAGES = ("splitjax", "jax", "jaxlib", "flax", "optax", "numpy")


@dataclasses.dataclass(frozen=True)
class Machine:
    """One machine with what is installed on it."""

    date: str  # ISO 8601, UTC
    system: str
    processor: str
    num_cores: int  # that this process may use
    memory_bytes: int
    devices: str  # such as "8 x cpu (virtual)"
    python: str
    versions: tuple[tuple[str, str], ...]  # (package, version)
    xla_flags: str
    commit: str  # of the checkout, such as "1a2b3c4", or "1a2b3c4 with changes"; empty outside a checkout


def this_machine(packages: tuple[str, ...] = PACKAGES) -> Machine:
    """Looks at this machine; starts JAX's backend, so flags and device counts have to be set before."""
    import jax

    devices = jax.devices()
    virtual = " (virtual)" if devices[0].platform == "cpu" and len(devices) > 1 else ""
    return Machine(
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        system=f"{platform.system()} {platform.machine()}",
        processor=_processor(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=_memory_bytes(),
        devices=f"{len(devices)} x {devices[0].device_kind}{virtual}",
        python=platform.python_version(),
        versions=tuple((package, version(package)) for package in packages),
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        commit=this_commit(),
    )


def this_commit() -> str:
    """The commit that the benchmarks' checkout stands at, and whether its files differ from it (result pages apart)."""
    folder = pathlib.Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short", "HEAD")
        changed = git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    except OSError:  # no git on this machine
        return ""
    return f"{commit} with changes" if commit and changed else commit


def version(package: str) -> str:
    """The installed version, or "not installed"."""
    if package == "splitjax":  # a checkout need not be installed
        import splitjax

        return splitjax.__version__
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def header(machine: Machine, command: str) -> str:
    """Markdown lines that a result page starts with. `command`: what makes the page anew."""
    lines = [
        (
            f"- {machine.date}{f', commit {machine.commit}' if machine.commit else ''}, {machine.system},"
            f" {machine.processor}, {machine.num_cores} cores, {machine.memory_bytes / 2**30:.0f} GiB"
        ),
        f"- devices: {machine.devices}; Python {machine.python}; "
        + ", ".join(f"{name} {number}" for name, number in machine.versions),
        f"- command: `{command}`" + (f"; `XLA_FLAGS={machine.xla_flags}`" if machine.xla_flags else ""),
    ]
    return "\n".join(lines) + "\n"


def _processor() -> str:
    """The processor's name, from /proc/cpuinfo where there is one."""
    info = pathlib.Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return 0
