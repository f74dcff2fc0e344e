"""Cuts a boundary's forward in two: what comes before its examples cross into split layers, and what comes behind.

`front` holds the data-parallel layers; `back` the first products with split weights and all that depends on them, the
loss among it. Group communication in turns (`turns.py`) runs the front once and the back in turns. A value is computed
in the back unless it is needed for a crossing value: random bits and labels' masks are made turn by turn. Scalars that
depend on parameters alone (penalties) are computed in the front, once. After Krizhevsky, "One weird trick" (arXiv
1404.5997, section 4.1).

`flatten_calls` makes a `FlatForward` of a forward; `cut_forward` finds its `Cut`, which gives both parts as jaxprs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from splitjax import _compat
from splitjax.planning.sites.exchange import EXAMPLES, SWAP, Exchange
from splitjax.primitives.calls import CALLS, inline_body
from splitjax.primitives.interpreter import fold
from splitjax.primitives.walk import Site


@dataclasses.dataclass(frozen=True, eq=False)
class FlatForward:
    """Holds a jaxpr with its calls inlined: equations over variables that are each written once.

    - `like`: the closed jaxpr that it was.
    - `invars`, `outvars`: the variables of operands and results. `eqns`: the equations, in order.
    - `sites`: per equation its site in the original.
    - `consts`: (variable, value) of the constants, those of the calls included.
    """

    like: Any
    invars: tuple[Any, ...]
    outvars: tuple[Any, ...]
    eqns: tuple[Any, ...]
    sites: tuple[Site, ...]
    consts: tuple[tuple[Any, Any], ...]

    def writer(self) -> dict[Any, int]:
        """Returns by variable the index of the equation that writes it."""
        return {v: index for index, eqn in enumerate(self.eqns) for v in eqn.outvars}

    def part(self, indices: Collection[int], invars: Sequence[Any], outvars: Sequence[Any]) -> ForwardPart:
        """Returns the equations at `indices` as a jaxpr with the variables `invars` and `outvars`."""
        chosen = sorted(indices)
        eqns = [self.eqns[i] for i in chosen]
        read = {v for eqn in eqns for v in variables(eqn)} | {v for v in outvars if not isinstance(v, _compat.Literal)}
        consts = [(v, value) for v, value in self.consts if v in read]
        return ForwardPart(
            _compat.build_jaxpr(self.like, invars, outvars, eqns, consts), tuple(self.sites[i] for i in chosen)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPart:
    """Holds some equations of a forward as a closed `jaxpr`, with their `sites` in the forward."""

    jaxpr: Any
    sites: tuple[Site, ...]

    def site(self, inside: Site) -> Site:
        """Returns the site `inside` of this jaxpr as a site of the forward."""
        return (*self.sites[inside[0]], *inside[1:])


@dataclasses.dataclass(frozen=True, eq=False)
class Cut:
    """Says how a forward is cut, by equation and variable number, so that it holds for a trace at another batch size.

    A *value* is (equation, result position), or (-1, operand position).

    - `back`, `front`: the equations of either part.
    - `crossing`: the values that the back reads of the front, as operands behind the forward's own.
    - `live`: per crossing value, whether it is differentiated.
    - `readers`: per crossing value, the equations of `back` that are exchanges and enter with it.
    - `outputs`: per result of the forward, whether the back computes it.
    """

    back: tuple[int, ...]
    front: tuple[int, ...]
    crossing: tuple[tuple[int, int], ...]
    live: tuple[bool, ...]
    readers: tuple[tuple[int, ...], ...]
    outputs: tuple[bool, ...]

    def parts(self, flat: FlatForward) -> tuple[ForwardPart, ForwardPart]:
        """Returns front and back of `flat`, which is cut, or of the same forward traced at another batch size.

        Front: operands -> crossing values, then results that it computes. Back: operands and crossing values -> its
        results."""
        crossing = [flat.invars[k] if e < 0 else flat.eqns[e].outvars[k] for e, k in self.crossing]
        of_front = [v for v, back in zip(flat.outvars, self.outputs, strict=True) if not back]
        of_back = [v for v, back in zip(flat.outvars, self.outputs, strict=True) if back]
        # A crossing value is an operand of the back under a name of its own: an operand of the forward may cross as it
        # is.
        renamed = {v: _compat.new_variable(v) for v in crossing}
        back = dataclasses.replace(flat, eqns=tuple(_rename(eqn, renamed) for eqn in flat.eqns))
        return (
            flat.part(self.front, flat.invars, [*crossing, *of_front]),
            back.part(
                self.back,
                [*flat.invars, *renamed.values()],
                [v if isinstance(v, _compat.Literal) else renamed.get(v, v) for v in of_back],
            ),
        )


def variables(eqn: Any) -> list[Any]:
    """Returns the variables that the equation `eqn` reads."""
    return [v for v in eqn.invars if not isinstance(v, _compat.Literal)]


def _rename(eqn: Any, renamed: Mapping[Any, Any]) -> Any:
    """Returns an equation that reads variables under their new names."""
    if not any(v in renamed for v in variables(eqn)):
        return eqn
    return eqn.replace(invars=[v if isinstance(v, _compat.Literal) else renamed.get(v, v) for v in eqn.invars])


def flatten_calls(closed: Any) -> FlatForward:
    """Returns the `closed` jaxpr with its calls inlined."""
    inner, values = _compat.open_jaxpr(closed)
    consts = list(zip(inner.constvars, values, strict=True))
    eqns: list[Any] = []
    sites: list[Site] = []

    def inline(jaxpr: Any, invars: Sequence[Any], constvars: Sequence[Any], prefix: Site) -> list[Any]:
        """Adds the equations of a jaxpr over the variables `invars`; returns the variables of its results."""

        def equation(index: int, eqn: Any, operands: list[Any]) -> Sequence[Any]:
            body = inline_body(eqn) if eqn.primitive.name in CALLS else None
            if body is not None:
                called, held = _compat.open_jaxpr(body)
                fresh = [_compat.new_variable(v) for v in called.constvars]
                consts.extend(zip(fresh, held, strict=True))
                return inline(body, operands, fresh, (*prefix, index, 0))
            outvars = list(eqn.outvars)
            if prefix:  # one jaxpr may be called several times
                outvars = [v if isinstance(v, _compat.DropVar) else _compat.new_variable(v) for v in outvars]
            eqns.append(eqn.replace(invars=operands, outvars=outvars))
            sites.append((*prefix, index))
            return outvars

        return fold(jaxpr, invars, equation, lambda literal: literal, constvars)

    outvars = inline(closed, inner.invars, inner.constvars, ())
    return FlatForward(closed, tuple(inner.invars), tuple(outvars), tuple(eqns), tuple(sites), tuple(consts))


def cut_forward(
    flat: FlatForward, positions: Sequence[int], exchanges: Mapping[Site, Exchange], holds_examples: Collection[Any]
) -> Cut | None:
    """Finds where a forward is cut; None where nothing crosses.

    **Arguments:**

    - `flat`: the forward.
    - `positions`: the differentiated operands.
    - `exchanges`: the planned exchanges of products with split weights, by site in the forward.
    - `holds_examples`: the variables with a dim that depends on the number of examples.
    """
    live, of_examples = _reached(flat, [flat.invars[p] for p in positions]), _reached(flat, list(holds_examples))
    return _Surgeon(flat, flat.writer(), _behind(flat, exchanges), live, set(holds_examples), of_examples).cut(
        exchanges
    )


def _behind(flat: FlatForward, exchanges: Mapping[Site, Exchange]) -> set[int]:
    """Returns the equations that are exchanges, hold an exchange further in, or depend on such an equation."""
    prefixes = {site[:depth] for site in exchanges for depth in range(1, len(site) + 1)}
    behind: set[int] = set()
    written: set[Any] = set()
    for index, (eqn, site) in enumerate(zip(flat.eqns, flat.sites, strict=True)):
        if site in prefixes or any(v in written for v in variables(eqn)):
            behind.add(index)
            written.update(eqn.outvars)
    return behind


def _reached(flat: FlatForward, sources: Sequence[Any]) -> set[Any]:
    """Returns the variables that depend on `sources`, these included."""
    reached = set(sources)
    for eqn in flat.eqns:
        if any(v in reached for v in variables(eqn)):
            reached.update(eqn.outvars)
    return reached


@dataclasses.dataclass(frozen=True)
class _Surgeon:
    """Finds a cut; lives for one call of `cut_forward`.

    - `flat`: the forward; `writer`: by variable the equation that writes it.
    - `behind`: the equations behind the crossing. `live`: the variables that depend on differentiated operands.
    - `holds_examples`: the variables with a dim of examples; `of_examples`: those that depend on examples: a batch's
      mean, too.
    """

    flat: FlatForward
    writer: Mapping[Any, int]
    behind: set[int]
    live: set[Any]
    holds_examples: set[Any]
    of_examples: set[Any]

    def cut(self, exchanges: Mapping[Site, Exchange]) -> Cut | None:
        """Returns the cut; None where nothing crosses, or the loss does not depend on what does."""
        flat = self.flat
        entering: dict[Any, list[int]] = {}
        nested: set[Any] = set()
        for index in sorted(self.behind):
            exchange = exchanges.get(flat.sites[index])
            if exchange is not None and exchange.enter in (EXAMPLES, SWAP):
                data = flat.eqns[index].invars[exchange.data]
                if not isinstance(data, _compat.Literal) and self.writer.get(data, -1) not in self.behind:
                    entering.setdefault(data, []).append(index)
            elif exchange is None and any(site[: len(flat.sites[index])] == flat.sites[index] for site in exchanges):
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
        of_front = {
            v
            for v, behind in zip(flat.outvars, results, strict=True)
            if not behind and not isinstance(v, _compat.Literal)
        }
        printed = {i for i, eqn in enumerate(flat.eqns) if eqn.effects and i not in back}
        front = printed | self.ancestors({*crossing, *of_front, *(v for i in printed for v in variables(flat.eqns[i]))})
        numbers = {v: (-1, k) for k, v in enumerate(flat.invars)}
        numbers |= {v: (i, k) for i, eqn in enumerate(flat.eqns) for k, v in enumerate(eqn.outvars)}
        return Cut(
            tuple(sorted(back)),
            tuple(sorted(front)),
            tuple(numbers[v] for v in crossing),
            tuple(v in self.live and jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in crossing),
            tuple(tuple(entering.get(v, ())) for v in crossing),
            tuple(results),
        )

    def ancestors(self, wanted: Collection[Any]) -> set[int]:
        """Returns the equations that compute the variables `wanted`, directly or not."""
        computing: set[int] = set()
        waiting = [self.writer[v] for v in wanted if v in self.writer]
        while waiting:
            index = waiting.pop()
            if index not in computing:
                computing.add(index)
                waiting += [self.writer[v] for v in variables(self.flat.eqns[index]) if v in self.writer]
        return computing

    def pull(self, before: set[int], entering: set[Any]) -> tuple[set[int], list[Any]]:
        """Returns the equations of the back, and the variables that it reads of the front, in a fixed order.

        `before`: the equations that crossing values need; `entering`: the variables that enter exchanges."""
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
        """Tells whether `v` is a scalar that depends on parameters, but on no examples."""
        return (
            v in self.live
            and v not in self.of_examples
            and v.aval.shape == ()
            and jnp.issubdtype(v.aval.dtype, jnp.inexact)
        )
