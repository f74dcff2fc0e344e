"""Reads one loss that was traced at two batch sizes as one program.

The *whole* jaxpr has the global number of examples, the *part* jaxpr the number that one microbatch of one worker has.
Both come from the same Python function, so their equations correspond one to one; a dim whose sizes differ holds
examples, and a literal that differs was computed from the number of examples. `pair` checks the correspondence and
numbers the values; calls of `jit` are inlined, other nested jaxprs become bodies of their node. What comes out, a
`PairedProgram`, is what `classify` and the evaluators work on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from splitjax import _compat
from splitjax.errors import Refusal
from splitjax.primitives.calls import AS_IT_IS, CALLS, CallKind, call_body, inline_body, kind_of
from splitjax.primitives.example_question import differing_params, is_same_constant
from splitjax.primitives.walk import Site
from splitjax.step.per_microbatch import is_per_microbatch


@dataclasses.dataclass(frozen=True, eq=False)
class Const:
    """Holds a literal or a constant as the two traces have it.

    `whole`, `part`: its values in them, of which the whole batch's is the true one; `whole_aval`, `part_aval`: their
    types."""

    whole: Any
    part: Any
    whole_aval: Any
    part_aval: Any

    @property
    def differs(self) -> bool:
        """Tells whether the two traces disagree on the value, which then comes from the number of examples."""
        return not is_same_constant(self.whole, self.part)

    @property
    def is_zero(self) -> bool:
        """Tells whether the constant is the scalar number 0 in both traces."""
        shape, dtype = getattr(self.whole_aval, "shape", None), getattr(self.whole_aval, "dtype", None)
        return (
            shape == ()
            and dtype is not None
            and jnp.issubdtype(dtype, jnp.number)
            and bool(self.whole == 0)
            and not self.differs
        )


Ref = int | Const  # a value's number, or a constant


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """Holds one operation of the two traces.

    - `whole`, `part`: its equations in the trace of the whole batch and in the part trace.
    - `site`: equation and body indices from the forward jaxpr inwards, as in `primitives.walk`.
    - `inputs`, `outputs`: the values that it reads and writes.
    - `bodies`: the jaxprs that it runs: a loop's, or one per branch.
    - `around`: the equations of the calls and loops that it stands in, outermost first.
    - `name`: of the primitive.
    - `per_microbatch`: it is a call that each microbatch evaluates on its own examples; it has no bodies then.
    """

    whole: Any
    part: Any
    site: Site
    inputs: tuple[Ref, ...]
    outputs: tuple[int, ...]
    bodies: tuple[Body, ...]
    around: tuple[Any, ...]
    name: str
    per_microbatch: bool = False

    @property
    def source(self) -> str:
        """The user's line; of the call that leads here, where a library function was traced before."""
        line = ""
        for eqn in (*self.around, self.whole):
            line = _source(eqn, line)
        return line

    @property
    def runs_as_it_is(self) -> bool:
        """Whether it has bodies that cannot be evaluated apart from it: a function with its own derivative rule."""
        return bool(self.bodies) and kind_of(self.whole) in AS_IT_IS


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """Holds a jaxpr of both traces: its `nodes` in program order, and the numbers of its `inputs` and `outputs`.

    Value numbers are unique in the program."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Ref, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PairedProgram:
    """Holds the paired forward jaxpr.

    `body`: its operations; `types[v]`: the abstract values of value `v` in the whole and in the part trace."""

    body: Body
    types: tuple[tuple[Any, Any], ...]

    @property
    def has_per_microbatch(self) -> bool:
        """Whether a call in it, or in its loops and branches, is taken over each microbatch's own examples."""
        return _has_per_microbatch(self.body)

    def type_of(self, ref: Ref) -> tuple[Any, Any]:
        """Returns the types of `ref`, a value or a constant, in the whole and in the part trace."""
        return (ref.whole_aval, ref.part_aval) if isinstance(ref, Const) else self.types[ref]

    def types_of(self, refs: Sequence[Ref]) -> tuple[tuple[Any, Any], ...]:
        """Returns the types of each of `refs`, as `type_of` does."""
        return tuple(self.type_of(ref) for ref in refs)


def _has_per_microbatch(body: Body) -> bool:
    return any(node.per_microbatch or any(map(_has_per_microbatch, node.bodies)) for node in body.nodes)


