"""Binds, changes and differentiates single equations of a jaxpr, under the settings, names and source lines that they
were traced with."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import effects, source_info_util
from jax.extend import random as jax_random
from jax.extend.core import Literal

from splitjax._compat.jaxprs import NO_EFFECTS, close_jaxpr, like_jaxpr, open_jaxpr, prune_jaxpr, trace


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan with the parameters `params` are constants and how many are carried (the rest
    are scanned over)."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def bind_equation(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Binds the primitive of `eqn` to new `operands`, as JAX's own interpreter does. Returns a list."""
    bound = eqn.primitive.get_bind_params(eqn.params)
    if isinstance(bound, tuple):
        subfuns, params = bound
        results = eqn.primitive.bind(*subfuns, *operands, **params)
    else:
        results = eqn.primitive.bind(*operands, **bound)
    return list(results) if eqn.primitive.multiple_results else [results]


def equation_context(eqn: Any) -> Any:
    """Returns a context manager under which a re-bound `eqn` keeps its own source line, name stack and settings, but
    for the mesh in context where there is one: inside a `shard_map` it is that of the evaluation, not the tracing."""
    stack, mesh = contextlib.ExitStack(), jax.sharding.get_abstract_mesh()
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    stack.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack))
    stack.enter_context(eqn.ctx.manager)
    if not mesh.empty:
        stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
    return stack


def rebind(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Binds `eqn` to new `operands` under its own source line, name stack and settings, as `eval_jaxpr` does."""
    with equation_context(eqn):
        return bind_equation(eqn, operands)


def has_ordered_effects(eqn: Any) -> bool:
    """Returns whether `eqn` has a side effect that JAX runs in the order of the program."""
    return any(effects.ordered_effects.contains(effect) for effect in eqn.effects)


def context_mesh(eqn: Any) -> Any:
    """Returns the abstract mesh in whose context `eqn` was traced; the empty one where there was none."""
    return eqn.ctx.cur_abstract_mesh


def moved_equation(
    eqn: Any, invars: Sequence[Any], outvars: Sequence[Any], params: dict[str, Any], mesh: Any, primitive: Any = None
) -> Any:
    """Returns `eqn` with other operands, results and parameters, in the context of the abstract `mesh`, with its own
    source line and name stack. `primitive`: another operation in its place."""
    with eqn.ctx.manager, jax.sharding.use_abstract_mesh(mesh):
        context = type(eqn.ctx)()
    changes = {} if primitive is None else {"primitive": primitive, "effects": NO_EFFECTS}
    return eqn.replace(invars=list(invars), outvars=list(outvars), params=params, ctx=context, **changes)


def with_params(eqn: Any, **changes: Any) -> Any:
    """Returns `eqn` with the parameters in `changes` changed."""
    return eqn.replace(params={**eqn.params, **changes})


def checkpoint_equation(
    eqn: Any,
    body: Any,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    policy: Callable[..., Any],
    *,
    prevent_cse: bool,
) -> Any:
    """Returns the equation of `jax.checkpoint` around the closed jaxpr `body`, which has no constants, as this release
    of JAX writes it.

    **Arguments:** `eqn`: one whose source line, name stack and settings it has. `inputs`: what it reads, an
    atom for each input of `body`. `outputs`: variables, one for each result. `policy`, `prevent_cse`: as of
    `jax.checkpoint`."""
    template = _checkpoint_template(policy, prevent_cse)
    inner, _ = open_jaxpr(body)
    return template.replace(
        invars=list(inputs),
        outvars=list(outputs),
        params={**template.params, "jaxpr": like_jaxpr(template.params["jaxpr"], inner)},
        source_info=eqn.source_info,
        ctx=eqn.ctx,
    )


@functools.cache
def _checkpoint_template(policy: Callable[..., Any], prevent_cse: bool) -> Any:
    """Returns an equation of `jax.checkpoint` around a function of one number."""
    fun = jax.checkpoint(jax.numpy.sin, policy=policy, prevent_cse=prevent_cse)
    closed, _ = trace(fun, jax.ShapeDtypeStruct((), jax.numpy.float32))
    (eqn,) = open_jaxpr(closed)[0].eqns
    return eqn


def prune(eqn: Any, used: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Returns the part of `eqn` that computes the results that are `used` (a flag for each): a closed jaxpr over the
    operands that these results need, and which operands those are. Literal operands count as operands."""
    types = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
        for v in eqn.invars
    ]
    return prune_jaxpr(close_jaxpr(trace(lambda *operands: bind_equation(eqn, operands), *types)[0]), used)


def pullback(eqn: Any) -> tuple[Any, tuple[int, ...], tuple[int, ...]]:
    """Returns the reverse derivative of `eqn` as a closed jaxpr: (operands that are not literals, cotangents) ->
    gradients.

    Also the operand positions that have a gradient, and the result positions that have a cotangent, both ascending.
    """
    inexact = lambda v: jax.numpy.issubdtype(v.aval.dtype, jax.numpy.inexact)
    variables = [i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal)]
    positions = tuple(i for i in variables if inexact(eqn.invars[i]))
    results = tuple(i for i, v in enumerate(eqn.outvars) if inexact(v))
    types = lambda vs: [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False)) for v in vs
    ]

    def gradients(operands, cotangents):
        values = [v.val if isinstance(v, Literal) else None for v in eqn.invars]
        for i, value in zip(variables, operands, strict=True):
            values[i] = value

        def function(*differentiated):
            merged = list(values)
            for i, value in zip(positions, differentiated, strict=True):
                merged[i] = value
            outputs = bind_equation(eqn, merged)
            return [outputs[i] for i in results]

        return jax.vjp(function, *[values[i] for i in positions])[1](cotangents)

    closed, _ = trace(gradients, types([eqn.invars[i] for i in variables]), types([eqn.outvars[i] for i in results]))
    return closed, positions, results


def hidden_body(eqn: Any) -> Any | None:
    """Returns the closed jaxpr of an `eqn` that keeps its meaning in Python (`call_hi_primitive` of JAX 0.12, behind
    functions such as `jnp.searchsorted`); None for any other."""
    hidden = eqn.params.get("_prim") if eqn.primitive.name == "call_hi_primitive" else None
    if hidden is None or not hasattr(hidden, "expand"):
        return None
    types = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
        for v in eqn.invars
    ]
    return trace(
        lambda *operands: jax.tree.leaves(hidden.expand(*jax.tree.unflatten(hidden.in_tree, operands))), *types
    )[0]


def has_positional_bits(eqn: Any) -> bool:
    """Returns whether `eqn`, a `random_bits`, draws each value from the key and the value's position alone, so that
    some can be drawn without the rest: one threefry key, JAX's partitionable generator (the default), and fewer than
    2^32 values."""
    if eqn.primitive.name != "random_bits" or eqn.invars[0].aval.shape != ():
        return False
    is_threefry = getattr(eqn.invars[0].aval.dtype, "_impl", None) is jax_random.threefry_prng_impl
    return is_threefry and bool(eqn.ctx.threefry_partitionable) and eqn.outvars[0].aval.size < 2**32


def positional_bits(key: Any, bit_width: int, positions: Any) -> Any:
    """Returns the values of `bit_width` bits that `random_bits` with `key` has at the given row-major `positions`
    (uint32), for equations with `has_positional_bits`."""
    first, second = jax.random.key_data(key)
    high, low = jax_random.threefry2x32_p.bind(first, second, jax.numpy.zeros_like(positions), positions)
    if bit_width == 64:
        return (high.astype("uint64") << 32) | low.astype("uint64")
    return (high ^ low).astype(f"uint{bit_width}")
