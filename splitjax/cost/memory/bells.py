"""Finds where a step computes exp(-x^2) that XLA has already: inside of erfc(x).

XLA has no complementary error function: it writes the one of JAX out as a polynomial times exp(-x^2). The derivative of
erfc asks for exp(-x^2) again, which XLA then finds equal, so that what was computed in the forward pass is stored for
the backward pass: in a GELU that is not approximated, a second array beside that of erfc
(`tests/cost/memory/test_bells.py` has the module). JAX before 0.12 asks for it so; later ones ask for a more precise
exponential, which XLA keeps apart. Operations come in one by one, in program order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Bells:
    """Remembers, while a program is read, which values are -x^2, and where exp(-x^2) is."""

    def __init__(self) -> None:
        self._squares: dict[int, int] = {}  # by value, of what it is the square
        self._negated: dict[int, int] = {}
        self._made: dict[int, int] = {}  # by x, exp(-x^2)

    def add(self, value: int, bell: int) -> None:
        """Remembers that `bell` is exp(-x^2) of the `value` x."""
        self._made[value] = bell

    def known(self, name: str, params: Mapping[str, Any], inputs: Sequence[int], outputs: Sequence[int]) -> int | None:
        """Returns the value that an operation computes again, if it is such an exponential; None for any other.
        `name`, `params`, `inputs`, `outputs`: of the operation."""
        is_square = name == "square" or (name == "integer_pow" and params["y"] == 2)
        if is_square or (name == "mul" and inputs[0] == inputs[1]):
            self._squares[outputs[0]] = inputs[0]
        elif name == "neg" and inputs[0] in self._squares:
            self._negated[outputs[0]] = self._squares[inputs[0]]
        elif name == "exp" and inputs[0] in self._negated:
            return self._made.get(self._negated[inputs[0]])
        return None