def pair(whole: Any, part: Any, label: str) -> PairedProgram | Refusal:
    """Pairs two closed jaxprs of one function, traced with the `whole` batch and with a `part` of it.

    `label` names the function where no equation tells its line. Returns a refusal where the structures differ.
    """
    pairer = _Pairer([], label, [])
    inner_whole, inner_part = _compat.open_jaxpr(whole)[0], _compat.open_jaxpr(part)[0]
    if len(inner_whole.invars) != len(inner_part.invars):
        return pairer.refuse(None, "it closes over a different number of values")
    inputs = tuple(pairer.number(a.aval, b.aval) for a, b in zip(inner_whole.invars, inner_part.invars, strict=True))
    body = pairer.body(whole, part, inputs, ())
    return pairer.refusals[0] if body is None else PairedProgram(body, tuple(pairer.types))


@dataclasses.dataclass(frozen=True)
class _Pairer:
    """Numbers the values while it walks, their types in `types`; lives for one call of `pair`, whose `label` it has.

    Where the traces differ, the walk ends: its methods return None, and `refusals` says why."""

    types: list[tuple[Any, Any]]
    label: str
    refusals: list[Refusal]

    def number(self, whole: Any, part: Any) -> int:
        """Returns the number of a new value with the types `whole` and `part` in the two traces."""
        self.types.append((whole, part))
        return len(self.types) - 1

    def refuse(self, eqn: Any, why: str) -> Refusal:
        """Returns the refusal for traces that differ: `why` says how, and `eqn` (if not None) where."""
        return Refusal(
            f"the loss does different operations for the whole batch and for one microbatch: {why}",
            value=None if eqn is None else eqn.primitive.name,
            place=(_compat.source_line(eqn) if eqn is not None else "") or self.label,
            remedy=(
                "let the loss do the same operations at every batch size (no Python branches on it), use fewer"
                " microbatches, or microbatches=None"
            ),
        )

    def require(self, holds: bool, eqn: Any, why: str) -> bool:
        """Returns `holds`, and notes the refusal where it is False; `eqn` and `why` are those of `refuse`."""
        if not holds:
            self.refusals.append(self.refuse(eqn, why))
        return holds

    def body(
        self, whole: Any, part: Any, inputs: tuple[int, ...], site: Site, around: tuple[Any, ...] = ()
    ) -> Body | None:
        """Pairs the jaxprs `whole` and `part` with the given `inputs`, which stand at `site`.

        `around` are the equations around them, outermost first."""
        nodes: list[Node] = []
        outputs = self.walk(whole, part, inputs, site, nodes, around)
        return None if outputs is None else Body(tuple(nodes), inputs, tuple(outputs))

    def walk(
        self, whole: Any, part: Any, inputs: Sequence[Ref], site: Site, nodes: list[Node], around: tuple[Any, ...]
    ) -> list[Ref] | None:
        """Adds the operations of the jaxprs `whole` and `part`, called with `inputs`, to `nodes`; returns the results.

        `site` is where the jaxprs stand, and `around` are the equations around them, outermost first."""
        (whole, whole_consts), (part, part_consts) = _compat.open_jaxpr(whole), _compat.open_jaxpr(part)
        first = next(iter(whole.eqns), None)
        if not self.require(len(whole.constvars) == len(part.constvars), first, "different constants"):
            return None
        if not self.require(
            len(whole.eqns) == len(part.eqns) and len(whole.outvars) == len(part.outvars),
            _first_difference(whole, part) or first,
            f"{len(whole.eqns)} operations against {len(part.eqns)}",
        ):
            return None
        known: dict[Any, Ref] = dict(zip(whole.invars, inputs, strict=True))
        matching: dict[Any, Ref] = dict(zip(part.invars, inputs, strict=True))
        for a, b, x, y in zip(whole.constvars, part.constvars, whole_consts, part_consts, strict=True):
            known[a] = matching[b] = Const(x, y, a.aval, b.aval)

        def read(many: Sequence[Any], others: Sequence[Any], eqn: Any) -> list[Ref] | None:
            refs: list[Ref] = []
            for a, b in zip(many, others, strict=True):
                literals = isinstance(a, _compat.Literal), isinstance(b, _compat.Literal)
                if all(literals):
                    refs.append(Const(a.val, b.val, a.aval, b.aval))
                    continue
                if not self.require(not any(literals), eqn, "a constant against a value"):
                    return None
                if not self.require(known[a] is matching[b] or known[a] == matching[b], eqn, "different operands"):
                    return None
                refs.append(known[a])
            return refs

        for index, (a, b) in enumerate(zip(whole.eqns, part.eqns, strict=True)):
            same = self.require(a.primitive is b.primitive, a, f"{a.primitive.name} against {b.primitive.name}")
            if not same or not self.require(
                len(a.invars) == len(b.invars) and len(a.outvars) == len(b.outvars),
                a,
                "different numbers of operands or results",
            ):
                return None
            operands = read(a.invars, b.invars, a)
            if operands is None:
                return None
            results = self.equation(a, b, operands, (*site, index), nodes, around)
            if results is None:
                return None
            known.update(zip(a.outvars, results, strict=True))
            matching.update(zip(b.outvars, results, strict=True))
        return read(whole.outvars, part.outvars, first)

    def equation(
        self, a: Any, b: Any, operands: Sequence[Ref], site: Site, nodes: list[Node], around: tuple[Any, ...]
    ) -> Sequence[Ref] | None:
        """Adds the equation `a` of the whole trace, paired with `b`, to `nodes`, or what it calls; returns its results.

        `operands` are what it reads, `site` is where it stands, and `around` are the equations around it."""
        marked = is_per_microbatch(a)
        is_call = a.primitive.name in CALLS and not marked
        whole, part = (inline_body(a), inline_body(b)) if is_call else (None, None)
        if whole is not None and part is not None:
            return self.walk(whole, part, operands, (*site, 0), nodes, (*around, a))
        results = tuple(self.number(x.aval, y.aval) for x, y in zip(a.outvars, b.outvars, strict=True))
        bodies = self.bodies(a, b, site, (*around, a)) if is_call else ()
        if bodies is None:
            return None
        nodes.append(Node(a, b, site, tuple(operands), results, bodies, around, a.primitive.name, marked))
        return results

    def bodies(self, a: Any, b: Any, site: Site, around: tuple[Any, ...]) -> tuple[Body, ...] | None:
        """Pairs the bodies that the equations `a` and `b` at `site` run; `around` are the equations around these."""
        whole, part = _bodies(a), _bodies(b)
        if not self.require(len(whole) == len(part), a, "different numbers of branches"):
            return None
        bodies = []
        for index, (x, y) in enumerate(zip(whole, part, strict=True)):
            first, second = _compat.open_jaxpr(x)[0].invars, _compat.open_jaxpr(y)[0].invars
            if not self.require(len(first) == len(second), a, "different numbers of operands"):
                return None
            inputs = tuple(self.number(v.aval, w.aval) for v, w in zip(first, second, strict=True))
            body = self.body(x, y, inputs, (*site, index), around)
            if body is None:
                return None
            bodies.append(body)
        return tuple(bodies)


