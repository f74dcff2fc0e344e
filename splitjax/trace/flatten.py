"""Flattens a jaxpr into a list of operations over numbered values, seeing through every call.

Nested jaxprs (jit, remat, custom_jvp, custom_vjp, cond, while, scan, and splitjax's own gradient boundary) are
inlined: what is only handed through keeps its value number, so that a parameter is recognised however deep it is
used. Loops are walked once; pseudo-operations (names starting with `_`) stand for what a loop does to its operands:

- `_scan_in`: one slice of a scanned operand (the leading dim is gone);
- `_scan_out`: results stacked over iterations (a new leading dim);
- `_carry_in`: a carried value entering the loop; `_carry_back`: the body's result becoming the next iteration's
  operand;
- `_branch`: one result of a conditional, from each branch;
- `_scan_index`: all scanned operands and stacked results of one scan: their leading dims count the same iterations;
- `_gradient`: the gradient of a differentiated operand of the boundary: same shape, same dims.

A `site` (`primitives.walk`) names the equation that an operation comes from; `lower.products.interpret` finds
operations again by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from splitjax import _compat
from splitjax.primitives.calls import (
    CALLS,
    EDITABLE,
    CallKind,
    boundary_parts,
    call_body,
    kind_of,
    scan_parts,
    while_parts,
)
from splitjax.primitives.interpreter import fold
from splitjax.primitives.operation import OperationFacts
from splitjax.primitives.table import OPERATIONS, STAND_FOR_MANY
from splitjax.primitives.walk import Site


class Op(NamedTuple):
    """Describes one operation of a flat step. A tuple, as a step has ten thousand, and more.

    - `primitive`: its name; pseudo-operations start with `_`.
    - `inputs`, `outputs`: numbers of the values that it reads and makes.
    - `params`: the equation's parameters.
    - `site`: the place of its equation (`primitives.walk`).
    - `trips`: how often it runs per step: the lengths of the scans around it, multiplied.
    - `loops`: identities of the enclosing loops, outermost first.
    - `eqn`: the equation, for source lines; None for a pseudo-operation.
    - `editable`: whether lowering can reach it: it does not stand inside a custom derivative rule.
    - `phase`: FORWARD or BACKWARD within a derivative that JAX already took, else "".
    - `inside`: whether it belongs to the forward computation of a gradient boundary.
    - `conditional`: whether it may not run: it stands in a branch, or in a loop that ends when it wants to.
    - `calls`: equations of the calls that it stands in, outermost first.
    - `rule_at`: where it is not editable, the site of the call whose derivative rule it stands in, if that is JAX's
      custom one.
    - `facts`: what the table of operations says of it, looked up once for all analyses.
    - `remats`: the sites of the rematerialised calls that it stands in, outermost first.
    """

    primitive: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: dict[str, Any]
    site: Site
    trips: int
    loops: tuple[int, ...]
    eqn: Any
    editable: bool
    phase: str
    inside: bool
    conditional: bool
    calls: tuple[Any, ...]
    rule_at: Site | None
    facts: OperationFacts
    remats: tuple[Site, ...] = ()

    @property
    def source(self) -> str:
        """The user's `file:line`. JAX traces some of its own functions once and keeps the result: then it is that of
        their call."""
        equations = (self.eqn, *reversed(self.calls)) if self.eqn is not None else reversed(self.calls)
        return next((line for eqn in equations if (line := _compat.source_line(eqn))), "")


class Rematerialised(NamedTuple):
    """Describes a call that the backward pass runs again, in the forward computation of a gradient boundary, and in no
    other such call.

    - `eqn`: its equation. `operands`: the numbers of the values that it reads.
    - `site`, `trips`, `loops`: as of `Op`.
    """

    eqn: Any
    operands: tuple[int, ...]
    site: Site
    trips: int
    loops: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class FlatStep:
    """Holds a flat step; `shapes[v]` and `dtypes[v]` describe value v.

    - `ops`: its operations in program order.
    - `inputs`, `outputs`: values of the step's flat arguments and flat results.
    - `num_boundaries`: the number of gradient boundaries.
    - `differentiated`: values that a boundary differentiates with respect to.
    - `carried`: pairs of a loop and a value that enters its body as a carry.
    - `constants`: values that the step closes over.
    - `literals`: value -> the number that stands in the program.
    - `rematerialised`: calls that lowering can rebuild, in program order.
    """

    ops: tuple[Op, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    num_boundaries: int
    differentiated: frozenset[int]
    carried: tuple[tuple[int, int], ...]
    constants: tuple[int, ...]
    literals: Mapping[int, Any]
    rematerialised: tuple[Rematerialised, ...] = ()


# What `vmap` makes of a collective over its own axis name: a collective whose axes are dims, which is a reduction.
_REDUCTIONS = {"psum": "reduce_sum", "pmax": "reduce_max", "pmin": "reduce_min"}


def _reduction(eqn: Any) -> str | None:
    """Names the reduction that a collective over dims alone is; None for everything else."""
    known = _REDUCTIONS.get(eqn.primitive.name)
    return (
        known if known and len(eqn.invars) == 1 and all(isinstance(axis, int) for axis in eqn.params["axes"]) else None
    )


FORWARD: str = "forward"
BACKWARD: str = "backward"


class _Flattener:
    """Collects operations while it walks. Lives for one call of `flatten`."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.shapes: list[tuple[int, ...]] = []
        self.dtypes: list[str] = []
        self.differentiated: set[int] = set()
        self.carried: list[tuple[int, int]] = []
        self.constants: list[int] = []
        self.literals: dict[int, Any] = {}
        self.rematerialised: list[Rematerialised] = []
        self.num_boundaries = 0
        self.num_loops = 0
        self.dtype_names: dict[Hashable, str] = {}
        self.facts: dict[str, OperationFacts] = {}

    def value(self, aval: Any) -> int:
        self.shapes.append(tuple(getattr(aval, "shape", ())))
        dtype = getattr(aval, "dtype", "token")
        name = self.dtype_names.get(dtype)
        if name is None:
            name = self.dtype_names[dtype] = str(dtype)
        self.dtypes.append(name)
        return len(self.shapes) - 1

    def walk(self, jaxpr: Any, operands: Sequence[int], where: _Where) -> list[int]:
        """Walks one jaxpr; returns the value numbers of its results."""
        inner, _ = _compat.open_jaxpr(jaxpr)
        # Values that a body closes over are constants of the trace: no leaf reaches them.
        constants = [self.value(var.aval) for var in inner.constvars]
        self.constants.extend(constants)
        # The outermost derivative counts: what an inner one does is part of what the outer one differentiates.
        phases: list[str] = []
        if not where.phase:
            stacks = _compat.name_stacks(inner.eqns)
            by_stack = {stack: derivative_phase(stack) for stack in set(stacks)}
            phases = [by_stack[stack] for stack in stacks]
        step = lambda index, eqn, values: self.equation(eqn, values, where.at(index, where.phase or phases[index]))
        return fold(jaxpr, operands, step, self.literal, constants)

    def literal(self, atom: Any) -> int:
        value = self.value(atom.aval)
        self.literals[value] = atom.val
        return value

    def equation(self, eqn: Any, operands: list[int], where: _Where) -> list[int]:
        name = eqn.primitive.name
        if name in CALLS:
            kind, body = kind_of(eqn), call_body(eqn)
            if body is not None:
                if kind is CallKind.REMAT and where.inside and where.editable and not (where.phase or where.remats):
                    self.rematerialised.append(
                        Rematerialised(eqn, tuple(operands), where.site, where.trips, where.loops)
                    )
                return self.walk(
                    body, operands, where.into_call(eqn, editable=kind in EDITABLE, custom=kind is CallKind.RULE)
                )
            if kind in _CONTROL:
                return _CONTROL[kind](self, eqn, operands, where)
        elif name in _REDUCTIONS:
            name = _reduction(eqn) or name
        return self.emit(name, operands, [v.aval for v in eqn.outvars], where, eqn, eqn.params)

    def emit(
        self,
        name: str,
        operands: Sequence[int],
        avals: Sequence[Any],
        where: _Where,
        eqn: Any = None,
        params: dict[str, Any] | None = None,
    ) -> list[int]:
        results = [self.value(aval) for aval in avals]
        params = params or {}
        self.ops.append(
            Op(
                name,
                tuple(operands),
                tuple(results),
                params,
                where.site,
                where.trips,
                where.loops,
                eqn,
                where.editable,
                where.phase,
                where.inside,
                where.conditional,
                where.calls,
                where.rule_at,
                self.facts.get(name) or self.looked_up(name, params),
                where.remats,
            )
        )
        return results

    def looked_up(self, name: str, params: Mapping[str, Any]) -> OperationFacts:
        """Returns what the table says of an operation, and keeps it for others of the name where that tells all."""
        facts = OPERATIONS.of(name, params)
        if name not in STAND_FOR_MANY:
            self.facts[name] = facts
        return facts

    def loop(self) -> int:
        self.num_loops += 1
        return self.num_loops - 1


