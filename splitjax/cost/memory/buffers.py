"""Decides which values of a split `Program` a compiler stores, and when: kernels with what they read and write.

Loops over elements are fused into those that read them, views and in-place updates have no bytes of their own, and
what crosses devices does. What is known of the compiler is in a `Compiler`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from splitjax.cost.memory.compilers import Compiler
from splitjax.cost.memory.joining import Domain, Kernel, joined
from splitjax.cost.memory.moves import add_moves
from splitjax.cost.memory.program import Kind, Node, Program, Region, views_of
from splitjax.cost.memory.rewriting import hoist_converts, slice_splits
from splitjax.cost.memory.rows import lay_out
from splitjax.cost.memory.schedule import Schedule, Step
from splitjax.cost.memory.tiles import LANES, Along, Tiling, tiled_bytes
from splitjax.cost.memory.uses import Uses, is_product, is_reduction, repeats, widens

# Operations that compilers compute once, however many loops read them.
_COSTLY = frozenset(
    "exp exp2 log log1p expm1 tanh logistic div pow rsqrt sqrt cbrt sin cos tan erf erf_inv erfc lgamma digamma atan2"
    " acos asin atan sinh cosh asinh acosh atanh rem gather cumsum dynamic_slice".split()
)


# Loops that read elements from elsewhere than they write them: they cannot work in place.
_MOVES = frozenset(
    "transpose transpose_operand transpose_result rev gather dynamic_slice slice slice_of_split pad concatenate".split()
)
# Sums and maxima of so many float32 elements are kernels of XLA's library on CPUs (YNNPACK), together with the
# arithmetic in front of them; what else they read is stored.
_LIBRARY_ELEMENTS = 32 * 1024
_LIBRARY_REDUCES = frozenset("reduce_sum reduce_max reduce_min".split())
_LIBRARY_LOOPS = frozenset("add add_any sub mul div max min neg exp log tanh sqrt rsqrt square integer_pow abs".split())
_IN_PLACE = frozenset("scatter scatter-add dynamic_update_slice".split())
# Loops that read parts of their first operand.
_SLICES = frozenset("slice slice_of_split dynamic_slice split gather".split())


class Storage:
    """Makes the schedule of a program. After `schedule`, `sizes` has the bytes of every buffer: a buffer is named after
    the value that is stored in it."""

    def __init__(self, program: Program, compiler: Compiler) -> None:
        self.program: Program = program
        self.compiler: Compiler = compiler
        self.sizes: dict[int, int] = {}
        self._roots: dict[int, int] = {}  # value -> the value whose bytes it looks at
        # Value of a fused loop, or one that loops compute anew -> stored values that it reads, and how much of each.
        self._through: dict[int, dict[int, int]] = {}
        self._again: dict[int, dict[int, int]] = {}
        self._uses: Uses  # of the program as `schedule` changes it first
        self._tilings: dict[int, Tiling | Along] = {}  # of values that lie otherwise than products want them
        self._costly: dict[int, frozenset[str]] = {}  # by fused loop, what is costly in it
        # By fused loop, the values that are repeated for it, each with one of the shape as which it is.
        self._repeated: dict[int, tuple[tuple[int, int], ...]] = {}
        self._bits: set[int] = set()  # results of comparisons that are stored with the product that they compare

    def schedule(self) -> Schedule:
        add_moves(self.program, self.compiler)
        if self.compiler.fills_tiles:
            self._tilings = lay_out(self.program)
        if self.compiler.fuses_operands:
            slice_splits(self.program, self.program.body)
            for stack, narrow in hoist_converts(self.program):
                self._tilings |= {narrow: self._tilings[stack]} if stack in self._tilings else {}
        self._uses = Uses(self.program)
        if self.compiler.fuses_operands:
            self._bits = self._uses.compared_products()
        for value in self.program.body.inputs:
            self._store(value)
        return self._schedule(self.program.body)

    @property
    def makers(self) -> dict[int, Node]:
        """By value, the node that makes it."""
        return self._uses.makers

    def root_of(self, value: int) -> int:
        """Returns the value whose bytes a value looks at: itself, or another through views."""
        return self._roots.get(value, value)

    def maker_of(self, value: int) -> str:
        """Returns the name of the operation that makes a value; "" where none is known."""
        maker = self.makers.get(value)
        return "" if maker is None else maker.name

    def _store(self, value: int) -> None:
        self.sizes[value] = self._stored_bytes(value)

    def _stored_bytes(self, value: int, is_rounded: bool = True) -> int:
        """Returns the bytes that a value takes where it is stored. `is_rounded`: in two bytes an element where products
        alone read it."""
        if value in self._bits:
            return -(-self._elements(value) // 8)
        if not self.compiler.fills_tiles:
            return self.program.bytes_of(value)
        part, full = self.program.part_of(value), self.program.itemsizes[value]
        itemsize = self._uses.itemsize(value) if is_rounded else full
        if self._uses.is_stack(value):  # what a loop writes in a round lies as it does inside
            return part[0] * tiled_bytes(part[1:], itemsize, Tiling.OPERAND)
        return tiled_bytes(part, itemsize, self._tilings.get(value, Tiling.OPERAND))

    def _is_fused(self, node: Node, region_outputs: set[int]) -> bool:
        """Whether a loop over elements is computed where it is read, and not stored."""
        if node.kind not in (Kind.LOOP, Kind.MADE, Kind.PART):
            return False
        readers = self._uses.readers_of(node.outputs[0])
        if readers is None or node.outputs[0] in region_outputs or node.outputs[0] in self._bits:
            return False
        if node.kind is Kind.MADE and not self.program.shapes[node.outputs[0]]:
            return True
        is_spread = node.kind is Kind.MADE or node.name == "broadcast_in_dim"
        if (
            self.compiler.fuses_operands
            and node.name == "broadcast_in_dim"
            and repeats(self.program, node, node.inputs[0])
        ):
            return False
        if not all(self._reads_fused(reader, node.outputs[0], is_spread) for reader in readers):
            return False
        if self.compiler.fuses_operands and node in self._uses.following:
            others = [reader for reader in readers if not is_reduction(reader)]
            if (
                others
                and not widens(self.program, node)
                and not any(self._uses.goes_on(node, reader) for reader in others)
            ):
                return False
        if self.compiler.fuses_operands and len(readers) > 1:
            costly = self._costly_in(node)
            is_narrow = self.program.itemsizes[node.outputs[0]] < 4
            is_anew = self.compiler.fuses_costly and all(map(is_product, readers))
            is_stored = (is_narrow or costly == {"div"}) and not is_anew
            if costly and is_stored and any(map(is_product, readers)):
                return False
        if node.name.startswith("reduce_") or node.name == "sort":
            return False
        if node.name == "concatenate" and not self._joins_tiles(node):
            return False
        if self.compiler.weighs_bytes:
            return len(readers) < 2 or self._moves_less(node, len(readers))
        if node.name not in _LIBRARY_LOOPS and any(map(self._is_library, readers)):
            return False
        if len(readers) > 1 and node.name in _COSTLY:
            return False
        if node.name in _COSTLY and any(r.name == "broadcast_in_dim" for r in readers):
            return False
        return True

    def _costly_in(self, node: Node) -> frozenset[str]:
        """Returns the names of costly operations that a loop computes, with those of the loops that it reads."""
        # What is spread over more elements, such as what belongs to a row, is computed once for all of them.
        num_elements = lambda value: math.prod(self.program.shapes[value])
        is_joined = node.name == "concatenate"
        whole = [value for value in node.inputs if is_joined or num_elements(value) >= num_elements(node.outputs[0])]
        inside = [self._costly.get(self.root_of(value), frozenset[str]()) for value in whole]
        return frozenset({node.name} & _COSTLY).union(*inside)

    def _reads_fused(self, node: Node, value: int, is_spread: bool) -> bool:
        """Whether a node computes itself what it reads, a `value` of a loop over elements; `is_spread`: one that only
        spreads a smaller one, which is made anew in the bodies of loops."""
        if not self.compiler.fuses_operands:
            return node.kind in (Kind.LOOP, Kind.PART, Kind.FILL)
        if node.name == "gather" and value == node.inputs[0]:
            return False
        if node.kind in (Kind.LOOP, Kind.PART, Kind.FILL):
            return True
        if node.kind is Kind.REGIONS:
            return is_spread and value not in node.inputs[: node.num_carry]
        return is_product(node)

    def _is_library(self, node: Node) -> bool:
        """Whether a node is a sum or a maximum that a library computes. Of an element its bytes are known, and not its
        type: sums of whole numbers of four bytes, which are rare, are taken for such."""
        if not self.compiler.reduces_by_library or node.name not in _LIBRARY_REDUCES:
            return False
        if self.program.itemsizes[node.inputs[0]] != 4:
            return False
        return self._elements(node.inputs[0]) >= _LIBRARY_ELEMENTS

    def _moves_less(self, node: Node, num_readers: int) -> bool:
        """Whether fewer bytes are moved where every reader of a loop computes it, than where it is stored. That it
        would be stored in two bytes an element counts where the loop reads several large arrays."""
        read = self._reads(node.inputs, by_loop=True)
        reads = sum(read.values())
        is_of_one = reads * 7 <= 8 * max(read.values(), default=0)  # but for an eighth, such as rows and biases
        written = sum(self._stored_bytes(value, is_rounded=not is_of_one) for value in node.outputs)
        return num_readers * reads <= reads + written + num_readers * written

    def _joins_tiles(self, node: Node) -> bool:
        """Whether a TPU's compiler reads the pieces of a concatenation in its place: each fills whole tiles."""
        if not self.compiler.fuses_operands:
            return False
        dim = node.params["dimension"]
        parts = [self.program.part_of(value) for value in node.inputs]
        return all(dim == len(part) - 1 and part[dim] % LANES == 0 for part in parts)

    def _repeated_in(self, node: Node) -> tuple[tuple[int, int], ...]:
        """Returns the values that a loop and those that it computes repeat, each with one of the shape as which it is.
        A broadcast that repeats is stored itself, and what moves elements repeats nothing."""
        if not self.compiler.fuses_operands or node.kind is not Kind.LOOP:
            return ()
        found = [pair for value in node.inputs for pair in self._repeated.get(self.root_of(value), ())]
        if node.name != "broadcast_in_dim" and node.name not in _MOVES | _IN_PLACE:
            found += [(value, node.outputs[0]) for value in node.inputs if repeats(self.program, node, value)]
        return tuple(dict.fromkeys(found))

    def _is_cheap_again(self, node: Node) -> bool:
        """Whether a loop that is stored for a kernel is computed again where other loops read it: it reads at most one
        array of its own size, and nothing in it is costly (XLA's `EffectivelyAtMostUnary`)."""
        if node.kind is not Kind.LOOP or node.name in _COSTLY or node.name.startswith("reduce_"):
            return False
        if node.name in ("concatenate", "sort", "transpose_operand", "transpose_result"):
            return False
        if self.compiler.fuses_operands and (node.name == "broadcast_in_dim" or node.outputs[0] in self._bits):
            return False
        if self.compiler.fuses_operands and self._uses.ends(node) and not widens(self.program, node):
            return False
        size = math.prod(self.program.shapes[node.outputs[0]])
        large = 0
        for value in node.inputs:
            maker = self.makers.get(self._roots.get(value, value))
            is_made = maker is not None and (maker.kind is Kind.MADE or maker.name == "broadcast_in_dim")
            large += math.prod(self.program.shapes[value]) >= size and not is_made
        return large <= 1

    def _may_share(self, node: Node) -> bool:
        """Whether a node may write over what it reads."""
        if node.kind is Kind.COLLECTIVE:
            return not self.compiler.reduces_apart or self.compiler.fuses_operands and self._uses.sums_product(node)
        return node.name in _IN_PLACE or node.kind is Kind.LOOP and node.name not in _MOVES

    def _reads(self, inputs: Sequence[int], by_loop: bool = False) -> dict[int, int]:
        """The stored values that are read for `inputs`, and how many bytes of each."""
        found: dict[int, int] = {}
        for value in inputs:
            root = self._roots.get(value, value)
            through = self._again.get(root) if by_loop else None
            for stored, size in (through or self._through.get(root, {root: self.sizes.get(root, 0)})).items():
                if stored in self.sizes:
                    found[stored] = min(found.get(stored, 0) + size, self.sizes[stored])
        return found

    def _schedule(self, region: Region) -> Schedule:
        steps: list[Step] = []
        for value in region.inputs:
            if value not in self.sizes:
                self._store(value)
        outputs_of_views = set(region.outputs)
        for node in region.nodes:
            if node.kind is Kind.VIEW:
                for value in dict.fromkeys(node.inputs):
                    self._roots |= dict.fromkeys(views_of(node, value), self.root_of(value))
                continue
            takes_part = self.compiler.fuses_operands and (node.kind is Kind.PART or node.name in _SLICES)
            if self._is_fused(node, outputs_of_views):
                through = self._reads(node.inputs, by_loop=not takes_part)
                self._costly |= dict.fromkeys(node.outputs, self._costly_in(node))
                self._repeated |= dict.fromkeys(node.outputs, self._repeated_in(node))
                for value in node.outputs:
                    most = self.program.bytes_of(value) if node.kind is Kind.PART or node.name in _SLICES else 2**62
                    self._through[value] = {stored: min(size, most) for stored, size in through.items()}
                continue
            if node.kind is Kind.FILL:
                read = self._reads(node.inputs[:1], by_loop=True)
                filled = self.program.bytes_of(node.inputs[0])
                steps.append(Step("fill", list(read), [], read_bytes=read, filled_bytes=filled))
                continue
            is_loop = node.kind in (Kind.LOOP, Kind.PART) and not self._is_library(node)
            read = self._reads(node.inputs, by_loop=is_loop and not takes_part)
            reads = list(read)
            if self._is_cheap_again(node):
                self._again[node.outputs[0]] = read
            inside = ()
            takes: tuple[tuple[int, int], ...] = ()
            if node.kind is Kind.REGIONS:
                for value in node.outputs:
                    self._store(value)
                inside = tuple(self._schedule(inner) for inner in node.regions)
                if node.num_carry:
                    inner = node.regions[0]
                    begun = (self._roots.get(value, value) for value in node.inputs[: node.num_carry])
                    takes = tuple(zip(begun, node.outputs, strict=False))
                    inside[0].carry = [
                        (before, self._roots.get(after, after))
                        for before, after in zip(inner.inputs, inner.outputs, strict=False)
                    ]
                inner_reads = {b for s in inside for b in _outer_reads(s)} - set(node.outputs)
                reads = list(dict.fromkeys([*reads, *inner_reads]))
            else:
                for value in node.outputs:
                    self._store(value)
            # A reduction repeats in its own kernel, as the count of a pool's maxima does.
            for value, whole in () if is_reduction(node) else self._repeated_in(node):
                steps.append(self._repeat(value, whole))
                reads += steps[-1].writes
            shares = self._may_share(node)
            combines = (node.name, *node.params) if node.name == "all_reduce" else ()
            if node.name in ("psum", "psum_invariant"):
                combines = (node.name, *node.params.get("axes", ()))
            gathers = _gathers(node)
            step = Step(
                node.name, reads, list(node.outputs), shares, inside, combines, read, gathers=gathers, takes=takes
            )
            steps.append(step)
        outputs = list(self._reads(region.outputs))
        return Schedule(self._joined(steps, outputs) if self.compiler.weighs_bytes else steps, outputs, [])

    def _repeat(self, value: int, whole: int) -> Step:
        """Returns the step that stores a `value` repeated, in the shape of `whole`."""
        program = self.program
        repeated = program.new(program.shapes[whole], program.itemsizes[value], program.splits[whole])
        if whole in self._tilings:
            self._tilings[repeated] = self._tilings[whole]
        self.makers[repeated] = Node("repeat", Kind.KERNEL, [value], [repeated])
        self._store(repeated)
        read = self._reads([value], by_loop=True)
        return Step("repeat", list(read), [repeated], read_bytes=read)

    def _joined(self, steps: Sequence[Step], outputs: Sequence[int]) -> list[Step]:
        """The kernels that a compiler for GPUs or TPUs makes of steps in program order."""
        kernels = [
            Kernel(
                number,
                self._domain(step),
                {buffer: step.read_bytes.get(buffer, self.sizes[buffer]) for buffer in step.reads},
                tuple(step.writes),
                bool(step.writes) and self._bits.issuperset(step.writes),
            )
            for number, step in enumerate(steps)
        ]
        made = []
        for each in joined(kernels, self.sizes, outputs, self.compiler.fuses_operands):
            first = steps[each.numbers[0]]
            if len(each.numbers) == 1:
                made.append(first)
                continue
            shares = all(steps[number].shares for number in each.numbers)
            if self.compiler.fuses_operands:  # what sums besides writes elsewhere than it reads
                domains = [kernels[number].domain for number in each.numbers]
                shares &= not any(domain is not None and domain.axes for domain in domains)
            made.append(
                Step(
                    first.name, list(each.reads), list(each.writes), shares, read_bytes=dict(each.reads),
                    made=first.writes[0],
                )
            )  # fmt: skip
        return made

    def _domain(self, step: Step) -> Domain | None:
        """What a step runs over, as far as others can join it."""
        node = self.makers.get(step.writes[0]) if step.writes else None
        if node is None or step.inside:
            return None
        if is_product(node):
            return Domain(0, is_product=True)
        if node.kind is not Kind.LOOP or node.name in _MOVES:
            return None
        if not node.name.startswith("reduce_"):
            return Domain(self._elements(node.outputs[0]))
        axes, last = tuple(node.params.get("axes", ())), len(self.program.shapes[node.inputs[0]]) - 1
        is_row_max = node.name == "reduce_max" and axes == (last,)
        return Domain(self._elements(node.inputs[0]), axes, is_row_max=is_row_max)

    def _elements(self, value: int) -> int:
        return self.program.bytes_of(value) // self.program.itemsizes[value]


def _gathers(node: Node) -> tuple[Any, ...]:
    """Returns of what kind of all-gather or reduce-scatter a node is; empty for others, and for what the partitioner
    moves."""
    if node.kind is not Kind.COLLECTIVE or not isinstance(node.params, dict):
        return ()
    kinds = [kind for kind in ("all_gather", "reduce_scatter") if node.name.startswith(kind)]
    axes = node.params.get("axis_name", ())
    return (*kinds, *(axes if isinstance(axes, tuple) else (axes,))) if kinds else ()


def _outer_reads(schedule: Schedule) -> set[int]:
    """Buffers that a schedule reads and does not write."""
    written = {b for step in schedule.steps for b in step.writes}
    read = {b for step in schedule.steps for b in step.reads} | set(schedule.outputs)
    inner = {before for before, _ in schedule.carry}
    return read - written - inner
