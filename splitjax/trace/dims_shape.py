"""Dim rules of operations that move dims: reshape, broadcast, transpose, slices, concatenation, windows."""

from __future__ import annotations

import math

from splitjax.trace.dims import DimMap, rule_for


def _all(shape):
    return tuple((i,) for i in range(len(shape)))


@rule_for("reshape")
def reshape(inputs, outputs, params):
    """Runs of dims with equal products face each other; within a run both sides are cut into common factors.

    (B, 7, 7, 64) -> (B, 3136) gives b -> b and (h w c) for the last dim. Where two shapes have no common factors at the
    same place, (6, 4) -> (4, 6) say, that run links nothing beyond what they share at the front."""
    source, target = inputs[0], outputs[0]
    if params.get("dimensions") is not None:
        return _unlinked(inputs, outputs)
    labels_in, labels_out, sizes = _refine(source, target)
    return DimMap((labels_in, *(_private(k, s) for k, s in enumerate(inputs[1:], 1))), (labels_out,), sizes=sizes)


def _refine(source, target):
    left: list[list] = [[] for _ in source]
    right: list[list] = [[] for _ in target]
    sizes: dict = {}
    i = j = 0
    rest_i = source[0] if source else 1
    rest_j = target[0] if target else 1
    count = 0

    def fresh(size):
        nonlocal count
        count += 1
        sizes[count] = size
        return count

    while i < len(source) and j < len(target):
        if rest_i == 1:
            i += 1
            rest_i = source[i] if i < len(source) else 1
            continue
        if rest_j == 1:
            j += 1
            rest_j = target[j] if j < len(target) else 1
            continue
        # Factors are taken major first: the leading factor of what is left on both sides.
        small, large = sorted((rest_i, rest_j))
        if large % small:
            # The leading parts do not nest; nothing behind this point of the run lines up.
            common = math.gcd(rest_i, rest_j)
            if common == 1 or rest_i == 0 or rest_j == 0:
                break
            small = common
        label = fresh(small)
        left[i].append(label)
        right[j].append(label)
        rest_i //= small
        rest_j //= small
        if rest_i != 1 and rest_j != 1:
            break  # (6, 4) -> (4, 6): both sides keep an unshared rest
    _pad(left, source, sizes, "l")
    _pad(right, target, sizes, "r")
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes


def _pad(sides, shape, sizes, tag):
    """Gives what the refinement did not reach a private factor, so that every dim's factors multiply to its size."""
    for k, size in enumerate(shape):
        have = math.prod(sizes[label] for label in sides[k])
        if size != have and have and size:
            label = f"{tag}{k}"
            sizes[label] = size // have
            sides[k].append(label)


@rule_for("broadcast_in_dim")
def broadcast_in_dim(inputs, outputs, params):
    """Operand dim i becomes result dim `broadcast_dimensions[i]`, unless it is stretched from 1."""
    where = params["broadcast_dimensions"]
    source = tuple((where[i],) if inputs[0][i] == outputs[0][where[i]] else (f"one{i}",) for i in range(len(inputs[0])))
    return DimMap((source, *(_private(k, s) for k, s in enumerate(inputs[1:], 1))), (_all(outputs[0]),))


@rule_for("transpose")
def transpose(inputs, outputs, params):
    """Result dim i is operand dim `permutation[i]`."""
    return DimMap((_all(inputs[0]),), (tuple((p,) for p in params["permutation"]),))


@rule_for("squeeze")
def squeeze(inputs, outputs, params):
    """Dims of size 1 vanish."""
    gone = {d % len(inputs[0]) for d in params["dimensions"]}
    return DimMap((_all(inputs[0]),), (tuple((i,) for i in range(len(inputs[0])) if i not in gone),))


@rule_for("expand_dims")
def expand_dims(inputs, outputs, params):
    """Dims of size 1 appear."""
    new = {d % len(outputs[0]) for d in params["dimensions"]}
    kept = [i for i in range(len(outputs[0])) if i not in new]
    return DimMap((tuple((i,) for i in kept),), (_all(outputs[0]),))


@rule_for("slice", "dynamic_slice", "pad", "split", "reduce_window", "reduce_window_sum", "reduce_window_max",
          "reduce_window_min")
def resize(inputs, outputs, params):
    """A dim that keeps its full size runs through; one that is cut, padded or windowed does not."""
    rank = len(outputs[0])
    window = params.get("window_dimensions")

    def through(i):
        return inputs[0][i] == outputs[0][i] and (window is None or window[i] == 1)

    ins = tuple(
        tuple((i,) if through(i) else (f"in{k}.{i}",) for i in range(rank)) if len(shape) == rank else _private(k, shape)
        for k, shape in enumerate(inputs)
    )
    outs = tuple(
        tuple((i,) if inputs[0][i] == shape[i] and through(i) else (f"out{k}.{i}",) for i in range(rank))
        for k, shape in enumerate(outputs)
    )
    return DimMap(ins, outs)


@rule_for("dynamic_update_slice")
def dynamic_update_slice(inputs, outputs, params):
    """The result is the operand; the update runs along where it covers a whole dim."""
    operand, update = inputs[0], inputs[1]
    part = tuple((i,) if operand[i] == update[i] else (f"part{i}",) for i in range(len(operand)))
    return DimMap((_all(operand), part, *(_private(k, s) for k, s in enumerate(inputs[2:], 2))), (_all(operand),))


@rule_for("concatenate")
def concatenate(inputs, outputs, params):
    """All dims run through but the one along which operands are laid end to end."""
    along = params["dimension"]

    def labels(tag, shape):
        return tuple((i,) if i != along or len(inputs) == 1 else (f"{tag}",) for i in range(len(shape)))

    return DimMap(tuple(labels(f"in{k}", s) for k, s in enumerate(inputs)), tuple(labels("out", s) for s in outputs))


@rule_for("stack")
def stack(inputs, outputs, params):
    """A new dim stands at `axis`; the others run through."""
    along = params.get("axis", params.get("dimension", 0)) % len(outputs[0])
    inner = tuple((i if i < along else i + 1,) for i in range(len(inputs[0])))
    return DimMap(tuple(inner for _ in inputs), (_all(outputs[0]),))


@rule_for("unstack")
def unstack(inputs, outputs, params):
    """The dim at `axis` vanishes; the others run through."""
    along = params.get("axis", params.get("dimension", 0)) % len(inputs[0])
    inner = tuple((i if i < along else i + 1,) for i in range(len(inputs[0]) - 1))
    return DimMap((_all(inputs[0]),), tuple(inner for _ in outputs))


@rule_for("bitcast_convert_type")
def bitcast(inputs, outputs, params):
    """Dims run through but the last one that a change of width adds or takes."""
    return DimMap((_all(inputs[0]),), (_all(outputs[0]),))


@rule_for("select_and_scatter_add", "select_and_gather_add", "select_and_scatter")
def select_window(inputs, outputs, params):
    """Pooling's derivative: dims with a window of 1 run through (operands are source and operand, or tangents and operand)."""
    window = params["window_dimensions"]

    def labels(tag, shape):
        return tuple((i,) if window[i] == 1 else (f"{tag}.{i}",) for i in range(len(shape)))

    ins = tuple(labels(f"in{k}", s) if len(s) == len(window) else _private(k, s) for k, s in enumerate(inputs))
    return DimMap(ins, tuple(labels(f"out{k}", s) for k, s in enumerate(outputs)))


def _private(k, shape):
    return tuple((f"private{k}.{i}",) for i in range(len(shape)))


def _unlinked(inputs, outputs):
    ins = tuple(_private(f"in{k}", s) for k, s in enumerate(inputs))
    return DimMap(ins, tuple(_private(f"out{k}", s) for k, s in enumerate(outputs)))
