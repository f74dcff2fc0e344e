"""Drawn lookups, scatters, slices and what is built of them, in every mode of an index out of bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.partitioner.draw import Case, Dice, Family, Input

_MODES = ("fill", "clip", "promise_in_bounds", None)
DTYPES = ("float64",) * 10 + ("float32",)


def _draw_gather(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "form": dice.pick(
            "rows",
            "rows",
            "rows",
            "columns",
            "pairs",
            "along",
            "along_weight",
            "slices",
            "data_rows",
            "take",
            "middle",
            "windows",
        ),
        "rows": dice.size(),
        "features": dice.size(),
        "extra": dice.sizes(dice.pick(0, 0, 1)),
        "ids": dice.sizes(dice.pick(0, 1, 1, 2)),
        "mode": dice.pick(*_MODES),
        "outside": dice.chance(0.3),
        "sorted": dice.chance(0.15),
    }


def _build_gather(params: Mapping[str, Any]) -> Case:
    batch, rows, features, form = params["batch"], params["rows"], params["features"], params["form"]
    mode, extra, ids = params["mode"], params["extra"], params["ids"]
    kind = f"around:{rows}" if params["outside"] and mode != "promise_in_bounds" else f"below:{rows}"
    options: dict[str, Any] = {"mode": mode} if mode else {}
    index = Input((batch, *ids), values=kind)
    order = (lambda i: jnp.sort(i, axis=0)) if params["sorted"] and not ids else (lambda i: i)
    if form == "rows":
        flags = {**options, "indices_are_sorted": params["sorted"] and not ids}
        return Case((Input((rows, features, *extra), "weight"), index), lambda w, i: (w.at[order(i)].get(**flags),))
    if form == "columns":
        return Case((Input((features, rows, *extra), "weight"), index), lambda w, i: (w.at[:, i].get(**options),))
    if form == "middle":
        return Case(
            (Input((features, rows, 4), "weight"), index), lambda w, i: (w.at[1 % features, i, 1:3].get(**options),)
        )
    if form == "pairs":
        other = Input((batch, *ids), values=f"below:{features}")
        return Case(
            (Input((rows, features, *extra), "weight"), index, other), lambda w, i, j: (w.at[i, j].get(**options),)
        )
    if form == "along":
        wide = Input((batch, max(ids, default=3)), values=f"below:{rows}")
        return Case(
            (Input((batch, rows, *extra)), wide),
            lambda x, i: (jnp.take_along_axis(x, i.reshape(*i.shape, *(1,) * len(extra)), axis=1, **options),),
        )
    if form == "along_weight":
        wide = Input((batch, features), values=f"below:{rows}")
        return Case(
            (Input((rows, features), "weight"), wide), lambda w, i: (jnp.take_along_axis(w, i, axis=0, **options),)
        )
    if form == "slices":
        starts = Input((batch,), values=f"below:{rows}")
        width = (rows + 1) // 2
        cut = lambda w, i: jax.vmap(lambda s: lax.dynamic_slice_in_dim(w, s, width, axis=0))(i)
        return Case((Input((rows, features), "weight"), starts), lambda w, i: (cut(w, i),))
    if form == "windows":
        starts = Input((batch,), values=f"below:{rows}")
        width = (rows + 1) // 2
        cut = jax.vmap(lambda x, s: lax.dynamic_slice_in_dim(x, s, width, axis=0))
        return Case((Input((batch, rows, features)), starts), lambda x, i: (cut(x, i),))
    if form == "data_rows":
        mine = Input((batch, *ids), values=f"below:{batch}")
        return Case((Input((batch, features, *extra)), mine), lambda x, i: (x.at[i].get(**options),))
    return Case(
        (Input((rows, features), "weight"), index),
        lambda w, i: (jnp.take(w, i, axis=0, mode=mode if mode != "promise_in_bounds" else None),),
    )


def _draw_scatter(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "form": dice.pick("rows", "rows", "columns", "batched", "into_data", "zeros", "segment", "windows", "pairs"),
        "how": dice.pick("add", "add", "set", "multiply", "min", "max", "subtract"),
        "rows": dice.size(),
        "features": dice.size(),
        "ids": dice.sizes(dice.pick(0, 0, 1)),
        "mode": dice.pick("fill", "clip", "promise_in_bounds", "drop", None),
        "outside": dice.chance(0.3),
    }


def _build_scatter(params: Mapping[str, Any]) -> Case:
    batch, rows, features, form, how, ids = (
        params[name] for name in ("batch", "rows", "features", "form", "how", "ids")
    )
    alone = how in ("set", "multiply", "min", "max")  # what is written twice is not defined, or has no derivative
    options: dict[str, Any] = {"unique_indices": True} if alone else {}
    if params["mode"]:
        options["mode"] = params["mode"]
    outside = params["outside"] and params["mode"] in ("fill", "drop") and not alone
    kind = f"around:{rows}" if outside else f"below:{rows}"
    if alone:
        rows, ids, kind = max(rows, batch), (), f"distinct:{max(rows, batch)}"
    write = lambda operand, where, update: (getattr(operand.at[where], how)(update, **options),)
    index = Input((batch, *ids), values=kind)
    if form == "rows":
        return Case(
            (Input((rows, features), "weight"), index, Input((batch, *ids, features))), lambda w, i, u: write(w, i, u)
        )
    if form == "columns":
        return Case(
            (Input((features, rows), "weight"), index, Input((batch, *ids))),
            lambda w, i, u: write(w, (slice(None), i), u * jnp.ones((features, *u.shape), u.dtype)),
        )
    if form == "zeros":
        return Case(
            (index, Input((batch, *ids, features))), lambda i, u: write(jnp.ones((rows, features), u.dtype), i, u)
        )
    if form == "pairs":
        other = Input((batch, *ids), values=f"below:{features}")
        return Case(
            (Input((rows, features), "weight"), index, other, Input((batch, *ids))),
            lambda w, i, j, u: write(w, (i, j), u),
        )
    if form == "into_data":
        mine = Input((batch,), values=f"distinct:{batch}")
        return Case((Input((batch, features)), mine, Input((batch, features))), lambda x, i, u: write(x, i, u))
    if form == "batched":
        each = Input((batch, 3), values=f"distinct:{max(params['rows'], 3)}")
        return Case(
            (Input((batch, max(params["rows"], 3), features)), each, Input((batch, 3, features))),
            lambda x, i, u: (jax.vmap(lambda a, b, c: write(a, b, c)[0])(x, i, u),),
        )
    if form == "windows":
        start = Input((batch,), values=f"below:{params['rows']}")
        width = (params["rows"] + 1) // 2
        update = jax.vmap(lambda x, u, s: lax.dynamic_update_slice_in_dim(x, u, s, axis=0))
        return Case(
            (Input((batch, params["rows"], features)), Input((batch, width, features)), start),
            lambda x, u, s: (update(x, u, s),),
        )
    segment = jax.ops.segment_max if how == "max" else jax.ops.segment_sum
    return Case(
        (Input((batch, features)), Input((batch,), values=f"below:{params['rows']}")),
        lambda x, i: (jnp.where(jnp.isfinite(y := segment(x, i, num_segments=params["rows"])), y, 0),),
    )


def _draw_slice(dice: Dice) -> dict[str, Any]:
    return {
        "batch": dice.batch(),
        "form": dice.pick(
            "static", "static", "dynamic", "update", "update_weight", "weight", "examples", "dynamic_examples", "split"
        ),
        "length": dice.size(),
        "features": dice.size(),
        "start": dice.random(),
        "stop": dice.random(),
        "stride": dice.pick(1, 1, 2, 3),
        "at": dice.randint(0, 5),
    }


def _build_slice(params: Mapping[str, Any]) -> Case:
    batch, length, features, form = (params[name] for name in ("batch", "length", "features", "form"))
    start, stride = int(params["start"] * length), params["stride"]
    stop = start + 1 + int(params["stop"] * (length - start - 1))
    x, w = Input((batch, length, features)), Input((length, features), "weight")
    where = Input((), "other", "below:" + str(length + 2))
    width = stop - start
    if form == "static":
        return Case((x,), lambda a: (a[:, start:stop:stride],))
    if form == "weight":
        return Case(
            (w, Input((batch, features))),
            lambda a, b: (a[start:stop:stride][0] * b, lax.slice_in_dim(a, start, stop, stride)),
        )
    if form == "examples":
        first = int(params["start"] * batch)
        return Case((x,), lambda a: (a[first::stride],))
    if form == "dynamic":
        return Case((x, where), lambda a, i: (lax.dynamic_slice_in_dim(a, i, width, axis=1),))
    if form == "dynamic_examples":
        some = max(int(params["stop"] * batch), 1)
        return Case((x, where), lambda a, i: (lax.dynamic_slice_in_dim(a, i, some, axis=0),))
    if form == "update":
        return Case(
            (x, Input((batch, width, features)), where),
            lambda a, u, i: (lax.dynamic_update_slice_in_dim(a, u, i, axis=1),),
        )
    if form == "update_weight":
        return Case(
            (w, Input((batch, features)), where),
            lambda a, u, i: (lax.dynamic_update_slice_in_dim(a, u[: min(batch, length)], i, axis=0),),
        )
    pieces = (start + 1, length - start - 1) if start + 1 < length else (length,)
    return Case((x,), lambda a: tuple(lax.split(a, pieces, axis=1)))


_SMALL = {"extra": (), "ids": (), "mode": None, "outside": False, "sorted": False}
FAMILIES = (
    Family("gather", _draw_gather, _build_gather, {"form": "rows", **_SMALL}, share=5, dtypes=DTYPES),
    Family(
        "scatter",
        _draw_scatter,
        _build_scatter,
        {"form": "rows", "how": "add", **_SMALL},
        frozenset({"jvp", "per_example_gradient"}),
        share=5,
        dtypes=DTYPES,
    ),
    Family("slice", _draw_slice, _build_slice, {"form": "static", "stride": 1, "start": 0.0}, share=3, dtypes=DTYPES),
)
