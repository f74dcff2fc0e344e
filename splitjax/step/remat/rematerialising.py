"""Has the repeated blocks of a traced step computed again in the backward pass, where the step itself says nothing.

The jaxpr of a step comes in; the same step comes out, in which `jax.checkpoint` stands around blocks of the forward of
its gradient boundaries, and around the bodies of their scans over layers. The numbers stay: the same operations run,
some of them twice. It is what the option `remat` of `splitjax.parallelize` does; what a step says itself by
`jax.checkpoint` stays.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from splitjax import _compat
from splitjax._plan_parts import DOTS, EVERY_BLOCK, NOTHING, BlockRemat
from splitjax.errors import GradientError
from splitjax.primitives.calls import CallKind, inline_body, kind_of
from splitjax.primitives.walk import boundaries, walk, walk_inside
from splitjax.step.boundary import Boundary, boundary_of
from splitjax.step.boundary_changes import with_boundaries
from splitjax.step.remat.blocks import (
    Origin,
    Span,
    makes_of,
    operand_origins,
    operand_path,
    origins_in,
    refused_in,
    spans_of,
)

# Of steps with more kinds of blocks all keep alike: what can be chosen grows as the power of 3.
_MOST_KINDS = 3
# Which blocks are computed again, in the order of the program.
Remat = tuple[BlockRemat, ...]
# JAX's policies by their names, the one that keeps most first.
POLICIES: Mapping[str, Callable[..., Any]] = {
    DOTS: jax.checkpoint_policies.dots_saveable,
    NOTHING: jax.checkpoint_policies.nothing_saveable,
}


@dataclasses.dataclass(frozen=True)
class RepeatedBlock:
    """Is a block with those like it, or the body of a loop: its `name`, such as `params/block*`, and whether it
    `has_products` that `dots_saveable` keeps: of matrices, and convolutions, but no ragged ones."""

    name: str
    has_products: bool = True


def repeated_blocks(jaxpr: _compat.ClosedJaxpr) -> tuple[RepeatedBlock, ...]:
    """Returns the repeated blocks of a step, in the order of the program."""
    found: dict[str, bool] = {}
    for visit in boundaries(jaxpr):
        for block in _Forward(boundary_of(visit.eqn.params)).blocks():
            found[block.name] = found.get(block.name, False) or block.has_products
    return tuple(RepeatedBlock(name, has_products) for name, has_products in found.items())


def choices_of(blocks: Sequence[RepeatedBlock]) -> tuple[Remat, ...]:
    """Returns what can be chosen of the repeated blocks of a step beside keeping all that it keeps as it is written:
    for each of them nothing, products where it has any, or the same as that; for many kinds of blocks the same for
    all."""
    policies = lambda block: [keeps for keeps in POLICIES if keeps != DOTS or block.has_products]
    if len(blocks) > _MOST_KINDS:
        kept = [keeps for keeps in POLICIES if any(keeps in policies(block) for block in blocks)]
        return tuple(tuple(BlockRemat(block.name, keeps) for block in blocks) for keeps in kept)
    found = itertools.product(*((None, *policies(block)) for block in blocks))
    return tuple(
        tuple(BlockRemat(block.name, keeps) for block, keeps in zip(blocks, each, strict=True) if keeps is not None)
        for each in found
        if any(each)
    )


def why_not_again(jaxpr: _compat.ClosedJaxpr) -> str:
    """Returns why nothing of a step can be chosen to be computed again; empty where something can."""
    if repeated_blocks(jaxpr):
        return ""
    found = [visit.eqn for visit in boundaries(jaxpr)]
    if not found:
        return "the step takes its gradient with JAX's own functions: take it with splitjax.value_and_grad"
    if any(kind_of(visit.eqn) is CallKind.REMAT for visit in walk(jaxpr)):
        return "jax.checkpoint says in the step what is kept"
    refused = {name: why for eqn in found for name, why in _Forward(boundary_of(eqn.params)).refused().items()}
    if refused:
        return "; ".join(f"{name} {why}" for name, why in refused.items())
    return "its loss has no blocks that repeat each other, and no scan over layers"


def rematerialised(jaxpr: _compat.ClosedJaxpr, remat: Remat) -> _compat.ClosedJaxpr:
    """Returns the step `jaxpr` with its blocks computed again as `remat` says. Raises what `resolved` raises."""
    if not remat:
        return jaxpr
    policies = {each.name: each.keeps for each in resolved(jaxpr, remat)}
    return with_boundaries(jaxpr, lambda eqn: _Forward(boundary_of(eqn.params)).changed(eqn, policies))


def resolved(jaxpr: _compat.ClosedJaxpr, remat: Remat) -> Remat:
    """Returns what each block of a step keeps of those that `remat` names, one by one or together, in the order of the
    program.

    Raises `GradientError` for a block that the step does not have, with those that it has."""
    if not remat:
        return ()
    known = [block.name for block in repeated_blocks(jaxpr)]
    for name in (each.name for each in remat):
        if (name != EVERY_BLOCK and name not in known) or not known:
            why = "it has no such repeated block" if known else why_not_again(jaxpr)
            raise GradientError(
                f"nothing of the step is computed again by this: {why}",
                value=name,
                place="remat",
                remedy=f"name one of {', '.join(known)}" if known else "leave remat= away",
            )
    keeps = {each.name: each.keeps for each in remat}
    found = ((name, keeps.get(name, keeps.get(EVERY_BLOCK))) for name in known)
    return tuple(BlockRemat(name, policy) for name, policy in found if policy is not None)


class _Forward:
    """The forward of a gradient boundary, with what its operands are. `boundary`: it."""

    def __init__(self, boundary: Boundary) -> None:
        self._closed = boundary.forward
        inner, _ = _compat.open_jaxpr(boundary.forward)
        differentiated = set(boundary.positions)
        paths = {i: operand_path(boundary.names[i]) for i in boundary.positions}
        avals = {path: inner.invars[i].aval for i, path in paths.items()}
        self._makes = makes_of({path: (tuple(aval.shape), str(aval.dtype)) for path, aval in avals.items()})
        self._origins: list[Origin] = [
            frozenset((paths[i],)) if i in differentiated else None for i in range(len(inner.invars))
        ]

    def blocks(self) -> Iterator[RepeatedBlock]:
        """Yields its blocks one by one, those in calls that it inlines among them."""
        yield from self._blocks(self._closed, self._origins)

    def refused(self) -> dict[str, str]:
        """Returns by name why blocks that repeat each other are not among these, as a clause."""
        return self._refused(self._closed, self._origins)

    def changed(self, eqn: Any, policies: Mapping[str, str]) -> Any:
        """Returns the equation of the boundary with its blocks computed again as `policies` say by name."""
        return _compat.with_params(eqn, forward=self._again(self._closed, self._origins, policies))

    def _blocks(self, closed: Any, origins: Sequence[Origin]) -> Iterator[RepeatedBlock]:
        inner, _ = _compat.open_jaxpr(closed)
        spans = spans_of(inner, origins, self._makes)
        for span in spans:
            yield RepeatedBlock(span.name, any(map(_has_products, inner.eqns[span.start : span.end])))
        for _, body, within in _inlined(inner, origins, spans):
            yield from self._blocks(body, within)

    def _refused(self, closed: Any, origins: Sequence[Origin]) -> dict[str, str]:
        inner, _ = _compat.open_jaxpr(closed)
        found = refused_in(inner, origins, self._makes)
        for _, body, within in _inlined(inner, origins, spans_of(inner, origins, self._makes)):
            # A call has the parameters of all blocks within it: what is said there is the reason.
            found |= self._refused(body, within)
        return found

    def _again(self, closed: Any, origins: Sequence[Origin], policies: Mapping[str, str]) -> Any:
        inner, _ = _compat.open_jaxpr(closed)
        spans = spans_of(inner, origins, self._makes)
        eqns = list(inner.eqns)
        for index, body, within in _inlined(inner, origins, spans):
            again = self._again(body, within, policies)
            changes = {name: again for name, value in eqns[index].params.items() if value is body}
            eqns[index] = _compat.with_params(eqns[index], **changes)
        # From the end, so that what stands in front keeps its place.
        for span in reversed(spans):
            policy = policies.get(span.name)
            if policy is None:
                continue
            if span.is_loop:
                eqns[span.start] = _loop_again(eqns[span.start], policy)
            else:
                read_later = {atom for eqn in eqns[span.end :] for atom in _variables(eqn.invars)}
                read_later.update(_variables(inner.outvars))
                block = eqns[span.start : span.end]
                eqns[span.start : span.end] = [_block_again(closed, block, read_later, policy)]
        return _compat.like_jaxpr(closed, inner.replace(eqns=eqns))


def _inlined(
    jaxpr: Any, origins: Sequence[Origin], spans: Sequence[Span]
) -> Iterator[tuple[int, Any, Sequence[Origin]]]:
    """Yields the calls of an open jaxpr that stand in no block and mean their bodies: (the position, the body, what its
    operands are made of)."""
    inside = {index for span in spans for index in range(span.start, span.end)}
    of_value = origins_in(jaxpr, origins)
    for index, eqn in enumerate(jaxpr.eqns):
        body = None if index in inside else inline_body(eqn)
        if body is not None and any(value is body for value in eqn.params.values()):
            yield index, body, operand_origins(eqn, of_value)


def _has_products(eqn: Any) -> bool:
    """Whether an equation is, or has in it, what JAX's policy for products keeps."""
    return any(
        POLICIES[DOTS](each.primitive, *(atom.aval for atom in each.invars), **each.params)
        for each in (eqn, *(visit.eqn for visit in walk_inside(eqn)))
    )


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, _compat.Literal)]


