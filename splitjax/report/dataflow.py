"""Which values of a compiled module flow into which: what a collective was made from, and what becomes of it.

XLA cuts a step into fusions, calls, loops and branches, and packs results into tuples. Here all of that is looked
through: what is left is one graph of *nodes*, the instructions that compute something, joined by the values they read.
Names and source lines say where an operation was written; this graph says what it is about, such as a sum that ends in
the new value of one parameter.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator

from splitjax.report.hlo import user_lines
from splitjax.report.wire import Instruction, Module

# (how it was reached, instruction, member): a computation that is called twice has its nodes twice; a combined
# collective has a node per member, everything else has the member 0.
Node = tuple[int, int, int]
_ENTRY = 0
_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
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
class _Call:
    """How a computation is reached: by which instruction, itself reached how."""

    computation: int
    caller: tuple[int, int] | None  # (call, instruction)


class Dataflow:
    """The nodes of one module. Built once, read by its methods.

    **Attributes:**

    - `results`: nodes whose values the step returns.
    - `decisions`: nodes that say which branch is taken or whether a loop goes on.
    """

    def __init__(self, module: Module) -> None:
        self._module = module
        self._calls: list[_Call] = []
        self._children: dict[tuple[int, int], list[int]] = {}
        self._collectives: dict[str, tuple[int, int]] = {}
        self._known: dict[tuple[int, int, int | None], tuple[Node, ...]] = {}
        if module.entry in module.computations:
            self._enter(_Call(module.entry, None))
        self._operands: dict[Node, tuple[tuple[Node, ...], ...]] = {}
        self._users: dict[Node, list[Node]] = collections.defaultdict(list)
        for node in self._nodes():
            sources = tuple(self._sources(node))
            self._operands[node] = sources
            for one in {source for operand in sources for source in operand}:
                self._users[one].append(node)
        root = module.computations.get(module.entry)
        self.decisions = frozenset(self._decisions())
        self.results: frozenset[Node] = frozenset(self._resolve(_ENTRY, root.root, None, ())) if root else frozenset()

    def collective(self, name: str, member: int) -> Node | None:
        """The node of a collective, by its instruction's name and its place among those it was combined with."""
        found = self._collectives.get(name)
        return None if found is None else (*found, member)

    def instruction(self, node: Node) -> Instruction:
        return self._module.computations[self._calls[node[0]].computation].instructions[node[1]]

    def opcode(self, node: Node) -> str:
        return self.instruction(node).opcode

    def operands(self, node: Node) -> tuple[tuple[Node, ...], ...]:
        """Per operand the nodes that it may come from: several where a loop or a branch gives it."""
        return self._operands.get(node, ())

    def users(self, node: Node) -> tuple[Node, ...]:
        return tuple(self._users.get(node, ()))

    def argument(self, node: Node) -> str | None:
        """The name that JAX gave the step's argument that a node is, such as `args[0]['params']['kernel']`; None for
        other nodes."""
        one = self.instruction(node)
        return one.op_name if one.opcode == "parameter" and node[0] == _ENTRY else None

    def walk(self, start: Iterable[Node], onward: Callable[[Node], Iterable[Node]]) -> Iterator[tuple[int, Node]]:
        """(distance, node) from the starting nodes on, nearest first, each once; `onward` gives where to go from a
        node."""
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
        """All nodes that a node reads."""
        return tuple(dict.fromkeys(one for operand in self.operands(node) for one in operand))

    def lines(self, node: Node) -> tuple[str, ...]:
        """The user's lines on an operation's stack, innermost first, as `hlo.CompiledCollective.frames`."""
        return user_lines(self._module.frames, self.instruction(node).stack_frame)

    def arguments(self) -> tuple[tuple[str, Node], ...]:
        """(name, node) of every argument that the module has."""
        return tuple((name, node) for node in self._operands if (name := self.argument(node)) is not None)

    def origin(self, node: Node, through: frozenset[str] = MOVES) -> str | None:
        """The argument whose values a node only rearranges; None where something was computed, or where there are
        several."""
        return self._only_argument(node, lambda one: self._moved(one, through) if self.opcode(one) in through else None)

    def scaled_origin(self, node: Node) -> str | None:
        """As `origin`, where constants may have scaled or shifted the values: the running mean in
        `0.9 * mean + 0.1 * new`."""

        def onward(one: Node) -> tuple[Node, ...] | None:
            opcode = self.opcode(one)
            if opcode in MOVES:
                return self._moved(one, MOVES)
            if opcode in SPREADS:
                return () if self._is_constant(one) else None
            return None if opcode in MIXES else self.sources(one)

        return self._only_argument(node, onward)

    def _only_argument(self, node: Node, onward: Callable[[Node], tuple[Node, ...] | None]) -> str | None:
        """The only argument that `onward` leads to; None for none, for several, or where it gives up (None)."""
        found: set[str | None] = set()
        queue, seen = [node], {node}
        while queue:
            one = queue.pop()
            opcode = self.opcode(one)
            if opcode == "parameter":
                found.add(self.argument(one))
            elif opcode != "constant":
                following = onward(one)
                if following is None or len(found) > 1 or len(seen) > _MAX_NODES:
                    return None
                queue += [source for source in following if source not in seen]
                seen.update(following)
        return found.pop() if len(found) == 1 else None

    def _is_constant(self, node: Node) -> bool:
        return all(
            self.opcode(one) in ("constant", "iota", *MOVES, *SPREADS) for _, one in self.walk([node], self.sources)
        )

    def _moved(self, node: Node, through: frozenset[str]) -> tuple[Node, ...]:
        """What a rearrangement reads; positions to cut at are no values of its result."""
        opcode = self.opcode(node)
        operands = self.operands(node)
        kept = (
            operands if opcode == "concatenate" else operands[:2] if opcode == "dynamic-update-slice" else operands[:1]
        )
        return tuple(one for operand in kept for one in operand)

    # Building.

    def _enter(self, call: _Call) -> int:
        number = len(self._calls)
        self._calls.append(call)
        for one in self._module.computations[call.computation].instructions.values():
            if one.opcode in _CALLS:
                inner = [
                    self._enter(_Call(called, (number, one.id)))
                    for called in one.called
                    if called in self._module.computations
                ]
                self._children[number, one.id] = inner
            elif _is_collective(one):
                self._collectives.setdefault(one.name, (number, one.id))
        return number

    def _nodes(self) -> Iterator[Node]:
        for number, call in enumerate(self._calls):
            for one in self._module.computations[call.computation].instructions.values():
                if (
                    one.opcode in _CALLS
                    or one.opcode in _SAME
                    or one.opcode in ("tuple", "get-tuple-element")
                    or _is_done(one)
                ):
                    continue
                if one.opcode == "parameter" and call.caller is not None:
                    continue
                for member in range(len(one.operands) if _is_combined(one) else 1):
                    yield number, one.id, member

    def _decisions(self) -> Iterator[Node]:
        for (call, number), inner in self._children.items():
            one = self._module.computations[self._calls[call].computation].instructions[number]
            if one.opcode == "conditional":
                yield from self._resolve(call, one.operands[0], None, ())
            elif one.opcode == "while":
                for child in inner:
                    computation = self._module.computations[self._calls[child].computation]
                    if (
                        computation.root in computation.instructions
                        and not computation.instructions[computation.root].shape.members
                    ):
                        yield from self._resolve(child, computation.root, None, ())

    def _sources(self, node: Node) -> Iterator[tuple[Node, ...]]:
        one = self.instruction(node)
        operands = one.operands[node[2] : node[2] + 1] if _is_combined(one) else one.operands
        for operand in operands:
            yield self._resolve(node[0], operand, None, ())

    def _resolve(self, call: int, number: int, index: int | None, pending: tuple) -> tuple[Node, ...]:
        """The nodes behind an instruction's result, or behind one member (`index`) of a result that is a tuple."""
        key = (call, number, index)
        if key in self._known:
            return self._known[key]
        if key in pending:  # once around a loop
            return ()
        found: list[Node] = []
        for inner, one, member in self._behind(call, number, index):
            if inner is None:
                found.append((call, one, member or 0))
            else:
                found += self._resolve(inner, one, member, (*pending, key))
        result = tuple(dict.fromkeys(found))
        if not pending:  # inside a loop a result may be cut short
            self._known[key] = result
        return result

    def _behind(self, call: int, number: int, index: int | None) -> Iterator[tuple[int | None, int, int | None]]:
        """One step of `_resolve`: (call, instruction, member) to resolve further, or (None, instruction, member) for a
        node."""
        instructions = self._module.computations[self._calls[call].computation].instructions
        one = instructions.get(number)
        if one is None:
            return
        opcode = one.opcode
        if opcode == "get-tuple-element":
            yield call, one.operands[0], one.tuple_index
        elif opcode == "tuple":
            for operand in one.operands if index is None else one.operands[index : index + 1]:
                yield call, operand, None
        elif opcode in ("async-done", "async-update"):
            yield call, one.operands[0], index
        elif opcode in _SAME or _is_done(one):
            yield call, one.operands[0], index
        elif opcode == "parameter" and self._calls[call].caller is not None:
            yield from self._passed(call, one, index)
        elif opcode in _CALLS:
            if opcode == "while":
                yield call, one.operands[0], index
            for inner in self._children.get((call, number), ()):
                computation = self._module.computations[self._calls[inner].computation]
                root = computation.instructions.get(computation.root)
                if opcode == "while" and root is not None and not root.shape.members:
                    continue  # the condition
                yield inner, computation.root, index
        elif _is_combined(one):
            members = range(len(one.operands)) if index is None else (index,)
            for member in members:
                if member < len(one.operands):
                    yield None, number, member
        else:
            yield None, number, 0

    def _passed(self, call: int, one: Instruction, index: int | None) -> Iterator[tuple[int | None, int, int | None]]:
        """What a call hands to a parameter of the computation that it calls."""
        outer, number = self._calls[call].caller or (0, 0)
        caller = self._module.computations[self._calls[outer].computation].instructions[number]
        if caller.opcode == "while":
            yield outer, caller.operands[0], index
            yield outer, number, index  # what the turn before left
        elif caller.opcode == "conditional":
            branch = self._children[outer, number].index(call)
            if branch + 1 < len(caller.operands):
                yield outer, caller.operands[branch + 1], index
        elif one.parameter < len(caller.operands):
            yield outer, caller.operands[one.parameter], index


def _is_collective(one: Instruction) -> bool:
    return one.opcode.removesuffix("-start") in _COLLECTIVES


def _is_combined(one: Instruction) -> bool:
    """Whether an instruction stands for several collectives; an all-to-all with several operands is one, a
    permutation's and a ragged exchange's further operands are not data."""
    return (
        _is_collective(one)
        and one.opcode.removesuffix("-start") in ("all-reduce", "all-gather", "reduce-scatter")
        and len(one.operands) > 1
    )


def _is_done(one: Instruction) -> bool:
    return one.opcode.endswith("-done") and one.opcode.removesuffix("-done") in _COLLECTIVES
