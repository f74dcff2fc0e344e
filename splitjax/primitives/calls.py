"""Tells what an equation does with the jaxprs that it holds: one table of calls, loops and branches.

An equation goes in; its kind, and its body or bodies come out. Every room that looks into calls, edits them, inlines
them or evaluates them anew asks here, so that no two rooms disagree on what a call is. Primitives are known by name:
those of every supported release of JAX stand side by side, and names that a release has no longer do no harm.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from splitjax import _compat

# The primitive of a gradient boundary (`step.boundary`), whose `forward` is differentiated when it is evaluated.
BOUNDARY: str = "splitjax_value_and_grad"


class CallKind(enum.Enum):
    """Names what an equation means beside the jaxprs that it holds.

    - `INLINE`: nothing: its body may stand in its place, under any transformation.
    - `REMAT`: its body is computed again for the backward pass.
    - `RULE`: a function with a derivative rule of the user's own (`custom_jvp`, `custom_vjp`).
    - `ANNOTATED`: its numbers are those of its body, and so are its derivatives where it has any; it carries something
      besides, such as a name for the compiler or a rule for `vmap`, that an edited body would lose.
    - `FIXED`: what it carries besides its body decides on its derivative or its partitioning.
    - `SCAN`, `WHILE`: a loop with a known number of iterations, and one that ends when it wants to.
    - `COND`: one of several branches.
    - `BOUNDARY`: a gradient boundary of splitjax.
    - `MANUAL`: a body that runs on each device's part of the operands (`shard_map`).
    """

    INLINE = "inline"
    REMAT = "remat"
    RULE = "rule"
    ANNOTATED = "annotated"
    FIXED = "fixed"
    SCAN = "scan"
    WHILE = "while"
    COND = "cond"
    BOUNDARY = "boundary"
    MANUAL = "manual"


# Kinds of which lowering can evaluate an edited body: all others carry something that is written for theirs.
EDITABLE: frozenset[CallKind] = frozenset({CallKind.INLINE, CallKind.REMAT})
# Kinds whose equation has to run as it is wherever it is differentiated.
AS_IT_IS: frozenset[CallKind] = frozenset({CallKind.RULE, CallKind.ANNOTATED, CallKind.FIXED})
# Kinds whose numbers and derivatives are those of their body, so that evaluating the body elsewhere changes neither.
MEANS_ITS_BODY: frozenset[CallKind] = frozenset({CallKind.INLINE, CallKind.REMAT, CallKind.ANNOTATED})


@dataclasses.dataclass(frozen=True)
class CallEntry:
    """Describes a primitive that holds jaxprs.

    - `name`: of the primitive.
    - `kind`: what it means beside them.
    - `parameters`: those that hold the bodies, in the order in which sites number them. A call has a single body, which
      is in the first of them that fits: releases of JAX name it differently.
    """

    name: str
    kind: CallKind
    parameters: tuple[str, ...]


_TABLE: dict[str, CallEntry] = {
    call.name: call
    for call in (
        CallEntry("jit", CallKind.INLINE, ("jaxpr",)),
        CallEntry("pjit", CallKind.INLINE, ("jaxpr",)),
        CallEntry("closed_call", CallKind.INLINE, ("call_jaxpr",)),
        CallEntry("core_call", CallKind.INLINE, ("call_jaxpr",)),
        CallEntry("core_closed_call", CallKind.INLINE, ("call_jaxpr",)),
        CallEntry("call", CallKind.INLINE, ("call_jaxpr",)),
        CallEntry("xla_call", CallKind.INLINE, ("call_jaxpr",)),
        CallEntry("eval_jaxpr", CallKind.INLINE, ("jaxpr", "call_jaxpr")),
        CallEntry("remat", CallKind.REMAT, ("jaxpr",)),
        CallEntry("remat2", CallKind.REMAT, ("jaxpr",)),
        CallEntry("checkpoint", CallKind.REMAT, ("jaxpr",)),
        CallEntry("custom_jvp_call", CallKind.RULE, ("call_jaxpr",)),
        CallEntry("custom_vjp_call", CallKind.RULE, ("call_jaxpr",)),
        CallEntry("custom_vjp_call_jaxpr", CallKind.RULE, ("fun_jaxpr", "call_jaxpr")),
        CallEntry("composite", CallKind.ANNOTATED, ("jaxpr", "call_jaxpr")),
        CallEntry("custom_vmap_call", CallKind.ANNOTATED, ("call",)),
        CallEntry(
            "call_hi_primitive", CallKind.ANNOTATED, ()
        ),  # its body is in Python: `_compat.hidden_body` traces it
        CallEntry("xla_metadata_call", CallKind.ANNOTATED, ("jaxpr",)),
        CallEntry("custom_lin", CallKind.FIXED, ("call_jaxpr",)),
        CallEntry("linear_call", CallKind.FIXED, ("callee",)),
        CallEntry("custom_partitioning", CallKind.FIXED, ("call",)),
        CallEntry("remat_opt", CallKind.FIXED, ("fwd_jaxpr",)),
        CallEntry("scan", CallKind.SCAN, ("jaxpr",)),
        CallEntry("while", CallKind.WHILE, ("cond_jaxpr", "body_jaxpr")),
        CallEntry("cond", CallKind.COND, ("branches",)),
        CallEntry(BOUNDARY, CallKind.BOUNDARY, ("forward",)),
        CallEntry("shard_map", CallKind.MANUAL, ("jaxpr",)),
    )
}
CALLS: frozenset[str] = frozenset(_TABLE)  # the names of all primitives that are calls, loops or branches
# Kinds whose body gets exactly the operands and gives exactly the results.
_ONE_TO_ONE = frozenset({CallKind.INLINE, CallKind.REMAT, CallKind.RULE, CallKind.ANNOTATED, CallKind.FIXED})


def names(*kinds: CallKind) -> frozenset[str]:
    """Returns the names of the primitives of the given `kinds`; of all calls where none is given."""
    return frozenset(call.name for call in _TABLE.values() if not kinds or call.kind in kinds)


def kind_of(eqn: Any) -> CallKind | None:
    """Returns what the equation `eqn` means beside the jaxprs that it holds; None for one that is no call, whatever
    jaxprs it holds (the combiner of a reduction, a kernel)."""
    call = _TABLE.get(eqn.primitive.name)
    return None if call is None else call.kind


def call_body(eqn: Any) -> Any | None:
    """Returns the jaxpr that `eqn` runs on exactly its operands, where it is a call; None for an equation that is no
    call."""
    call = _TABLE.get(eqn.primitive.name)
    if call is None or call.kind not in _ONE_TO_ONE:
        return None
    for parameter in call.parameters:
        body = eqn.params.get(parameter)
        if _compat.is_jaxpr(body):
            inner, _ = _compat.open_jaxpr(body)
            if len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
                return body
    return _compat.hidden_body(eqn)


def inline_body(eqn: Any) -> Any | None:
    """Returns the body of `eqn` where it is a call that means nothing else, so that the body may stand in its place;
    None for every other equation."""
    return call_body(eqn) if kind_of(eqn) is CallKind.INLINE else None


def boundary_parts(eqn: Any) -> tuple[Any, tuple[int, ...]]:
    """Returns the forward jaxpr of a gradient boundary, and which of its operands it differentiates.

    `eqn` is the boundary's equation. Its results are the value, the auxiliary values, then one gradient per
    differentiated operand.
    """
    return eqn.params["forward"], tuple(eqn.params["positions"])


class ScanParts(NamedTuple):
    """Holds what goes into a scan, or what its body gets, in groups.

    - `consts`: what every iteration reads. `carry`: what iterations hand on. `xs`: of which each has a slice.
    """

    consts: list[Any]
    carry: list[Any]
    xs: list[Any]


def scan_parts(eqn: Any, values: Sequence[Any]) -> ScanParts:
    """Divides `values`, one per operand of the scan `eqn` or per input of its body, into what they are to the loop."""
    num_consts, num_carry = _compat.scan_counts(eqn.params)
    end = num_consts + num_carry
    return ScanParts(list(values[:num_consts]), list(values[num_consts:end]), list(values[end:]))


class WhileParts(NamedTuple):
    """Holds the operands of a `while` in groups.

    - `cond_consts`, `body_consts`: what its condition and its body read besides the carry. `carry`: what both get.
    """

    cond_consts: list[Any]
    body_consts: list[Any]
    carry: list[Any]


def while_parts(eqn: Any, values: Sequence[Any]) -> WhileParts:
    """Divides `values`, one per operand of the `while` equation `eqn`, into what they are to the loop."""
    num_cond = eqn.params["cond_nconsts"]
    end = num_cond + eqn.params["body_nconsts"]
    return WhileParts(list(values[:num_cond]), list(values[num_cond:end]), list(values[end:]))


def num_trips(eqn: Any) -> int | None:
    """Returns how often the bodies of the equation `eqn` run each time that it runs; None where only the run tells."""
    kind = kind_of(eqn)
    if kind is CallKind.WHILE:
        return None
    return eqn.params["length"] if kind is CallKind.SCAN else 1
