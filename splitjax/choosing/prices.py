"""Says what a predicted step takes in seconds: arithmetic, memory traffic and what is sent, one after the other.

A `cost.Prediction` and the figures of a machine come in, seconds come out. They are a sum over the parts of the step,
nothing of which overlaps, so that a change of one layer changes them by what it changes there: that is what a search
over layers needs. `cost.time` predicts the time of a lowered program, which takes a thousand times as long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from splitjax.cost.prediction import Prediction
from splitjax.cost.row_tables import RowTable, beside_rows
from splitjax.cost.time.machine import Machine
from splitjax.machines import tables
from splitjax.machines.calibration import Calibration, OperationKind
from splitjax.machines.devices import DEVICES
from splitjax.machines.links import Link
from splitjax.machines.routes import routes
from splitjax.machines.targets import Target
from splitjax.mesh import MeshShape
from splitjax.mesh.axis_parts import whole_axis
from splitjax.plan import Collective

# Stand for CPUs, of which no vendor publishes such figures: the order of a core, its memory, and sockets between
# processes. Choices on CPU are as good as these are for the machine at hand.
_CPU_FLOPS, _CPU_BYTES, _CPU_LINK = 5e10, 1e10, Link(5e-5, 2e9)
# How often state and activations pass through memory in a step: written once and read once each.
_PASSES = 2
# How often the bytes of the weights do for each further microbatch: they are read, and the sums of their gradients are
# read and written.
_PASSES_OF_A_PART = 3
# Large enough, in flops, bytes or columns, that an operation goes at the rate of the largest that was measured.
_LARGE = 1e12


@dataclasses.dataclass(frozen=True)
class Prices:
    """Holds the figures of a machine that decide what a layout takes.

    **Attributes:**

    - `flops_per_second`: of a device. `memory_bytes_per_second`: of its main memory.
    - `link`: what carries an axis of the mesh; `links`: of axes of which more is known, by name.
    - `slow_axes`: those that cross slow links, between hosts, slices or processes.
    """

    flops_per_second: float
    memory_bytes_per_second: float
    link: Link
    links: Mapping[str, Link] = dataclasses.field(default_factory=dict)
    slow_axes: frozenset[str] = frozenset()

    @classmethod
    def of_platform(cls, platform: str) -> Prices:
        """Returns the figures that stand for the devices of a JAX `platform`: those of TPU v5e or H100, and nominal
        ones where nothing is published, as for `cpu`."""
        kind = {"tpu": tables.TPU_V5E, "gpu": tables.GPU_H100, "cuda": tables.GPU_H100}.get(platform)
        if kind is None:
            return cls(_CPU_FLOPS, _CPU_BYTES, _CPU_LINK)
        return cls(kind.flops_per_second("bfloat16"), kind.memory_bytes_per_second, kind.fabric.link)

    @classmethod
    def of_target(cls, target: Target, mesh: MeshShape) -> Prices:
        """Returns the published figures of a `target` for a `mesh`. Raises `TargetError` for a mesh of another
        size."""
        if not target.kind.peak_flops:
            return cls.of_platform(target.kind.platform)
        taken = routes(target, dict(mesh.axes))
        found = {axis: route.link for axis, route in taken.items()}
        slow = frozenset(axis for axis, route in taken.items() if route.is_slow)
        kind = DEVICES[target.kind.name]
        peak = kind.flops_per_second("bfloat16")
        return cls(peak, kind.memory_bytes_per_second, kind.fabric.link, found, slow)

    @classmethod
    def of_calibration(cls, calibration: Calibration, mesh: MeshShape) -> Prices:
        """Returns the figures of a machine that was measured, for a `mesh`: its largest product and loop, and its
        all-reduces. Raises `CalibrationError` where a figure was not measured."""
        machine = Machine.measured(calibration, dict(mesh.axes))
        links = {}
        for axis in mesh.present(mesh.names):
            count, between = mesh.size((axis,)), machine.crosses_processes(axis)
            latency = calibration.collective_seconds("all_reduce", count, between, 0.0)
            sending = calibration.collective_seconds("all_reduce", count, between, _LARGE) - latency
            # The latency of a calibration is that of all steps of a ring.
            links[axis] = Link(latency / (2 * (count - 1)), _LARGE / sending)
        return cls(
            _LARGE / calibration.seconds(OperationKind.PRODUCT, _LARGE, int(_LARGE)),
            _LARGE / calibration.seconds(OperationKind.ELEMENTWISE, _LARGE),
            _CPU_LINK,
            links,
            frozenset(axis for axis in links if machine.crosses_processes(axis)),
        )

    def seconds(self, prediction: Prediction, tables: Sequence[RowTable] = ()) -> float:
        """Returns the seconds of a predicted step. `tables`: those that go by rows, of which a step reads and writes
        few."""
        rows = [each for table in tables for each in table.sent]
        beside = beside_rows(prediction.collectives, {table.param for table in tables})
        sent = self.sending_seconds((*beside, *rows), prediction.setting.mesh)
        return self.local_seconds(prediction, tables) + sent

    def local_seconds(self, prediction: Prediction, tables: Sequence[RowTable] = ()) -> float:
        """Returns the seconds of a predicted step without what is sent. `tables`: as for `seconds`."""
        untouched = {leaf for table in tables for leaf in table.leaves}
        memory = prediction.memory
        stored = memory.state_bytes - sum(prediction.leaves[leaf].bytes_per_device for leaf in untouched)
        return self.of_sums(prediction.compute.flops, stored + memory.activation_bytes, 0.0)

    def of_sums(self, flops: int, stored_bytes: int, sending_seconds: float) -> float:
        """Returns the seconds of a step of so many `flops` of a device, with so many bytes of state and activations,
        and what is sent."""
        moved = _PASSES * stored_bytes
        return flops / self.flops_per_second + moved / self.memory_bytes_per_second + sending_seconds

    def seconds_of_a_part(self, prediction: Prediction) -> float:
        """Returns the seconds that a step takes longer for each further microbatch.

        Weights pass through memory once more, and so do the sums of their gradients, which are read and written.
        Activations are sent in as many bytes, each time after a wait. What lies in parts over the axes of the batch is
        gathered and summed in each microbatch, and so are the gradients beside it that are summed over these axes."""
        mesh = prediction.setting.mesh
        weights = [leaf for leaf in prediction.leaves if leaf.role == "param"]
        shared = {axis for leaf in weights for axis in leaf.axes if axis in prediction.setting.batch_axes}
        again = [each for sent in prediction.sent_by_leaf for each in sent if shared & set(each.axis.split("+"))]
        waits = (self.ring(each.op, each.axis, mesh)[0] for each in prediction.activations)
        moved = _PASSES_OF_A_PART * sum(leaf.bytes_per_device for leaf in weights)
        return moved / self.memory_bytes_per_second + sum(waits) + self.sending_seconds(again, mesh)

    def seconds_again(self, prediction: Prediction) -> float:
        """Returns the seconds that the backward pass takes longer for what it computes again of the forward pass.

        Products are those that the graph says are repeated; activations are written and read once more. What is sent
        again is among the prediction's collectives."""
        uses = zip(prediction.flows, prediction.split_by_use, strict=True)
        flops = sum(flow.use.flops * flow.use.repeated // split for flow, split in uses)
        return self.of_sums(flops, prediction.memory.activation_bytes, 0.0)

    def sending_seconds(self, collectives: Iterable[Collective], mesh: MeshShape) -> float:
        """Returns the seconds of collectives, one after the other."""
        return self.sender(mesh)(collectives)

    def sender(self, mesh: MeshShape) -> Callable[[Iterable[Collective]], float]:
        """Returns what says the seconds of collectives on a `mesh`, one after the other: it knows each ring once it was
        asked for it."""
        rings: dict[tuple[str, str], tuple[float, float]] = {}

        def sending_seconds(collectives: Iterable[Collective]) -> float:
            sent = 0.0
            for each in collectives:
                kind = each.op, each.axis
                if kind not in rings:
                    rings[kind] = self.ring(each.op, each.axis, mesh)
                seconds, rate = rings[kind]
                sent += seconds + each.bytes / rate
            return sent

        return sending_seconds

    def least_seconds(self, flops: float, num_devices: int) -> float:
        """Returns what no layout of a step goes below: its `flops` shared evenly, and nothing sent."""
        return flops / num_devices / self.flops_per_second

    def ring(self, op: str, axis: str, mesh: MeshShape) -> tuple[float, float]:
        """Returns (seconds, bytes a second) of a ring over the slowest of the axes that a collective goes over: what
        its steps wait, and what carries the bytes that a device sends. `axis`: one, or several as `data+model`."""
        axes = mesh.present(axis.split("+"))
        if not axes:
            return 0.0, math.inf
        links = [self.links.get(whole_axis(each), self.link) for each in axes]
        steps = mesh.size(axes) - 1
        latency = max(link.latency_seconds for link in links)
        rate = min(link.bytes_per_second for link in links)
        return (2 if op == "all_reduce" else 1) * steps * latency, rate
