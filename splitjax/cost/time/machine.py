"""Says how long a machine takes for a task: by what was measured of it, or by what its vendor publishes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from splitjax.cost.time.work import Load, Task
from splitjax.machines.calibration import Calibration, OperationKind
from splitjax.machines.routes import Route, routes
from splitjax.machines.targets import Target


@dataclasses.dataclass(frozen=True)
class Machine:
    """Holds what is known of a machine for a mesh.

    **Attributes:**

    - `sizes`: of the mesh axes, in the mesh's order.
    - `calibration`: what was measured of it; None for a machine that is known by its vendor's figures alone. Nothing
      runs at these peaks, so that times are lower bounds where its kernels are those that are predicted: on an H100 six
      of six steps took longer (benchmarks/results/accelerator.md).
    - `target`: the machine that is not here; None for the one that was measured.
    - `routes`: by mesh axis, what carries it; empty for a measured one.
    - `overlaps`: whether collectives go on while the device computes.
    """

    sizes: Mapping[str, int]
    calibration: Calibration | None = None
    target: Target | None = None
    routes: Mapping[str, Route] = dataclasses.field(default_factory=dict)
    overlaps: bool = False

    @classmethod
    def measured(cls, calibration: Calibration, sizes: Mapping[str, int]) -> Machine:
        """Returns the machine of a `calibration`, for a mesh of these `sizes`. On CPU a device's collectives and its
        operations take turns."""
        return cls(sizes, calibration, overlaps=calibration.platform != "cpu")

    @classmethod
    def published(cls, target: Target, sizes: Mapping[str, int]) -> Machine:
        """Returns a `target` as its vendor describes it, for a mesh of these `sizes`. Raises `TargetError` for a mesh
        of another size, and for a kind of device that nobody publishes figures of."""
        target.kind.flops_per_second("bfloat16")
        return cls(sizes, target=target, routes=routes(target, sizes), overlaps=True)

    @property
    def platform(self) -> str:
        """The platform whose compiler makes the kernels, such as `gpu`."""
        if self.calibration is not None:
            return self.calibration.platform
        assert self.target is not None, "a machine is measured or published"
        return self.target.kind.platform

    @property
    def device_kind(self) -> str:
        """The kind of its devices, such as `tpu:v5e`; "" of a machine that was measured."""
        return "" if self.target is None else self.target.kind.name

    @property
    def call_seconds(self) -> float:
        """What a step takes beside what its device does."""
        return self.calibration.call_seconds if self.calibration is not None else 0.0

    def new_memory_seconds(self, num_bytes: float) -> float:
        """Returns what a call takes to get so many bytes from the system: where allocators give large blocks back after
        each call (glibc's those above 32 MiB), every page of them is made again when it is first written."""
        return self.calibration.new_memory_seconds(num_bytes) if self.calibration is not None else 0.0

    def has_waits(self, task: Task) -> bool:
        """Returns whether devices wait for each other at a `task`: whether it is a collective between processes of a
        measured machine whose collectives and operations take turns."""
        if not task.op or self.overlaps or self.calibration is None or self.calibration.num_processes == 1:
            return False
        return any(self.sizes.get(axis, 1) > 1 and self.crosses_processes(axis) for axis in task.axes)

    def waiting_seconds(self, computed_seconds: float) -> float:
        """Returns what a device waits for others at a collective after it computed for so long."""
        return self.calibration.waiting_seconds(computed_seconds) if self.calibration is not None else 0.0

    def seconds(self, task: Task) -> float:
        """Returns what a `task` takes that is neither a loop nor waits for anything."""
        if task.op:
            return self._between(task)
        if self.calibration is not None:
            if self.calibration.platform != "cpu":
                # The matrices of a batched product run side by side: they take as long as one that is as much work.
                loads = [dataclasses.replace(load, size=task.repeats * load.size) for load in task.loads]
                return sum(self._measured(self.calibration, load, task.num_bytes, task.dtype) for load in loads)
            num_bytes = task.num_bytes / task.repeats
            return task.repeats * sum(
                self._measured(self.calibration, load, num_bytes, task.dtype) for load in task.loads
            )
        assert self.target is not None, "a machine is measured or published"
        kind = self.target.kind
        return max(task.flops / kind.flops_per_second(task.dtype), task.num_bytes / kind.memory_bytes_per_second)

    def _measured(self, calibration: Calibration, load: Load, num_bytes: float, dtype: str) -> float:
        seconds = calibration.seconds(load.kind, load.size, load.narrow, dtype)
        if load.kind.counts_flops or load.kind in (OperationKind.ROW_SUM, OperationKind.COLUMN_SUM):
            # What is small in flops may still have to come from memory.
            moved = calibration.seconds(OperationKind.ELEMENTWISE, num_bytes)
            return max(seconds, moved)
        return seconds

    def _between(self, task: Task) -> float:
        """Returns what a collective takes, over one mesh axis after the other."""
        axes = [axis for axis in task.axes if self.sizes.get(axis, 1) > 1]
        count = math.prod(self.sizes[axis] for axis in axes)
        if not axes:
            return 0.0
        if self.calibration is not None:
            between = any(self.crosses_processes(axis) for axis in axes)
            return self.calibration.collective_seconds(task.op, count, between, task.sent_bytes, task.num_messages)
        found, left = 0.0, task.sent_bytes
        for number, axis in enumerate(axes):
            route = self.routes[axis]
            # The first axis carries its own share of a ring over all devices; the next ones carry what is left.
            share = left if number == len(axes) - 1 else left * (1 - 1 / route.size) / (1 - 1 / count)
            left -= share
            count //= route.size
            found += _along(route, task.op, share)
        return found

    def crosses_processes(self, axis: str) -> bool:
        """Returns whether neighbours along a mesh axis of a measured machine are in different processes: devices of one
        are numbered one after the other, and the last mesh axis runs fastest."""
        assert self.calibration is not None, "processes are those of a calibration"
        names = list(self.sizes)
        stride = math.prod(self.sizes[name] for name in names[names.index(axis) + 1 :])
        return stride * self.sizes[axis] > self.calibration.devices_per_process

    def places(self, task: Task) -> frozenset[str]:
        """Returns the links that a collective takes: two with one in common go one after the other."""
        if not self.routes:
            return frozenset(("links",))
        return frozenset(place for axis in task.axes if axis in self.routes for place in self.routes[axis].over)


def _along(route: Route, op: str, sent_bytes: float) -> float:
    """Returns what a collective takes along one mesh axis: by a ring, or an all-reduce by a tree where that is faster
    (Thakur, Rabenseifner, Gropp 2005, as `cost.ring`)."""
    steps = {"all_reduce": 2 * (route.size - 1), "permute": 1}.get(op, route.size - 1)
    link = route.link
    ring = steps * link.latency_seconds + sent_bytes / link.bytes_per_second
    if op != "all_reduce":
        return ring
    # A tree sends all of the bytes up and down, in few steps.
    whole = sent_bytes * route.size / max(route.size - 1, 1)
    return min(ring, 2 * math.log2(route.size) * link.latency_seconds + whole / link.bytes_per_second)
