"""Predicts what a step's program needs of a device's memory by how long its arrays live, before it is compiled.

The traced program with everything that a plan adds to it, where its arguments live, and a mesh shape come in; a
`ProgramMemory` comes out. `reading` makes nodes of the jaxpr, `spreading` says how each value is split, `buffers`
decides what is stored, and `timeline` for how long. What a compiler does with a program is known of XLA's CPU compiler
under its memory-optimised scheduler, of its GPU compiler and of that for TPUs (`compilers.Compiler`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from splitjax import _compat
from splitjax.cost.memory.buffers import Storage
from splitjax.cost.memory.compilers import Compiler, compiler_of
from splitjax.cost.memory.donating import copy_donated
from splitjax.cost.memory.layers import Layers
from splitjax.cost.memory.moments import MemoryTimeline, StoredSpan, passes_of
from splitjax.cost.memory.products import store_parts
from splitjax.cost.memory.program import Kind, Program, Region, Split
from splitjax.cost.memory.reading import read
from splitjax.cost.memory.schedule import Schedule
from splitjax.cost.memory.spreading import nodes_of, spread
from splitjax.cost.memory.timeline import Order, combined, peak_of, spans_of
from splitjax.cost.memory.zeros import store_zeros
from splitjax.display import registry
from splitjax.plan import StoredArray

# By how much temporaries may be beyond the careful simulation: the least that holds for every cell that
# `python -m benchmarks planner` does not hold out.
BOUND_FACTOR = 1.21
# The same beyond the most of the three orders that a GPU's compiler tries: 1.003 holds for all of the 24 cells that are
# not held out, and a tenth is added because they are few.
BOUND_FACTOR_OF_MOST = 1.1
# The same of programs that exchange rows of tables: XLA stores zeros of one shape once, for as long as the step runs,
# and each scatter that fills rows or marks ids writes into a copy. It is 1.47 in the LSTM of
# `tests/lower/tables/test_sparse.py`, the one such program that was looked at, and the rest is room.
BOUND_FACTOR_WITH_ROWS = 1.6
# The same beyond the peak of a TPU's order: 1.14 holds for all of the 31 cells that are not held out, and a tenth is
# added, as for GPUs. A program takes more where the chip has room, as its compiler leaves gaps between buffers, and
# less where its memory is limited.
BOUND_FACTOR_ON_TPUS = 1.24
# By order, the order whose peak is bounded, and by which factor.
_BOUNDS = {
    Order.LEAST: (Order.MOST, BOUND_FACTOR_OF_MOST),
    Order.SOON: (Order.SOON, BOUND_FACTOR_ON_TPUS),
}
_ROWS = "splitjax:rows:"  # the name scope of such an exchange
_NUM_ALIVE = 60
# So many arrays of a timeline have their layers, the largest.
_NUM_NAMED = 400


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
    """Holds the predicted bytes per device of a step's program.

    **Attributes:**

    - `argument_bytes`: of its arguments, exact.
    - `temporary_bytes`: the most that is stored beside the arguments at a time, results that are not written over
      arguments among it.
    - `bound_bytes`: what the program is not expected to go beyond; on a TPU where its compiler is told that it may use
      no more, as without such a limit it leaves gaps between buffers.
    - `at_peak`: the largest arrays beside the arguments that are stored at the peak, the largest first.
    """

    argument_bytes: int
    temporary_bytes: int
    bound_bytes: int
    at_peak: tuple[StoredArray, ...] = ()

    @property
    def estimate_bytes(self) -> int:
        """The bytes that the program is expected to need in all."""
        return self.argument_bytes + self.temporary_bytes

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)


@dataclasses.dataclass(frozen=True, eq=False)
class PlacedProgram:
    """Holds a traced program with what is decided of its arrays.

    **Attributes:**

    - `jaxpr`: the closed jaxpr, derivatives, exchanges and constraints written out.
    - `arguments`, `results`: by argument and by result how it is split; None where the compiler decides.
    - `donated`: by result that is written over an argument, the argument.
    - `axes`: the sizes of the mesh axes. `platform`: of its devices, such as `cpu`.
    - `paths`: by argument its path, which names what is made of it alone. `layers`: the names of the step's layers.
    - `device_kind`: of the devices, such as `TPU v5 lite`; "" where that is not known.
    """

    jaxpr: Any
    arguments: Sequence[Split | None]
    results: Sequence[Split | None]
    donated: Mapping[int, int]
    axes: Mapping[str, int]
    platform: str
    paths: Sequence[str] = ()
    layers: Sequence[str] = ()
    device_kind: str = ""


def predict_program_memory(placed: PlacedProgram) -> ProgramMemory:
    """Predicts what a program needs of a device's memory. `placed`: the program."""
    simulated = _simulated(placed)
    sizes = simulated.storage.sizes
    likely = peak_of(simulated.schedule, sizes, simulated.free, simulated.order)
    careful, factor = _BOUNDS.get(simulated.order, (Order.CAREFUL, BOUND_FACTOR))
    most = likely if careful is simulated.order else peak_of(simulated.schedule, sizes, simulated.free, careful)
    if _exchanges_rows(simulated.program.body):
        factor = max(factor, BOUND_FACTOR_WITH_ROWS)
    alive = [simulated.array(value) for value in likely.alive[:_NUM_ALIVE]]
    held = simulated.argument_bytes
    return ProgramMemory(held, likely.num_bytes, held + round(factor * most.num_bytes), tuple(alive))


