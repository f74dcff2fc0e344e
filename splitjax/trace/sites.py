"""Finds its way in nested jaxprs: the bodies that an equation has, and the equation at a site.

An equation goes in, its sub-jaxprs come out in the order in which sites number them; a jaxpr and a site go in, the
equation comes out. A `site` names an equation by indices from the outermost jaxpr inwards: `(12, 0, 3)` is the fourth
equation of the first sub-jaxpr of the thirteenth equation. The walk that makes sites (`trace.flatten`) and the rooms
that edit or evaluate a step read the same jaxprs by it.
"""

from __future__ import annotations

from typing import Any

from splitjax import _compat

Site = tuple[int, ...]


# Calls that hand operands and results straight through: primitive name -> the parameters that may hold the body.
_CALLS = {
    "jit": ("jaxpr",),
    "pjit": ("jaxpr",),
    "closed_call": ("call_jaxpr",),
    "core_call": ("call_jaxpr",),
    "core_closed_call": ("call_jaxpr",),
    "call": ("call_jaxpr",),
    "xla_call": ("call_jaxpr",),
    "remat": ("jaxpr",),
    "remat2": ("jaxpr",),
    "checkpoint": ("jaxpr",),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "custom_vjp_call_jaxpr": ("fun_jaxpr", "call_jaxpr"),
    "custom_lin": ("call_jaxpr",),
    "composite": ("jaxpr", "call_jaxpr"),
    "linear_call": ("callee",),
    "custom_vmap_call": ("call",),
    "custom_partitioning": ("call",),
    "remat_opt": ("fwd_jaxpr",),
    "xla_metadata_call": ("jaxpr",),
    "eval_jaxpr": ("jaxpr",),
}


BOUNDARY: str = "splitjax_value_and_grad"


def call_body(eqn: Any) -> Any | None:
    """Returns the jaxpr that `eqn` runs on exactly its operands, where it is a call; None for an equation that is no
    call."""
    for parameter in _CALLS.get(eqn.primitive.name, ()):
        body = eqn.params.get(parameter)
        if _compat.is_jaxpr(body):
            inner, _ = _compat.open_jaxpr(body)
            if len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars):
                return body
    return _compat.hidden_body(eqn)


def boundary_parts(eqn: Any) -> tuple[Any, tuple[int, ...]]:
    """Returns the forward jaxpr of a gradient boundary, and which of its operands it differentiates.

    `eqn` is the boundary's equation. Its results are the value, the auxiliary values, then one gradient per
    differentiated operand.
    """
    return eqn.params["forward"], tuple(eqn.params["positions"])


def equation_at(jaxpr: Any, site: Site) -> Any:
    """Returns the equation of `jaxpr` at `site`, or None where the jaxpr has no such equation."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    if not site or site[0] >= len(inner.eqns):
        return None
    eqn = inner.eqns[site[0]]
    if len(site) == 1:
        return eqn
    inner_jaxprs = bodies(eqn)
    return equation_at(inner_jaxprs[site[1]], site[2:]) if site[1] < len(inner_jaxprs) else None


def bodies(eqn: Any) -> list[Any]:
    """Returns the sub-jaxprs of the equation `eqn`, in the order in which sites number them."""
    if eqn.primitive.name == "while":
        return [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    return [
        body
        for value in eqn.params.values()
        for body in (value if isinstance(value, (tuple, list)) else (value,))
        if _compat.is_jaxpr(body)
    ]