class _Where(NamedTuple):
    """Says where the walk stands: what `Op` records of the place of an operation."""

    site: Site = ()
    trips: int = 1
    loops: tuple[int, ...] = ()
    editable: bool = True
    phase: str = ""
    inside: bool = False
    conditional: bool = False
    calls: tuple[Any, ...] = ()
    rule_at: Site | None = None
    remats: tuple[Site, ...] = ()

    def at(self, index: int, phase: str) -> _Where:
        return _Where(
            (*self.site, index),
            self.trips,
            self.loops,
            self.editable,
            phase,
            self.inside,
            self.conditional,
            self.calls,
            self.rule_at,
            self.remats,
        )

    def into(self, body: int) -> _Where:
        """Goes into the body of this number."""
        return self._replace(site=(*self.site, body))

    def in_doubt(self) -> _Where:
        """Stays, where it is not certain that operations run."""
        return self._replace(conditional=True)

    def into_loop(self, body: int, loop: int, trips: int = 1) -> _Where:
        """Goes into a body of the loop of number `loop`, which runs it `trips` times."""
        return self._replace(site=(*self.site, body), trips=self.trips * trips, loops=(*self.loops, loop))

    def into_call(self, call: Any, editable: bool, custom: bool) -> _Where:
        """Goes into the body of the equation `call`. `editable`: lowering can rebuild it. `custom`: it has a derivative
        rule of its own."""
        return self._replace(
            site=(*self.site, 0),
            editable=self.editable and editable,
            calls=(*self.calls, call),
            rule_at=self.site if custom and self.editable else self.rule_at,
            remats=(*self.remats, self.site) if kind_of(call) is CallKind.REMAT else self.remats,
        )


