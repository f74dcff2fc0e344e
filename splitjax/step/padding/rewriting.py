"""Traces a step again over leaves that are stored larger than the step knows them.

A step's jaxpr and the padded sizes of some of its leaves come in; the same step over the padded leaves comes out. Its
numbers are the same: the dims that go with a padded one, in activations and gradients, are padded too, and whatever
adds up, compares or selects along them leaves the padding out. What no rule is known for gets arrays as the step has
them, cut out of the padded ones.

Which dims go together is read from the dim rules of all operations (`trace.links`), as for layouts: so that arrays that
begin without a leaf (zeros to which a look-up's gradient is added, a one-hot mask) are made at the padded size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from splitjax import _compat
from splitjax.primitives import interpreter
from splitjax.primitives.calls import CALLS
from splitjax.primitives.interpreter import RunBody
from splitjax.primitives.walk import Site
from splitjax.step.padding.bodies import call
from splitjax.step.padding.contracting import CONTRACTING
from splitjax.step.padding.indexing import INDEXING
from splitjax.step.padding.pointwise import pointwise
from splitjax.step.padding.reshaping import RESHAPING
from splitjax.step.padding.values import (
    Padded,
    Sizes,
    array_of,
    fill_of,
    fitted,
    grown,
    logical,
    masked,
    padded,
    sizes_of,
)
from splitjax.trace.classes import Atoms, refine, unite
from splitjax.trace.collecting import uncollected
from splitjax.trace.flatten import FlatStep, flatten
from splitjax.trace.links import link, tie

LeafSizes = Mapping[int, Sizes]  # position of a flat argument -> its padded dims


@dataclasses.dataclass(frozen=True)
class WantedDims:
    """Says which dims of a step's values are to be padded.

    - `results`: by site of an operation, per result. `carried`: by site of a loop's body, per carried value.
    - `around`: the sites of the calls and loops in which there are such.
    """

    results: Mapping[Site, Sequence[Sizes]]
    carried: Mapping[Site, Sequence[Sizes]]
    around: frozenset[Site]


def padded_step(jaxpr: _compat.ClosedJaxpr, leaves: LeafSizes, matched: Mapping[int, int]) -> _compat.ClosedJaxpr:
    """Returns the step over padded leaves.

    **Arguments:** `jaxpr`: the closed jaxpr of the step. `leaves`: the padded dims of its flat arguments. `matched`:
    flat argument of a state leaf -> its flat result, which is padded alike, with zeros."""
    inner, consts = _compat.open_jaxpr(jaxpr)
    with uncollected():
        wanted = wanted_dims(jaxpr, leaves, matched)
    stored = {target: leaves[source] for source, target in matched.items() if source in leaves}
    rewriting = _Rewriting(wanted)

    def run(*arrays: Any) -> list[Any]:
        operands = [
            padded(array, tuple(variable.aval.shape), leaves.get(number, {}), 0.0)
            for number, (array, variable) in enumerate(zip(arrays, inner.invars, strict=True))
        ]
        results = interpreter.evaluate(inner, operands, rewriting.handle, constants=list(consts))
        for number, result in enumerate(results):
            shape = tuple(inner.outvars[number].aval.shape)
            is_stored = number in stored
            results[number] = masked(fitted(result, shape, stored[number]), 0) if is_stored else logical(result)
        return [array_of(result) for result in results]

    types = []
    for number, variable in enumerate(inner.invars):
        shape = tuple(leaves.get(number, {}).get(dim, size) for dim, size in enumerate(variable.aval.shape))
        weak = bool(getattr(variable.aval, "weak_type", False))
        types.append(jax.ShapeDtypeStruct(shape, variable.aval.dtype, weak_type=weak))
    return _compat.trace(run, *types)[0]


def wanted_dims(jaxpr: _compat.ClosedJaxpr, leaves: LeafSizes, matched: Mapping[int, int]) -> WantedDims:
    """Finds the dims that go with the padded dims of `leaves`; the arguments are those of `padded_step`."""
    flat, atoms, labels, sizes, fused = _labelled(jaxpr, leaves, matched)

    def of_value(value: int) -> Sizes:
        found = {}
        for dim in range(len(flat.shapes[value])):
            own = atoms.dim(value, dim)
            key = tuple(labels[atom] for atom in own)
            if key in fused:
                found[dim] = fused[key]
            elif own and labels[own[0]] in sizes:
                found[dim] = sizes[labels[own[0]]] * math.prod(atoms.sizes[atom] for atom in own[1:])
        return found

    results: dict[Site, list[Sizes]] = {}
    carried: dict[Site, list[Sizes]] = {}
    around: set[Site] = set()
    for op in flat.ops:
        if op.primitive == "_carry_in":
            carried.setdefault(op.site, []).append(of_value(op.outputs[0]))
        elif op.outputs and (op.eqn is not None or op.primitive == "_branch"):
            found = list(map(of_value, op.outputs))
            results.setdefault(op.site, []).extend(found) if op.primitive == "_branch" else results.update(
                {op.site: found}
            )
            if any(found):
                around |= {op.site[:depth] for depth in range(1, len(op.site), 2)}
    results = {site: found for site, found in results.items() if any(found)}
    return WantedDims(results, carried, frozenset(around))


def joined_leaves(jaxpr: _compat.ClosedJaxpr, leaves: LeafSizes, matched: Mapping[int, int]) -> frozenset[int]:
    """Finds the leaves with heads, or the like, side by side in a padded dim, which the step lays into one dim behind
    others somewhere (examples by heads): the padding would stand between entries there, and is not worth it. In what a
    fused weight makes, which has several weights' heads in one dim, it does not: that is cut apart first.

    The arguments are those of `padded_step`; returned are positions of flat arguments, with those that share such a
    dim."""
    with uncollected():
        flat, atoms, labels, _, fused = _labelled(jaxpr, leaves, matched)
    padded_dims = [(number, atoms.dim(flat.inputs[number], dim)) for number, own in leaves.items() for dim in own]
    several = {labels[own[0]] for _, own in padded_dims if len(own) > 1}
    cut_apart = {key[0] for key in fused}
    behind = {
        labels[atom]
        for value, shape in enumerate(flat.shapes)
        for dim in range(len(shape))
        if (own := atoms.dim(value, dim)) and labels[own[0]] not in cut_apart
        for atom in own[1:]
    }
    return frozenset(
        number for number, own in padded_dims if not {labels[atom] for atom in own}.isdisjoint(several & behind)
    )


def _labelled(
    jaxpr: _compat.ClosedJaxpr, leaves: LeafSizes, matched: Mapping[int, int]
) -> tuple[FlatStep, Atoms, tuple[int, ...], dict[int, int], dict[tuple[int, ...], int]]:
    """Returns a step's operations, the atoms of its dims with their labels, by label the padded size, and by the labels
    of a dim that has the columns of a fused weight, each of whose weights is padded, the size of that. The arguments
    are those of `padded_step`."""
    flat = flatten(jaxpr)
    linked = link(flat)
    raw = [*linked.links, *tie([(flat.inputs[i], flat.outputs[o]) for i, o in matched.items()], flat.shapes)]
    atoms, pairs = refine(linked.shapes, raw)
    labels = unite(atoms, pairs)
    sizes: dict[int, int] = {}
    padded_dims = [(atoms.dim(flat.inputs[n], dim), size) for n, own in leaves.items() for dim, size in own.items()]
    leading, fused = {labels[own[0]] for own, _ in padded_dims if own}, dict[tuple[int, ...], int]()
    for own, size in padded_dims:
        inside = math.prod(atoms.sizes[atom] for atom in own[1:])
        if any(labels[atom] in leading for atom in own[1:]):
            fused[tuple(labels[atom] for atom in own)] = size
        elif own and size % inside == 0:  # heads that lie side by side in a dim are padded by whole ones
            sizes[labels[own[0]]] = size // inside
    return flat, atoms, labels, sizes, fused


class _Rewriting:
    """Evaluates equations with padded operands, or results that are to be padded. `wanted`: these."""

    def __init__(self, wanted: WantedDims) -> None:
        self._wanted = wanted
        self._is_differentiated = False
        self._made: dict[Any, Any] = {}  # by variable, the number with which an array of one number was made

    @property
    def carried(self) -> Mapping[Site, Sequence[Sizes]]:
        """See `bodies.Rewriting`."""
        return self._wanted.carried

    def differentiated(self, run: Callable[[], list[Any]]) -> list[Any]:
        """See `bodies.Rewriting`."""
        before, self._is_differentiated = self._is_differentiated, True
        try:
            return run()
        finally:
            self._is_differentiated = before

    def alone(self, jaxpr: Any, operands: Sequence[Any]) -> list[Any]:
        """See `bodies.Rewriting`. Nothing is known of its dims but what its operands have."""
        apart = _Rewriting(WantedDims({}, {}, frozenset()))
        return interpreter.evaluate(jaxpr, operands, apart.handle)

    def handle(self, eqn: Any, values: list[Any], site: Site, run: RunBody) -> list[Any] | None:
        """Is the handler of the evaluation."""
        wanted = self._wanted.results.get(site) or [{}] * len(eqn.outvars)
        if eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.shape == ():
            self._made[eqn.outvars[0]] = values[0]
        is_touched = any(isinstance(value, Padded) for value in values)
        if not is_touched and not any(wanted) and site not in self._wanted.around:
            return None
        results = self._results(eqn, values, site, run, wanted)
        if results is None:
            results = _compat.bind_equation(eqn, [logical(value) for value in values])
        if eqn.primitive.name in CALLS:
            return results
        return [
            fitted(result, tuple(variable.aval.shape), {**sizes_of(result), **sizes}) if sizes else result
            for result, variable, sizes in zip(results, eqn.outvars, wanted, strict=True)
        ]

    def _results(
        self, eqn: Any, values: list[Any], site: Site, run: RunBody, wanted: Sequence[Sizes]
    ) -> list[Any] | None:
        name = eqn.primitive.name
        if name in CALLS:
            return call(self, eqn, values, site, run, wanted)
        if name in RESHAPING:
            return RESHAPING[name](eqn, values, wanted)
        if name in INDEXING:
            return INDEXING[name](eqn, values, wanted)
        if name in CONTRACTING:
            return CONTRACTING[name](eqn, values, wanted, self._is_differentiated)
        return pointwise(eqn, self._made_anew(eqn, values), wanted, self._is_differentiated)

    def _made_anew(self, eqn: Any, values: list[Any]) -> list[Any]:
        """Returns operands with arrays of one number at the size of the padded ones that they meet: nobody knew when
        they were made."""
        sizes = next((value.sizes for value in values if isinstance(value, Padded)), {})
        shape = tuple(eqn.outvars[0].aval.shape)
        return [
            padded(
                jnp.full(grown(shape, sizes), self._made[variable], variable.aval.dtype),
                shape,
                sizes,
                fill_of(self._made[variable]),
            )
            if not isinstance(value, Padded)
            and not isinstance(variable, _compat.Literal)
            and variable in self._made
            and tuple(variable.aval.shape) == shape
            else value
            for variable, value in zip(eqn.invars, values, strict=True)
        ]