def _bodies(eqn: Any) -> tuple[Any, ...]:
    """Returns the jaxprs of `eqn` that are analysed with it: a loop's, a call's, or one per branch."""
    kind = kind_of(eqn)
    if kind is CallKind.SCAN:
        return (eqn.params["jaxpr"],)
    if kind is CallKind.COND:
        return tuple(eqn.params["branches"])
    body = call_body(eqn)
    return () if body is None else (body,)


def _source(eqn: Any, outer: str) -> str:
    """Returns the user's line of an equation, or `outer`, the enclosing call's, where it knows a library's only."""
    line = _compat.source_line(eqn)
    return outer if outer and (not line or _compat.is_machinery(line.rsplit(":", 1)[0])) else line


def _first_difference(whole: Any, part: Any) -> Any:
    """Returns the first equation of `whole` whose counterpart is another primitive, None without such."""
    return next((a for a, b in zip(whole.eqns, part.eqns, strict=False) if a.primitive is not b.primitive), None)


def resized(node: Node, resize: Callable[[int, int], int]) -> Any:
    """Returns the part trace's equation of `node` at another number of examples.

    `resize(whole, part)` interpolates a size that differs between the two traces."""
    changes = {}
    for key in differing_params(node, frozenset({"sharding", "out_sharding"})):
        whole, part = node.whole.params[key], node.part.params[key]
        if isinstance(whole, tuple):
            changes[key] = tuple(a if a == b else resize(a, b) for a, b in zip(whole, part, strict=True))
        else:
            changes[key] = resize(whole, part)
    return _compat.with_params(node.part, **changes) if changes else node.part
