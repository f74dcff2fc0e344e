"""Finds which values of a compiled module flow into which: what a collective was made from, and what becomes of it.

A module goes in; out comes a graph that can be walked in both directions. XLA cuts a step into fusions, calls, loops
and branches, and packs results into tuples. Here all of that is looked through: what is left is a graph of *nodes*, the
instructions that compute something, joined by the values they read. Names and source lines say where an operation was
written; this graph says what it is about, such as a sum that ends in the new value of a parameter.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator

from splitjax.report.hlo import user_lines
from splitjax.report.wire import Instruction, Module

# (how its computation was reached, instruction, member): a computation that is called twice has its nodes twice; a
# combined collective has a node per member, everything else has the member 0.
Node = tuple[int, int, int]
# (how it was reached, instruction, member or None for all of them): a value that may be a tuple.
_Place = tuple[int, int, int | None]
_ENTRY = 0
_COLLECTIVES = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all collective-permute collective-broadcast ragged-all-to-all".split()
)
_CALLS = frozenset({"fusion", "call", "conditional", "async-start", "while"})
# Hand on the value that they read, tuples and all.
_SAME = frozenset(
    {"copy-start", "copy-done", "async-done", "async-update", "optimization-barrier", "opt-barrier", "add-dependency"}
)
# Rearrange values, or pick some of them, but compute nothing.
MOVES = frozenset(
    {
        "bitcast",
        "bitcast-convert",
        "copy",
        "reshape",
        "transpose",
        "convert",
        "slice",
        "dynamic-slice",
        "dynamic-reshape",
        "reverse",
        "pad",
        "dynamic-update-slice",
        "concatenate",
        "all-gather",
        "all-gather-start",
        "all-to-all",
        "all-to-all-start",
        "collective-permute",
        "collective-permute-start",
        "collective-broadcast",
        "domain",
        "reduce-precision",
    }
)
# Compute each value from several of an operand's: they end what one array's values say about another's.
MIXES = frozenset(
    {
        "dot",
        "convolution",
        "reduce",
        "reduce-window",
        "select-and-scatter",
        "gather",
        "scatter",
        "sort",
        "custom-call",
        "rng",
        "rng-bit-generator",
        "fft",
        "triangular-solve",
        "cholesky",
        "topk",
        "map",
        "scan",
        "ragged-dot",
        "all-reduce",
        "all-reduce-start",
        "reduce-scatter",
        "reduce-scatter-start",
        "ragged-all-to-all",
    }
)
# Make many values of few: what they read has another shape than what they give.
SPREADS = frozenset({"broadcast", "iota"})
# Cones of activations may span the whole step; what says something about a collective stands near it.
_MAX_NODES = 4000


@dataclasses.dataclass(frozen=True)
class _Invocation:
    """Says how a computation is reached.

    **Attributes:**

    - `computation`: its id.
    - `caller`: (invocation, instruction) that calls it; None for the entry computation.
    """

    computation: int
    caller: tuple[int, int] | None  # (call, instruction)


class Dataflow:
    """Joins the nodes of a module by what they read. Built once, read by its methods.

    **Attributes:**

    - `results`: nodes whose values the step returns.
    - `decisions`: nodes that say which branch is taken or whether a loop goes on.

    The argument `module` is the compiled module.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._calls: list[_Invocation] = []
        self._children: dict[tuple[int, int], list[int]] = {}
        self._collectives: dict[str, tuple[int, int]] = {}
        self._known: dict[_Place, tuple[Node, ...]] = {}
        if module.entry in module.computations:
            self._enter(_Invocation(module.entry, None))
        self._operands: dict[Node, tuple[tuple[Node, ...], ...]] = {}
        self._users: dict[Node, list[Node]] = collections.defaultdict(list)
        for node in self._nodes():
            sources = tuple(self._sources(node))
            self._operands[node] = sources
            for source in {source for operand in sources for source in operand}:
                self._users[source].append(node)
        root = module.computations.get(module.entry)
        self.decisions: frozenset[Node] = frozenset(self._decisions())
        self.results: frozenset[Node] = frozenset(self._resolve(_ENTRY, root.root, None, ())) if root else frozenset()

    def collective(self, name: str, member: int) -> Node | None:
        """Returns the node of a collective by its instruction's `name` and its place `member` among those it was
        combined with; None where the module has no such instruction."""
        instruction = self._collectives.get(name)
        return None if instruction is None else (*instruction, member)

    def instruction(self, node: Node) -> Instruction:
        """Returns the instruction that `node` is."""
        return self._module.computations[self._calls[node[0]].computation].instructions[node[1]]

    def opcode(self, node: Node) -> str:
        """Returns XLA's name of the operation of `node`."""
        return self.instruction(node).opcode

    def operands(self, node: Node) -> tuple[tuple[Node, ...], ...]:
        """Returns, for each operand of `node`, the nodes that it may come from: several where a loop or a branch gives
        it."""
        return self._operands.get(node, ())

    def users(self, node: Node) -> tuple[Node, ...]:
        """Returns the nodes that read `node`."""
        return tuple(self._users.get(node, ()))

    def argument(self, node: Node) -> str | None:
        """Returns the name that JAX gave the step's argument that `node` is, such as `args[0]['params']['kernel']`;
        None for other nodes."""
        instruction = self.instruction(node)
        return instruction.op_name if instruction.opcode == "parameter" and node[0] == _ENTRY else None

    def walk(self, start: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> Iterator[tuple[int, Node]]:
        """Yields (distance, node) from the nodes of `start` on, nearest first, each once. `onward` gives where to go
        from a node; the walk ends after some thousands of nodes."""
        queue = collections.deque((0, node) for node in start)
        seen = {node for _, node in queue}
        while queue and len(seen) < _MAX_NODES:
            distance, node = queue.popleft()
            yield distance, node
            for following in onward(node):
                if following not in seen:
                    seen.add(following)
                    queue.append((distance + 1, following))

    def sources(self, node: Node) -> tuple[Node, ...]:
        """Returns all nodes that `node` reads."""
        return tuple(dict.fromkeys(source for operand in self.operands(node) for source in operand))

    def lines(self, node: Node) -> tuple[str, ...]:
        """Returns the user's lines on the stack of the operation `node`, innermost first, as in
        `hlo.CompiledCollective.frames`."""
        return user_lines(self._module.frames, self.instruction(node).stack_frame)

    def arguments(self) -> tuple[tuple[str, Node], ...]:
        """Returns (name, node) of every argument that the module has."""
        return tuple((name, node) for node in self._operands if (name := self.argument(node)) is not None)

    def origin(self, node: Node, through: frozenset[str] = MOVES) -> str | None:
        """Returns the argument whose values `node` only rearranges; None where something was computed, or where there
        are several. The opcodes `through` are those that count as rearranging."""
        return self._only_argument(
            node, lambda rearranged: self._moved(rearranged, through) if self.opcode(rearranged) in through else None
        )

    def scaled_origin(self, node: Node) -> str | None:
        """Returns the argument whose values `node` rearranges, where constants may also have scaled or shifted them:
        the running mean in `0.9 * mean + 0.1 * new`. None as in `origin`."""

        def onward(reached: Node) -> tuple[Node, ...] | None:
            opcode = self.opcode(reached)
            if opcode in MOVES:
                return self._moved(reached, MOVES)
            if opcode in SPREADS:
                return () if self._is_constant(reached) else None
            return None if opcode in MIXES else self.sources(reached)

        return self._only_argument(node, onward)

    def _only_argument(self, node: Node, onward: Callable[[Node], tuple[Node, ...] | None]) -> str | None:
        """Returns the only argument that `onward` leads to; None for none, for several, or where it gives up (None)."""
        arguments: set[str | None] = set()
        queue, seen = [node], {node}
        while queue:
            reached = queue.pop()
            opcode = self.opcode(reached)
            if opcode == "parameter":
                arguments.add(self.argument(reached))
            elif opcode != "constant":
                following = onward(reached)
                if following is None or len(arguments) > 1 or len(seen) > _MAX_NODES:
                    return None
                queue += [source for source in following if source not in seen]
                seen.update(following)
        return arguments.pop() if len(arguments) == 1 else None

    def _is_constant(self, node: Node) -> bool:
        return all(
            self.opcode(source) in ("constant", "iota", *MOVES, *SPREADS)
            for _, source in self.walk([node], self.sources)
        )

    def _moved(self, node: Node, through: frozenset[str]) -> tuple[Node, ...]:
        """Returns the nodes whose values a rearrangement reads; positions to cut at are no values of its result."""
        opcode = self.opcode(node)
        operands = self.operands(node)
        kept = (
            operands if opcode == "concatenate" else operands[:2] if opcode == "dynamic-update-slice" else operands[:1]
        )
        return tuple(source for operand in kept for source in operand)

    # Building.

    def _enter(self, call: _Invocation) -> int:
        """Lists an invocation and all that its computation calls. Returns its number."""
        number = len(self._calls)
        self._calls.append(call)
        for instruction in self._module.computations[call.computation].instructions.values():
            if instruction.opcode in _CALLS:
                inner = [
                    self._enter(_Invocation(called, (number, instruction.id)))
                    for called in instruction.called
                    if called in self._module.computations
                ]
                self._children[number, instruction.id] = inner
            elif _is_collective(instruction):
                self._collectives.setdefault(instruction.name, (number, instruction.id))
        return number

    def _nodes(self) -> Iterator[Node]:
        """Yields all nodes: what computes nothing and what is looked through are left out."""
        for number, call in enumerate(self._calls):
            for instruction in self._module.computations[call.computation].instructions.values():
                if (
                    instruction.opcode in _CALLS
                    or instruction.opcode in _SAME
                    or instruction.opcode in ("tuple", "get-tuple-element")
                    or _is_done(instruction)
                ):
                    continue
                if instruction.opcode == "parameter" and call.caller is not None:
                    continue
                for member in range(len(instruction.operands) if _is_combined(instruction) else 1):
                    yield number, instruction.id, member

    def _decisions(self) -> Iterator[Node]:
        """Yields the nodes behind the index of every choice and behind the condition of every loop."""
        for (call, number), inner in self._children.items():
            instruction = self._module.computations[self._calls[call].computation].instructions[number]
            if instruction.opcode == "conditional":
                yield from self._resolve(call, instruction.operands[0], None, ())
            elif instruction.opcode == "while":
                for child in inner:
                    computation = self._module.computations[self._calls[child].computation]
                    if (
                        computation.root in computation.instructions
                        and not computation.instructions[computation.root].shape.members
                    ):
                        yield from self._resolve(child, computation.root, None, ())

    def _sources(self, node: Node) -> Iterator[tuple[Node, ...]]:
        """Yields, for each operand of a node, the nodes that it may come from."""
        instruction = self.instruction(node)
        operands = instruction.operands[node[2] : node[2] + 1] if _is_combined(instruction) else instruction.operands
        for operand in operands:
            yield self._resolve(node[0], operand, None, ())

    def _resolve(self, call: int, number: int, index: int | None, pending: tuple[_Place, ...]) -> tuple[Node, ...]:
        """Returns the nodes behind an instruction's result, or behind one member (`index`) of a result that is a tuple.
        `pending` holds what is being resolved already: a value that comes around a loop."""
        key = (call, number, index)
        if key in self._known:
            return self._known[key]
        if key in pending:  # once around a loop
            return ()
        nodes: list[Node] = []
        for inner, behind, member in self._behind(call, number, index):
            if inner is None:
                nodes.append((call, behind, member or 0))
            else:
                nodes += self._resolve(inner, behind, member, (*pending, key))
        result = tuple(dict.fromkeys(nodes))
        if not pending:  # inside a loop a result may be cut short
            self._known[key] = result
        return result

    def _behind(self, call: int, number: int, index: int | None) -> Iterator[tuple[int | None, int, int | None]]:
        """Takes one step of `_resolve`: yields (invocation, instruction, member) to resolve further, or (None,
        instruction, member) for a node."""
        instructions = self._module.computations[self._calls[call].computation].instructions
        instruction = instructions.get(number)
        if instruction is None:
            return
        opcode = instruction.opcode
        if opcode == "get-tuple-element":
            yield call, instruction.operands[0], instruction.tuple_index
        elif opcode == "tuple":
            for operand in instruction.operands if index is None else instruction.operands[index : index + 1]:
                yield call, operand, None
        elif opcode in _SAME or _is_done(instruction):
            yield call, instruction.operands[0], index
        elif opcode == "parameter" and self._calls[call].caller is not None:
            yield from self._passed(call, instruction, index)
        elif opcode in _CALLS:
            if opcode == "while":
                yield call, instruction.operands[0], index
            for inner in self._children.get((call, number), ()):
                computation = self._module.computations[self._calls[inner].computation]
                root = computation.instructions.get(computation.root)
                if opcode == "while" and root is not None and not root.shape.members:
                    continue  # the condition
                yield inner, computation.root, index
        elif _is_combined(instruction):
            members = range(len(instruction.operands)) if index is None else (index,)
            for member in members:
                if member < len(instruction.operands):
                    yield None, number, member
        else:
            yield None, number, 0

    def _passed(
        self, call: int, parameter: Instruction, index: int | None
    ) -> Iterator[tuple[int | None, int, int | None]]:
        """Yields what a call hands to a `parameter` of the computation that it calls, as `_behind` does."""
        outer, number = self._calls[call].caller or (0, 0)
        caller = self._module.computations[self._calls[outer].computation].instructions[number]
        if caller.opcode == "while":
            yield outer, caller.operands[0], index
            yield outer, number, index  # what the trip before left
        elif caller.opcode == "conditional":
            branch = self._children[outer, number].index(call)
            if branch + 1 < len(caller.operands):
                yield outer, caller.operands[branch + 1], index
        elif parameter.parameter < len(caller.operands):
            yield outer, caller.operands[parameter.parameter], index


def _is_collective(instruction: Instruction) -> bool:
    return instruction.opcode.removesuffix("-start") in _COLLECTIVES


def _is_combined(instruction: Instruction) -> bool:
    """Tells whether an instruction stands for several collectives; an all-to-all with several operands is a single one,
    a permutation's and a ragged exchange's further operands are not data."""
    return (
        _is_collective(instruction)
        and instruction.opcode.removesuffix("-start") in ("all-reduce", "all-gather", "reduce-scatter")
        and len(instruction.operands) > 1
    )


def _is_done(instruction: Instruction) -> bool:
    return instruction.opcode.endswith("-done") and instruction.opcode.removesuffix("-done") in _COLLECTIVES
