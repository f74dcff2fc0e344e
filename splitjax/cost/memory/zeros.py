"""Stores the zeros that XLA's GPU compiler stores: a `Program` comes in, and is changed.

Gradients of a table are added into an array of zeros. Where a loop over elements reads zeros of the same shape, such as
an update's `where(sums > 0, rates, 0)`, the compiler takes both for one array, copies it for what is added in place,
and fills all such arrays in one kernel before the first is needed: each lives from there to its own last reader.
`tests/cost/memory/test_zeros.py` has a module for an H200 that shows it.
"""

from __future__ import annotations

import dataclasses

from splitjax.cost.memory.program import Kind, Node, Program

_ADDS = frozenset(("scatter", "scatter-add"))


@dataclasses.dataclass
class _Alike:
    """Holds the zeros of one shape. `nodes`: what makes them, in program order. `added`: those that are added into.
    `read`: those that loops read."""

    nodes: list[Node] = dataclasses.field(default_factory=list)
    added: list[int] = dataclasses.field(default_factory=list)
    read: list[int] = dataclasses.field(default_factory=list)


def store_zeros(program: Program) -> None:
    """Makes one node of all zeros of a shape, where something is added into one of them and others are read too."""
    users = _users(program)
    alike: dict[tuple[tuple[int, ...], int], _Alike] = {}
    for node in program.body.nodes:
        if node.kind is not Kind.MADE or len(node.outputs) != 1 or node.outputs[0] not in program.zeros:
            continue
        (value,) = node.outputs
        if not program.shapes[value]:
            continue
        here = alike.setdefault((_part(program, value), program.itemsizes[value]), _Alike())
        readers = _readers(program, value, users)
        here.nodes.append(node)
        if any(reader.name in _ADDS and of == reader.inputs[0] for reader, of in readers):
            here.added.append(value)
        elif any(reader.kind in (Kind.LOOP, Kind.PART) for reader, _ in readers):
            here.read.append(value)
    for here in alike.values():
        if here.added and len(here.added) + len(here.read) > 1:
            _store(program, here)


def _store(program: Program, alike: _Alike) -> None:
    first = alike.read[:1]
    made = Node("zeros", Kind.KERNEL, [], [*first, *alike.added], origin=alike.nodes[0].origin)
    nodes: list[Node] = []
    for node in program.body.nodes:
        if node not in alike.nodes:
            nodes.append(node)
            continue
        if made not in nodes:
            nodes.append(made)
        (value,) = node.outputs
        if value in alike.read[1:]:
            nodes.append(Node("zeros", Kind.VIEW, first, [value]))
        elif value not in made.outputs:
            nodes.append(node)
    program.body.nodes[:] = nodes


def _part(program: Program, value: int) -> tuple[int, ...]:
    """Returns the shape that a device has of a value."""
    dims = zip(program.shapes[value], program.splits[value], strict=True)
    return tuple(-(-size // program.num_parts(axes)) for size, axes in dims)


def _users(program: Program) -> dict[int, list[Node]]:
    users: dict[int, list[Node]] = {}
    for node in program.body.nodes:
        for value in dict.fromkeys(node.inputs):
            users.setdefault(value, []).append(node)
    return users


def _readers(program: Program, value: int, users: dict[int, list[Node]]) -> list[tuple[Node, int]]:
    """Returns what reads a value, through views of all that a device has of it, and as which value."""
    found: list[tuple[Node, int]] = []
    for user in users.get(value, ()):
        if user.kind is not Kind.VIEW:
            found.append((user, value))
        elif program.bytes_of(user.outputs[0]) == program.bytes_of(value):
            found += _readers(program, user.outputs[0], users)
    return found
