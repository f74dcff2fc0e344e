"""Defines a primitive that every transformation of JAX sees through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def define_primitive(
    name: str,
    evaluate: Callable[..., list[Any]],
    result_types: Callable[..., tuple[list[Any], Any]],
    differentiable: Callable[..., list[Any]] | None = None,
    batched: Callable[..., list[Any]] | None = None,
) -> Primitive:
    """Returns a primitive `name` with several results that means `evaluate(*operands, **params)` to every
    transformation but tracing.

    `result_types(*operand_types, **params)` gives the abstract results and the effects. Derivatives, batching and
    compilation see through the primitive: they transform `evaluate`, but for what is given here.

    - `differentiable(*operands, **params)`: is differentiated in place of `evaluate`.
    - `batched(dims, *operands, **params)`: gives the results for a batch of operands, with the batch in front; `dims`
      says where the operands have it, None for one without.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_effectful_abstract_eval(result_types)
    primitive.def_impl(evaluate)

    def derive(primals, tangents, **params):
        active = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

        def of_active(*values):
            operands = list(primals)
            for i, value in zip(active, values, strict=True):
                operands[i] = value
            return (differentiable or evaluate)(*operands, **params)

        results, changes = jax.jvp(of_active, [primals[i] for i in active], [tangents[i] for i in active])
        return results, [
            ad.Zero(jax.typeof(change)) if change.dtype == jax.dtypes.float0 else change for change in changes
        ]

    def batch(axis, operands, dims, /, **params):
        if all(dim is None for dim in dims) and not result_types(*map(jax.typeof, operands), **params)[1]:
            results = primitive.bind(*operands, **params)
            return results, [None] * len(results)
        if batched is not None:
            results = batched(tuple(dims), *operands, **params)
            return results, [0] * len(results)
        mapped = jax.vmap(
            lambda *values: evaluate(*values, **params),
            in_axes=tuple(dims),
            axis_size=axis.size,
            axis_name=None if type(axis.name) is object else axis.name,  # JAX's mark for "unnamed" is a bare object
            spmd_axis_name=axis.spmd_name,
        )
        results = mapped(*operands)
        return results, [0] * len(results)

    ad.primitive_jvps[primitive] = derive
    batching.fancy_primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, mlir.lower_fun(evaluate, multiple_results=True))
    return primitive
