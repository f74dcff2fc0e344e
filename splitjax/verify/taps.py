"""Taps a rewritten step: shows values of its operations besides its results, so that a wrong one can be located.

The evaluator of a step (`splitjax.verify.rewriting`) calls taps at every equation; taps and their values come out.
Forward, these are every floating-point result of every operation. Backward, for every floating-point operand of every
operation inside a gradient boundary, what the operation contributes to its cotangent: a zero is added to the operand,
and differentiated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from splitjax import _compat
from splitjax.primitives.calls import CallKind, call_body, kind_of
from splitjax.primitives.walk import Site


@dataclasses.dataclass(frozen=True)
class Tap:
    """Names what is looked at: a result of an equation, or what it contributes to the cotangent of an operand.

    - `site`, `eqn`: the equation, and where it stands.
    - `result`: number of the result; None for a contribution.
    - `operand`: number of the operand of a contribution; None for a result.
    - `loops`: how many leading dims count iterations.
    - `gradient_of`: of a result of a boundary, the operand that it is the gradient of.
    """

    site: Site
    eqn: Any
    result: int | None = None
    operand: int | None = None
    loops: int = 0
    gradient_of: str | None = None


class Taps:
    """Shows nothing but a step's results: the base of the two kinds of taps that there are.

    - `taps`: what was seen, in order.
    - `values`: their values.
    """

    def __init__(self) -> None:
        self.taps: list[Tap] = []
        self.values: list[Any] = []

    def read(self, site: Site, eqn: Any, values: list[Any]) -> list[Any]:
        """Returns the operands `values` of the equation `eqn` at `site` as it is to get them."""
        return values

    def write(self, site: Site, eqn: Any, results: Sequence[Any]) -> None:
        """Takes note of the results of the equation `eqn` at `site`."""

    def within(self, zeros: Sequence[Any] = ()) -> Taps:
        """Returns the taps of a body that is traced by itself; `zeros` are its further operands."""
        return self

    def take(self, local: Taps, values: Sequence[Any]) -> None:
        """Takes over the taps of the body's `local`, with what they saw as `values` outside of it."""

    def enter_loop(self, site: Site, length: int) -> tuple[Taps, list[Any]]:
        """Returns the taps of the body, at `site`, of a scan of `length` iterations, and what else is scanned over."""
        return self, []

    def leave_loop(self, inner: Taps, values: Sequence[Any], length: int) -> None:
        """Takes over the taps of `inner` with what they saw in all `length` iterations, stacked, as `values`."""

    def enter_boundary(self, site: Site, boundary: Any) -> Taps:
        """Returns the taps inside the gradient `boundary` at `site`."""
        return self

    def zeros(self) -> list[Any]:
        """Returns further operands of a boundary, to be differentiated."""
        return []

    def leave_boundary(
        self,
        inner: Taps,
        local: Taps,
        site: Site,
        eqn: Any,
        results: Sequence[Any],
        values: Sequence[Any],
        gradients: Sequence[Any],
    ) -> None:
        """Takes over what was seen inside a boundary.

        **Arguments:**

        - `inner`: the taps of `enter_boundary`; `local`: those of its body.
        - `site`, `eqn`: of the boundary.
        - `results`: its value and auxiliary values; `values`: what `local` saw; `gradients`: those it gives.
        """


NONE: Taps = Taps()


def is_whole(eqn: Any) -> bool:
    """Tells whether the equation `eqn` is looked at by itself: it is not a call whose body's equations are."""
    return call_body(eqn) is None or kind_of(eqn) is CallKind.RULE


def is_floating(value: Any) -> bool:
    """Tells whether the array `value` holds floating-point or complex numbers."""
    return jnp.issubdtype(value.dtype, jnp.inexact)


