"""Holds dim rules of operations that move dims: reshape, broadcast, transpose, slices, concatenation, windows.

Shapes go in and labels come out, as `dims.DimRule` says; importing the module registers them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping, Sequence

from splitjax.primitives.dims import DimMap, Label, Labels, Params, Shape, Shapes
from splitjax.primitives.table import dim_rule

Factors = tuple[Label, ...]  # the labels of a dim


def _all(shape: Shape) -> Labels:
    """Labels every dim with its position."""
    return tuple((i,) for i in range(len(shape)))


@dim_rule("reshape")
def reshape(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels runs of dims of `inputs[0]` and `outputs[0]` with equal products; within a run both sides are cut into
    common factors.

    (B, 7, 7, 64) -> (B, 3136) gives b -> b and (h w c) for the last dim. Where two runs do not nest, (6, 4) -> (4,
    6) say, they share what they have in common at the front and at the back: (2 3) (2 2) -> (2 2) (3 2).
    `params["dimensions"]`, if there, is an order in which the operand's dims are read.
    """
    order = params.get("dimensions") or range(len(inputs[0]))  # an order other than this transposes first
    sizes: dict[Label, int] = {}
    labels, labels_out = common_factors([inputs[0][d] for d in order], outputs[0], sizes)
    placed = dict(zip(order, labels, strict=True))
    labels_in = tuple(placed[d] for d in range(len(inputs[0])))
    return DimMap((labels_in, *(_private(k, s) for k, s in enumerate(inputs[1:], 1))), (labels_out,), sizes=sizes)


def common_factors(
    source: Sequence[int], target: Sequence[int], sizes: MutableMapping[Label, int]
) -> tuple[Labels, Labels]:
    """Labels the dims of both sides of a reshape by the factors that they share.

    `source` and `target` are the shapes before and after. Returns the labels per dim of both, major first; the sizes
    of labels are added to `sizes`. Dims of size 1 have no labels.
    """
    left: list[Factors] = [()] * len(source)
    right: list[Factors] = [()] * len(target)
    for i, j in _runs(source, target):
        shared = _share([source[k] for k in i], [target[k] for k in j], sizes)
        for side, positions, labels in zip((left, right), (i, j), shared, strict=True):
            for k, factors in zip(positions, labels, strict=True):
                side[k] = factors
    return tuple(left), tuple(right)


def _runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Yields the shortest runs of positions (of sizes above 1) on both sides that have equal products."""
    if 0 in source or 0 in target:
        return
    left = [k for k, size in enumerate(source) if size != 1]
    right = [k for k, size in enumerate(target) if size != 1]
    a = b = 0
    while a < len(left) and b < len(right):
        first_a, first_b, have, want = a, b, source[left[a]], target[right[b]]
        a, b = a + 1, b + 1
        while have != want:
            if have < want:
                have, a = have * source[left[a]], a + 1
            else:
                want, b = want * target[right[b]], b + 1
        yield left[first_a:a], right[first_b:b]


def _share(left: Sequence[int], right: Sequence[int], sizes: MutableMapping[Label, int]) -> list[list[Factors]]:
    """Cuts the dims of one run into factors: from the front until the sides do not nest, then what is left from the
    back; the rest of a dim, if any, stands between and is its own."""
    rests = [list(left), list(right)]
    heads: list[list[list[Label]]] = [[[] for _ in side] for side in rests]
    tails: list[list[list[Label]]] = [[[] for _ in side] for side in rests]
    for parts, step in ((heads, 1), (tails, -1)):
        orders = [list(range(len(side)))[::step] for side in rests]
        while orders[0] and orders[1]:
            here = [order[0] for order in orders]
            now = [rest[k] for rest, k in zip(rests, here, strict=True)]
            if 1 in now:
                orders[now.index(1)].pop(0)
                continue
            factor = math.gcd(*now)
            if factor == 1:
                break
            label = len(sizes)
            sizes[label] = factor
            for rest, part, k in zip(rests, parts, here, strict=True):
                rest[k] //= factor
                part[k].append(label)
            if factor not in now:
                break
    out: list[list[Factors]] = []
    for rest, head, tail in zip(rests, heads, tails, strict=True):
        labels: list[Factors] = []
        for k, size in enumerate(rest):
            own: Factors = () if size == 1 else (len(sizes),)
            sizes.update(dict.fromkeys(own, size))
            labels.append((*head[k], *own, *reversed(tail[k])))
        out.append(labels)
    return out


@dim_rule("tile")
def tile(inputs: Shapes, _outputs: Shapes, params: Params) -> DimMap:
    """Labels a dim that is repeated, by `params["reps"]`, as (repetition, the dim of `inputs[0]`)."""
    out: list[Factors] = []
    sizes: dict[Label, int] = {}
    for i, times in enumerate(params["reps"]):
        out.append((i,) if times == 1 else (("repeat", i), i))
        sizes |= {} if times == 1 else {("repeat", i): times, i: inputs[0][i]}
    return DimMap((_all(inputs[0]),), (tuple(out),), sizes=sizes)


@dim_rule("broadcast_in_dim")
def broadcast_in_dim(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels dim i of `inputs[0]` like dim `params["broadcast_dimensions"][i]` of `outputs[0]`, unless it is stretched
    from 1."""
    where = params["broadcast_dimensions"]
    source = tuple((where[i],) if inputs[0][i] == outputs[0][where[i]] else (f"one{i}",) for i in range(len(inputs[0])))
    return DimMap((source, *(_private(k, s) for k, s in enumerate(inputs[1:], 1))), (_all(outputs[0]),))


