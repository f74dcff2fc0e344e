"""Rebuilds calls around bodies that are evaluated otherwise: scan as scan, remat as remat.

An equation that is a call, its operands and an evaluator of its bodies come in; its results come out. `REBUILD` has a
function for every kind of call that can be rebuilt so; all others carry derivative rules beside their body, and are
bound as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from splitjax import _compat
from splitjax.primitives.calls import CallKind, call_body, scan_parts, while_parts
from splitjax.primitives.interpreter import RunBody

# Evaluates a call anew, with its bodies evaluated otherwise: (evaluator, equation, operands) -> results.
Rebuild = Callable[[RunBody, Any, list[Any]], list[Any]]


def _inline(run: RunBody, eqn: Any, values: list[Any]) -> list[Any]:
    """Rebuilds a call that only wraps a body, by evaluating the body in its place."""
    body = call_body(eqn)
    assert body is not None, f"{eqn.primitive.name}, which means its body, has none that takes its operands"
    return run(body, 0, values)


def remat(run: RunBody, eqn: Any, values: list[Any]) -> list[Any]:
    """Rebuilds the rematerialised call `eqn` on `values`, with its body evaluated by `run`; returns its results."""
    body = eqn.params["jaxpr"]
    fun = jax.checkpoint(
        lambda *operands: run(body, 0, operands), prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"]
    )
    return list(fun(*values))


def _scan(run: RunBody, eqn: Any, values: list[Any]) -> list[Any]:
    consts, init, xs = scan_parts(eqn, values)

    def body(carry: list[Any], x: list[Any]) -> tuple[list[Any], list[Any]]:
        results = run(eqn.params["jaxpr"], 0, [*consts, *carry, *x])
        return results[: len(init)], results[len(init) :]

    carry, ys = jax.lax.scan(
        body,
        init,
        xs,
        length=eqn.params["length"],
        reverse=eqn.params["reverse"],
        unroll=eqn.params["unroll"],
    )
    return [*carry, *ys]


def _while(run: RunBody, eqn: Any, values: list[Any]) -> list[Any]:
    cond_consts, body_consts, init = while_parts(eqn, values)
    goes_on = lambda carry: run(eqn.params["cond_jaxpr"], 0, [*cond_consts, *carry])[0]
    body = lambda carry: run(eqn.params["body_jaxpr"], 1, [*body_consts, *carry])
    num_batched = len(_compat.open_jaxpr(eqn.params["cond_jaxpr"])[0].outvars[0].aval.shape)

    # what `vmap` makes of a loop that each example leaves by itself: who has left stays as it is
    def batched(carry: list[Any]) -> list[Any]:
        stays = goes_on(carry)
        keep = lambda old: jax.lax.broadcast_in_dim(stays, old.shape, tuple(range(num_batched)))
        return [jax.lax.select(keep(old), new, old) for old, new in zip(carry, body(carry), strict=True)]

    if num_batched:
        return list(jax.lax.while_loop(lambda carry: goes_on(carry).any(), batched, init))
    return list(jax.lax.while_loop(goes_on, body, init))


def _cond(run: RunBody, eqn: Any, values: list[Any]) -> list[Any]:
    def branch(k: int) -> Callable[..., list[Any]]:
        return lambda *operands: run(eqn.params["branches"][k], k, operands)

    return list(jax.lax.switch(values[0], [branch(k) for k in range(len(eqn.params["branches"]))], *values[1:]))


REBUILD: Mapping[CallKind, Rebuild] = {
    CallKind.INLINE: _inline,
    CallKind.REMAT: remat,
    CallKind.SCAN: _scan,
    CallKind.WHILE: _while,
    CallKind.COND: _cond,
}
