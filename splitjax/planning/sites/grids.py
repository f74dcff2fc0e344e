"""Decides over which mesh axes a traced `pallas_call` runs on parts, and refuses those that cannot.

A step's graph and what the plan splits come in; the axes of each call's grid dims come out
(`lower.products.local_kernel`), or an error with the `splitjax.kernel` line that keeps the kernel whole. XLA is not
asked: it does not know what a kernel does in a block, and on a TPU it refuses to partition one.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from splitjax import _compat
from splitjax.errors import UnknownPrimitiveError
from splitjax.mesh import MeshShape
from splitjax.planning.sites.kernels import LocalKernel, split_labels
from splitjax.planning.sites.sharded_dims import ShardedDims
from splitjax.primitives.calls import call_body
from splitjax.primitives.dims import DimMap
from splitjax.primitives.foreign.grids import PALLAS, grid_label, pallas_call, split_dims
from splitjax.trace.graph import Dim, ForeignCall, Graph

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
            raise _refused(call, graph, labels, split)
        if split is not None:
            whole.append(f"{call.primitive} at {call.source}")
        if call.editable:
            kernels.append(LocalKernel(call.site, split_labels(call, labels, free, sharded, mesh)))
    return tuple(kernels), tuple(whole)


def _labels(call: ForeignCall) -> DimMap:
    shapes = [[tuple(v.aval.shape) for v in side] for side in (call.eqn.invars, call.eqn.outvars)]
    return pallas_call(shapes[0], shapes[1], call.eqn.params)


def _split_elsewhere(
    call: ForeignCall, labels: DimMap, free: Sequence[Any], sharded: ShardedDims
) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    """Yields the dims of a call that are split and that have none of the labels `free`: array, dim, axes."""
    sides = (("operand", labels.inputs, call.operand_dims), ("result", labels.outputs, call.result_dims))
    for side, of_side, tensors in sides:
        for number, (names, dims) in enumerate(zip(of_side, tensors, strict=True)):
            for position, (name, dim) in enumerate(zip(names, dims, strict=True)):
                axes = sharded.axes(dim, call.site)
                if axes and name[0] not in free:
                    yield f"{side} {number}", position, axes


def _refused(
    call: ForeignCall, graph: Graph, labels: DimMap, split: tuple[str, int, tuple[str, ...]]
) -> UnknownPrimitiveError:
    tensor, dim, axes = split
    shipped = next((name for part, name in _SHIPPED if part in _compat.function_file(call.eqn.params["jaxpr"])), None)
    if shipped is None:
        remedy = (
            f"keep the kernel whole, with its derivative rule: {_kernel_line(call, graph, labels)} (leave out of whole"
            " every label along which parts of the operands give that part of the results; .check(...) tries them)"
        )
    else:
        remedy = (
            f"call splitjax.jax_kernels.{shipped}, which keeps this kernel of JAX whole, with its derivative rule, and"
            " says what its dims are"
        )
        remedy += _BY_EXAMPLE if shipped == "gmm" else ""
    inside = " inside a function with a derivative rule of its own" if not call.editable else ""
    return UnknownPrimitiveError(
        f"a Pallas call{inside} cannot run on parts of dim {dim} of its {tensor}, which is split over"
        f" {', '.join(axes)}: it can along grid dims whose blocks have size 1 and the grid's index, and where lowering"
        " reaches it",
        value=call.primitive,
        place=call.source or f"equation {'.'.join(map(str, call.site))}",
        remedy=remedy,
    )


def _kernel_line(call: ForeignCall, graph: Graph, labels: DimMap) -> str:
    """Writes the line that keeps the kernel of a Pallas call whole, with the shapes of its arrays.

    Where it stands in a function with a derivative rule, that function is named; its arrays have the labels of the
    call's arrays of the same shape."""
    letters = _Letters(graph)
    known: dict[tuple[int, ...], list[list[str]]] = collections.defaultdict(list)
    free = {grid_label(dim) for dim in split_dims(call.eqn.params)}
    may_split = set()
    for variables, tensors, of_side in (
        (call.eqn.invars, call.operand_dims, labels.inputs),
        (call.eqn.outvars, call.result_dims, labels.outputs),
    ):
        for variable, dims, names in zip(variables, tensors, of_side, strict=True):
            shape = tuple(variable.aval.shape)
            written = [letters.of(dim, size) for dim, size in zip(dims, shape, strict=True)]
            may_split |= {text for text, name in zip(written, names, strict=True) if name[0] in free}
            known[shape].append(written)
    outer, name = call.eqn, call.eqn.params["name"] or "kernel"
    if call.rule is not None:
        outer, body = call.rule, call_body(call.rule)
        name = name if body is None else _compat.function_name(body)
    sides = []
    for variables in (outer.invars, outer.outvars):
        written = []
        for variable in variables:
            shape = tuple(variable.aval.shape)
            alike = known[shape]
            # an array of a shape that was there before is likely one of the same kind: results come back so
            again = len(alike) > 1 and variables is not outer.outvars
            written.append((alike.pop(0) if again else alike[0]) if alike else [letters.of((), size) for size in shape])
        sides.append(written)
    sides[1] = [
        _like_an_operand(tensor, v.aval.shape, sides[0], outer)
        for tensor, v in zip(sides[1], outer.outvars, strict=True)
    ]
    results = [set(tensor) for tensor in sides[1]]
    in_all = set.intersection(*results) if results else set()
    whole = sorted(in_all - may_split - {"b", "_"})
    text = " -> ".join(", ".join(" ".join(tensor) for tensor in side) for side in sides)
    shapes = " -> ".join(
        ", ".join(f"{v.aval.dtype}[{','.join(map(str, v.aval.shape))}]" for v in side)
        for side in (outer.invars, outer.outvars)
    )
    said = f', whole="{" ".join(whole)}"' if whole else ""
    return f'{name} = splitjax.kernel({name}, dims="{text}"{said}) for {shapes}'


def _like_an_operand(tensor: list[str], shape: Sequence[int], operands: Sequence[list[str]], outer: Any) -> list[str]:
    """Returns the letters of a result, with those of the first operand of its shape in place of letters that no operand
    has: kernels mostly keep the order of dims."""
    alike = [each for each, v in zip(operands, outer.invars, strict=True) if tuple(v.aval.shape) == tuple(shape)]
    known = {letter for each in operands for letter in each}
    if not alike:
        return tensor
    return [
        letter if letter in known or other in tensor else other for letter, other in zip(tensor, alike[0], strict=True)
    ]


class _Letters:
    """Gives letters to dims: one to each dim class, `b` to the examples, `_` to dims of size 1. Lives for one error."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._of_class: dict[int, str] = {}
        self._left = iter([*"acdefghijkmnpqrstuvwxyz", *(f"d{number}" for number in range(100))])

    def of(self, dim: Dim, size: int) -> str:
        """Returns the letter of a dim with these atoms; another one each time for a dim without."""
        if size == 1:
            return "_"
        if self._graph.is_example(dim):
            return "b"
        if not dim:
            return next(self._left)
        label = self._graph.local[dim[0]]
        if label not in self._of_class:
            self._of_class[label] = next(self._left)
        return self._of_class[label]
