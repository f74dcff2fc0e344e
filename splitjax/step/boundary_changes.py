"""Changes the gradient boundaries of a traced step, wherever they stand in it.

The jaxpr of a step and a change of one boundary's equation come in; the same step comes out with all of its boundaries
changed. Those within the forward of another stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from splitjax import _compat
from splitjax.primitives.walk import holds_boundary
from splitjax.step.boundary import is_boundary

# The equation of a boundary -> the same, changed; itself where nothing is to change.
Change = Callable[[Any], Any]


def with_boundaries(jaxpr: Any, change: Change) -> Any:
    """Returns the step `jaxpr`, open or closed, with what `change` makes of each gradient boundary; `jaxpr` itself
    where it changes none."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    eqns = [_changed(eqn, change) for eqn in inner.eqns]
    if all(new is old for new, old in zip(eqns, inner.eqns, strict=True)):
        return jaxpr
    return _compat.like_jaxpr(jaxpr, inner.replace(eqns=eqns))


def _changed(eqn: Any, change: Change) -> Any:
    if is_boundary(eqn):
        return change(eqn)
    if not holds_boundary(eqn):
        return eqn
    swap = lambda value: with_boundaries(value, change) if isinstance(value, _compat.JAXPR_TYPES) else value
    changes = {
        name: type(value)(map(swap, value)) if type(value) in (tuple, list) else swap(value)
        for name, value in eqn.params.items()
    }
    return _compat.with_params(eqn, **changes)