def _exchanges_rows(region: Region) -> bool:
    """Whether a program exchanges rows of tables, by the scopes around its collectives."""
    sent = (node for node in nodes_of(region) if node.kind is Kind.COLLECTIVE)
    return any(_ROWS in name for node in sent for name in _compat.name_stacks(node.origin))


def temporary_bytes(placed: PlacedProgram) -> int:
    """Returns the `ProgramMemory.temporary_bytes` of a program alone. `placed`: the program."""
    simulated = _simulated(placed)
    return peak_of(simulated.schedule, simulated.storage.sizes, simulated.free, simulated.order).num_bytes


def predict_timeline(placed: PlacedProgram) -> MemoryTimeline:
    """Predicts what a device stores at each moment of a program, whose peak is what `predict_program_memory` expects.
    The largest arrays have their layers. `placed`: the program."""
    simulated = _simulated(placed)
    storage = simulated.storage
    spans = spans_of(simulated.schedule, storage.sizes, simulated.free, simulated.order)
    buffers = sorted(spans.buffers, key=lambda span: -storage.sizes[span[0]])
    named = [simulated.array(value, named=number < _NUM_NAMED) for number, (value, _, _) in enumerate(buffers)]
    makers = [storage.makers.get(step.writes[0]) if step.writes else None for step in spans.steps]
    scopes = ["" if maker is None else "/".join(_compat.name_stacks(maker.origin)) for maker in makers]
    return MemoryTimeline(
        simulated.argument_bytes,
        tuple(step.name for step in spans.steps),
        # What compilers add has no equation, and lies between others; an equation without scopes is of no pass.
        passes_of(
            scope or ("" if maker is None or not maker.origin else "step")
            for scope, maker in zip(scopes, makers, strict=True)
        ),
        tuple(StoredSpan(array, start, end) for array, (_, start, end) in zip(named, buffers, strict=True)),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Simulated:
    """Holds a program as it is simulated: what is stored, the steps in program order, and `free`, the buffers that are
    counted with the arguments. `order`: in which the compiler runs them."""

    program: Program
    storage: Storage
    schedule: Schedule
    free: set[int]
    layers: Layers
    order: Order

    @property
    def argument_bytes(self) -> int:
        return sum(self.storage.sizes[value] for value in self.program.body.inputs)

    def array(self, value: int, named: bool = True) -> StoredArray:
        """Describes a stored value, with its layer where it is to be `named`."""
        layer = self.layers.of(value) if named else ""
        storage = self.storage
        return StoredArray(self.program.shapes[value], storage.sizes[value], storage.maker_of(value), layer)


def _simulated(placed: PlacedProgram) -> _Simulated:
    program = read(placed.jaxpr, placed.arguments, placed.results, placed.axes, placed.platform)
    spread(program)
    compiler = compiler_of(placed.platform, placed.device_kind)
    if compiler.stores_zeros:
        store_zeros(program)
    storage = Storage(program, compiler)
    schedule = storage.schedule()
    if compiler.splits_products:
        store_parts(schedule, storage.sizes, storage.makers, program)
    schedule = combined(schedule, storage.sizes, compiler.combines_bytes, compiler.combines_gathers)
    arguments, outputs = program.body.inputs, program.body.outputs
    over = {arguments[each]: storage.root_of(outputs[result]) for result, each in placed.donated.items()}
    if compiler.copies_donated:
        copy_donated(schedule, over, program, storage.sizes, storage.makers)
    free = {*arguments, *over.values()}
    layers = Layers(storage.makers, dict(zip(arguments, placed.paths, strict=False)), placed.layers)
    order = _order_of(compiler)
    return _Simulated(program, storage, schedule, free, layers, order)


def _order_of(compiler: Compiler) -> Order:
    if compiler.takes_least:
        return Order.LEAST
    return Order.SOON if compiler.frees_soon else Order.DEPTH_FIRST
