"""Drawn pieces of models: attention, norms, recurrence, experts, losses, chains of layers, whose operations get their
layouts from each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.partitioner.draw import Case, Dice, Family, Input


def _draw_attention(dice: Dice) -> dict[str, Any]:
    shared = dice.pick(1, 2, 4, 4, 8)
    return {
        "batch": dice.batch(),
        "length": dice.pick(1, 3, 4, 5, 8),
        "shared": shared,
        "groups": dice.pick(1, 1, 1, 2, 3),
        "width": dice.pick(1, 2, 3, 4),
        "model": dice.pick(4, 6, 8, 8),
        "form": dice.pick("own", "own", "jax", "causal", "masked", "einsum", "relative"),
        "keys": dice.pick(0, 0, 3, 8),
    }


def _build_attention(params: Mapping[str, Any]) -> Case:
    n, length, shared, groups, width, model, form = (
        params[name] for name in ("batch", "length", "shared", "groups", "width", "model", "form")
    )
    heads, keys = shared * groups, params["keys"] or length

    def run(x: Any, wq: Any, wk: Any, wv: Any, wo: Any, lengths: Any) -> Any:
        q = (x @ wq).reshape(n, length, heads, width)
        source = x if keys == length else jnp.concatenate([x] * (keys // length + 1), 1)[:, :keys]
        k, v = ((source @ w).reshape(n, keys, shared, width) for w in (wk, wv))
        if form in ("jax", "causal"):
            out = jax.nn.dot_product_attention(q, k, v, is_causal=form == "causal", implementation="xla")
        else:
            k, v = (jnp.repeat(t, groups, 2) for t in (k, v))
            logits = (
                jnp.einsum("btnh,bsnh->bnts", q, k)
                if form != "own"
                else jnp.swapaxes(q, 1, 2) @ jnp.transpose(k, (0, 2, 3, 1))
            )
            if form == "masked":
                logits = jnp.where(jnp.arange(keys) <= lengths[:, None, None, None], logits, -1e9)
            if form == "relative":
                logits = logits + (jnp.arange(length)[:, None] - jnp.arange(keys)) * 0.1
            out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)
        return (out.reshape(n, length, heads * width) @ wo,)

    w = lambda *shape: Input(shape, "weight")
    return Case(
        (
            Input((n, length, model)),
            w(model, heads * width),
            w(model, shared * width),
            w(model, shared * width),
            w(heads * width, model),
            Input((n,), values=f"below:{keys}"),
        ),
        run,
    )


def _draw_recurrent(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "length": dice.pick(1, 3, 4),
        "into": dice.size(),
        "hidden": dice.pick(1, 2, 3, 4, 8),
        "form": dice.pick("lstm", "gru", "linear", "rnn", "reverse", "remat", "while", "fori", "map", "switch"),
        "unroll": dice.pick(1, 1, 2),
    }


def _build_recurrent(params: Mapping[str, Any]) -> Case:
    n, length, into, hidden, form = (params[name] for name in ("batch", "length", "into", "hidden", "form"))
    gates = {"lstm": 4, "gru": 3}.get(form, 1)

    def cell(carry: Any, x: Any, w: Any, u: Any, b: Any) -> Any:
        h, c = carry
        z = x @ w + h @ u + b
        if form == "lstm":
            i, f, g, o = jnp.split(z, 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return jax.nn.sigmoid(o) * jnp.tanh(c), c
        if form == "gru":
            r, t, g = jnp.split(z, 3, -1)
            return (1 - jax.nn.sigmoid(t)) * jnp.tanh(g * jax.nn.sigmoid(r)) + jax.nn.sigmoid(t) * h, c
        return (z if form == "linear" else jnp.tanh(z)), c

    def run(xs: Any, w: Any, u: Any, b: Any) -> Any:
        start = (jnp.zeros((n, hidden), xs.dtype), jnp.zeros((n, hidden), xs.dtype))
        step = lambda carry, x: ((new := cell(carry, x, w, u, b)), new[0])
        over = jnp.swapaxes(xs, 0, 1)
        if form == "map":
            return (lax.map(lambda x: jnp.tanh(x @ w + b), over),)
        if form == "switch":
            branches = [lambda x: jnp.tanh(x @ w), lambda x: x @ w * 2, lambda x: -x @ w]
            return (lax.scan(lambda carry, x: (carry + 1, lax.switch(carry % 3, branches, x)), 0, over)[1],)
        if form == "fori":
            return (
                lax.fori_loop(
                    0, length, lambda t, carry: cell(carry, lax.dynamic_index_in_dim(xs, t, 1, False), w, u, b), start
                )[0],
            )
        if form == "while":
            fixed = [lax.stop_gradient(v) for v in (xs, w, u, b)]
            more = lambda state: (state[0] < length) & (jnp.sum(jnp.abs(state[1][0])) < 1e6)
            body = lambda state: (
                state[0] + 1,
                cell(state[1], lax.dynamic_index_in_dim(fixed[0], state[0], 1, False), *fixed[1:]),
            )
            return (lax.while_loop(more, body, (0, start))[1][0],)
        step = jax.checkpoint(step) if form == "remat" else step
        (h, _), hs = lax.scan(step, start, over, reverse=form == "reverse", unroll=params["unroll"])
        return (h, jnp.swapaxes(hs, 0, 1))

    w = lambda *shape: Input(shape, "weight")
    return Case((Input((n, length, into)), w(into, gates * hidden), w(hidden, gates * hidden), w(gates * hidden)), run)


def _draw_experts(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "experts": dice.pick(2, 4, 4, 8),
        "into": dice.size(),
        "hidden": dice.size(),
        "capacity": dice.pick(2, 4, 8),
        "k": dice.pick(1, 2),
        "form": dice.pick("dense", "dispatch", "ragged", "lookup", "sampled", "dlrm", "tied"),
    }


def _build_experts(params: Mapping[str, Any]) -> Case:
    n, experts, into, hidden, form = (params[name] for name in ("batch", "experts", "into", "hidden", "form"))
    x, gate = Input((n, into)), Input((into, experts), "weight")
    first, last = Input((experts, into, hidden), "weight"), Input((experts, hidden, into), "weight")
    w = lambda *shape: Input(shape, "weight")

    def moe(a: Any, g: Any, u: Any, v: Any) -> Any:
        weights, chosen = lax.top_k(jax.nn.softmax(a @ g), params["k"])
        mask = jax.nn.one_hot(chosen, experts, dtype=a.dtype)
        if form == "dense":
            each = jnp.einsum(
                "ne,ned->nd",
                jnp.einsum("nk,nke->ne", weights, mask),
                jnp.einsum("neh,ehd->ned", jax.nn.relu(jnp.einsum("nd,edh->neh", a, u)), v),
            )
            return (each,)
        if form == "ragged":
            order = jnp.argsort(chosen[:, 0])
            sizes = jnp.sum(mask[:, 0], 0).astype(jnp.int32)
            back = lax.ragged_dot(jax.nn.relu(lax.ragged_dot(a[order], u, sizes)), v, sizes)
            return (jnp.zeros_like(a).at[order].set(back * weights[order, :1], unique_indices=True),)
        place = (jnp.cumsum(mask[:, 0], 0) - 1) * mask[:, 0]
        seat = jax.nn.one_hot(place.sum(-1), params["capacity"], dtype=a.dtype)
        dispatch = mask[:, 0, :, None] * seat[:, None]
        into_experts = jnp.einsum("nec,nd->ecd", dispatch, a)
        out = jnp.einsum("ech,ehd->ecd", jax.nn.relu(jnp.einsum("ecd,edh->ech", into_experts, u)), v)
        return (jnp.einsum("nec,ecd->nd", dispatch * weights[:, :1, None], out),)

    if form in ("dense", "dispatch", "ragged"):
        return Case((x, gate, first, last), moe)
    ids = Input((n, params["k"] + 1), values=f"below:{experts * 2}")
    table = w(experts * 2, into)
    if form == "lookup":
        return Case((ids, table, w(into, hidden)), lambda i, t, u: (jnp.mean(t[i], 1) @ u,))
    if form == "tied":
        return Case((ids, table), lambda i, t: (lax.map(lambda h: jax.nn.log_softmax(h @ t.T), t[i]),))
    if form == "sampled":
        return Case(
            (ids, x, table), lambda i, a, t: (jax.nn.logsumexp(a @ t[i[0]].T, -1), jnp.einsum("nd,nkd->nk", a, t[i]))
        )

    def dlrm(i: Any, a: Any, t: Any, u: Any) -> Any:
        features = jnp.concatenate([t[i], (a @ u)[:, None]], 1)
        products = features @ jnp.swapaxes(features, 1, 2)
        rows, columns = jnp.tril_indices(products.shape[1], -1)
        return (jnp.concatenate([a @ u, products[:, rows, columns]], 1),)

    return Case((ids, x, table, w(into, into)), dlrm)


# Layers that keep (examples, height, width, features): what they need of weights, and what they do.
_LAYERS: dict[str, tuple[Callable[[int], tuple[tuple[int, ...], ...]], Callable[..., Any]]] = {
    "dense": (lambda c: ((c, c),), lambda x, w: jnp.tanh(x @ w)),
    "conv": (
        lambda c: ((3, 3, c, c),),
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")),
    ),
    "conv_strided": (
        lambda c: ((3, 3, c, c),),
        lambda x, w: jnp.repeat(
            jnp.repeat(
                lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")), 2, 1
            ),
            2,
            2,
        )[:, : x.shape[1], : x.shape[2]],
    ),
    "pointwise": (
        lambda c: ((1, 1, c, c),),
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
    ),
    "depthwise": (
        lambda c: ((3, 3, 1, c),),
        lambda x, w: lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1]
        ),
    ),
    "batch_norm": (
        lambda c: ((c,), (c,)),
        lambda x, s, b: (x - jnp.mean(x, (0, 1, 2))) * lax.rsqrt(jnp.var(x, (0, 1, 2)) + 0.1) * s + b,
    ),
    "layer_norm": (
        lambda c: ((c,), (c,)),
        lambda x, s, b: (x - jnp.mean(x, -1, keepdims=True)) * lax.rsqrt(jnp.var(x, -1, keepdims=True) + 0.1) * s + b,
    ),
    "group_norm": (
        lambda c: ((c,),),
        lambda x, s: (
            lambda g: (
                (
                    (g - jnp.mean(g, (1, 2, 4), keepdims=True)) * lax.rsqrt(jnp.var(g, (1, 2, 4), keepdims=True) + 0.1)
                ).reshape(x.shape)
                * s
            )
        )(x.reshape(*x.shape[:3], -1, 2 if x.shape[3] % 2 == 0 else 1)),
    ),
    "pool": (lambda c: (), lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")),
    "average": (lambda c: (), lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 1, 1, 1), "SAME") / 4),
    "relu": (lambda c: (), lambda x: jax.nn.relu(x + 0.1)),
    "shuffle": (
        lambda c: (),
        lambda x: jnp.swapaxes(x.reshape(*x.shape[:3], -1, 2 if x.shape[3] % 2 == 0 else 1), 3, 4).reshape(x.shape),
    ),
    "flatten_dense": (
        lambda c: ((c * 4, c),),
        lambda x, w: (
            x
            + (
                x[:, :2, :2].reshape(x.shape[0], -1)[:, : w.shape[0]]
                @ w[: min(x.shape[1], 2) * min(x.shape[2], 2) * x.shape[3]]
            )[:, None, None]
        ),
    ),
    "squeeze_excite": (lambda c: ((c, c),), lambda x, w: x * jax.nn.sigmoid(jnp.mean(x, (1, 2)) @ w)[:, None, None]),
    "residual_dense": (lambda c: ((c, 2 * c), (2 * c, c)), lambda x, w, v: x + jax.nn.gelu(x @ w) @ v),
    "flip": (lambda c: (), lambda x: x + x[:, ::-1] + jnp.roll(x, 1, 2)),
    "scan_rows": (
        lambda c: ((c, c),),
        lambda x, w: jnp.moveaxis(
            lax.scan(lambda h, r: ((h := jnp.tanh(r + h @ w)), h), x[:, 0], jnp.moveaxis(x, 1, 0))[1], 0, 1
        ),
    ),
}


def _draw_chain(dice: Dice) -> dict[str, Any]:
    layers = tuple(dice.choice(sorted(_LAYERS)) for _ in range(dice.pick(2, 2, 3, 4)))
    return {
        "batch": dice.batch(),
        "height": dice.pick(1, 2, 3, 4),
        "width": dice.pick(1, 2, 3, 4),
        "features": dice.pick(1, 2, 4, 4, 6, 8, 8),
        "layers": layers,
        "classes": dice.pick(0, 0, 3, 8),
    }


def _build_chain(params: Mapping[str, Any]) -> Case:
    n, c, classes = params["batch"], params["features"], params["classes"]
    inputs = [Input((n, params["height"], params["width"], c))]
    counts = []
    for name in params["layers"]:
        shapes = _LAYERS[name][0](c)
        counts.append(len(shapes))
        inputs += [Input(shape, "weight") for shape in shapes]
    if classes:
        inputs += [Input((c, classes), "weight"), Input((n,), values=f"below:{classes}")]

    def run(x: Any, *rest: Any) -> Any:
        weights = list(rest)
        for name, count in zip(params["layers"], counts, strict=True):
            x = _LAYERS[name][1](x, *weights[:count])
            weights = weights[count:]
        if not classes:
            return (x,)
        logits = jnp.mean(x, (1, 2)) @ weights[0]
        return (
            -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), weights[1][:, None], 1)),
            jnp.argmax(logits, -1) == weights[1],
        )

    return Case(tuple(inputs), run)


_NO = frozenset({"per_example_gradient"})
FAMILIES = (
    Family(
        "attention", _draw_attention, _build_attention, {"groups": 1, "form": "own", "keys": 0}, share=3, without=_NO
    ),
    Family(
        "recurrent", _draw_recurrent, _build_recurrent, {"form": "rnn", "length": 1, "unroll": 1}, share=2, without=_NO
    ),
    Family("experts", _draw_experts, _build_experts, {"form": "dense", "k": 1}, share=2, without=_NO | {"per_example"}),
    Family("chain", _draw_chain, _build_chain, {"classes": 0}, share=5, without=_NO),
)