def derivative_phase(name_stack: str) -> str:
    """Tells which pass of the outermost derivative an equation belongs to, by the transformations in its `name_stack`.

    Returns FORWARD, BACKWARD, or "" outside any derivative.
    """
    backward, forward = name_stack.find("transpose("), name_stack.find("jvp(")
    if backward < 0 and forward < 0:
        return ""
    return BACKWARD if 0 <= backward and (forward < 0 or backward < forward) else FORWARD


def _scan(flat: _Flattener, eqn: Any, operands: list[int], where: _Where) -> list[int]:
    consts, init, scanned = scan_parts(eqn, operands)
    inner, num_carry = scan_parts(eqn, _compat.open_jaxpr(eqn.params["jaxpr"])[0].invars), len(init)
    loop = flat.loop()
    inside = where.into_loop(0, loop, trips=eqn.params["length"])
    carry = _enter(flat, init, [v.aval for v in inner.carry], inside, loop)
    first = len(operands) - len(scanned)
    slices = [
        flat.emit("_scan_in", [outer], [var.aval], inside, params={"operand": first + number})[0]
        for number, (outer, var) in enumerate(zip(scanned, inner.xs, strict=True))
    ]
    results = flat.walk(eqn.params["jaxpr"], [*consts, *carry, *slices], inside)
    _carry_back(flat, results[:num_carry], carry, inside)
    stacked = [
        flat.emit("_scan_out", [inner], [var.aval], where)[0]
        for inner, var in zip(results[num_carry:], eqn.outvars[num_carry:], strict=True)
    ]
    if len(scanned) + len(stacked) > 1:
        flat.emit("_scan_index", [*scanned, *stacked], [], where)
    return [*results[:num_carry], *stacked]


