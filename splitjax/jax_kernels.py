"""JAX's own kernels, kept whole (`splitjax.kernel`): attention and grouped products for TPUs, cuDNN's attention.

Arrays come in as the kernels take them, and go out as they give them. In a parallel step every device runs the kernel
on its examples and its heads (or columns), forward and backward; outside of one it is just the call. Positions and the
dims that scores sum over are whole. The kernels are those of `jax.experimental.pallas.ops.tpu` and of
`jax.nn.dot_product_attention`, whose options they take; they are imported when they are first called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from splitjax.step.kernel import kernel


class SegmentIds(NamedTuple):
    """Numbers the segment of each position: a query attends to keys of its own segment alone.

    **Attributes:** `q`: of queries, int32[batch, positions]. `kv`: of keys, int32[batch, positions].
    """

    q: jax.Array
    kv: jax.Array


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ab: jax.Array | None = None,
    segment_ids: SegmentIds | None = None,
    **options: Any,
) -> jax.Array:
    """Runs the flash attention for TPUs of `jax.experimental.pallas.ops.tpu.flash_attention` (Dao et al., 2022).

    **Arguments:**

    - `q`, `k`, `v`: [batch, heads, positions, head_dim], with as many heads each.
    - `ab`: a bias of the scores, [batch, heads, query positions, key positions].
    - `segment_ids`: which positions attend to each other.
    - `options`: `causal`, `sm_scale`, `block_sizes`, as the kernel has them.

    Returns [batch, heads, positions, head_dim]. Raises what the kernel raises of shapes that its blocks do not divide.
    """
    dims = ["b h s d", "b h t d", "b h t d"]
    arrays = [q, k, v]
    if ab is not None:
        dims, arrays = [*dims, "b h s t"], [*arrays, ab]
    if segment_ids is not None:
        dims, arrays = [*dims, "b s", "b t"], [*arrays, *segment_ids]

    def flash_attention(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu import flash_attention as flash

        bias = None if ab is None else others[0]
        segments = None if segment_ids is None else flash.SegmentIds(*others[-2:])
        return flash.flash_attention(q, k, v, bias, segments, **options)

    return kernel(flash_attention, f"{', '.join(dims)} -> b h s d", whole="s t d")(*arrays)


def splash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: SegmentIds | None = None,
    *,
    mask: Any = None,
    **options: Any,
) -> jax.Array:
    """Runs the sparse flash ("splash") attention for TPUs of `jax.experimental.pallas.ops.tpu.splash_attention`, which
    does not scale the queries.

    **Arguments:**

    - `q`: [batch, heads, positions, head_dim]. `k`, `v`: the same, with as many heads or with a divisor of them, each
      of which serves as many of the query's.
    - `segment_ids`: which positions attend to each other.
    - `mask`: of every head, a `splash_attention_mask.Mask` of shape (query positions, key positions), such as
      `CausalMask`; None: every position attends to every other.
    - `options`: `block_sizes`, `attn_logits_soft_cap` and others of `make_splash_mha`.

    Returns [batch, heads, positions, head_dim].
    """
    heads, shared = _heads(q.shape[1], k.shape[1])
    dims = [f"b {heads} s d", f"b {shared} t d", f"b {shared} t d"]
    arrays = [q, k, v]
    if segment_ids is not None:
        dims, arrays = [*dims, "b s", "b t"], [*arrays, *segment_ids]

    def splash_attention(q: jax.Array, k: jax.Array, v: jax.Array, *others: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

        of_head = splash_attention_mask.FullMask((q.shape[2], k.shape[2])) if mask is None else mask
        of_heads = splash_attention_mask.MultiHeadMask([of_head] * q.shape[1])
        run: Any = splash_attention_kernel.make_splash_mha(of_heads, head_shards=1, q_seq_shards=1, **options)
        if not others:
            return jax.vmap(run)(q, k, v)
        return jax.vmap(run)(q, k, v, splash_attention_kernel.SegmentIds(*others))

    return kernel(splash_attention, f"{', '.join(dims)} -> b {heads} s d", whole="s t d")(*arrays)


def gmm(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, transpose_rhs: bool = False, **options: Any
) -> jax.Array:
    """Multiplies rows that are sorted by group with the matrix of their group, by the megablox kernel for TPUs of
    `jax.experimental.pallas.ops.tpu.megablox` (Gale et al., 2022).

    **Arguments:**

    - `lhs`: the rows, [rows, k]. With a leading dim, [batch, rows, k], each example sorts its own rows by group, and
      examples lie over the devices; without, all rows are whole on every device.
    - `rhs`: a matrix for each group, [groups, k, n]; [groups, n, k] with `transpose_rhs`.
    - `group_sizes`: how many rows each group has, int32[groups], or int32[batch, groups].
    - `options`: `preferred_element_type`, `tiling`, `interpret`, as the kernel has them.

    Returns [rows, n], or [batch, rows, n].
    """
    by_example = lhs.ndim == 3
    matrices = "e n k" if transpose_rhs else "e k n"
    dims = f"b m k, {matrices}, b e -> b m n" if by_example else f"m k, {matrices}, e -> m n"

    def gmm(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        from jax.experimental.pallas.ops.tpu.megablox import gmm as megablox_gmm

        types = {"preferred_element_type": jnp.float32, "tiling": (128, 128, 128), "interpret": False, **options}

        def of_rows(rows_and_sizes: tuple[jax.Array, jax.Array]) -> jax.Array:
            rows, sizes = rows_and_sizes
            # by position: its derivative rule names the arguments that it does not differentiate by theirs
            return megablox_gmm(
                rows,
                rhs,
                sizes,
                types["preferred_element_type"],
                types["tiling"],
                None,
                None,
                transpose_rhs,
                types["interpret"],
            )

        return lax.map(of_rows, (lhs, group_sizes)) if by_example else of_rows((lhs, group_sizes))

    return kernel(gmm, dims, whole="m")(lhs, rhs, group_sizes)


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Runs cuDNN's attention for GPUs, behind `jax.nn.dot_product_attention(implementation="cudnn")`.

    **Arguments:**

    - `query`: [batch, positions, heads, head_dim]. `key`, `value`: the same, with as many heads or with a divisor of
      them.
    - `bias`, `mask`: of the scores, [batch, heads, query positions, key positions]; dims of size 1 serve for all.
    - `options`: `scale`, `is_causal`, `local_window_size`, as of `jax.nn.dot_product_attention`.

    Returns [batch, positions, heads, head_dim]. Raises `RuntimeError` where there is no GPU with cuDNN.
    """
    heads, shared = _heads(query.shape[2], key.shape[2])
    given = [array for array in (bias, mask) if array is not None]
    of_scores = ("b", heads, "s", "t")
    dims = [f"b s {heads} d", f"b t {shared} d", f"b t {shared} d"]
    dims += [
        " ".join("_" if size == 1 else label for label, size in zip(of_scores, array.shape, strict=True))
        for array in given
    ]

    def cudnn_attention(query: jax.Array, key: jax.Array, value: jax.Array, *arrays: jax.Array) -> jax.Array:
        left = iter(arrays)
        others = [None if array is None else next(left) for array in (bias, mask)]
        return jax.nn.dot_product_attention(query, key, value, *others, **options, implementation="cudnn")

    return kernel(cudnn_attention, f"{', '.join(dims)} -> b s {heads} d", whole="s t d")(query, key, value, *given)


def _heads(count: int, shared: int) -> tuple[str, str]:
    """Returns the labels of the heads of queries and of keys: one of the latter serves as many of the former each."""
    if shared == count:
        return "h", "h"
    return ("h", "_") if shared == 1 else ("(n g)", "n")
