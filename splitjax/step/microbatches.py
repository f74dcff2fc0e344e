"""Has the gradients of a traced step taken in microbatches, where the step itself says nothing about it.

The jaxpr of a step comes in; the same step comes out, whose gradient boundaries ask for a number of microbatches. It is
what the option `microbatches` of `splitjax.parallelize` does; what a boundary was told by `splitjax.value_and_grad`
stays.
"""

from __future__ import annotations

from splitjax import _compat
from splitjax.primitives.walk import boundaries, everywhere, walk
from splitjax.step.boundary_changes import with_boundaries
from splitjax.step.per_microbatch import is_per_microbatch


def in_microbatches(jaxpr: _compat.ClosedJaxpr, number: int | None) -> _compat.ClosedJaxpr:
    """Returns the step `jaxpr` with `number` microbatches for each gradient boundary that asks for none; None and 1
    leave it as it is. Boundaries within the forward of another stay whole."""
    if number in (None, 1):
        return jaxpr
    divided = lambda eqn: (
        eqn if eqn.params["microbatches"] is not None else _compat.with_params(eqn, microbatches=number)
    )
    return with_boundaries(jaxpr, divided)


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
