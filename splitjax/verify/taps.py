"""Taps: what a rewritten step shows of its operations besides its results.

Forward, every floating-point result of every operation. Backward, for every floating-point operand of every operation
inside a gradient
boundary, what the operation contributes to its cotangent: a zero is added to the operand, and differentiated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from splitjax import _compat
from splitjax.trace.flatten import call_body

Site = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Tap:
    """What is looked at: a result of an equation (`operand` is None), or what it contributes to the cotangent of an
    operand."""

    site: Site
    eqn: Any
    result: int | None = None
    operand: int | None = None
    loops: int = 0  # how many leading dims count iterations
    gradient_of: str | None = None  # of a result of a boundary: the operand that it is the gradient of


class Taps:
    """No taps: a rewritten step shows its results only. The base of the two kinds that there are."""

    def __init__(self) -> None:
        self.taps: list[Tap] = []
        self.values: list[Any] = []

    def read(self, site: Site, eqn: Any, values: list[Any]) -> list[Any]:
        """The operands as an equation gets them."""
        return values

    def write(self, site: Site, eqn: Any, results: Sequence[Any]) -> None:
        """Takes note of an equation's results."""

    def within(self, zeros: Sequence[Any] = ()) -> Taps:
        """The taps of a body that is traced by itself."""
        return self

    def take(self, local: Taps, values: Sequence[Any]) -> None:
        """Takes over what was seen inside a body, as its results outside."""

    def enter_loop(self, site: Site, length: int) -> tuple[Taps, list[Any]]:
        """The taps of a scan's body, and further arrays to be scanned over."""
        return self, []

    def leave_loop(self, inner: Taps, values: Sequence[Any], length: int) -> None:
        """Takes over what was seen in all iterations, stacked."""

    def enter_boundary(self, site: Site, boundary: Any) -> Taps:
        """The taps inside a gradient boundary."""
        return self

    def zeros(self) -> list[Any]:
        """Further operands of a boundary, to be differentiated."""
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
        """Takes over what was seen inside a boundary (`values`), its value and auxiliary values (`results`), and its
        gradients."""


NONE = Taps()


def is_whole(eqn: Any) -> bool:
    """Whether an equation is looked at by itself: it is not a call whose body's equations are."""
    return call_body(eqn) is None or eqn.primitive.name in (
        "custom_jvp_call",
        "custom_vjp_call",
        "custom_vjp_call_jaxpr",
    )


def is_floating(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


class ResultTaps(Taps):
    """Every floating-point result; with `gradients_only` just what gradient boundaries give."""

    def __init__(self, gradients_only: bool = False) -> None:
        super().__init__()
        self.gradients_only = gradients_only
        self._inner: list[ResultTaps] = []

    def write(self, site: Site, eqn: Any, results: Sequence[Any]) -> None:
        if self.gradients_only or not is_whole(eqn) or eqn.primitive.name == "splitjax_value_and_grad":
            return
        for number, value in enumerate(results):
            if is_floating(value) and not isinstance(eqn.outvars[number], _compat.DropVar):
                self.taps.append(Tap(site, eqn, result=number))
                self.values.append(value)

    def within(self, zeros: Sequence[Any] = ()) -> ResultTaps:
        local = ResultTaps(self.gradients_only)
        self._inner[:] = [local]
        return local

    def take(self, local: Taps, values: Sequence[Any]) -> None:
        self.taps += local.taps
        self.values += values

    def enter_loop(self, site: Site, length: int) -> tuple[Taps, list[Any]]:
        return ResultTaps(self.gradients_only), []

    def leave_loop(self, inner: Taps, values: Sequence[Any], length: int) -> None:
        local = inner._inner[0]
        self.taps += [dataclasses.replace(tap, loops=tap.loops + 1) for tap in local.taps]
        self.values += values

    def enter_boundary(self, site: Site, boundary: Any) -> Taps:
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


class CotangentTaps(Taps):
    """What every operation inside a boundary contributes to the cotangents of its operands.

    `wanted`: pairs (site, operand) with shape and dtype of the zero that is added there, by the site of the boundary's
    forward; None while they
    are still being found out."""

    def __init__(
        self,
        wanted: dict[Site, list[tuple[Tap, Any]]] | None = None,
        found: dict[Site, list[tuple[Tap, Any]]] | None = None,
    ) -> None:
        super().__init__()
        self.wanted = wanted
        self.found = {} if found is None else found  # by boundary; filled where `wanted` is None
        self._boundary: Site | None = None
        self._supply: dict[tuple[Site, int], Any] = {}
        self._seen: list[tuple[Tap, Any]] = []
        self._loops: list[int] = []
        self._singles: set[Any] = set()

    def _child(self, supply: dict, loops: list[int]) -> CotangentTaps:
        child = CotangentTaps(self.wanted, self.found)
        child._boundary, child._supply, child._seen, child._loops = self._boundary, supply, self._seen, loops
        child._singles = self._singles
        return child

    def read(self, site: Site, eqn: Any, values: list[Any]) -> list[Any]:
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
        if not zeros:
            return self
        keys = self._keys
        return self._child({**self._supply, **dict(zip(keys, zeros, strict=True))}, self._loops)

    def enter_loop(self, site: Site, length: int) -> tuple[Taps, list[Any]]:
        keys = [key for key in self._supply if key[0][: len(site)] == site]
        child = self._child(
            {key: zero for key, zero in self._supply.items() if key not in keys}, [*self._loops, length]
        )
        child._keys = keys
        return child, [self._supply[key] for key in keys]

    def enter_boundary(self, site: Site, boundary: Any) -> Taps:
        child = CotangentTaps(self.wanted, self.found)
        child._boundary = site
        inner, _ = _compat.open_jaxpr(boundary.forward)
        uses: dict[Any, int] = {}
        for eqn in inner.eqns:
            for atom in eqn.invars:
                if not isinstance(atom, _compat.Literal):
                    uses[atom] = uses.get(atom, 0) + 1 + (not is_whole(eqn))
        # The gradient of an operand that one operation reads is what this operation contributes.
        child._singles = {inner.invars[i] for i in boundary.positions if uses.get(inner.invars[i], 0) == 1}
        child._keys = [(tap.site, tap.operand) for tap, _ in (self.wanted or {}).get(site, ())]
        return child

    def zeros(self) -> list[Any]:
        return [jnp.zeros(one.shape, one.dtype) for _, one in (self.wanted or {}).get(self._boundary, ())]

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
        if self.wanted is None:
            # A body may be traced more than once.
            self.found[inner._boundary] = list(
                {(tap.site, tap.operand): (tap, one) for tap, one in inner._seen}.values()
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
    """Which equation, and which of its operands, is the only one to read an input; None if several do, or a call
    does."""
    found = [
        (index, number)
        for index, eqn in enumerate(forward.eqns)
        for number, atom in enumerate(eqn.invars)
        if atom is forward.invars[position]
    ]
    return found[0] if len(found) == 1 and is_whole(forward.eqns[found[0][0]]) else None
