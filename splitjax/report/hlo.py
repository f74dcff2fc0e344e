"""Lists the collectives of a compiled step as values: what runs, over which mesh axes, how often, and how many bytes.

The modules that XLA compiled (`report.wire`) go in. They are read from the entry computation on: into loops (their
bodies count as often as they run), calls, branches, fusions and the computations that asynchronous collectives are
wrapped in. A TPU's compiler writes a reduce-scatter as a fusion of an all-reduce with the slice of it that the device
keeps; it is sent as a reduce-scatter, and is listed as one. Combined collectives are taken apart again: XLA joins small
ones of the same kind into an operation with several operands, each of which had its own cause.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from splitjax import _compat
from splitjax.cost.ring import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, reduce_scatter_bytes
from splitjax.mesh import MeshShape
from splitjax.report.groups import OTHER, axes_of, expand, permuted_axes, varying_axes
from splitjax.report.loops import num_trips
from splitjax.report.wire import Computation, Frame, Groups, Instruction, Module, Shape, read_module

# Opcode -> our name. Of a pair `-start`, `-done` only the start is counted: the done names no groups.
_OPS = {
    f"{name}{suffix}": name.replace("-", "_")
    for name in (
        "all-reduce",
        "all-gather",
        "reduce-scatter",
        "all-to-all",
        "collective-permute",
        "collective-broadcast",
        "ragged-all-to-all",
    )
    for suffix in ("", "-start")
}
# Instructions that hand a value on: the cause of what they hand on stands further up.
_PASSING = frozenset(
    "bitcast copy get-tuple-element tuple reshape transpose convert optimization-barrier copy-start copy-done "
    "async-done async-update opt-barrier".split()
)
# (name as JAX says it, bits) by `xla.PrimitiveType`.
DTYPES: dict[int, tuple[str, int]] = {
    1: ("bool", 8),
    2: ("int8", 8),
    3: ("int16", 16),
    4: ("int32", 32),
    5: ("int64", 64),
    6: ("uint8", 8),
    7: ("uint16", 16),
    8: ("uint32", 32),
    9: ("uint64", 64),
    10: ("float16", 16),
    11: ("float32", 32),
    12: ("float64", 64),
    15: ("complex64", 64),
    16: ("bfloat16", 16),
    18: ("complex128", 128),
    19: ("float8_e5m2", 8),
    20: ("float8_e4m3fn", 8),
    21: ("int4", 4),
    22: ("uint4", 4),
    23: ("float8_e4m3b11fnuz", 8),
    24: ("float8_e5m2fnuz", 8),
    25: ("float8_e4m3fnuz", 8),
    26: ("int2", 2),
    27: ("uint2", 2),
    28: ("float8_e4m3", 8),
    29: ("float8_e3m4", 8),
    30: ("int1", 1),
    31: ("uint1", 1),
    32: ("float4_e2m1fn", 4),
    33: ("float8_e8m0fnu", 8),
    35: ("float6_e3m2fn", 6),
    36: ("float6_e2m3fn", 6),
}


# A choice among branches of which splitjax knows how many steps of a cycle, or how many workers, take each
# (`lower.partial.truncation.turns_scope`).
_BRANCH_COUNTS = re.compile(r"splitjax:(?:turns|depths):([\d.]+)/cond$")
_HANDED = "splitjax:handed:"  # `lower.partial.allreduce`


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """Describes a collective of a compiled step, or a member of a combined one.

    **Attributes:**

    - `op`: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `collective_permute`, `collective_broadcast` or
      `ragged_all_to_all`.
    - `axis`: the mesh axes it runs over, joined by `+` in the mesh's order; `other` for groups that are no set of axes.
    - `groups`: device numbers of each group where `axis` is `other` or groups are of unequal size, else empty. Of a
      permutation over `other`: its (from, to) pairs.
    - `group_size`: devices that take part together; of groups of unequal size, in the largest.
    - `bytes`: what each device sends per step by the ring formulas (`cost.ring`), all `trips` together; where groups
      are of unequal size, and of hand-overs of partial sums, the mean over all devices; else of those that send.
    - `dtype`, `shape`: of what a device puts in, once.
    - `trips`: how often it runs per step.
    - `trips_known`: False inside a loop whose number of trips XLA does not know: `trips` then counts a single trip.
    - `conditional`: whether it stands in a branch, so that a step may do without it.
    - `share`: how much of the time it runs, where splitjax knows how often a branch is taken (partial backpropagation:
      the share of the steps of a cycle, or of the workers, each of which takes the branch of its depth); `bytes` is
      then the mean over steps and workers. 1 for everything else: what XLA may skip is counted as if it ran.
    - `branch`: of a collective with a share, which branch it stands in.
    - `op_name`: the path of scopes and transformations that JAX gave the operation it belongs to.
    - `source`: the user's `file:line (function)`; empty where XLA has none.
    - `frames`: all of the user's lines on the stack, innermost first, as `source`.
    - `name`: of the instruction in the module.
    - `num_combined`: how many collectives XLA joined into this instruction.
    - `member`: which of them this is, from 0.
    """

    op: str
    axis: str
    bytes: int
    dtype: str
    shape: tuple[int, ...]
    group_size: int
    trips: int = 1
    trips_known: bool = True
    conditional: bool = False
    op_name: str = ""
    source: str = ""
    frames: tuple[str, ...] = ()
    name: str = ""
    num_combined: int = 1
    member: int = 0
    groups: Groups = ()
    share: float = 1.0
    branch: str = ""

    @property
    def local_bytes(self) -> int:
        """Bytes that a device puts in, once."""
        return num_bytes(self.dtype, self.shape)


@dataclasses.dataclass(frozen=True)
class _Context:
    """Says how an instruction is reached: how often it runs, in a loop or branch or not (`CompiledCollective` has the
    same)."""

    trips: int = 1
    known: bool = True
    conditional: bool = False
    share: float = 1.0
    branch: str = ""

    def into(self, conditional: Instruction, number: int) -> _Context:
        """Returns the context inside branch `number` of an instruction that chooses among branches."""
        scope = _BRANCH_COUNTS.search(conditional.op_name)
        weights = [int(weight) for weight in scope.group(1).split(".")] if scope else []
        if len(weights) != len(conditional.called):
            return dataclasses.replace(self, conditional=True)
        share = self.share * weights[number] / sum(weights)
        return dataclasses.replace(self, conditional=True, share=share, branch=f"{conditional.name}:{number}")


@dataclasses.dataclass(frozen=True)
class _PlacedModule:
    """Holds a module and the mesh of the devices that it was compiled for."""

    module: Module
    mesh: MeshShape


_BITS = dict(DTYPES.values())


def num_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Returns the bytes of an array of dtype `dtype` (JAX's name of it) and shape `shape`: dtypes of less than a byte
    are packed."""
    return -(-math.prod(shape) * _BITS.get(dtype, 8) // 8)


def compiled_collectives(compiled: object, mesh: MeshShape) -> tuple[CompiledCollective, ...]:
    """Lists the collectives of `compiled`, a `jax.stages.Compiled`, in the order of the program.

    `mesh` holds the devices in the order in which the program numbers them. Collectives within groups of one device
    send nothing and are left out. Raises `report.protobuf.WireError` where the modules cannot be read.
    """
    return tuple(
        collective
        for data in _compat.serialized_modules(compiled)
        for collective in read_collectives(read_module(data), mesh)
    )


def read_collectives(module: Module, mesh: MeshShape) -> tuple[CompiledCollective, ...]:
    """Lists the collectives of a single `module`, compiled for the devices of `mesh`, as `compiled_collectives`
    does."""
    entry = module.computations.get(module.entry)
    return tuple(_walk(_PlacedModule(module, mesh), entry, _Context())) if entry is not None else ()


def _walk(
    placed: _PlacedModule, computation: Computation, context: _Context, fused: set[str] | None = None
) -> Iterator[CompiledCollective]:
    """Yields the collectives of `computation` and of what it calls, in the program's order.

    `fused` is given for a fusion's body: the chains of collectives that fusions beside it held already. The TPU's
    compiler hides a collective behind others' work in a chain of fusions that each hold a copy of it: the first starts
    it, the next carry it on and compute, the last waits for it. (Channels do not tell them apart: a `shard_map`'s
    collectives all have the same.)
    """
    inside: set[str] = set()
    for instruction in computation.instructions.values():
        if instruction.opcode in _OPS:
            if fused is None or instruction.chain not in fused:
                op = _OPS[instruction.opcode]
                if fused is not None and _keeps_a_part(computation, instruction):
                    op = "reduce_scatter"
                yield from _collective(placed, computation, instruction, context, op)
            if fused is not None and instruction.chain:
                fused.add(instruction.chain)
            continue
        if instruction.opcode in ("async-update", "async-done"):
            continue  # they name the computation of their start once more
        inner = context
        if instruction.opcode == "while":
            trips = num_trips(placed.module, computation, instruction)
            inner = dataclasses.replace(
                context, trips=context.trips * (trips or 1), known=context.known and trips is not None
            )
        for number, called in enumerate(instruction.called):
            if called in placed.module.computations:
                where = context.into(instruction, number) if instruction.opcode == "conditional" else inner
                yield from _walk(
                    placed,
                    placed.module.computations[called],
                    where,
                    inside if instruction.opcode == "fusion" else None,
                )


def _keeps_a_part(fused: Computation, instruction: Instruction) -> bool:
    """Tells whether an `instruction` in the body of a fusion is an all-reduce of which nothing but a slice is read."""
    users = [user for user in fused.instructions.values() if instruction.id in user.operands]
    return (
        instruction.opcode == "all-reduce"
        and bool(users)
        and all(user.opcode == "dynamic-slice" and user.operands[0] == instruction.id for user in users)
    )


def _collective(
    placed: _PlacedModule, computation: Computation, instruction: Instruction, context: _Context, op: str
) -> Iterator[CompiledCollective]:
    """Yields what an instruction sends, a collective `op`: a value for each collective that was combined into it;
    nothing within one device."""
    num_devices = max(placed.mesh.num_devices, 1)
    if op == "collective_permute":
        size, axes = 2, permuted_axes(instruction.pairs, placed.mesh)
        groups, kept = instruction.pairs, instruction.pairs if axes is None else ()
        sends = [source for source, target in instruction.pairs if source != target]
        # What a scheme of sparse synchronisation sends counts by the worker that sends most; hand-overs of partial sums
        # by the mean.
        sending = len(sends) / num_devices if _HANDED in instruction.op_name else min(len(sends), 1)
        send = lambda local: sending * local
    else:
        groups = expand(instruction.groups, placed.mesh.num_devices)
        size, axes = max(map(len, groups)), axes_of(groups, placed.mesh)
        uneven = len(set(map(len, groups))) > 1
        kept = groups if axes is None or uneven else ()
        if axes is None and uneven:
            axes = varying_axes(groups, placed.mesh)
        sending = size - 1
        send = lambda local: (
            sum(len(group) * _sent(op, len(group), local) for group in groups) / num_devices
            if uneven
            else _sent(op, size, local)
        )
    if not sending:
        return
    members = _members(computation, instruction, op)
    for position, (shape, member) in enumerate(members):
        dtype = DTYPES.get(shape.element_type, ("unknown", 8))[0]
        op_name, frame, direct = _cause(placed.module, computation, instruction, position, len(members))
        frames = user_lines(placed.module.frames, frame) or direct
        yield CompiledCollective(
            op=op,
            axis=OTHER if axes is None else "+".join(axes),
            bytes=round(context.share * context.trips * send(num_bytes(dtype, member))),
            dtype=dtype,
            shape=member,
            group_size=size,
            trips=context.trips,
            trips_known=context.known,
            conditional=context.conditional,
            op_name=op_name,
            source=frames[0] if frames else "",
            frames=frames,
            name=instruction.name,
            num_combined=len(members),
            member=position,
            groups=kept,
            share=context.share,
            branch=context.branch,
        )


def _members(computation: Computation, instruction: Instruction, op: str) -> list[tuple[Shape, tuple[int, ...]]]:
    """Lists (shape, dims) of the arrays that a device puts in: an array per collective that was combined. An all-to-all
    may be written with an operand per receiver, which is a single exchange."""
    operands = [computation.instructions[n].shape for n in instruction.operands if n in computation.instructions]
    shapes = [flat for shape in operands for flat in _flat(shape)]
    if op == "ragged_all_to_all":
        return [(shape, shape.dims) for shape in shapes[:1]]  # the other operands are where the pieces go
    if op == "collective_permute":
        shapes = shapes[:1]
    if op == "all_to_all" and len(shapes) > 1:
        return [(shapes[0], (len(shapes), *shapes[0].dims))]
    return [(shape, shape.dims) for shape in shapes]


def _flat(shape: Shape) -> Iterator[Shape]:
    """Yields the arrays in a shape, tuples taken apart."""
    if shape.members:
        for member in shape.members:
            yield from _flat(member)
    elif shape.element_type in DTYPES:
        yield shape


def _sent(op: str, size: int, local_bytes: int) -> int:
    """Returns the bytes that a device sends by the ring formulas where `size` devices put in `local_bytes` each."""
    if op == "all_reduce":
        return all_reduce_bytes(size, local_bytes)
    if op == "all_gather":
        return all_gather_bytes(size, size * local_bytes)
    if op == "reduce_scatter":
        return reduce_scatter_bytes(size, local_bytes)
    if op in ("all_to_all", "ragged_all_to_all"):
        return all_to_all_bytes(size, local_bytes)
    return local_bytes  # a broadcast that every device hands on


def _cause(
    module: Module, computation: Computation, collective: Instruction, position: int, count: int
) -> tuple[str, int, tuple[str, ...]]:
    """Returns the name, stack frame and direct source of the operation that a collective belongs to, or member
    `position` of a combined one of `count`.

    A combined collective carries the metadata of one of its members. What each of them was is kept by the instruction
    that takes its result out of the tuple, and by the instruction that computes its operand.
    """
    candidates: list[Instruction] = []
    if count > 1:
        candidates += [
            user
            for user in computation.instructions.values()
            if user.opcode == "get-tuple-element" and collective.id in user.operands and user.tuple_index == position
        ]
        candidates += _producers(computation.instructions, collective.operands[position : position + 1])
    candidates.append(collective)
    if count == 1:
        candidates += _producers(computation.instructions, collective.operands[:1])
    named = [
        instruction
        for instruction in candidates
        if instruction.op_name or instruction.stack_frame or instruction.source[0]
    ]
    if not named:
        return "", 0, ()
    best = next(
        (
            instruction
            for instruction in named
            if instruction.op_name and (instruction.stack_frame or instruction.source[0])
        ),
        named[0],
    )
    direct = best.source
    return (
        best.op_name,
        best.stack_frame,
        (f"{direct[0]}:{direct[1]}",) if direct[0] and not _compat.is_machinery(direct[0]) else (),
    )


def _producers(instructions: Mapping[int, Instruction], operands: tuple[int, ...]) -> list[Instruction]:
    """Lists the instructions behind an operand, nearest first, through those that only hand a value on."""
    producers: list[Instruction] = []
    while operands and operands[0] in instructions:
        producer = instructions[operands[0]]
        producers.append(producer)
        if producer.opcode not in _PASSING:
            break
        operands = producer.operands
    return producers


def user_lines(frames: tuple[Frame, ...], position: int) -> tuple[str, ...]:
    """Returns the user's lines of a stack, innermost first, as `_compat.source_line` writes them: `file:line
    (function)`.

    `position` is the place of the innermost line among the module's `frames`, counted from 1; 0 gives no lines.
    """
    lines: list[str] = []
    seen: set[int] = set()
    while 0 < position <= len(frames) and position not in seen:  # jax 0.12 has frames that are their own callers
        seen.add(position)
        frame = frames[position - 1]
        if frame.file and not _compat.is_machinery(frame.file):
            lines.append(f"{frame.file}:{frame.line} ({frame.function.rsplit('.', 1)[-1]})")
        position = frame.parent if frame.parent != position else 0
    return tuple(lines)