class ResultTaps(Taps):
    """Shows every floating-point result; with `gradients_only` just what gradient boundaries give."""

    def __init__(self, gradients_only: bool = False) -> None:
        super().__init__()
        self.gradients_only: bool = gradients_only
        self._inner: list[ResultTaps] = []

    def write(self, site: Site, eqn: Any, results: Sequence[Any]) -> None:
        """Takes note of the floating-point `results` of `eqn` at `site`."""
        if self.gradients_only or not is_whole(eqn) or kind_of(eqn) is CallKind.BOUNDARY:
            return
        for number, value in enumerate(results):
            if is_floating(value) and not isinstance(eqn.outvars[number], _compat.DropVar):
                self.taps.append(Tap(site, eqn, result=number))
                self.values.append(value)

    def within(self, zeros: Sequence[Any] = ()) -> ResultTaps:
        """Returns taps of their own for a body; there are no `zeros`."""
        local = ResultTaps(self.gradients_only)
        self._inner[:] = [local]
        return local

    def take(self, local: Taps, values: Sequence[Any]) -> None:
        """Takes over the taps of `local`, with `values`."""
        self.taps.extend(local.taps)
        self.values.extend(values)

    def enter_loop(self, site: Site, length: int) -> tuple[Taps, list[Any]]:
        """Returns taps of their own for the loop's body at `site`, whatever its `length`; no more is scanned over."""
        return ResultTaps(self.gradients_only), []

    def leave_loop(self, inner: Taps, values: Sequence[Any], length: int) -> None:
        """Takes over the taps of `inner`, with `values` that have a dim of `length` iterations in front."""
        assert isinstance(inner, ResultTaps), "the taps of a loop's body are those that enter_loop returned"
        local = inner._inner[0]
        self.taps.extend([dataclasses.replace(tap, loops=tap.loops + 1) for tap in local.taps])
        self.values.extend(values)

    def enter_boundary(self, site: Site, boundary: Any) -> Taps:
        """Returns itself: forward, the `boundary` at `site` is like any body."""
        return self

    def leave_boundary(
        self,
        inner: Taps,
        local: Taps,
        site: Site,
        eqn: Any,
        results: Sequence[Any],
        values: Sequence[Any],
        gradients: Sequence[Any],
    ) -> None:
        """Takes over `values` that `local` saw, and the `results` and `gradients` of the boundary `eqn` at `site`.

        `inner` is the object itself.
        """
        self.take(local, values)
        for number, value in enumerate(results):
            if is_floating(value):
                self.taps.append(Tap(site, eqn, result=number))
                self.values.append(value)
        names = eqn.params["names"]
        for number, (position, value) in enumerate(zip(eqn.params["positions"], gradients, strict=True)):
            self.taps.append(
                Tap(site, eqn, result=len(eqn.outvars) - len(gradients) + number, gradient_of=names[position])
            )
            self.values.append(value)


# The zeros to add, by boundary: which operand, and the type of its zero.
Zeros: TypeAlias = dict[Site, list[tuple[Tap, jax.ShapeDtypeStruct]]]
_Operand: TypeAlias = tuple[Site, int | None]  # an equation's site, and the operand's number