def _block_again(like: Any, eqns: Sequence[Any], read_later: set[Any], policy: str) -> Any:
    """Returns one equation that computes those of a block again in the backward pass."""
    made = {out for eqn in eqns for out in eqn.outvars}
    inputs = [atom for atom in dict.fromkeys(a for eqn in eqns for a in _variables(eqn.invars)) if atom not in made]
    outputs = [out for eqn in eqns for out in eqn.outvars if out in read_later]
    body = _compat.build_jaxpr(like, inputs, outputs, eqns, ())
    # The barrier keeps XLA from making one of both computations.
    return _compat.checkpoint_equation(eqns[0], body, inputs, outputs, POLICIES[policy], prevent_cse=True)


def _loop_again(scan: Any, policy: str) -> Any:
    """Returns a scan whose turns are computed again in the backward pass."""
    closed = scan.params["jaxpr"]
    inner, consts = _compat.open_jaxpr(closed)
    constvars, inputs = list(inner.constvars), list(inner.invars)
    results = list(dict.fromkeys(out for out in _variables(inner.outvars) if out not in {*constvars, *inputs}))
    body = _compat.build_jaxpr(closed, [*constvars, *inputs], results, inner.eqns, ())
    new = {old: _compat.new_variable(old) for old in results}
    operands, made = [*constvars, *inputs], list(new.values())
    eqn = _compat.checkpoint_equation(scan, body, operands, made, POLICIES[policy], prevent_cse=False)
    outvars = [out if isinstance(out, _compat.Literal) else new.get(out, out) for out in inner.outvars]
    again = _compat.build_jaxpr(closed, inputs, outvars, [eqn], list(zip(constvars, consts, strict=True)))
    return _compat.with_params(scan, jaxpr=again)
