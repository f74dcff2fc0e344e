"""Cuts a boundary's forward in two: what comes before its examples cross into split layers, and what comes behind.

`front` holds the data-parallel layers; `back` the first products with split weights and all that depends on them, the
loss among it. Group communication in turns (`turns.py`) runs the front once and the back in turns. A value is computed
in the back unless it is needed for a crossing value: random bits and labels' masks are made turn by turn. Scalars that
depend on parameters alone (penalties) are computed in the front, once. After Krizhevsky, "One weird trick" (arXiv
1404.5997, section 4.1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from splitjax import _compat
from splitjax.lower.products.exchange import EXAMPLES, SWAP, Exchange

Site = tuple[int, ...]
# Calls without a meaning of their own, and the parameter with their body.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


@dataclasses.dataclass(frozen=True, eq=False)
class Flat:
    """A jaxpr with its calls inlined: equations over variables that are each written once, with their sites in the
    original."""

    like: Any
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    eqns: tuple[Any, ...]
    sites: tuple[Site, ...]
    consts: tuple[tuple[Any, Any], ...]  # (variable, value)

    def writer(self) -> dict[Any, int]:
        """Variable -> the equation that writes it."""
        return {v: index for index, eqn in enumerate(self.eqns) for v in eqn.outvars}

    def part(self, indices: Collection[int], invars: Sequence[Any], outvars: Sequence[Any]) -> Part:
        """The jaxpr of some equations."""
        chosen = sorted(indices)
        eqns = [self.eqns[i] for i in chosen]
        read = {v for eqn in eqns for v in variables(eqn)} | {v for v in outvars if not isinstance(v, _compat.Literal)}
        consts = [(v, value) for v, value in self.consts if v in read]
        return Part(_compat.build_jaxpr(self.like, invars, outvars, eqns, consts), tuple(self.sites[i] for i in chosen))


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Some equations of a forward as a closed jaxpr, with their sites in the forward."""

    jaxpr: Any
    sites: tuple[Site, ...]

    def site(self, inside: Site) -> Site:
        """A site of this jaxpr as one of the forward."""
        return (*self.sites[inside[0]], *inside[1:])


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """How a forward is cut, by equation and variable number, so that it holds for a trace at another batch size too.

    A *value* is (equation, result position), or (-1, operand position)."""

    back: tuple[int, ...]  # equations
    front: tuple[int, ...]
    # values that the back reads of the front, as operands behind the forward's own
    crossing: tuple[tuple[int, int], ...]
    live: tuple[bool, ...]  # per crossing value, whether it is differentiated
    # per crossing value, the equations of `back` that are exchanges and enter with it
    readers: tuple[tuple[int, ...], ...]
    outputs: tuple[bool, ...]  # per result of the forward, whether the back computes it

    def parts(self, flat: Flat) -> tuple[Part, Part]:
        """Front: operands -> crossing values, then results that it computes. Back: operands and crossing values -> its
        results."""
        crossing = [flat.invars[k] if e < 0 else flat.eqns[e].outvars[k] for e, k in self.crossing]
        mine = [v for v, back in zip(flat.outvars, self.outputs, strict=True) if not back]
        theirs = [v for v, back in zip(flat.outvars, self.outputs, strict=True) if back]
        # A crossing value is an operand of the back under a name of its own: an operand of the forward may cross as it
        # is.
        renamed = {v: _compat.new_variable(v) for v in crossing}
        back = dataclasses.replace(flat, eqns=tuple(_rename(eqn, renamed) for eqn in flat.eqns))
        return (
            flat.part(self.front, flat.invars, [*crossing, *mine]),
            back.part(
                self.back,
                [*flat.invars, *renamed.values()],
                [v if isinstance(v, _compat.Literal) else renamed.get(v, v) for v in theirs],
            ),
        )


def variables(eqn: Any) -> list[Any]:
    """The variables that an equation reads."""
    return [v for v in eqn.invars if not isinstance(v, _compat.Literal)]


def _rename(eqn: Any, renamed: Mapping[Any, Any]) -> Any:
    if not any(v in renamed for v in variables(eqn)):
        return eqn
    return eqn.replace(invars=[v if isinstance(v, _compat.Literal) else renamed.get(v, v) for v in eqn.invars])


def flatten_calls(closed: Any) -> Flat:
    """A closed jaxpr with its calls inlined."""
    inner, values = _compat.open_jaxpr(closed)
    consts = list(zip(inner.constvars, values, strict=True))
    eqns: list[Any] = []
    sites: list[Site] = []

    def walk(jaxpr: Any, names: dict[Any, Any], prefix: Site, fresh: bool) -> None:
        for index, eqn in enumerate(jaxpr.eqns):
            invars = [v if isinstance(v, _compat.Literal) else names.get(v, v) for v in eqn.invars]
            body = eqn.params.get(_CALLS.get(eqn.primitive.name, ""))
            if _compat.is_jaxpr(body):
                called, held = _compat.open_jaxpr(body)
                inside = dict(zip(called.invars, invars, strict=True))
                for v, value in zip(called.constvars, held, strict=True):
                    inside[v] = _compat.new_variable(v)
                    consts.append((inside[v], value))
                walk(called, inside, (*prefix, index, 0), True)
                names.update(
                    (v, o if isinstance(o, _compat.Literal) else inside[o])
                    for v, o in zip(eqn.outvars, called.outvars, strict=True)
                )
                continue
            outvars = list(eqn.outvars)
            if fresh:  # one jaxpr may be called several times
                outvars = [v if isinstance(v, _compat.DropVar) else _compat.new_variable(v) for v in outvars]
                names.update(zip(eqn.outvars, outvars, strict=True))
            eqns.append(eqn.replace(invars=invars, outvars=outvars))
            sites.append((*prefix, index))

    names: dict[Any, Any] = {}
    walk(inner, names, (), False)
    outvars = [v if isinstance(v, _compat.Literal) else names.get(v, v) for v in inner.outvars]
    return Flat(closed, tuple(inner.invars), tuple(outvars), tuple(eqns), tuple(sites), tuple(consts))


