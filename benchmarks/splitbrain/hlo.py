"""What the benchmarks of SplitBrain read off a compiled module besides its collectives: flops with loops multiplied
out, and which transfers have compute between their start and their end in the schedule.

`cost_analysis` counts the body of a loop once, however often it runs, so that a step in turns looks cheaper than it is.
Field numbers are those of `xla/service/hlo.proto` and `xla/xla_data.proto`, as in `splitjax.report.wire`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

from splitjax import _compat
from splitjax.mesh import MeshShape
from splitjax.report import protobuf, wire
from splitjax.report.hlo import CompiledCollective, read_collectives

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)


@dataclasses.dataclass(frozen=True)
class Detail:
    """What `wire.Instruction` leaves out. `flops`: of a product, once; 0 for anything else. `target`: of a custom
    call."""

    flops: int = 0
    target: str = ""


@dataclasses.dataclass(frozen=True)
class Scheduled:
    """A module with the order in which each computation runs (ids), and details by instruction id."""

    module: wire.Module
    order: Mapping[int, tuple[int, ...]]
    details: Mapping[int, Mapping[int, Detail]]  # computation -> instruction -> detail

    def calls(self, computation: int) -> Iterator[tuple[wire.Instruction, Detail]]:
        """Instructions in the order they run, or as they are stored where nothing says."""
        one = self.module.computations[computation]
        for number in self.order.get(computation) or one.instructions:
            yield one.instructions[number], self.details[computation].get(number, Detail())


@dataclasses.dataclass(frozen=True)
class Transfer:
    """One collective as scheduled. `covered_flops`, `covered_ops`: of the products, and the number of operations that
    compute, between its start and its end; a collective that is started and awaited at once has none."""

    name: str
    op: str
    trips: int
    asynchronous: bool
    covered_flops: int = 0
    covered_ops: int = 0

    @property
    def overlaps(self) -> bool:
        """Whether a product runs while it is under way."""
        return self.covered_flops > 0


def scheduled_modules(compiled: object) -> list[Scheduled]:
    """The modules of a `jax.stages.Compiled`."""
    return [read(data) for data in _compat.serialized_modules(compiled)]


def read(data: bytes) -> Scheduled:
    """Reads a serialised `HloModuleProto` a second time, for what `wire.read_module` leaves out."""
    fields, module = protobuf.fields_of(data), wire.read_module(data)
    module = _with_trips(module, fields)
    order = {}
    for entry in protobuf.messages_at(protobuf.message_at(fields, 7), 1):
        order[protobuf.number_at(entry, 1)] = protobuf.numbers_at(protobuf.message_at(entry, 2), 1)
    details = {}
    for computation in protobuf.messages_at(fields, 3):
        number = protobuf.number_at(computation, 5)
        known = module.computations[number].instructions
        details[number] = {
            protobuf.number_at(one, 35): _detail(one, known)
            for one in protobuf.messages_at(computation, 2)
            if protobuf.text_at(one, 2) in ("dot", "convolution", "custom-call")
        }
    return Scheduled(module, order, details)


def _with_trips(module: wire.Module, fields: protobuf.Message) -> wire.Module:
    """The module with the turns of loops that only their condition tells (a TPU's), as JAX writes it: a counter from 0,
    less than N."""
    constants = {}
    for computation in protobuf.messages_at(fields, 3):
        for one in protobuf.messages_at(computation, 2):
            value = protobuf.numbers_at(protobuf.message_at(one, 8), 4)
            if protobuf.text_at(one, 2) == "constant" and len(value) == 1:
                constants[protobuf.number_at(computation, 5), protobuf.number_at(one, 35)] = value[0]
    limits = {}
    for number, computation in module.computations.items():
        root = computation.instructions.get(computation.root)
        if root is not None and root.opcode == "compare":
            found = [constants[number, operand] for operand in root.operands if (number, operand) in constants]
            limits[number] = found[0] if len(found) == 1 else None

    def known(one: wire.Instruction) -> wire.Instruction:
        if one.opcode != "while" or one.trip_count is not None:
            return one
        return dataclasses.replace(
            one, trip_count=next((limits[called] for called in one.called if limits.get(called)), None)
        )

    return dataclasses.replace(
        module,
        computations={
            number: dataclasses.replace(
                computation, instructions={key: known(one) for key, one in computation.instructions.items()}
            )
            for number, computation in module.computations.items()
        },
    )


def flops(compiled: object) -> int:
    """Flops of one device's dots and convolutions per step, loop bodies as often as they run.

    Raises `ValueError` for a loop whose number of turns XLA does not know."""
    return sum(_flops(one, one.module.entry, {}) for one in scheduled_modules(compiled))


def _flops(scheduled: Scheduled, computation: int, known: dict[int, int]) -> int:
    if computation not in known:
        total = 0
        for one, detail in scheduled.calls(computation):
            total += detail.flops
            inner = sum(
                _flops(scheduled, called, known) for called in one.called if called in scheduled.module.computations
            )
            if inner and one.opcode == "while" and one.trip_count is None:
                raise ValueError(f"nobody knows how often {one.name} runs")
            total += inner * ((one.trip_count or 0) if one.opcode == "while" else 1)
        known[computation] = total
    return known[computation]


def product_flops(
    opcode: str, operands: list[tuple[int, ...]], result: tuple[int, ...], fields: protobuf.Message
) -> int:
    """Flops of one dot or convolution, two per multiplication with a value that is there (padding and dilation count
    nothing)."""
    if opcode == "dot":
        contracted = protobuf.numbers_at(protobuf.message_at(fields, 30), 1)
        return 2 * math.prod(result) * math.prod(operands[0][dim] for dim in contracted)
    numbers = protobuf.message_at(fields, 16)
    window = protobuf.messages_at(protobuf.message_at(fields, 15), 1)
    batch, features = (operands[0][protobuf.number_at(numbers, field)] for field in (7, 8))
    out_features = result[protobuf.number_at(numbers, 10)]
    pairs = 1
    for dim_in, dim_out, one in zip(
        protobuf.numbers_at(numbers, 11), protobuf.numbers_at(numbers, 12), window, strict=True
    ):
        size, stride, low, _, dilation, base = (protobuf.number_at(one, field) for field in range(1, 7))
        pairs *= _pairs(operands[0][dim_in], result[dim_out], size, max(stride, 1), low, max(dilation, 1), max(base, 1))
    groups, batch_groups = (max(protobuf.number_at(fields, field), 1) for field in (50, 61))
    return 2 * pairs * (batch // batch_groups) * (features // groups) * out_features


def _pairs(size_in: int, size_out: int, size: int, stride: int, low: int, dilation: int, base: int) -> int:
    """How many pairs of a result's position and a window's position, along one dim, meet a value of the input."""
    last = base * (size_in - 1)
    found = 0
    for start in range(-low, size_out * stride - low, stride):
        found += sum(0 <= at <= last and at % base == 0 for at in range(start, start + size * dilation, dilation))
    return found


def _detail(fields: protobuf.Message, known: Mapping[int, wire.Instruction]) -> Detail:
    opcode = protobuf.text_at(fields, 2)
    if opcode == "custom-call":
        return Detail(target=protobuf.text_at(fields, 28))
    operands = [known[number].shape.dims for number in protobuf.numbers_at(fields, 36)]
    return Detail(flops=product_flops(opcode, operands, wire.shape_of(protobuf.message_at(fields, 3)).dims, fields))


# Schedules. A TPU's compiler writes a collective that runs beside compute as a chain of fusions: one that starts it,
# fusions that compute and carry the collective along, one that awaits it. The collective's instruction stands in each
# of them.


def collectives(compiled: object, mesh: MeshShape) -> list[CompiledCollective]:
    """As `compiled_collectives`, with the turns of a TPU's loops."""
    return [one for scheduled in scheduled_modules(compiled) for one in read_collectives(scheduled.module, mesh)]


def transfers(compiled: object) -> list[Transfer]:
    """Every collective of a compiled step in the order it is scheduled, with what runs while it is under way."""
    return [
        one for scheduled in scheduled_modules(compiled) for one in _transfers(scheduled, scheduled.module.entry, 1)
    ]


def _transfers(scheduled: Scheduled, computation: int, trips: int) -> Iterator[Transfer]:
    calls, flops_of = list(scheduled.calls(computation)), {}
    for position, (one, _) in enumerate(calls):
        inner = [called for called in one.called if called in scheduled.module.computations]
        if one.opcode == "while":
            for called in inner:
                yield from _transfers(scheduled, called, trips * (one.trip_count or 1))
        elif one.opcode in ("call", "conditional"):
            for called in inner:
                yield from _transfers(scheduled, called, trips)
        elif one.opcode in COLLECTIVES:
            yield Transfer(one.name, one.opcode, trips, False)
        else:
            started = _started(scheduled, one, inner)
            if started is None:
                continue
            end = _end(scheduled, calls, position)
            between = calls[position + 1 : end]
            covered = [
                other.opcode
                for other, other_detail in between
                if other.opcode in ("fusion", "dot", "convolution", "custom-call", "while", "call")
                and other_detail.target != "AllocateBuffer"
            ]
            products = sum(
                other_detail.flops
                + sum(
                    _flops(scheduled, called, flops_of)
                    for called in other.called
                    if called in scheduled.module.computations
                )
                for other, other_detail in between
            )
            yield Transfer(*started, trips, True, products, len(covered))


def _started(scheduled: Scheduled, one: wire.Instruction, inner: list[int]) -> tuple[str, str] | None:
    """Name and opcode of the collective that an instruction starts, or None."""
    plain = one.opcode.removesuffix("-start")
    if plain != one.opcode and plain in COLLECTIVES:
        return one.name, plain
    if one.opcode == "async-start" or (
        one.opcode == "fusion" and any(_target(scheduled, called, "AsyncCollectiveStart") for called in inner)
    ):
        for called in inner:
            for other in scheduled.module.computations[called].instructions.values():
                if other.opcode in COLLECTIVES:
                    return other.name, other.opcode
    return None


def _end(scheduled: Scheduled, calls: list[tuple[wire.Instruction, Detail]], position: int) -> int:
    """Where what starts at a position is awaited: the first done along its chain, or where nobody hands it on."""
    chain, last = {calls[position][0].id}, position
    for later, (one, _) in enumerate(calls[position + 1 :], start=position + 1):
        if chain.isdisjoint(one.operands):
            continue
        last = later
        if one.opcode.endswith("-done") or any(
            _target(scheduled, called, "AsyncCollectiveDone") for called in one.called
        ):
            return later
        if one.opcode in ("get-tuple-element", "fusion", "tuple", "bitcast", "async-update"):
            chain.add(one.id)
    return last


def _target(scheduled: Scheduled, computation: int, target: str) -> bool:
    return any(detail.target == target for detail in scheduled.details.get(computation, {}).values())
