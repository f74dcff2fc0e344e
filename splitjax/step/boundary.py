"""Defines the gradient boundary: the equation that `splitjax.value_and_grad` binds into a traced step.

The equation's operands come in, value, auxiliary values and gradients come out. It exists because a step that is
differentiated by plain JAX arrives with its backward pass already traced, where nothing says any more what is
differentiated, over which examples, and how often. The parameters of this equation hold the *forward* jaxpr; the
derivative is taken when the equation is evaluated. Lowering can therefore change how the forward runs (shardings,
microbatches, synchronisation) and differentiate through the change.

The equation:

- operands: values that the function closes over, then the traced leaves of the arguments in flat order;
- results: the value (a scalar), the array leaves of aux, one gradient per differentiated operand, each of exactly its
  operand's shape and dtype;
- parameters: `forward` (closed jaxpr without constants, operands -> value, *aux), `positions` (the differentiated
  operands), `holomorphic`, `microbatches` (a number or None), `label` (function and user's line), `names` (per operand
  its path among the arguments, or "captured").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from splitjax import _compat
from splitjax.primitives.calls import BOUNDARY
from splitjax.primitives.walk import Site

PRIMITIVE = BOUNDARY


@dataclasses.dataclass(frozen=True)
class Boundary:
    """Describes a boundary equation as a value: see the module's docstring for the order of operands and results.

    - `forward`: the closed jaxpr without constants, operands -> value, *aux.
    - `positions`: the differentiated operands, by position.
    - `holomorphic`: as for `jax.value_and_grad`.
    - `microbatches`: the number of parts of a worker's batch that are differentiated by themselves; None for whole.
    - `label`: the function and the user's line, such as `loss_fn at train.py:12`.
    - `names`: the path of each operand, such as `params['w']`, or "captured".
    """

    forward: _compat.ClosedJaxpr
    positions: tuple[int, ...]
    holomorphic: bool
    microbatches: int | None
    label: str
    names: tuple[str, ...]

    @property
    def num_aux(self) -> int:
        """The number of auxiliary results."""
        return len(_compat.open_jaxpr(self.forward)[0].outvars) - 1

    @property
    def gradients(self) -> tuple[tuple[int, int], ...]:
        """Pairs each gradient with what it is the gradient of: (result position, operand position)."""
        return tuple((1 + self.num_aux + i, position) for i, position in enumerate(self.positions))


def boundary_of(params: dict[str, Any]) -> Boundary:
    """Returns the boundary that `params`, the parameters of its equation, describe."""
    return Boundary(**params)


def is_boundary(eqn: Any) -> bool:
    """Returns whether the equation `eqn` is a gradient boundary."""
    return eqn.primitive is value_and_grad_p


def boundary_forward(eqn: Any) -> tuple[_compat.ClosedJaxpr, tuple[int, ...]]:
    """Returns the closed forward jaxpr (operands -> value, *aux; no constants) of the boundary `eqn`, and the positions
    of its differentiated operands."""
    return eqn.params["forward"], eqn.params["positions"]


def expand(
    params: dict[str, Any],
    operands: Sequence[Any],
    eval_forward: Callable[[_compat.ClosedJaxpr, Sequence[Any]], Sequence[Any]] | None = None,
) -> list[Any]:
    """Evaluates a boundary whole, and returns value, aux leaves and gradients.

    **Arguments:**

    - `params`: the parameters of the boundary's equation. `microbatches` is ignored here (see `microbatch.py`): it
      never changes the numbers.
    - `operands`: of the equation, in order.
    - `eval_forward(forward, operands) -> [value, *aux]`: replaces the evaluation of the forward jaxpr; the derivative
      is taken through it. None evaluates the forward as it is.
    """
    evaluate = eval_forward or (lambda forward, values: _compat.eval_jaxpr(forward, (), *values))
    positions = params["positions"]

    def value_and_aux(differentiated: Sequence[Any]) -> tuple[Any, list[Any]]:
        merged = list(operands)
        for position, value in zip(positions, differentiated, strict=True):
            merged[position] = value
        value, *aux = evaluate(params["forward"], merged)
        return value, aux

    differentiate = jax.value_and_grad(value_and_aux, has_aux=True, holomorphic=params["holomorphic"])
    (value, aux), grads = differentiate([operands[i] for i in positions])
    return [value, *aux, *grads]


def _result_types(*operands: Any, **params: Any) -> tuple[list[Any], Any]:
    forward = params["forward"]
    return [*forward.out_avals, *(operands[i] for i in params["positions"])], _compat.jaxpr_effects(forward)


value_and_grad_p: _compat.Primitive = _compat.define_primitive(
    PRIMITIVE, lambda *operands, **params: expand(params, operands), _result_types
)


# Finds a boundary in a trace with another number of examples: (its equation, its site, the number) -> that equation, or
# why there is none (`splitjax.errors.Refusal`).
Twin = Callable[[Any, Site, int], Any]