def cut_forward(
    flat: Flat, positions: Sequence[int], exchanges: Mapping[Site, Exchange], holds_examples: Collection[Any]
) -> Cut | None:
    """Where a forward is cut; None where nothing crosses.

    **Arguments:** `positions`: the differentiated operands. `exchanges`: by site in the forward. `holds_examples`: the
    variables with a dim that depends on the number of examples."""
    live, of_examples = _reached(flat, [flat.invars[p] for p in positions]), _reached(flat, list(holds_examples))
    return _Surgeon(flat, flat.writer(), _behind(flat, exchanges), live, set(holds_examples), of_examples).cut(
        exchanges
    )


def _behind(flat: Flat, exchanges: Mapping[Site, Exchange]) -> set[int]:
    """Equations that are exchanges, hold one further in, or depend on one."""
    prefixes = {site[:depth] for site in exchanges for depth in range(1, len(site) + 1)}
    found: set[int] = set()
    written: set[Any] = set()
    for index, (eqn, site) in enumerate(zip(flat.eqns, flat.sites, strict=True)):
        if site in prefixes or any(v in written for v in variables(eqn)):
            found.add(index)
            written.update(eqn.outvars)
    return found


def _reached(flat: Flat, sources: Sequence[Any]) -> set[Any]:
    """The variables that depend on some."""
    reached = set(sources)
    for eqn in flat.eqns:
        if any(v in reached for v in variables(eqn)):
            reached.update(eqn.outvars)
    return reached


@dataclasses.dataclass(frozen=True)
class _Surgeon:
    """Lives for one call of `cut_forward`."""

    flat: Flat
    writer: Mapping[Any, int]
    behind: set[int]
    live: set[Any]
    holds_examples: set[Any]
    of_examples: set[Any]  # depends on examples: a batch's mean, too

    def cut(self, exchanges: Mapping[Site, Exchange]) -> Cut | None:
        flat = self.flat
        entering: dict[Any, list[int]] = {}
        nested: set[Any] = set()
        for index in sorted(self.behind):
            one = exchanges.get(flat.sites[index])
            if one is not None and one.enter in (EXAMPLES, SWAP):
                data = flat.eqns[index].invars[one.data]
                if not isinstance(data, _compat.Literal) and self.writer.get(data, -1) not in self.behind:
                    entering.setdefault(data, []).append(index)
            elif one is None and any(site[: len(flat.sites[index])] == flat.sites[index] for site in exchanges):
                nested.update(
                    v
                    for v in variables(flat.eqns[index])
                    if v in self.holds_examples and self.writer.get(v, -1) not in self.behind
                )
        wanted = {*entering, *(v for v in nested if v in self.writer)}
        if not entering and not wanted:
            return None
        before = self.ancestors(wanted)
        back, crossing = self.pull(before, set(entering))
        results = [not isinstance(v, _compat.Literal) and self.writer.get(v, -1) in back for v in flat.outvars]
        if not results[0]:
            return None
        mine = {
            v
            for v, behind in zip(flat.outvars, results, strict=True)
            if not behind and not isinstance(v, _compat.Literal)
        }
        printed = {i for i, eqn in enumerate(flat.eqns) if eqn.effects and i not in back}
        front = printed | self.ancestors({*crossing, *mine, *(v for i in printed for v in variables(flat.eqns[i]))})
        numbers = {v: (-1, k) for k, v in enumerate(flat.invars)}
        numbers |= {v: (i, k) for i, eqn in enumerate(flat.eqns) for k, v in enumerate(eqn.outvars)}
        return Cut(
            tuple(sorted(back)),
            tuple(sorted(front)),
            tuple(numbers[v] for v in crossing),
            tuple(v in self.live and np.issubdtype(v.aval.dtype, np.inexact) for v in crossing),
            tuple(tuple(entering.get(v, ())) for v in crossing),
            tuple(results),
        )

    def ancestors(self, wanted: Collection[Any]) -> set[int]:
        """The equations that compute some variables."""
        found: set[int] = set()
        waiting = [self.writer[v] for v in wanted if v in self.writer]
        while waiting:
            index = waiting.pop()
            if index not in found:
                found.add(index)
                waiting += [self.writer[v] for v in variables(self.flat.eqns[index]) if v in self.writer]
        return found

    def pull(self, before: set[int], entering: set[Any]) -> tuple[set[int], list[Any]]:
        """The equations of the back, and the variables that it reads of the front, in a fixed order."""
        back = set(self.behind)
        crossing: dict[Any, None] = dict.fromkeys(sorted(entering, key=lambda v: self.writer.get(v, -1)))
        waiting = sorted(back)
        while waiting:
            for v in variables(self.flat.eqns[waiting.pop()]):
                index = self.writer.get(v)
                if v in crossing or index is None or index in back:
                    continue
                if (index in before and v in self.of_examples) or self.is_penalty(v):
                    crossing[v] = None
                else:
                    back.add(index)
                    waiting.append(index)
        return back, list(crossing)

    def is_penalty(self, v: Any) -> bool:
        return (
            v in self.live
            and v not in self.of_examples
            and v.aval.shape == ()
            and np.issubdtype(v.aval.dtype, np.inexact)
        )
