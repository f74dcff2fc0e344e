"""Connects the gradient boundaries of a step that ask for microbatches with their evaluation (`microbatch.py`).

The step is traced a second time with as many examples as one microbatch of one worker has; the boundary at the same site of
that trace is the local forward, and operand dims whose sizes differ between the traces are the example dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from splitjax import _compat
from splitjax.errors import MicrobatchError, SplitjaxError
from splitjax.lower import gradient
from splitjax.lower.arguments import Bound, abstract
from splitjax.lower.layout import BoundaryHook, Layout, Site, evaluate_equation
from splitjax.lower.microbatch import expand_microbatches, local_examples, manual_axes
from splitjax.plan import Plan
from splitjax.trace.graph import Graph


def boundary_hook(bound: Bound, graph: Graph, mesh: Mesh, plan: Plan, layout: Layout, trace: Callable[[list[Any]], Any]) -> BoundaryHook:
    """The evaluator of boundaries with `microbatches`.

    `trace(leaves)` traces the step for other flat arguments (`ShapeDtypeStruct`s) and returns its closed jaxpr."""
    manual = manual_axes(plan.batch_axes, mesh, [leaf.spec for leaf in plan.leaves if leaf.role == "param"])

    @functools.cache
    def local_jaxpr(num_examples: int) -> Any:
        leaves = [
            jax.ShapeDtypeStruct((num_examples, *leaf.shape[1:]), leaf.dtype, weak_type=leaf.weak_type) if argument.is_batch and leaf.shape else leaf
            for leaf, argument in zip(abstract(bound.leaves, bound.signature.avals), bound.arguments, strict=True)
        ]
        try:
            return trace(leaves)
        except SplitjaxError:
            raise
        except Exception as error:
            raise MicrobatchError(
                f"the step cannot be traced with {num_examples} examples, the size of one microbatch: {error}", value=num_examples,
                place="microbatches", remedy="write the step for any batch size, or use microbatches=None",
            ) from error

    def hook(eqn: Any, operands: Sequence[Any], site: Site, forward: Callable) -> list[Any]:
        number = eqn.params["microbatches"]
        if graph.num_examples is None:
            return gradient.expand(eqn.params, operands, forward)
        size = local_examples(graph.num_examples, number, plan.batch_axes, mesh, manual)
        twin = equation_at(local_jaxpr(size), site)
        if twin is None or not gradient.is_boundary(twin) or len(twin.invars) != len(eqn.invars):
            raise MicrobatchError(
                f"{eqn.params['label']}: the step is another program for {size} examples than for {graph.num_examples}",
                value=size, place=eqn.params["label"], remedy="do not let the program depend on the batch size, or use microbatches=None",
            )
        copies: dict[Any, Any] = {}
        dims = [_example_dim(a.aval.shape, b.aval.shape) for a, b in zip(eqn.invars, twin.invars, strict=True)]
        return expand_microbatches(
            eqn.params, operands, dims, gradient.boundary_forward(twin)[0], number, plan.batch_axes, mesh, manual_axes=manual,
            bind=lambda inner, values, inside: evaluate_equation(layout.without(manual), inner, values, (*site, 0, *inside), copies),
            eval_forward=forward,
        )

    return hook


def _example_dim(whole: Sequence[int], part: Sequence[int]) -> int | None:
    differ = [d for d, (a, b) in enumerate(zip(whole, part, strict=True)) if a != b]
    return differ[0] if differ else None


def equation_at(jaxpr: Any, site: Site) -> Any:
    """The equation at a site (see `trace.flatten`), or None where the jaxpr has no such equation."""
    inner, _ = _compat.open_jaxpr(jaxpr)
    if not site or site[0] >= len(inner.eqns):
        return None
    eqn = inner.eqns[site[0]]
    if len(site) == 1:
        return eqn
    bodies = _bodies(eqn)
    return equation_at(bodies[site[1]], site[2:]) if site[1] < len(bodies) else None


def _bodies(eqn: Any) -> list[Any]:
    """The sub-jaxprs of an equation, in the order in which sites number them."""
    if eqn.primitive.name == "while":
        return [eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]]
    return [
        body for value in eqn.params.values() for body in (value if isinstance(value, (tuple, list)) else (value,)) if _compat.is_jaxpr(body)
    ]
