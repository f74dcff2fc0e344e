"""Drawn operations that move dims, walk along them or slide windows: reshapes, pads, concatenations, reductions,
cumulative sums, sorts, pooling."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.partitioner.draw import Case, Dice, Family, Input

DTYPES = ("float64",) * 8 + ("float32",)


def _draw_reshape(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "a": dice.size(),
        "b": dice.size(),
        "c": dice.size(),
        "weight": dice.chance(0.3),
        "order": dice.random(),
        "form": dice.pick(
            "merge_tail",
            "merge_examples",
            "split",
            "split_examples",
            "regroup",
            "flatten",
            "heads",
            "transpose",
            "squeeze",
            "merge_split",
            "order",
        ),
    }


def _build_reshape(params: Mapping[str, Any]) -> Case:
    n, a, b, c, form = (params[name] for name in ("batch", "a", "b", "c", "form"))
    x = Input((a * 2, b, c), "weight") if params["weight"] else Input((n, a, b, c))
    n = x.shape[0]
    rest = math.prod(x.shape[1:])
    dice = Dice(str(params["order"]))
    factor = dice.choice([k for k in range(1, n + 1) if n % k == 0])
    inner = dice.choice([k for k in range(1, x.shape[-1] + 1) if x.shape[-1] % k == 0])
    order = list(range(len(x.shape)))
    dice.shuffle(order)
    changes = {
        "merge_tail": lambda v: v.reshape(n, -1),
        "merge_examples": lambda v: v.reshape(n * v.shape[1], *v.shape[2:]),
        "split": lambda v: v.reshape(*v.shape[:-1], inner, -1),
        "split_examples": lambda v: v.reshape(factor, n // factor, *v.shape[1:]),
        "regroup": lambda v: v.reshape(*v.shape[:1], *v.shape[1:][::-1]),
        "flatten": lambda v: v.reshape(-1),
        "heads": lambda v: jnp.swapaxes(v.reshape(n, -1, inner, v.shape[-1] // inner), 1, 2),
        "transpose": lambda v: jnp.transpose(v, order),
        "squeeze": lambda v: jnp.squeeze(v[:, :1], 1)[None],
        "merge_split": lambda v: v.reshape(n * rest).reshape(rest, n),
        "order": lambda v: lax.reshape(v, (rest, n), tuple(order)),
    }
    change = changes[form]
    return Case(
        (x, Input((n,), "weight" if params["weight"] else "data")),
        lambda v, s: (change(v), change(v * s.reshape(n, *(1,) * (v.ndim - 1))) * 0.5),
    )


def _draw_move(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "length": dice.size(),
        "features": dice.size(),
        "axis": dice.pick(0, 1, 1, 2),
        "second": dice.size(),
        "shift": dice.randint(-5, 9),
        "low": dice.randint(-2, 3),
        "high": dice.randint(-2, 3),
        "interior": dice.pick(0, 0, 0, 1, 2),
        "weight": dice.chance(0.3),
        "form": dice.pick(
            "pad",
            "pad",
            "concatenate",
            "concatenate",
            "concatenate_weight",
            "roll",
            "reverse",
            "tile",
            "repeat",
            "stack",
            "unstack",
            "broadcast",
            "edge",
            "flip_roll",
            "tril",
            "bitcast",
            "barrier",
        ),
    }


def _build_move(params: Mapping[str, Any]) -> Case:
    n, length, features, axis, form = (params[name] for name in ("batch", "length", "features", "axis", "form"))
    shape = (n, length, features)
    x = Input(shape, "weight" if params["weight"] else "data")
    second = Input(tuple(params["second"] if d == axis and d else size for d, size in enumerate(shape)))
    pads = [(0, 0, 0)] * 3
    low, high = params["low"], params["high"]
    if shape[axis] + (shape[axis] - 1) * params["interior"] + low + high < 1:
        raise ValueError("nothing is left")
    pads[axis] = (low, high, params["interior"])
    if form == "pad":
        return Case((x,), lambda a: (lax.pad(a, jnp.ones((), a.dtype), pads),))
    if form == "concatenate":
        return Case((x, second), lambda a, b: (jnp.concatenate([a, b, a], axis),))
    if form == "concatenate_weight":
        w = Input((params["second"], features), "weight")
        return Case((Input(shape), w), lambda a, b: (jnp.concatenate([a, jnp.broadcast_to(b, (n, *b.shape))], 1),))
    if form == "stack":
        return Case((x, Input(shape)), lambda a, b: (jnp.stack([a, b, a], axis),))
    if form == "broadcast":
        w = Input((length, 1) if axis == 1 else (features,), "weight")
        return Case((w, Input(shape)), lambda a, b: (jnp.broadcast_to(a, shape), jnp.broadcast_to(a, shape) * b))
    changes = {
        "roll": lambda a: jnp.roll(a, params["shift"], axis),
        "flip_roll": lambda a: jnp.roll(jnp.flip(a, axis), params["shift"], (axis + 1) % 3),
        "reverse": lambda a: lax.rev(a, (axis,)),
        "tile": lambda a: jnp.tile(a, tuple(2 if d == axis else 1 for d in range(3))),
        "repeat": lambda a: jnp.repeat(a, 3, axis),
        "unstack": lambda a: sum(jnp.unstack(a, axis=axis)),
        "edge": lambda a: jnp.pad(
            a, [(1, 2) if d == axis else (0, 0) for d in range(3)], mode="edge" if params["shift"] % 2 else "wrap"
        ),
        "tril": lambda a: jnp.tril(a, params["shift"] // 3) @ jnp.swapaxes(jnp.triu(a), 1, 2),
        "bitcast": lambda a: (
            lax.bitcast_convert_type(lax.bitcast_convert_type(a, jnp.uint32) >> 1, a.dtype).astype(jnp.int8)
            if a.dtype == jnp.float32
            else lax.bitcast_convert_type(a, jnp.uint32) >> 1
        ),
        "barrier": lambda a: sum(lax.optimization_barrier((a, jnp.flip(a, axis)))),
    }
    return Case((x,), lambda a: (changes[form](a),))


def _draw_reduce(dice: Dice) -> dict[str, Any]:
    rank = dice.pick(1, 2, 3, 4)
    return {
        "batch": dice.batch(),
        "sizes": dice.sizes(rank - 1),
        "axes": tuple(d for d in range(rank) if dice.chance(0.5)) or (0,),
        "weight": dice.chance(0.25),
        "keep": dice.chance(0.3),
        "form": dice.pick(
            "sum",
            "mean",
            "max",
            "min",
            "prod",
            "prod_integer",
            "var",
            "logsumexp",
            "softmax",
            "norm",
            "argmax",
            "argmin",
            "all",
            "any",
            "xor",
            "custom",
            "pairs",
            "count",
            "median",
            "weighted",
        ),
    }


def _build_reduce(params: Mapping[str, Any]) -> Case:
    n, axes, form = params["batch"], tuple(params["axes"]), params["form"]
    shape = (n, *params["sizes"])
    if not axes or axes[-1] >= len(shape):
        raise ValueError("a dim to reduce is missing")
    options = {"axis": axes, "keepdims": params["keep"]}
    x = Input(
        shape,
        "weight" if params["weight"] else "data",
        "distinct"
        if form in ("max", "min", "argmax", "argmin", "pairs", "median", "custom")
        else "positive"
        if form == "prod"
        else "normal",
    )
    first = axes[0]

    def pairs(a: Any) -> Any:
        places = lax.broadcasted_iota(jnp.int32, a.shape, first)
        better = lambda one, two: (
            jnp.where(one[0] >= two[0], one[0], two[0]),
            jnp.where(one[0] >= two[0], one[1], two[1]),
        )
        return lax.reduce(
            (lax.stop_gradient(a), places), (jnp.asarray(-jnp.inf, a.dtype), jnp.int32(0)), better, (first,)
        )

    changes = {
        "mean": lambda a: jnp.mean(a, **options),
        "sum": lambda a: jnp.sum(a, **options),
        "max": lambda a: jnp.max(a, **options),
        "min": lambda a: jnp.min(a, **options),
        "prod": lambda a: jnp.prod(0.9 + 0.1 * a, **options),
        "prod_integer": lambda a: jnp.prod((a > 0) * 2 - 1, **options),
        "var": lambda a: jnp.var(a, **options),
        "logsumexp": lambda a: jnp.log(
            jnp.sum(jnp.exp(a - lax.stop_gradient(jnp.max(a, axis=axes, keepdims=True))), **options)
        ),
        "softmax": lambda a: (
            jnp.exp(a - jnp.max(a, axis=axes, keepdims=True))
            / jnp.sum(jnp.exp(a - jnp.max(a, axis=axes, keepdims=True)), axis=axes, keepdims=True)
        ),
        "norm": lambda a: (
            (a - jnp.mean(a, axis=axes, keepdims=True)) * lax.rsqrt(jnp.var(a, axis=axes, keepdims=True) + 0.1)
        ),
        "argmax": lambda a: jnp.argmax(a, first),
        "argmin": lambda a: jnp.argmin(a, first),
        "all": lambda a: jnp.all(a > -1, **options),
        "any": lambda a: jnp.any(a > 1, **options),
        "xor": lambda a: lax.reduce_xor(
            lax.bitcast_convert_type(a, jnp.uint64 if a.dtype == jnp.float64 else jnp.uint32), axes=axes
        ),
        "custom": lambda a: lax.reduce(
            lax.stop_gradient(a), jnp.asarray(0.5, a.dtype), lambda p, q: jnp.maximum(p, q) + 0 * q, axes
        ),
        "count": lambda a: jnp.sum(a > 0, **options),
        "median": lambda a: jnp.median(a, axis=first),
        "weighted": lambda a: jnp.sum(a * (a > 0), **options) / (1 + jnp.sum(a > 0, **options)),
    }
    if form == "pairs":
        return Case((x,), pairs)
    return Case((x,), lambda a: (changes[form](a),))


def _draw_along(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "length": dice.size(),
        "features": dice.size(),
        "axis": dice.pick(0, 1, 1, 2),
        "reverse": dice.chance(0.3),
        "weight": dice.chance(0.25),
        "k": dice.randint(1, 4),
        "form": dice.pick(
            "cumsum",
            "cumsum",
            "cumprod",
            "cummax",
            "cummin",
            "cumlogsumexp",
            "sort",
            "sort_pairs",
            "argsort",
            "top_k",
            "approx_max",
            "associative",
            "searchsorted",
        ),
    }


def _build_along(params: Mapping[str, Any]) -> Case:
    axis, form, reverse = params["axis"], params["form"], params["reverse"]
    shape = (params["batch"], params["length"], params["features"])
    x = Input(shape, "weight" if params["weight"] else "data", "distinct")
    k = min(params["k"], shape[2])
    if form == "sort_pairs":
        return Case(
            (x, Input(shape)), lambda a, b: tuple(lax.sort((a, b, a * 2), dimension=axis, num_keys=2 if reverse else 1))
        )
    if form == "searchsorted":
        return Case(
            (Input((params["batch"],), values="distinct"), Input((params["length"],), "weight", "distinct")),
            lambda a, b: (jnp.searchsorted(jnp.sort(lax.stop_gradient(b)), lax.stop_gradient(a)),),
        )
    changes = {
        "cumsum": lambda a: lax.cumsum(a, axis, reverse),
        "cumprod": lambda a: lax.cumprod(1 + 0.1 * a, axis, reverse),
        "cummax": lambda a: lax.cummax(a, axis, reverse),
        "cummin": lambda a: lax.cummin(a, axis, reverse),
        "cumlogsumexp": lambda a: lax.cumlogsumexp(a, axis, reverse),
        "sort": lambda a: jnp.sort(a, axis, descending=reverse),
        "argsort": lambda a: jnp.argsort(a, axis),
        "associative": lambda a: lax.associative_scan(lambda p, q: p * 0.5 + q, a, reverse, axis),
    }
    if form == "top_k":
        return Case((x,), lambda a: tuple(lax.top_k(a, k)))
    if form == "approx_max":
        return Case((x,), lambda a: tuple(lax.approx_max_k(a, k)))
    return Case((x,), lambda a: (changes[form](a),))


def _draw_window(dice: Dice) -> dict[str, Any]:
    rank = dice.pick(1, 2, 2, 3)
    window = tuple(dice.pick(1, 2, 2, 3) for _ in range(rank))
    return {
        "batch": dice.batch(),
        "space": tuple(max(w, dice.pick(2, 3, 4, 5, 6, 8, 8)) for w in window),
        "features": dice.size(),
        "window": window,
        "strides": tuple(dice.pick(1, 2, 2, 3) for _ in range(rank)),
        "padding": dice.pick("VALID", "SAME", "own"),
        "low": dice.randint(0, 2),
        "high": dice.randint(0, 2),
        "dilation": dice.pick(1, 1, 1, 2),
        "base": dice.pick(1, 1, 1, 2),
        "form": dice.pick("max", "max", "sum", "average", "min", "custom", "examples", "select_scatter"),
    }


def _build_window(params: Mapping[str, Any]) -> Case:
    rank, form = len(params["window"]), params["form"]
    if rank != len(params["space"]) or rank != len(params["strides"]) or not rank:
        raise ValueError("ranks differ")
    window, strides = (1, *params["window"], 1), (1, *params["strides"], 1)
    if form == "examples":
        window, strides = (2, *window[1:]), (2, *strides[1:])
    padding: Any = params["padding"]
    dilation = tuple(params["dilation"] if 0 < d <= rank else 1 for d in range(rank + 2))
    base = tuple(params["base"] if 0 < d <= rank else 1 for d in range(rank + 2))
    shape = (params["batch"], *params["space"], params["features"])
    if padding == "own":
        padding = [
            (params["low"], params["high"])
            if 0 < d <= rank and params["low"] < window[d] and params["high"] < window[d]
            else (0, 0)
            for d in range(rank + 2)
        ]
    if params["batch"] < window[0] or any(
        (s - 1) * b + 1 < (w - 1) * e + 1 for s, w, b, e in zip(shape, window, base, dilation, strict=True)
    ):
        raise ValueError("the window is wider than the data")
    x = Input(shape, "data", "distinct")
    plain = dict(window_dimensions=window, window_strides=strides, padding=padding)
    if form == "select_scatter":
        # The derivative of max pooling on its own, and the derivative of that.
        pooled = lambda a: lax.reduce_window(a, -jnp.inf, lax.max, window, strides, padding)
        return Case((x,), lambda a: (pooled(a), jnp.cos(pooled(a) * 2)))
    if form in ("custom",):
        start = jnp.asarray(0.1)
        return Case(
            (x,),
            lambda a: (
                lax.reduce_window(lax.stop_gradient(a), start.astype(a.dtype), lambda p, q: jnp.maximum(p, q), **plain),
            ),
        )
    how = {"max": (-jnp.inf, lax.max), "min": (jnp.inf, lax.min)}.get(form, (0.0, lax.add))
    options = {**plain, "window_dilation": dilation}
    if how[1] is lax.add:
        options["base_dilation"] = base
    else:
        options["window_dilation"] = (1,) * (rank + 2)  # JAX has no derivative of a dilated maximum
    finite = lambda a: jnp.where(jnp.isfinite(a), a, 0)
    scale = math.prod(window) if form == "average" else 1
    return Case((x,), lambda a: (finite(lax.reduce_window(a, *how, **options)) / scale,))


_window = functools.partial(Family, "window", _draw_window, _build_window)
FAMILIES = (
    Family(
        "reshape",
        _draw_reshape,
        _build_reshape,
        {"form": "merge_tail", "weight": False, "order": 0.0},
        share=4,
        dtypes=DTYPES,
        without=frozenset({"per_example", "per_example_gradient"}),
    ),
    Family(
        "move",
        _draw_move,
        _build_move,
        {"interior": 0, "weight": False, "shift": 1, "low": 0, "high": 0},
        share=5,
        dtypes=DTYPES,
        without=frozenset({"per_example_gradient"}),
    ),
    Family(
        "reduce",
        _draw_reduce,
        _build_reduce,
        {"keep": False, "weight": False},
        share=4,
        dtypes=DTYPES,
        without=frozenset({"per_example_gradient"}),
    ),
    Family(
        "along",
        _draw_along,
        _build_along,
        {"reverse": False, "weight": False, "k": 1},
        share=4,
        without=frozenset({"per_example_gradient"}),
    ),
    _window(
        {"padding": "VALID", "dilation": 1, "base": 1, "low": 0, "high": 0}, frozenset({"per_example_gradient"}), 4
    ),
)
