"""Measures the machine that this run is on: all of its devices, and the links between them, into a `Calibration`."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from splitjax.errors import CalibrationError
from splitjax.machines.calibration import Calibration, Curve, OperationKind, Point
from splitjax.measure.calibrating.collectives import collective_times
from splitjax.measure.calibrating.operations import probes
from splitjax.measure.calibrating.timing import Clock, Timer
from splitjax.measure.calibrating.waiting import COMPUTED_SECONDS, waiting_curve

_PACKAGES = ("jax", "jaxlib")
# What computes long on what it reads, and what is transposed, which was made right before, need not come from memory.
_WARM = (
    OperationKind.CONVOLUTION,
    OperationKind.FILTER_GRADIENT,
    OperationKind.SMALL_CONVOLUTION,
    OperationKind.SORT,
    OperationKind.RANDOM,
    OperationKind.TRANSPOSE,
)
# Bytes that a call is given, below and above the 32 MiB up to which glibc's allocator keeps what a program frees.
_NEW_MEMORY = (4 << 20, 28 << 20, 40 << 20, 160 << 20)


def calibrate(
    clock: Clock = "wall", *, quick: bool = False, told: Callable[[str], None] = lambda line: None
) -> Calibration:
    """Measures how long operations and collectives take on the devices of this run.

    In a run of several processes all must call it at the same time; all get what process 0 measured. It takes about a
    minute on an idle machine.

    **Arguments:**

    - `clock`: `"wall"`, or `"processor"`: processor time over the cores that the devices use, for machines that are
      busy with other work. It does not see waiting, and so no links between processes: these are timed by the wall.
    - `quick`: fewer and smaller sizes, in some seconds, for trying it out.
    - `told`: is called with a line for everything that was measured.

    Raises `CalibrationError` for another clock, and where processes have unequal numbers of devices.
    """
    if clock not in ("wall", "processor"):
        raise CalibrationError(
            "a clock is wall or processor", value=clock, place="clock", remedy='leave it out, or give "processor"'
        )
    devices = tuple(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    num_processes = len({device.process_index for device in devices})
    if len(devices) % num_processes:
        raise CalibrationError(
            "the processes have unequal numbers of devices",
            value=[device.process_index for device in devices],
            place="calibrate",
            remedy="start them alike",
        )
    timer = Timer(devices, clock, enough_seconds=0.002, rounds=3) if quick else Timer(devices, clock)
    by_kind: dict[tuple[OperationKind, str], list[Point]] = {}
    is_accelerator = devices[0].platform != "cpu"
    chosen = probes(most_elements=1 << 14, most_flops=2.0**21) if quick else probes(is_accelerator=is_accelerator)
    for probe in chosen:
        seconds = timer.seconds(probe.turn, probe.arrays, cold=probe.kind not in _WARM, in_loop=probe.in_loop)
        by_kind.setdefault((probe.kind, probe.dtype), []).append(Point(probe.narrow, probe.size, seconds))
        told(f"{probe.kind.value} of {probe.size:.3g}, {probe.narrow} wide: {1e6 * seconds:.4g} us")
    if not is_accelerator:
        memory = new_memory_curve(timer, quick=quick)
        by_kind[memory.kind, memory.dtype] = list(memory.points)
        for point in memory.points:
            told(f"{int(point.size) >> 20} MiB of new memory: {1e3 * point.seconds:.4g} ms")
    curves = tuple(
        Curve(kind, dtype, tuple(sorted(points, key=lambda point: (point.narrow, point.size))))
        for (kind, dtype), points in by_kind.items()
    )
    curves = tuple(_beside_moving(curve, curves) if curve.kind is OperationKind.COSTLY else curve for curve in curves)
    by_wall = timer if num_processes == 1 else Timer(devices, "wall", timer.enough_seconds, timer.rounds)
    collectives = []
    for each in collective_times(by_wall, num_processes, *(((1 << 8, 1 << 12),) if quick else ())):
        collectives.append(each)
        told(f"{each.op} of {each.participants}: {each.link}")
    if num_processes > 1 and not is_accelerator:
        waits = waiting_curve(by_wall, num_processes, *((COMPUTED_SECONDS[:2],) if quick else ()))
        curves += (waits,)
        for point in waits.points:
            told(f"waiting after {1e3 * point.size:.4g} ms of computing: {1e6 * point.seconds:.4g} us")
    smallest = jax.ShapeDtypeStruct((8,), jnp.float32)
    return Calibration(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        platform=devices[0].platform,
        device=devices[0].device_kind,
        versions=tuple((package, importlib.metadata.version(package)) for package in _PACKAGES),
        num_processes=num_processes,
        devices_per_process=len(devices) // num_processes,
        clock=clock,
        call_seconds=timer.call_seconds(),
        node_seconds=timer.seconds(lambda x: x * 0.999, (smallest,)),
        curves=curves,
        collectives=tuple(collectives),
    )


def new_memory_curve(timer: Timer, *, quick: bool = False) -> Curve:
    """Returns what a call takes to get memory in this process: what it takes in another one depends on whether that
    keeps memory, which its environment says when it begins.

    **Arguments:** `timer`: of all devices of the run. `quick`: as of `calibrate`."""
    sizes = _NEW_MEMORY[:2] if quick else _NEW_MEMORY
    points = tuple(Point(0, float(num_bytes), timer.new_memory_seconds(num_bytes)) for num_bytes in sizes)
    return Curve(OperationKind.NEW_MEMORY, "float32", points)


def _beside_moving(costly: Curve, curves: Sequence[Curve]) -> Curve:
    """Returns what exponentials take beyond the loop that reads and writes their elements, which counts by its bytes;
    a tenth of it at least, where noise made that loop slower. `costly`: as measured, that loop included."""
    moving = next(curve for curve in curves if curve.kind is OperationKind.ELEMENTWISE)
    points = []
    for point in costly.points:
        beside = point.seconds - moving.seconds(8 * point.size)
        points.append(dataclasses.replace(point, seconds=max(beside, point.seconds / 10)))
    return dataclasses.replace(costly, points=tuple(points))