@dim_rule("transpose")
def transpose(inputs: Shapes, _outputs: Shapes, params: Params) -> DimMap:
    """Labels dim i of the result like dim `params["permutation"][i]` of `inputs[0]`."""
    return DimMap((_all(inputs[0]),), (tuple((p,) for p in params["permutation"]),))


@dim_rule("squeeze")
def squeeze(inputs: Shapes, _outputs: Shapes, params: Params) -> DimMap:
    """Drops the dims of `inputs[0]` among `params["dimensions"]`, which are of size 1."""
    gone = {d % len(inputs[0]) for d in params["dimensions"]}
    return DimMap((_all(inputs[0]),), (tuple((i,) for i in range(len(inputs[0])) if i not in gone),))


@dim_rule(
    "slice",
    "dynamic_slice",
    "pad",
    "split",
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
)
def resize(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels a dim that keeps its full size in `inputs` and `outputs` alike; one that is cut, padded or windowed (by
    `params["window_dimensions"]`) links nothing."""
    rank = len(outputs[0])
    window = params.get("window_dimensions")

    def through(i: int) -> bool:
        return inputs[0][i] == outputs[0][i] and (window is None or window[i] == 1)

    ins = tuple(
        tuple((i,) if through(i) else (f"in{k}.{i}",) for i in range(rank))
        if len(shape) == rank
        else _private(k, shape)
        for k, shape in enumerate(inputs)
    )
    outs = tuple(
        tuple((i,) if inputs[0][i] == shape[i] and through(i) else (f"out{k}.{i}",) for i in range(rank))
        for k, shape in enumerate(outputs)
    )
    return DimMap(ins, outs)


@dim_rule("dynamic_update_slice")
def dynamic_update_slice(inputs: Shapes, _outputs: Shapes, _params: Params) -> DimMap:
    """Labels the result like the operand, `inputs[0]`; the update, `inputs[1]`, runs along whole dims."""
    operand, update = inputs[0], inputs[1]
    part = tuple((i,) if operand[i] == update[i] else (f"part{i}",) for i in range(len(operand)))
    return DimMap((_all(operand), part, *(_private(k, s) for k, s in enumerate(inputs[2:], 2))), (_all(operand),))


@dim_rule("concatenate")
def concatenate(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels `inputs` and `outputs` alike but for `params["dimension"]`, along which operands are laid end to end."""
    along = params["dimension"]

    def labels(tag: str, shape: Shape) -> Labels:
        return tuple((i,) if i != along or len(inputs) == 1 else (f"{tag}",) for i in range(len(shape)))

    return DimMap(tuple(labels(f"in{k}", s) for k, s in enumerate(inputs)), tuple(labels("out", s) for s in outputs))


@dim_rule("stack")
def stack(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels `inputs` like `outputs[0]` without the new dim that stands at `params["axis"]`."""
    along = params.get("axis", params.get("dimension", 0)) % len(outputs[0])
    inner = tuple((i if i < along else i + 1,) for i in range(len(inputs[0])))
    return DimMap(tuple(inner for _ in inputs), (_all(outputs[0]),))


@dim_rule("unstack")
def unstack(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels `outputs` like `inputs[0]` without the dim at `params["axis"]`."""
    along = params.get("axis", params.get("dimension", 0)) % len(inputs[0])
    inner = tuple((i if i < along else i + 1,) for i in range(len(inputs[0]) - 1))
    return DimMap((_all(inputs[0]),), tuple(inner for _ in outputs))


@dim_rule("bitcast_convert_type")
def bitcast(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels `inputs[0]` and `outputs[0]` alike but for a last dim that a change of width adds or takes."""
    return DimMap((_all(inputs[0]),), (_all(outputs[0]),))


@dim_rule("select_and_scatter_add", "select_and_gather_add", "select_and_scatter")
def select_window(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels pooling's derivative: dims whose window in `params["window_dimensions"]` is 1 run through `inputs` and
    `outputs`.

    Operands are source and operand, or tangents and operand.
    """
    window = params["window_dimensions"]

    def labels(tag: str, shape: Shape) -> Labels:
        return tuple((i,) if window[i] == 1 else (f"{tag}.{i}",) for i in range(len(shape)))

    ins = tuple(labels(f"in{k}", s) if len(s) == len(window) else _private(k, s) for k, s in enumerate(inputs))
    return DimMap(ins, tuple(labels(f"out{k}", s) for k, s in enumerate(outputs)))


def _private(k: int, shape: Shape) -> Labels:
    """Gives every dim of operand `k` a label that no other tensor has."""
    return tuple((f"private{k}.{i}",) for i in range(len(shape)))
