"""Has the gradients of a traced step taken in microbatches, where the step itself says nothing about it.

The jaxpr of a step comes in; the same step comes out, whose gradient boundaries ask for a number of microbatches. It is
what the option `microbatches` of `splitjax.parallelize` does; what a boundary was told by `splitjax.value_and_grad`
stays.
"""

from __future__ import annotations

from typing import Any

from splitjax import _compat
from splitjax.primitives.walk import boundaries, everywhere, holds_boundary, walk
from splitjax.step.boundary import is_boundary
from splitjax.step.per_microbatch import is_per_microbatch


def in_microbatches(jaxpr: _compat.ClosedJaxpr, number: int | None) -> _compat.ClosedJaxpr:
    """Returns the step `jaxpr` with `number` microbatches for each gradient boundary that asks for none; None and 1
    leave it as it is. Boundaries within the forward of another stay whole."""
    return jaxpr if number in (None, 1) else _changed(jaxpr, number)


def why_not_in_microbatches(jaxpr: _compat.ClosedJaxpr) -> str:
    """Returns why the number of microbatches of a step cannot be chosen, whatever its layout; empty where it can."""
    found = [visit.eqn for visit in boundaries(jaxpr)]
    if not found:
        return "the step takes its gradient with JAX's own functions: take it with splitjax.value_and_grad"
    if all(eqn.params["microbatches"] is not None for eqn in found):
        return "splitjax.value_and_grad says how many there are"
    if any(is_per_microbatch(visit.eqn) for visit in walk(jaxpr, everywhere)):
        return "what splitjax.per_microbatch marks has other numbers in another number of them"
    return ""


def _changed(jaxpr: Any, number: int | None) -> Any:
    inner, _ = _compat.open_jaxpr(jaxpr)
    eqns = [_changed_equation(eqn, number) for eqn in inner.eqns]
    if all(new is old for new, old in zip(eqns, inner.eqns, strict=True)):
        return jaxpr
    return _compat.like_jaxpr(jaxpr, inner.replace(eqns=eqns))


def _changed_equation(eqn: Any, number: int | None) -> Any:
    if is_boundary(eqn):
        return eqn if eqn.params["microbatches"] is not None else _compat.with_params(eqn, microbatches=number)
    if not holds_boundary(eqn):
        return eqn
    swap = lambda value: _changed(value, number) if isinstance(value, _compat.JAXPR_TYPES) else value
    changes = {
        name: type(value)(map(swap, value)) if type(value) in (tuple, list) else swap(value)
        for name, value in eqn.params.items()
    }
    return _compat.with_params(eqn, **changes)