class CotangentTaps(Taps):
    """Shows what every operation inside a boundary contributes to the cotangents of its operands.

    - `wanted`: taps of operands with shape and dtype of the zero that is added there, by the site of the boundary's
      forward; None while they are still being found out.
    - `noted`: the same, filled where `wanted` is None.
    """

    def __init__(
        self,
        wanted: Zeros | None = None,
        noted: Zeros | None = None,
    ) -> None:
        super().__init__()
        self.wanted: Zeros | None = wanted
        self.noted: Zeros = {} if noted is None else noted
        self._boundary: Site | None = None
        self._supply: dict[_Operand, Any] = {}
        self._keys: list[_Operand] = []  # of the zeros that a body gets
        self._seen: list[tuple[Tap, jax.ShapeDtypeStruct]] = []
        self._loops: list[int] = []
        self._singles: set[Any] = set()

    def _child(self, supply: dict[_Operand, Any], loops: list[int]) -> CotangentTaps:
        child = CotangentTaps(self.wanted, self.noted)
        child._boundary, child._supply, child._seen, child._loops = self._boundary, supply, self._seen, loops
        child._singles = self._singles
        return child

    def read(self, site: Site, eqn: Any, values: list[Any]) -> list[Any]:
        """Adds the zeros of `eqn` at `site` to its operands `values`, or takes note of the operands."""
        if self._boundary is None or not is_whole(eqn):
            return values
        values = list(values)
        for number, (atom, value) in enumerate(zip(eqn.invars, values, strict=True)):
            if (
                isinstance(atom, _compat.Literal)
                or not is_floating(value)
                or (eqn.primitive.name == "scan" and not np.shape(value))
            ):
                continue
            if self.wanted is None:
                if atom not in self._singles:
                    shape = (*self._loops, *np.shape(value))
                    self._seen.append(
                        (
                            Tap(site, eqn, operand=number, loops=len(self._loops)),
                            jax.ShapeDtypeStruct(shape, value.dtype),
                        )
                    )
            elif (site, number) in self._supply:
                values[number] = jax.lax.add(value, self._supply[site, number])
        return values

    def within(self, zeros: Sequence[Any] = ()) -> CotangentTaps:
        """Returns the taps of a body that gets `zeros` to add."""
        if not zeros:
            return self
        keys = self._keys
        return self._child({**self._supply, **dict(zip(keys, zeros, strict=True))}, self._loops)

    def enter_loop(self, site: Site, length: int) -> tuple[Taps, list[Any]]:
        """Returns the taps of the loop's body at `site`, and its zeros, which have a dim of `length` iterations in
        front.
        """
        keys = [key for key in self._supply if key[0][: len(site)] == site]
        child = self._child(
            {key: zero for key, zero in self._supply.items() if key not in keys}, [*self._loops, length]
        )
        child._keys = keys
        return child, [self._supply[key] for key in keys]

    def enter_boundary(self, site: Site, boundary: Any) -> Taps:
        """Returns the taps inside the `boundary` at `site`, which know its zeros."""
        child = CotangentTaps(self.wanted, self.noted)
        child._boundary = site
        inner, _ = _compat.open_jaxpr(boundary.forward)
        uses: dict[Any, int] = {}
        for eqn in inner.eqns:
            for atom in eqn.invars:
                if not isinstance(atom, _compat.Literal):
                    uses[atom] = uses.get(atom, 0) + 1 + (not is_whole(eqn))
        # The gradient of an operand that one operation reads is what this operation contributes.
        child._singles = {inner.invars[i] for i in boundary.positions if uses.get(inner.invars[i], 0) == 1}
        child._keys = [(tap.site, tap.operand) for tap, _ in (self.wanted or {}).get(site, [])]
        return child

    def zeros(self) -> list[Any]:
        """Returns the zeros to differentiate by."""
        if self.wanted is None or self._boundary is None:
            return []
        return [jnp.zeros(zero.shape, zero.dtype) for _, zero in self.wanted.get(self._boundary, [])]

    def leave_boundary(
        self,
        inner: Taps,
        local: Taps,
        site: Site,
        eqn: Any,
        results: Sequence[Any],
        values: Sequence[Any],
        gradients: Sequence[Any],
    ) -> None:
        """Takes over the `gradients` of the boundary `eqn` at `site` as contributions: those of the zeros of `inner`,
        and those of operands that only one operation reads. `local`, `results` and `values` tell nothing more.
        """
        assert isinstance(inner, CotangentTaps) and inner._boundary is not None, (
            "these are what enter_boundary returned"
        )
        if self.wanted is None:
            # A body may be traced more than once.
            self.noted[inner._boundary] = list(
                {(tap.site, tap.operand): (tap, zero) for tap, zero in inner._seen}.values()
            )
            return
        own = len(eqn.params["positions"])
        forward, _ = _compat.open_jaxpr(eqn.params["forward"])
        for position, value in zip(eqn.params["positions"], gradients[:own], strict=True):
            reader = _single_reader(forward, position)
            if reader is not None and is_floating(value):
                index, number = reader
                self.taps.append(
                    Tap(
                        (*site, 0, index),
                        forward.eqns[index],
                        operand=number,
                        gradient_of=eqn.params["names"][position],
                    )
                )
                self.values.append(value)
        for (tap, _), value in zip(self.wanted[inner._boundary], gradients[own:], strict=True):
            self.taps.append(tap)
            self.values.append(value)


def _single_reader(forward: Any, position: int) -> tuple[int, int] | None:
    """Returns which equation, and which of its operands, alone reads an input; None if several do, or a call does."""
    readers = [
        (index, number)
        for index, eqn in enumerate(forward.eqns)
        for number, atom in enumerate(eqn.invars)
        if atom is forward.invars[position]
    ]
    return readers[0] if len(readers) == 1 and is_whole(forward.eqns[readers[0][0]]) else None
