"""Reads a user's own `shard_map`: which dims of its operands and results run along each other.

The equation's specs and body go in, a `DimMap` comes out. A dim of a result is linked with a dim of an operand where
the specs split both over the same mesh axes and the body hands the one on as the other. Where the body holds an
operation that nobody can see through (a kernel, say), equal axes and equal sizes have to do. It exists because a
`shard_map` that links nothing tears the layers on both sides of it apart: a column-split layer before it would not know
of the row-split one behind it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from splitjax import _compat
from splitjax.primitives.calls import CallKind, call_body, kind_of, scan_parts, while_parts
from splitjax.primitives.dims import DimMap, Label, Labels, Params, Shape, Shapes
from splitjax.primitives.interpreter import fold
from splitjax.primitives.operation import Trait
from splitjax.primitives.table import OPERATIONS, dim_rule

Axes = tuple[str, ...]
Nodes = tuple[int, ...]  # of the dims of a value


class _Flow:
    """Follows dims through a body, by the dim rules of its operations. Lives for one call of `manual`.

    A dim is a node; nodes of dims that run along each other are united, a compound dim by its leading factor.

    - `mixes`: whether some operation combines values across a dim. `hides`: whether some operation has no dim rule.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self.mixes = False
        self.hides = False

    def new(self, shape: Sequence[int]) -> Nodes:
        first = len(self._parent)
        self._parent.extend(range(first, first + len(shape)))
        return tuple(range(first, first + len(shape)))

    def find(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def unite(self, left: Nodes, right: Nodes) -> None:
        for a, b in zip(left, right, strict=False):
            self._parent[self.find(a)] = self.find(b)

    def walk(self, jaxpr: Any, operands: Sequence[Nodes]) -> list[Nodes]:
        """Follows the dims of `operands` through `jaxpr`; returns those of its results."""
        inner, _ = _compat.open_jaxpr(jaxpr)
        constants = [self.new(var.aval.shape) for var in inner.constvars]
        literal = lambda atom: self.new(atom.aval.shape)
        return fold(jaxpr, operands, lambda _, eqn, values: self._equation(eqn, values), literal, constants)

    def _equation(self, eqn: Any, values: list[Nodes]) -> list[Nodes]:
        kind, body = kind_of(eqn), call_body(eqn)
        if body is not None:
            return self.walk(body, values)
        if kind in _CONTROL:
            return _CONTROL[kind](self, eqn, values)
        results = [self.new(getattr(v.aval, "shape", ())) for v in eqn.outvars]
        operation = OPERATIONS.of(eqn.primitive.name, eqn.params)
        shapes = [tuple(v.aval.shape) for v in eqn.invars], [tuple(getattr(v.aval, "shape", ())) for v in eqn.outvars]
        if operation.dims is not None:
            dim_map = operation.dims(*shapes, eqn.params)
            self.mixes = self.mixes or dim_map.mixing
            self.hides = self.hides or operation.has(Trait.FOREIGN)
            self._label([*values, *results], [*dim_map.inputs, *dim_map.outputs], [*shapes[0], *shapes[1]])
        elif operation.has(Trait.COLLECTIVE) or eqn.primitive.name in _MARKS:
            # a dim that is gathered, scattered or exchanged changes its size; the others stay what they are
            for before, after, old, new in zip(values, results, *shapes, strict=False):
                for a, b, size, kept in zip(before, after, old, new, strict=False):
                    if len(old) == len(new) and size == kept:
                        self.unite((a,), (b,))
        elif values:
            self.mixes = self.hides = True
        return results

    def _label(self, tensors: Sequence[Nodes], labels: Sequence[Labels], shapes: Sequence[Shape]) -> None:
        anchor: dict[Label, int] = {}
        for nodes, dims, shape in zip(tensors, labels, shapes, strict=True):
            for node, dim, size in zip(nodes, dims, shape, strict=True):
                if dim and size != 1:
                    self.unite((node,), (anchor.setdefault(dim[0], node),))


# What says on which devices a value varies, and changes nothing.
_MARKS = frozenset({"pbroadcast", "pcast", "preduced", "pvary"})


def _scan(flow: _Flow, eqn: Any, values: list[Nodes]) -> list[Nodes]:
    consts, init, scanned = scan_parts(eqn, values)
    results = flow.walk(eqn.params["jaxpr"], [*consts, *init, *(nodes[1:] for nodes in scanned)])
    for before, after in zip(init, results, strict=False):
        flow.unite(before, after)
    return [*results[: len(init)], *((*flow.new((1,)), *nodes) for nodes in results[len(init) :])]


def _while(flow: _Flow, eqn: Any, values: list[Nodes]) -> list[Nodes]:
    _, consts, init = while_parts(eqn, values)
    results = flow.walk(eqn.params["body_jaxpr"], [*consts, *init])
    for before, after in zip(init, results, strict=True):
        flow.unite(before, after)
    return results


def _cond(flow: _Flow, eqn: Any, values: list[Nodes]) -> list[Nodes]:
    first, *others = [flow.walk(branch, values[1:]) for branch in eqn.params["branches"]]
    for other in others:
        for before, after in zip(first, other, strict=True):
            flow.unite(before, after)
    return first


_CONTROL: dict[CallKind | None, Callable[[_Flow, Any, list[Nodes]], list[Nodes]]] = {
    CallKind.SCAN: _scan,
    CallKind.WHILE: _while,
    CallKind.COND: _cond,
}


@dataclasses.dataclass(frozen=True)
class _Split:
    """Describes a dim of an operand or a result of a `shard_map`.

    - `tensor`, `dim`: which of the operands and results, counted through, and which of its dims.
    - `size`: of the dim on all devices together. `axes`: the mesh axes over which its spec splits it.
    """

    tensor: int
    dim: int
    size: int
    axes: Axes


def spec_of(params: Params) -> tuple[list[tuple[Axes, ...]], list[tuple[Axes, ...]]]:
    """Returns the mesh axes over which a `shard_map` with these parameters splits each dim of its operands, and of its
    results. Dims behind the end of a spec are left out."""

    def axes(spec: Any) -> tuple[Axes, ...]:
        entries = (entry if isinstance(entry, (str, tuple)) else () for entry in spec)
        return tuple((entry,) if isinstance(entry, str) else entry for entry in entries)

    return [axes(spec) for spec in params["in_specs"]], [axes(spec) for spec in params["out_specs"]]


@dim_rule("shard_map")
def manual(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels the dims of `inputs` and `outputs` that the specs split alike and that the body hands on."""
    body, _ = _compat.open_jaxpr(params["jaxpr"])
    flow = _Flow()
    operands = [flow.new(var.aval.shape) for var in body.invars]
    nodes = [*operands, *flow.walk(params["jaxpr"], operands)]
    dims = list(_dims([*inputs, *outputs], params))
    groups: dict[Label, list[_Split]] = collections.defaultdict(list)
    for each in dims:
        groups[each.axes, flow.find(nodes[each.tensor][each.dim])].append(each)
    if flow.hides:
        groups |= _by_specs(dims, groups, len(inputs))
    labels: list[list[tuple[Label, ...]]] = [[()] * len(shape) for shape in (*inputs, *outputs)]
    sizes: dict[Label, int] = {}
    for label, group in groups.items():
        if not group:
            continue
        # a dim that is led by another one is split as that one is, so that it shares its label
        size = min(each.size for each in group)
        alone = len({each.tensor for each in group}) < len(group)
        for each in group:
            rest = ("rest", each.tensor, each.dim)
            if alone or each.size % size or (each.size > size and not each.axes):
                labels[each.tensor][each.dim] = (rest,)
            elif each.size == size:
                labels[each.tensor][each.dim] = (label,)
            else:
                labels[each.tensor][each.dim] = (label, rest)
                sizes |= {label: size, rest: each.size // size}
    split = tuple(tuple(tensor) for tensor in labels)
    return DimMap(split[: len(inputs)], split[len(inputs) :], mixing=flow.mixes, sizes=sizes)


OPERATIONS.state("shard_map", Trait.FOREIGN)


def _dims(shapes: Shapes, params: Params) -> Iterator[_Split]:
    """Yields every dim of operands and results that has several entries."""
    in_specs, out_specs = spec_of(params)
    for tensor, (shape, spec) in enumerate(zip(shapes, (*in_specs, *out_specs), strict=True)):
        for dim, size in enumerate(shape):
            if size > 1:
                yield _Split(tensor, dim, size, spec[dim] if dim < len(spec) else ())


def _by_specs(
    dims: Sequence[_Split], groups: dict[Label, list[_Split]], num_operands: int
) -> dict[Label, list[_Split]]:
    """Returns groups, by the labels that they take over, in which split dims of results that the body leaves alone join
    the operands' dims of the same axes and size."""
    label_of = {(each.tensor, each.dim): label for label, group in groups.items() for each in group}
    joined: dict[Label, list[_Split]] = {}
    for each in dims:
        label = label_of[each.tensor, each.dim]
        if each.tensor < num_operands or not each.axes or any(other.tensor < num_operands for other in groups[label]):
            continue
        alike = [other for other in dims if (other.axes, other.size) == (each.axes, each.size)]
        for other in alike:
            joined[label_of[other.tensor, other.dim]] = []
        joined[label] = alike
    return joined