def _while(flat: _Flattener, eqn: Any, operands: list[int], where: _Where) -> list[int]:
    cond_consts, body_consts, init = while_parts(eqn, operands)
    loop = flat.loop()
    body, _ = _compat.open_jaxpr(eqn.params["body_jaxpr"])
    inside = where.into_loop(1, loop).in_doubt()
    carry = _enter(flat, init, [v.aval for v in body.invars[len(body_consts) :]], inside, loop)
    flat.walk(
        eqn.params["cond_jaxpr"],
        [*cond_consts, *carry],
        where.into_loop(0, loop).in_doubt(),
    )
    results = flat.walk(eqn.params["body_jaxpr"], [*body_consts, *carry], inside)
    _carry_back(flat, results, carry, inside)
    return results


def _enter(flat: _Flattener, init: list[int], avals: list[Any], where: _Where, loop: int) -> list[int]:
    carry = [flat.emit("_carry_in", [outer], [aval], where)[0] for outer, aval in zip(init, avals, strict=True)]
    flat.carried.extend((loop, value) for value in carry)
    return carry


def _carry_back(flat: _Flattener, results: list[int], carry: list[int], where: _Where) -> None:
    for result, value in zip(results, carry, strict=True):
        if result != value:
            flat.emit("_carry_back", [result, value], [], where)


def _cond(flat: _Flattener, eqn: Any, operands: list[int], where: _Where) -> list[int]:
    branches = [flat.walk(b, operands[1:], where.into(k).in_doubt()) for k, b in enumerate(eqn.params["branches"])]
    return [
        flat.emit("_branch", list(results), [var.aval], where)[0]
        for results, var in zip(zip(*branches, strict=True), eqn.outvars, strict=True)
    ]


def _boundary(flat: _Flattener, eqn: Any, operands: list[int], where: _Where) -> list[int]:
    flat.num_boundaries += 1
    forward, differentiated = boundary_parts(eqn)
    results = flat.walk(forward, operands, where._replace(site=(*where.site, 0), inside=True))
    gradients = []
    for position in differentiated:
        flat.differentiated.add(operands[position])
        var = eqn.outvars[len(results) + len(gradients)]
        place = {"result": len(results) + len(gradients)}
        gradients.append(flat.emit("_gradient", [operands[position], results[0]], [var.aval], where, params=place)[0])
    return [*results, *gradients]


_CONTROL = {CallKind.SCAN: _scan, CallKind.WHILE: _while, CallKind.COND: _cond, CallKind.BOUNDARY: _boundary}


def flatten(jaxpr: Any) -> FlatStep:
    """Flattens the closed `jaxpr` of a step (see the module's docstring)."""
    flat = _Flattener()
    inner, _ = _compat.open_jaxpr(jaxpr)
    inputs = [flat.value(var.aval) for var in inner.invars]
    outputs = flat.walk(jaxpr, inputs, _Where())
    return FlatStep(
        tuple(flat.ops),
        tuple(flat.shapes),
        tuple(flat.dtypes),
        tuple(inputs),
        tuple(outputs),
        flat.num_boundaries,
        frozenset(flat.differentiated),
        tuple(flat.carried),
        tuple(flat.constants),
        flat.literals,
        tuple(flat.rematerialised),
    )
