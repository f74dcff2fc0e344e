"""Holds dim rules of fused operations whose plain form other rules would see through: attention kernels, scaled
products.

Shapes go in and labels come out, as `dims.DimRule` says; importing the module registers them.
"""

from __future__ import annotations

from splitjax.primitives.dims import DimMap, Label, Labels, Params, Shape, Shapes, from_notation
from splitjax.primitives.table import dim_rule

FUSED_ATTENTION = frozenset({"dot_product_attention_fwd_wrapper", "dot_product_attention_fwd"})


@dim_rule(*FUSED_ATTENTION, "dot_product_attention_bwd_wrapper", "dot_product_attention_bwd")
def fused_attention(inputs: Shapes, outputs: Shapes, params: Params) -> DimMap:
    """Labels cuDNN's attention behind `jax.nn.dot_product_attention(implementation="cudnn")`.

    The `inputs` are query (b, t, heads, h), key and value (b, s, shared heads, h), then others; with
    `params["layout"]` 1 heads stand before positions. Each shared head serves a group of the query's: heads are
    (shared, group). Further operands: bias (b, heads, t, s), lengths (b,), and in the backward pass softmax
    statistics (b, heads, t), the forward result and its cotangent, both shaped like the query. The `outputs` are the
    result and statistics, or the gradients of query, key and value.
    """
    heads = 1 if params["layout"] else 2
    query, key = inputs[0], inputs[1]
    shared = key[heads]
    sizes: dict[Label, int] = {"n": shared, "g": query[heads] // shared, "b": query[0]}

    def ordered(positions: str, mine: tuple[Label, ...], last: str) -> Labels:
        return (("b",), mine, (positions,), (last,)) if params["layout"] else (("b",), (positions,), mine, (last,))

    q, o = ordered("t", ("n", "g"), "h"), ordered("t", ("n", "g"), "v")
    k, v = ordered("s", ("n",), "h"), ordered("s", ("n",), "v")

    def further(tag: str, shape: Shape) -> Labels:
        if len(shape) == 3 and shape == (query[0], query[heads], query[3 - heads]):
            return (("b",), ("n", "g"), ("t",))
        if len(shape) == 1 and shape[0] == query[0]:
            return (("b",),)
        return tuple(((tag, i),) for i in range(len(shape)))

    backward = len(outputs) > 2
    ins: list[Labels] = [q, k, v, *(further(f"in{i}", s) for i, s in enumerate(inputs[3:]))]
    if backward:
        ins[-2:] = [o, o]
        outs = [q, k, v, *(further(f"out{i}", s) for i, s in enumerate(outputs[3:]))]
    else:
        outs = [o, *(further(f"out{i}", s) for i, s in enumerate(outputs[1:]))]
    return DimMap(tuple(ins), tuple(outs), mixing=True, sizes=sizes)


@dim_rule("scaled_matmul_wrapper", "scaled_matmul")
def scaled_matmul(inputs: Shapes, outputs: Shapes, _params: Params) -> DimMap:
    """Labels block-scaled products: `inputs` (b, m, k) and (b, n, k) with scales (b, m, k / block) and (b, n, k /
    block) make `outputs` (b, m, n)."""
    return from_notation("b m k, b n k, b m _, b n _ -> b m n", inputs, outputs)
