"""Drawn products and convolutions: every dim a label may take part in, every way a window may slide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax

from benchmarks.partitioner.draw import Case, Dice, Family, Input

PRODUCT_DTYPES = ("float64",) * 8 + ("float32", "bfloat16")


def _draw_dot(dice: Dice) -> dict[str, Any]:
    # Examples are a free, a contracted or a batch dim of the left operand.
    examples = dice.pick("free", "free", "free", "contracted", "batch")
    counts = {
        "batched": dice.pick(0, 0, 1, 2),
        "contracted": dice.pick(1, 1, 1, 2),
        "left": dice.pick(0, 1, 1, 2),
        "right": dice.pick(0, 1, 1, 2),
    }
    return {
        "batch": dice.batch(),
        "examples": examples,
        "both_data": examples != "free" or dice.chance(0.15),
        "swapped": dice.chance(0.2),
        **{name: dice.sizes(count) for name, count in counts.items()},
        "order": dice.random(),
        "preferred": dice.pick("", "", "", "float32"),
    }


def _build_dot(params: Mapping[str, Any]) -> Case:
    both_data, examples = params["both_data"], params["examples"]
    if examples != "free" and not both_data:
        raise ValueError("examples of the left operand alone are free")
    sizes: dict[str, int] = {"n": params["batch"]}
    groups: dict[str, list[str]] = {}
    for name, letter in (("batched", "b"), ("contracted", "k"), ("left", "l"), ("right", "r")):
        groups[name] = [f"{letter}{i}" for i in range(len(params[name]))]
        sizes.update(zip(groups[name], params[name], strict=True))
    dice = Dice(str(params["order"]))
    left_rest = groups["batched"] + groups["contracted"] + groups["left"]
    right_rest = groups["batched"] + groups["contracted"] + groups["right"]
    dice.shuffle(left_rest)
    dice.shuffle(right_rest)
    left = ["n", *left_rest]
    right = right_rest if not both_data else ["m" if examples == "free" else "n", *right_rest]
    sizes["m"] = params["batch"]
    batch = groups["batched"] + (["n"] if examples == "batch" else [])
    contracted = groups["contracted"] + (["n"] if examples == "contracted" else [])
    dice.shuffle(batch)
    dice.shuffle(contracted)
    if params["swapped"]:
        left, right = right, left
    numbers = (
        (tuple(left.index(x) for x in contracted), tuple(right.index(x) for x in contracted)),
        (tuple(left.index(x) for x in batch), tuple(right.index(x) for x in batch)),
    )

    def run(data: Any, other: Any) -> Any:
        operands = (other, data) if params["swapped"] else (data, other)
        preferred = jnp.float32 if params["preferred"] and data.dtype == jnp.bfloat16 else None
        return (lax.dot_general(*operands, numbers, preferred_element_type=preferred),)

    shapes = [tuple(sizes[x] for x in side) for side in ((right, left) if params["swapped"] else (left, right))]
    return Case((Input(shapes[0]), Input(shapes[1], "data" if both_data else "weight")), run)


def _draw_ragged(dice: Dice) -> dict[str, Any]:
    groups = dice.pick(1, 2, 3, 4, 8)
    return {
        "batch": dice.batch(),
        "groups": groups,
        "into": dice.size(),
        "out": dice.size(),
        "order": dice.random(),
        "mode": dice.pick("rows", "rows", "contracted", "stacked"),
    }


def _build_ragged(params: Mapping[str, Any]) -> Case:
    rows, groups, into, out = (params[name] for name in ("batch", "groups", "into", "out"))
    dice = Dice(str(params["order"]))
    cuts = sorted(dice.randint(0, rows) for _ in range(groups - 1))
    sizes = tuple(b - a for a, b in zip((0, *cuts), (*cuts, rows), strict=True))
    group_sizes = lambda: jnp.asarray(sizes, jnp.int32)
    if params["mode"] == "rows":
        return Case(
            (Input((rows, into)), Input((groups, into, out), "weight")),
            lambda x, w: (lax.ragged_dot(x, w, group_sizes()),),
        )
    if params["mode"] == "contracted":  # JAX has no derivative of it
        numbers = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
        return Case(
            (Input((rows, into)), Input((rows, out))),
            lambda x, y: (lax.ragged_dot_general(lax.stop_gradient(x), lax.stop_gradient(y), group_sizes(), numbers),),
        )
    # Rows of two stacks, each in groups.
    numbers = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), (1,), (1,))
    many = lambda: jnp.asarray((sizes, sizes[::-1]), jnp.int32)
    run = lambda x, w: (lax.ragged_dot_general(jnp.stack([x, 2 * x]), w, many(), numbers),)
    return Case((Input((rows, into)), Input((2, groups, into, out), "weight")), run)


def _draw_conv(dice: Dice) -> dict[str, Any]:
    rank = dice.pick(1, 1, 2, 2, 2, 3)
    kind = dice.pick(
        "plain", "plain", "grouped", "depthwise", "transposed", "dilated", "batch_groups", "both_data", "any"
    )
    groups, into, out = 1, dice.size(), dice.size()
    if kind in ("grouped", "any"):
        groups = dice.pick(1, 2, 3, 4, 6, 8)
        into, out = dice.pick(1, 2, 3, 4), groups * dice.pick(1, 2, 3, 4, 6)
    if kind == "depthwise":
        groups = dice.pick(1, 2, 3, 4, 6, 8, 8, 16)
        into, out = 1, groups * dice.pick(1, 1, 2, 3)
    batch_groups = 1
    if kind == "batch_groups":
        batch_groups = dice.pick(1, 2, 4, 8)
        out = batch_groups * dice.pick(1, 2, 3, 4)
    window = tuple(dice.pick(1, 2, 3, 3, 4) for _ in range(rank))
    space = tuple(max(w, dice.pick(1, 3, 4, 5, 6, 7, 8, 8)) if rank < 3 else max(w, dice.pick(2, 3, 4)) for w in window)
    ones = (1,) * rank
    free = kind == "any" or dice.chance(0.3)
    padding = dice.pick("SAME", "VALID", "own")
    return {
        "batch": dice.batch(),
        "kind": kind,
        "rank": rank,
        "groups": groups,
        "batch_groups": batch_groups,
        "into": into,
        "out": out,
        "window": window,
        "space": space,
        "strides": tuple(dice.pick(1, 1, 2, 3) for _ in range(rank)) if dice.chance(0.5) else ones,
        "lhs_dilation": tuple(dice.pick(1, 2, 3) for _ in range(rank))
        if kind == "transposed" or (free and dice.chance(0.4))
        else ones,
        "rhs_dilation": tuple(dice.pick(1, 2, 3) for _ in range(rank))
        if kind == "dilated" or (free and dice.chance(0.4))
        else ones,
        "padding": tuple((dice.pick(0, 0, 1, 2, -1), dice.pick(0, 0, 1, 2, -1)) for _ in range(rank))
        if padding == "own"
        else padding,
        "orders": dice.random() if dice.chance(0.4) else 0.0,
        "both_data": kind == "both_data",
    }


def _build_conv(params: Mapping[str, Any]) -> Case:
    rank, groups, batch_groups = params["rank"], params["groups"], params["batch_groups"]
    for name in ("window", "space", "strides", "lhs_dilation", "rhs_dilation"):
        if len(params[name]) != rank:
            raise ValueError(f"{name} has another rank")
    batch, into, out = params["batch"], params["into"], params["out"]
    if out % groups or out % batch_groups or batch % batch_groups or (groups > 1 and batch_groups > 1):
        raise ValueError("features do not divide by their groups")
    # Orders as letters: examples first in the data, so that splitjax sees them; the weight's and the result's are
    # drawn.
    space = [f"s{i}" for i in range(rank)]
    lhs, rhs, result = ["n", *space, "i"], [*space, "i", "o"], ["n", *space, "o"]
    if params["orders"]:
        dice = Dice(str(params["orders"]))
        tail = lhs[1:]
        dice.shuffle(tail)
        lhs = ["n", *tail]
        dice.shuffle(rhs)
        dice.shuffle(result)
    spec = lambda dims, first, second: (dims.index(first), dims.index(second), *(dims.index(x) for x in space))
    numbers = lax.ConvDimensionNumbers(spec(lhs, "n", "i"), spec(rhs, "o", "i"), spec(result, "n", "o"))
    sizes = {"n": batch, "i": into * groups, **dict(zip(space, params["space"], strict=True))}
    window = {"i": into, "o": out, **dict(zip(space, params["window"], strict=True))}
    padding = params["padding"]
    if isinstance(padding, str):
        reach = [(w - 1) * d + 1 for w, d in zip(params["window"], params["rhs_dilation"], strict=True)]
        padding = [((r - 1) // 2, r // 2) if padding == "SAME" else (0, 0) for r in reach]
    options = dict(
        window_strides=params["strides"],
        padding=[tuple(pair) for pair in padding],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=numbers,
        feature_group_count=groups,
        batch_group_count=batch_groups,
    )
    shape, kernel = tuple(sizes[x] for x in lhs), tuple(window[x] for x in rhs)
    if params["both_data"]:
        # The kernel comes from the data: its output features are examples.
        moved = [rhs.index("o"), *(d for d in range(len(rhs)) if rhs[d] != "o")]
        order = tuple(moved.index(d) for d in range(len(rhs)))
        kernel_of = (batch, *(kernel[d] for d in moved[1:]))
        if batch % groups or batch % batch_groups:
            raise ValueError("examples do not divide by the groups")
        return Case(
            (Input(shape), Input(kernel_of)),
            lambda x, y: (lax.conv_general_dilated(x, lax.transpose(y, order), **options),),
        )
    return Case((Input(shape), Input(kernel, "weight")), lambda x, w: (lax.conv_general_dilated(x, w, **options),))


FAMILIES = (
    Family(
        "dot",
        _draw_dot,
        _build_dot,
        {
            "examples": "free",
            "both_data": False,
            "swapped": False,
            "batched": (),
            "left": (),
            "right": (),
            "preferred": "",
            "order": 0.0,
        },
        dtypes=PRODUCT_DTYPES,
        share=6,
    ),
    Family(
        "ragged_dot",
        _draw_ragged,
        _build_ragged,
        {"mode": "rows", "groups": 1},
        frozenset({"vmap_data", "vmap_weights", "vmap_both", "per_example", "per_example_gradient"}),
        share=2,
    ),
    Family(
        "conv",
        _draw_conv,
        _build_conv,
        {"groups": 1, "batch_groups": 1, "both_data": False, "orders": 0.0, "padding": "VALID", "kind": "plain"},
        dtypes=PRODUCT_DTYPES,
        share=12,
    ),
)
