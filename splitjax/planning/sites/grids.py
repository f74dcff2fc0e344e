"""Decides over which mesh axes a traced `pallas_call` runs on parts, and refuses those that cannot.

A step's graph and what the plan splits come in; the axes of each call's grid dims come out
(`lower.products.local_kernel`), or an error with the `splitjax.kernel` line that keeps the kernel whole. XLA is not
asked: it does not know what a kernel does in a block, and on a TPU it refuses to partition one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from splitjax import _compat
from splitjax.errors import UnknownPrimitiveError
from splitjax.mesh import MeshShape
from splitjax.planning.kernel_lines import kernel_line
from splitjax.planning.sites.kernels import LocalKernel, split_labels
from splitjax.planning.sites.sharded_dims import ShardedDims
from splitjax.primitives.dims import DimMap
from splitjax.primitives.foreign.carried import carried_dims
from splitjax.primitives.foreign.grids import PALLAS, followed, grid_label, pallas_call, split_dims
from splitjax.trace.graph import ForeignCall, Graph

# Parts of the paths of JAX's own kernels, and what keeps them whole in `splitjax.jax_kernels`. No line that is written
# from shapes alone could: rows and the sizes of their groups look like dims of their own.
_SHIPPED = (
    ("jax/experimental/pallas/ops/tpu/megablox", "gmm"),
    ("jax/experimental/pallas/ops/tpu/flash_attention", "flash_attention"),
    ("jax/experimental/pallas/ops/tpu/splash_attention", "splash_attention"),
)
_BY_EXAMPLE = (
    "; with a leading dim of examples, [examples, rows, k] and [examples, groups], each device has its own rows"
)


def derive_grids(
    graph: Graph, sharded: ShardedDims, mesh: MeshShape, unknown: str
) -> tuple[tuple[LocalKernel, ...], tuple[str, ...]]:
    """Returns how the Pallas calls of a step run, in program order, and which of them run whole on every device.

    **Arguments:** `sharded`: what the plan splits on `mesh`. `unknown`: `error` or `gather`, for a call that cannot run
    on the parts that the plan has.

    Raises `UnknownPrimitiveError` for such a call."""
    kernels, whole = [], []
    for call in graph.foreign if mesh.num_devices > 1 else ():
        if call.eqn.primitive.name != PALLAS:
            continue
        labels, dims = _labels(call), split_dims(call.eqn.params)
        free = [grid_label(dim) for dim in dims] if call.editable else []
        split = next(_split_elsewhere(call, labels, free, sharded), None)
        if split is not None and unknown == "error":
            raise _refused(call, graph, split)
        if split is not None:
            whole.append(f"{call.primitive} at {call.source}")
        if call.editable:
            kernels.append(LocalKernel(call.site, split_labels(call, labels, free, sharded, mesh)))
    return tuple(kernels), tuple(whole)


def _labels(call: ForeignCall) -> DimMap:
    shapes = [[tuple(v.aval.shape) for v in side] for side in (call.eqn.invars, call.eqn.outvars)]
    return pallas_call(shapes[0], shapes[1], call.eqn.params)


@dataclasses.dataclass(frozen=True)
class _Split:
    """Names a dim of a call that the plan splits, and along which the call cannot run on parts.

    - `side`, `number`: which of the operands (0) or results (1). `dim`, `axes`: which of its dims, over what.
    """

    side: int
    number: int
    dim: int
    axes: tuple[str, ...]


def _split_elsewhere(call: ForeignCall, labels: DimMap, free: Sequence[Any], sharded: ShardedDims) -> Iterator[_Split]:
    """Yields the dims of a call that are split and that have none of the labels `free`."""
    sides = ((labels.inputs, call.operand_dims), (labels.outputs, call.result_dims))
    for side, (of_side, tensors) in enumerate(sides):
        for number, (names, dims) in enumerate(zip(of_side, tensors, strict=True)):
            for position, (name, dim) in enumerate(zip(names, dims, strict=True)):
                axes = sharded.axes(dim, call.site)
                if axes and name[0] not in free:
                    yield _Split(side, number, position, axes)


def _refused(call: ForeignCall, graph: Graph, split: _Split) -> UnknownPrimitiveError:
    shipped = next((name for part, name in _SHIPPED if part in _compat.function_file(call.eqn.params["jaxpr"])), None)
    if shipped is None:
        remedy = (
            f"keep the kernel whole, with its derivative rule: {kernel_line(call, graph)} (leave out of whole"
            " every label along which parts of the operands give that part of the results; .check(...) tries them)"
        )
    else:
        remedy = (
            f"call splitjax.jax_kernels.{shipped}, which keeps this kernel of JAX whole, with its derivative rule, and"
            " says what its dims are"
        )
        remedy += _BY_EXAMPLE if shipped == "gmm" else ""
    inside = " inside a function with a derivative rule of its own" if not call.editable else ""
    why = "it can along grid dims whose blocks have size 1 and the grid's index, and where lowering reaches it"
    if _is_carried(call, split):
        why = "its kernel may read scratch, or an operand, that an earlier step of the grid along this dim has written"
    return UnknownPrimitiveError(
        f"a Pallas call{inside} cannot run on parts of dim {split.dim} of its {('operand', 'result')[split.side]}"
        f" {split.number}, which is split over {', '.join(split.axes)}: {why}",
        value=call.primitive,
        place=call.source or f"equation {'.'.join(map(str, call.site))}",
        remedy=remedy,
    )


def _is_carried(call: ForeignCall, split: _Split) -> bool:
    """Returns whether a split dim follows a grid dim along which the kernel may carry values in memory."""
    follows = followed(call.eqn.params)[split.side][split.number]
    return bool(follows) and follows[split.dim] in carried_dims(call.eqn.params)
