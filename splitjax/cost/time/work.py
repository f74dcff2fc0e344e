"""Says what a device does in a step: the kernels that its compiler makes of the program, with kinds and sizes.

A program with its layout comes in (`cost.memory.PlacedProgram`), tasks come out, in the order of the program: what is
fused with what, what is stored, and which collectives the partitioner adds are those of the memory's prediction
(`cost.memory.buffers`), so that time and memory are predicted of the same kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from splitjax.cost.memory.buffers import Storage
from splitjax.cost.memory.compilers import Compiler, compiler_of
from splitjax.cost.memory.layers import Layers
from splitjax.cost.memory.lifetimes import PlacedProgram
from splitjax.cost.memory.program import Axes, Kind, Node, Program, Region
from splitjax.cost.memory.reading import read
from splitjax.cost.memory.schedule import Schedule, Step
from splitjax.cost.memory.spreading import nodes_of, spread
from splitjax.cost.memory.timeline import combine
from splitjax.cost.ring import all_gather_bytes, all_reduce_bytes, all_to_all_bytes, reduce_scatter_bytes
from splitjax.machines.calibration import OperationKind

_COSTLY = frozenset(
    "exp exp2 log log1p expm1 tanh logistic div pow rsqrt sqrt cbrt sin cos tan erf erf_inv erfc lgamma digamma"
    " atan2 acos asin atan sinh cosh asinh acosh atanh rem".split()
)
_MOVES = frozenset("transpose transpose_operand transpose_result rev".split())
_RANDOM = frozenset("threefry2x32 random_bits rng_bit_generator".split())
_SORTS = frozenset("sort top_k approx_top_k cumsum cumprod cummax cummin cumlogsumexp".split())
_DTYPES = {1: "int8", 2: "bfloat16", 4: "float32", 8: "float64"}
_OPS = {
    "psum": "all_reduce", "psum_invariant": "all_reduce", "psum2": "all_reduce", "pmax": "all_reduce",
    "pmin": "all_reduce", "all_reduce": "all_reduce", "all_reduces": "all_reduce", "all_gather": "all_gather",
    "all_gather_invariant": "all_gather", "reduce_scatter": "reduce_scatter", "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all", "move": "all_to_all", "ppermute": "permute", "pgather": "all_gather",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Load:
    """Says how much of a kind an operation is: `size` and `narrow`, as `OperationKind` counts them."""

    kind: OperationKind
    size: float
    narrow: int = 0


@dataclasses.dataclass(frozen=True)
class Task:
    """Is something that a device does in a step.

    **Attributes:**

    - `name`: of the operation. `shape`: of its whole result.
    - `loads`: what it computes; empty for a collective. `repeats`: how often it does that, one after the other (the
      matrices of a batched product). `flops`, `num_bytes`: of it all, bytes read and written in memory.
    - `dtype`: of its operands.
    - `op`: the kind of collective; empty for what is none. `axes`: the mesh axes that it goes over. `sent_bytes`: what
      the device sends, by the ring formulas. `num_messages`: in how many messages, one after the other.
    - `reads`, `writes`: numbers of what it waits for and makes.
    - `inside`: of a loop, what a turn does. `turns`: how many there are.
    - `layers`: whose it is, as (layer, share), where that was asked for; an empty name for nobody's.
    """

    name: str
    shape: tuple[int, ...] = ()
    loads: tuple[Load, ...] = ()
    repeats: int = 1
    flops: float = 0.0
    num_bytes: float = 0.0
    dtype: str = "float32"
    op: str = ""
    axes: Axes = ()
    sent_bytes: float = 0.0
    num_messages: int = 1
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    inside: tuple[Task, ...] = ()
    turns: int = 1
    layers: tuple[tuple[str, float], ...] = ()


def tasks_of(placed: PlacedProgram, layered: bool = False) -> tuple[Task, ...]:
    """Returns what a device does in a step of the program `placed`, in the order of the program. `layered`: whether to
    say of every task whose it is."""
    program = read(placed.jaxpr, placed.arguments, placed.results, placed.axes, placed.platform)
    spread(program)
    compiler = compiler_of(placed.platform, placed.device_kind)
    storage = Storage(program, compiler)
    schedule = storage.schedule()
    paths = dict(zip(program.body.inputs, placed.paths, strict=False))
    layers = Layers(storage.makers, paths, placed.layers) if layered else None
    return _Reader(program, storage.sizes, compiler, layers).tasks(schedule, program.body)


class _Reader:
    """Makes tasks of schedules. `sizes`: bytes of what is stored. `compiler`: what is known of the compiler. `layers`:
    whose values are; None where nobody asks."""

    def __init__(
        self, program: Program, sizes: Mapping[int, int], compiler: Compiler, layers: Layers | None = None
    ) -> None:
        self.program, self.sizes, self.compiler, self.layers = program, sizes, compiler, layers
        self.makers = {value: node for node in nodes_of(program.body) for value in node.outputs if node.name != "carry"}
        self.regions: dict[int, Sequence[Region]] = {
            value: node.regions for node in nodes_of(program.body) if node.regions for value in node.outputs
        }

    def tasks(self, schedule: Schedule, region: Region) -> tuple[Task, ...]:
        """Returns the tasks of a schedule, which is that of a `region`."""
        found = [
            self.whose(task, task.writes or task.reads)
            for step in combine(schedule, self.sizes, self.compiler.combines_bytes).steps
            for task in self.of_step(step)
        ]
        return (*found, *self.costly(region))

    def whose(self, task: Task, values: Sequence[int]) -> Task:
        """Returns a task with the layers of the `values` that it makes: joined all-reduces are theirs by what each of
        them sends, anything else is its first one's."""
        if self.layers is None or task.inside or not values:
            return task
        sent = {value: 1.0 for value in values[:1]}
        if task.name == "all_reduces":
            makers = {value: self.makers[value] for value in values if value in self.makers}
            sent = {value: self.collective(maker).sent_bytes for value, maker in makers.items()} or sent
        total = sum(sent.values()) or 1.0
        return dataclasses.replace(
            task, layers=tuple((self.layers.of(value), size / total) for value, size in sent.items())
        )

    def of_step(self, step: Step) -> Iterator[Task]:
        node = self.makers.get(step.writes[0] if step.made is None else step.made) if step.writes else None
        if node is not None and node.is_rare:
            return
        reads, writes = tuple(step.reads), tuple(step.writes)
        if step.name == "all_reduces":  # several that became one
            each_sends = [self.collective(maker).sent_bytes for each in writes if (maker := self.makers.get(each))]
            axes, apart = tuple(step.combines[1:]), len(each_sends) if self.compiler.sends_apart else 1
            yield Task(
                step.name, op="all_reduce", axes=axes, sent_bytes=sum(each_sends), num_messages=max(apart, 1),
                reads=reads, writes=writes,
            )  # fmt: skip
        elif step.inside:
            regions = self.regions.get(step.writes[0], ()) if step.writes else ()
            branches = [self.tasks(s, r) for s, r in zip(step.inside, regions, strict=False)]
            # Of branches the longest counts, by what it reads and writes.
            inside = max(branches, key=lambda tasks: sum(task.num_bytes + task.flops for task in tasks), default=())
            turns = _num_turns(self.program, regions[0]) if step.name == "scan" and regions else 1
            yield Task(step.name, reads=reads, writes=writes, inside=inside, turns=turns)
        elif node is None or node.kind is Kind.FILL:
            moved = 2.0 * self.read_bytes(step)
            if self.compiler.weighs_bytes:
                moved = float(self.read_bytes(step) + step.filled_bytes)
            yield Task(step.name, (), _moved(moved), num_bytes=moved, reads=reads, writes=writes)
        elif node.kind is Kind.COLLECTIVE:
            yield dataclasses.replace(self.collective(node), reads=reads, writes=writes)
        else:
            yield self.computed(node, step)

    def read_bytes(self, step: Step) -> int:
        """Returns the bytes that a step reads: of what it reads through a slice, such as a turn's part of what a scan
        goes through, that part alone."""
        return sum(step.read_bytes.get(value, self.sizes.get(value, 0)) for value in step.reads)

    def computed(self, node: Node, step: Step) -> Task:
        """Returns the task of a kernel that is no collective."""
        program, out = self.program, node.outputs[0]
        written = sum(self.sizes.get(value, 0) for value in step.writes)
        moved = float(written + self.read_bytes(step))
        repeats, flops, loads = 1, 0.0, ()
        name = node.name
        if name in ("dot_general", "ragged_dot"):
            repeats, flops, load = self.product(node)
            loads = (load,)
        elif name == "conv_general_dilated":
            flops, load = self.convolution(node)
            loads = (load,)
        elif name.startswith("reduce_window"):
            loads = (Load(OperationKind.WINDOW, self.elements(out) * _window(node)),)
        elif name.startswith("select_and_"):
            loads = (Load(OperationKind.WINDOW_GRADIENT, self.elements(node.inputs[0]) * _window(node)),)
        elif name.startswith("reduce_") or name in ("argmax", "argmin"):
            value = node.inputs[0]
            axes, last = node.params.get("axes", ()), len(program.shapes[value]) - 1
            kind = OperationKind.ROW_SUM if last in axes else OperationKind.COLUMN_SUM
            loads = (Load(kind, self.elements(value)),)
        elif name == "gather":
            moved = 2.0 * written
            loads = (Load(OperationKind.GATHER, self.elements(out)),)
        elif name.startswith("scatter"):
            moved = 2.0 * sum(program.bytes_of(value) for value in node.inputs[2:3])
            loads = (Load(OperationKind.SCATTER, self.elements(node.inputs[2])),)
        elif name in _RANDOM:
            loads = (Load(OperationKind.RANDOM, self.elements(out)),)
        elif name in _SORTS:
            loads = (Load(OperationKind.SORT, self.elements(node.inputs[0])),)
        elif name in _MOVES:
            loads = (Load(OperationKind.TRANSPOSE, moved),)
        elif node.kind is Kind.PART or name in ("dynamic_update_slice", "dynamic_slice"):
            part = written if node.kind is Kind.PART or name == "dynamic_slice" else program.bytes_of(node.inputs[1])
            moved = 2.0 * part
            loads = _moved(moved)
        else:
            loads = _moved(moved)
        dtype = _DTYPES.get(program.itemsizes[(node.inputs or node.outputs)[0]], "float32")
        return Task(
            name, program.shapes[out], loads, repeats, flops, moved, dtype, reads=tuple(step.reads),
            writes=tuple(step.writes),
        )  # fmt: skip

    def product(self, node: Node) -> tuple[int, float, Load]:
        """Returns how many matrices a device multiplies, the flops of all of them, and the load of one."""
        numbers = node.params.get("dimension_numbers")
        if numbers is None:
            numbers = node.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        (contracted, over), (batch, _) = numbers
        left, out = self.local(node.inputs[0]), self.local(node.outputs[0])
        inner = math.prod(left[dim] for dim in contracted)
        many = math.prod(left[dim] for dim in batch)
        rows = math.prod(size for dim, size in enumerate(left) if dim not in contracted and dim not in batch)
        columns = max(math.prod(out) // max(many * rows, 1), 1)
        flops = 2.0 * inner * rows * columns
        # Leading dims of both operands are the examples, which the gradient of a weight sums over.
        summed = list(range(len(contracted)))
        is_gradient = sorted(contracted) == summed == sorted(over) and len(left) > len(summed)
        kind = OperationKind.WEIGHT_GRADIENT if is_gradient else OperationKind.PRODUCT
        return many, many * flops, Load(kind, flops, min(inner, rows, columns))

    def convolution(self, node: Node) -> tuple[float, Load]:
        numbers = node.params["dimension_numbers"]
        image, filters, out = self.local(node.inputs[0]), self.local(node.inputs[1]), self.local(node.outputs[0])
        window = math.prod(filters[dim] for dim in numbers.rhs_spec[2:])
        made = math.prod(out[dim] for dim in numbers.out_spec[2:])
        before, after = filters[numbers.rhs_spec[1]], filters[numbers.rhs_spec[0]]
        flops = 2.0 * math.prod(out) * window * before
        dilations = node.params.get("lhs_dilation") or (1,) * len(numbers.lhs_spec[2:])
        places = math.prod((image[dim] - 1) * by + 1 for dim, by in zip(numbers.lhs_spec[2:], dilations, strict=True))
        if places < window and self.compiler.swaps_filters:
            return flops, Load(OperationKind.SMALL_CONVOLUTION, flops, min(before, after))
        # The filter's gradient has the other gradient for its window, of the size of the image, and sums the examples.
        if made < window <= places or window == places < made:
            narrow = min(image[numbers.lhs_spec[0]], after)
            return flops, Load(OperationKind.FILTER_GRADIENT, flops, narrow)
        return flops, Load(OperationKind.CONVOLUTION, flops, min(before, after))

    def collective(self, node: Node) -> Task:
        program, op = self.program, _OPS.get(node.name, "all_reduce")
        axes = _axes_of(program, node)
        count = program.num_parts(axes)
        held = sum(program.bytes_of(value) for value in node.inputs)
        sent = {
            "all_reduce": lambda: all_reduce_bytes(count, held),
            "all_gather": lambda: all_gather_bytes(count, count * held),
            "reduce_scatter": lambda: reduce_scatter_bytes(count, held),
            "all_to_all": lambda: all_to_all_bytes(count, held),
            "permute": lambda: held,
        }[op]()
        over = program.crossed(axes)
        return Task(node.name, program.shapes[node.outputs[0]], op=op, axes=over, sent_bytes=float(sent))

    def costly(self, region: Region) -> Iterator[Task]:
        """Yields what exponentials and the like of a region take, wherever they are fused; nothing where they run
        beside the memory."""
        if self.compiler.weighs_bytes:
            return
        for node in region.nodes:
            if node.name in _COSTLY and node.kind is Kind.LOOP:
                count = self.elements(node.outputs[0])
                if count > 1:
                    shape = self.program.shapes[node.outputs[0]]
                    task = Task(node.name, shape, (Load(OperationKind.COSTLY, count),))
                    yield self.whose(task, node.outputs)

    def local(self, value: int) -> tuple[int, ...]:
        """Returns the shape of a device's part of a value."""
        program = self.program
        return tuple(
            -(-size // program.num_parts(axes)) if axes else size
            for size, axes in zip(program.shapes[value], program.splits[value], strict=True)
        )

    def elements(self, value: int) -> float:
        return float(math.prod(self.local(value)))


def _moved(num_bytes: float) -> tuple[Load, ...]:
    return (Load(OperationKind.ELEMENTWISE, num_bytes),) if num_bytes else ()


def _window(node: Node) -> int:
    return math.prod(node.params.get("window_dimensions", ()))


def _axes_of(program: Program, node: Node) -> Axes:
    """Returns the mesh axes that a collective goes over: as it says, or those that its operand is split over and its
    result is not."""
    if isinstance(node.params, tuple):
        return node.params
    if isinstance(node.params, dict):
        for key in ("axes", "axis_name"):
            if key in node.params:
                named = node.params[key]
                named = named if isinstance(named, (tuple, list)) else (named,)
                return tuple(axis for axis in named if axis in program.sizes or axis in program.others)
    used = lambda value: [axis for axes in program.splits[value] for axis in axes]
    before, after = used(node.inputs[0]), used(node.outputs[0])
    return tuple(axis for axis in before if axis not in after) or tuple(axis for axis in before)


def _num_turns(program: Program, region: Region) -> int:
    """Returns the turns of a scan: the size of what it goes through; 1 where it goes through nothing."""
    for node in region.nodes:
        if node.name == "slice_of_scan":
            return program.shapes[node.inputs[0]][0]
        if node.name == "fill_of_scan":
            return program.shapes[node.inputs[1]][0]
    return 1


def walk(tasks: Sequence[Task], turns: int = 1) -> Iterator[tuple[Task, int]]:
    """Yields every task of `tasks` that is no loop, with how often it runs; `turns`: how often they all do."""
    for task in tasks:
        if task.inside:
            yield from walk(task.inside, turns * task.turns)
        else:
            yield task, turns


def totals(tasks: Sequence[Task]) -> Mapping[str, Any]:
    """Returns flops, bytes and sent bytes of all `tasks` together."""
    found = {"flops": 0.0, "num_bytes": 0.0, "sent_bytes": 0.0}
    for task, turns in walk(tasks):
        for name in found:
            found[name] += turns * getattr(task, name)
    return found
