"""Says what the kernels of a call take on a GPU, by the device's own clock.

A loop around a small operation would tell how fast the host is: before each turn of a loop it waits for the answer
whether there is one (23 us on an H100, where a kernel takes 1 us), and what makes turns depend on each other copies
arrays. The profiler has the beginning and the end of every kernel.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
from jax.profiler import ProfileData

from splitjax.errors import CalibrationError


def kernel_seconds(run: Callable[[], Any], num_calls: int) -> float:
    """Returns the seconds that the kernels of a call of `run` take together, a mean over `num_calls` calls; `run`
    starts what it times, compiled before, and returns arrays to wait for. Raises `CalibrationError` where the profiler
    sees no kernel of a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(num_calls):
                jax.block_until_ready(run())
        files = sorted(pathlib.Path(folder).glob("**/*.xplane.pb"))
        nanoseconds = sum(_of_file(file) for file in files)
    if not nanoseconds:
        raise CalibrationError(
            "the profiler saw no kernel of a GPU",
            value=[device.device_kind for device in jax.devices()],
            place="calibrate",
            remedy="let this process use NVIDIA's profiling interface (CUPTI), or measure on another machine",
        )
    return nanoseconds / num_calls / 1e9


def _of_file(file: pathlib.Path) -> float:
    """The nanoseconds of all kernels in a profile: those of devices' streams, and not the lines that sum them up."""
    return sum(
        event.duration_ns
        for plane in ProfileData.from_file(str(file)).planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )
