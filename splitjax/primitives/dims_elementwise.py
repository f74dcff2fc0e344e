"""Holds dim rules of operations that keep dims in place: elementwise operations, identities, reductions, scans along a
dim, random bits, and the pseudo-operations of `flatten`.

Shapes go in and labels come out, as `dims.DimRule` says; importing the module registers them.
"""

from __future__ import annotations

import dataclasses

from splitjax.primitives.dims import DimMap, Labels, Params, Shape, Shapes
from splitjax.primitives.elementwise import ELEMENTWISE
from splitjax.primitives.table import dim_rule


@dim_rule(*ELEMENTWISE)
def elementwise(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels dim i of all `outputs` like dim i of every one of `inputs` that has their rank.

    An operand dim of size 1 is an implicit broadcast (missing it unlinks every factored Adafactor statistic); a
    scalar links nothing.
    """
    rank = max(len(shape) for shape in outputs)

    def labels(k: int, shape: Shape) -> Labels:
        if len(shape) != rank:
            return tuple((f"private{k}.{i}",) for i in range(len(shape)))
        return tuple((i,) if size != 1 else () for i, size in enumerate(shape))

    return DimMap(
        tuple(labels(k, s) for k, s in enumerate(inputs)), tuple(labels(-1, s) for s in outputs), joins=len(inputs) > 1
    )


@dim_rule("optimization_barrier")
def pairwise(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels the dims of every one of `outputs` like those of the one of `inputs` at its position."""
    ins = tuple(tuple(((k, i),) for i in range(len(shape))) for k, shape in enumerate(inputs))
    outs = tuple(tuple(((k, i),) for i in range(len(shape))) for k, shape in enumerate(outputs))
    return DimMap(ins, outs)


@dim_rule(
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"
)
def reduction(inputs: Shapes, _outputs: Shapes, params: Params) -> DimMap:
    """Keeps the dims of `inputs[0]` that are not among `params["axes"]`, in order."""
    kept = [i for i in range(len(inputs[0])) if i not in params["axes"]]
    return DimMap((tuple((i,) for i in range(len(inputs[0]))),), (tuple((i,) for i in kept),))


@dim_rule("reduce")
def general_reduction(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Keeps the dims of `lax.reduce`'s operands that are not among `params["dimensions"]`, the same in all `outputs`.

    The `inputs` are operands, then one scalar initial value for each.
    """
    rank = len(inputs[0])
    kept = tuple((i,) for i in range(rank) if i not in params["dimensions"])
    operands = tuple(tuple((i,) for i in range(rank)) if len(shape) == rank else () for shape in inputs)
    return DimMap(operands, tuple(kept for _ in outputs))


@dim_rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "rev", "sort")
def along_a_dim(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels `inputs` and `outputs` alike: values move along one dim, and the dims stay what they are."""
    return DimMap(_by_position(inputs), _by_position(outputs))


@dim_rule("top_k", "approx_top_k")
def top_k(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Keeps all dims of `inputs[0]` in all `outputs` but the searched one: the last, unless `params` name another."""
    rank = len(inputs[0])
    searched = params.get("axis", params.get("reduction_dimension", rank - 1)) % rank
    labels = tuple((i,) if i != searched else (f"k{i}",) for i in range(rank))
    source = tuple((i,) for i in range(rank))
    return DimMap((source,), tuple(labels for _ in outputs))


@dim_rule(
    "iota",
    "empty",
    "empty2",
    "rng_uniform",
    "platform_index",
    "create_token",
    "debug_callback",
    "debug_print",
    "inspect_sharding",
    "unvmap_any",
    "unvmap_all",
    "unvmap_max",
)
def creation(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Links nothing: the dims of `outputs` are new (as those of `inputs`, if any), and link through what later meets
    them."""
    return _unlinked(inputs, outputs)


@dim_rule("random_bits", "random_split", "random_wrap", "random_unwrap", "random_clone", "random_seed")
def random(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Keeps the dims of a batch of keys, seeds or raw keys, `inputs[0]`, at the front of `outputs[0]`, whose further
    dims are what each key gives."""
    lead = min(len(inputs[0]), len(outputs[0]))
    labels = [
        tuple((i,) if i < lead else (f"{tag}{i}",) for i in range(len(shape)))
        for tag, shape in (("in", inputs[0]), ("out", outputs[0]))
    ]
    return DimMap((labels[0],), (labels[1],))


@dim_rule("rng_bit_generator")
def bit_generator(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels the key that goes in (`inputs[0]`) and comes out (`outputs[0]`) alike; the bits, `outputs[1]`, are new."""
    key: Labels = tuple((("key", i),) for i in range(len(inputs[0])))
    return DimMap((key,), (key, *_unlinked((), outputs[1:]).outputs))


def _by_position(shapes: Shapes) -> tuple[Labels, ...]:
    """Labels every dim with its position, so that all tensors share the label of a position."""
    return tuple(tuple((i,) for i in range(len(shape))) for shape in shapes)


def _unlinked(inputs: Shapes, outputs: Shapes) -> DimMap:
    """Gives every dim of every tensor a label of its own."""
    ins = tuple(tuple((f"in{k}.{i}",) for i in range(len(s))) for k, s in enumerate(inputs))
    outs = tuple(tuple((f"out{k}.{i}",) for i in range(len(s))) for k, s in enumerate(outputs))
    return DimMap(ins, outs)


@dim_rule("custom_linear_solve")
def opaque(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Links nothing between `inputs` and `outputs`: XLA places these itself."""
    return dataclasses.replace(_unlinked(inputs, outputs), mixing=True)


@dim_rule("_scan_in")
def scan_in(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels `outputs[0]` as a slice of the scanned `inputs[0]`, whose leading dim is gone."""
    return DimMap((tuple((i,) for i in range(-1, len(inputs[0]) - 1)),), (tuple((i,) for i in range(len(outputs[0]))),))


@dim_rule("_scan_out")
def scan_out(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels `outputs[0]` as the results `inputs[0]` of all iterations, stacked in front."""
    return DimMap((tuple((i,) for i in range(len(inputs[0]))),), (tuple((i,) for i in range(-1, len(outputs[0]) - 1)),))


@dim_rule("_scan_index")
def scan_index(inputs: Shapes, _outputs: Shapes, _params: Params) -> DimMap:
    """Labels the leading dims of all `inputs` alike: they count iterations. The others have nothing to do with each
    other."""
    return DimMap(tuple((("index",), *((f"in{k}.{i}",) for i in range(1, len(s)))) for k, s in enumerate(inputs)), ())


@dim_rule("_carry_in", "_carry_back", "_branch")
def handed_on(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels `inputs` and `outputs` alike: the result is the same array under another name."""
    return DimMap(_by_position(inputs), _by_position(outputs))


@dim_rule("_gradient")
def gradient(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels the gradient, `outputs[0]`, like `inputs[0]` that it is taken for; the loss, `inputs[1]`, is a scalar."""
    return DimMap((tuple((i,) for i in range(len(inputs[0]))), ()), (tuple((i,) for i in range(len(outputs[0]))),))
