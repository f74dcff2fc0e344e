"""Keeps a kernel whole in a traced step: `splitjax.kernel`, and the equation that it binds.

A function of arrays and a notation of its dims come in; a function that does the same comes out. On traced arrays it
binds one equation, whose parameters hold the function: lowering traces it again at the shapes of a device's part. It
exists because nobody can split what a Pallas kernel or a foreign call does, while its writer knows along which dims it
may run on parts.

The equation's parameters: `fn` (operands -> list of results), `dims` (`KernelDims`), `name` (for messages).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.errors import KernelError
from splitjax.primitives.dims import DimMap, Label, Labels
from splitjax.primitives.foreign.wrapped import KERNEL, KernelDims, kernel_dims
from splitjax.step.kernel_derivative import Types, derivative

Params = Mapping[str, Any]


class Kernel:
    """Does what the function does that it was made of (`kernel`), and keeps it whole in a parallel step.

    - `fn`: the function. `dims`: its dims.
    """

    def __init__(self, fn: Callable[..., Any], dims: KernelDims) -> None:
        self.fn = fn
        self.dims = dims
        functools.update_wrapper(self, fn, updated=())

    def __repr__(self) -> str:
        return f"splitjax.kernel({_name(self.fn)}, dims={self.dims.notation!r})"

    def __call__(self, *operands: Any, **options: Any) -> Any:
        """Calls the function. `options` go to it as they are, and hold no arrays that are differentiated or split."""
        if not any(_compat.is_abstract(operand) for operand in operands):
            return self.fn(*operands, **options)
        self._check(operands, options)
        values = [jnp.asarray(operand) for operand in operands]
        closed, shape = _compat.trace(lambda *arrays: self.fn(*arrays, **options), *_types(values))
        leaves, tree = jax.tree.flatten(shape)
        captured = next((value for value in _compat.open_jaxpr(closed)[1] if isinstance(value, Tracer)), None)
        if captured is not None:
            raise KernelError(
                "the function of a kernel closes over a traced array",
                value=captured,
                place=repr(self),
                remedy="pass it by position, and give it a group of labels in dims: each device takes its part of it",
            )
        if len(leaves) != len(self.dims.results):
            raise KernelError(
                f"the dims have {len(self.dims.results)} results, the kernel gives {len(leaves)}",
                value=self.dims.notation,
                place=repr(self),
                remedy="write a group of labels for each array that it returns, separated by commas",
            )
        dims = self.dims.spelt_out([value.ndim for value in values], [len(leaf.shape) for leaf in leaves])
        dims.fitted([value.shape for value in values], [leaf.shape for leaf in leaves])
        fn = lambda *arrays: jax.tree.leaves(self.fn(*arrays, **options))
        return jax.tree.unflatten(tree, kernel_p.bind(*values, fn=fn, dims=dims, name=_name(self.fn)))

    def check(self, *operands: jax.Array, rtol: float = 1e-3, **options: Any) -> None:
        """Calls the function on whole `operands` and on halves of them, along each dim along which a plan may split it,
        and raises `KernelError` for one along which the halves give other numbers.

        **Arguments:** `operands`: arrays on a device that the function runs on. `rtol`: by how much numbers may differ,
        of the largest number of a result. `options`: as in a call. Dims of odd size are not tried."""
        expected = jax.tree.leaves(self.fn(*operands, **options))
        fitted = self.dims.fitted([np.shape(value) for value in operands], [value.shape for value in expected])
        for label in self.dims.may_split(fitted):
            sizes = label_sizes(fitted, [np.shape(value) for value in operands])
            if sizes[label] % 2:
                continue
            halves = [
                jax.tree.leaves(self.fn(*_half(operands, fitted.inputs, label, half), **options)) for half in (0, 1)
            ]
            for position, whole in enumerate(expected):
                dim = _dim_of(fitted.outputs[position], label)
                joined = jnp.concatenate([half[position] for half in halves], dim)
                error = float(jnp.abs(joined - whole).max()) if joined.shape == whole.shape else float("inf")
                if not error <= rtol * float(jnp.abs(whole).max()):
                    raise KernelError(
                        f"on halves along {label!r} it gives other numbers than on the whole",
                        value=self.dims.notation,
                        place=repr(self),
                        remedy=f"say that the dim is whole: splitjax.kernel(..., whole={str(label)!r})",
                    )

    def _check(self, operands: Sequence[Any], options: Mapping[str, Any]) -> None:
        """Raises `KernelError` for a call that does not fit the dims."""
        if len(operands) != len(self.dims.operands):
            raise KernelError(
                f"the dims have {len(self.dims.operands)} operands, the call {len(operands)}",
                value=self.dims.notation,
                place=repr(self),
                remedy="write a group of labels for each operand, separated by commas; what is no array is an option",
            )
        traced = next((key for key, value in options.items() if isinstance(value, Tracer)), None)
        if traced is not None:
            raise KernelError(
                "a traced array is passed by keyword",
                value=traced,
                place=repr(self),
                remedy="pass arrays by position, and give each a group of labels in dims",
            )


def kernel(fn: Callable[..., Any], dims: str, *, whole: str = "") -> Kernel:
    """Keeps a kernel whole in parallel steps: a Pallas or a foreign call, or any function of arrays, with a derivative
    rule of its own or without.

    Under a plan that splits some of its dims every device runs it on its part, forward and backward: it is traced again
    at the local shapes, inside a `shard_map`. Elsewhere it is just the call.

    **Arguments:**

    - `fn`: the function. It takes arrays by position, and returns an array or a tuple of them.
    - `dims`: its dims, operands and results separated by commas: `"b s h d, b t h d, b t h d -> b s h d"`, for
      attention with `whole="s d"`. `(h d)` is a dim made of factors, `...` stands for leading dims, `_` for a dim that
      has nothing to do with others. A label is one dim in all arrays that have it. Along a label that every result has
      and that `whole` does not name, it promises that parts of the operands give that part of the results; an operand
      without the label is whole on every device, and its gradient is summed over them. A label that some result lacks
      is whole.
    - `whole`: labels, separated by blanks, that are whole although every result has them, because entries influence
      each other or the kernel counts them: `"s d"` for causal attention. Without it all labels of the results may be
      split.

    Raises `TraceError` for dims that do not parse or that contradict themselves; a call raises it for shapes that do
    not fit them, and `KernelError` for another number of operands or results. `Kernel.check` tries the promise on
    arrays of yours.
    """
    return Kernel(fn, kernel_dims(dims, whole, _name(fn)))


def _name(fn: Callable[..., Any]) -> str:
    inner = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    return getattr(inner, "__name__", None) or type(inner).__name__


def label_sizes(fitted: DimMap, inputs: Sequence[Sequence[int]]) -> dict[Label, int]:
    """Returns the sizes of the labels that operands of the shapes `inputs` have, by the labels `fitted` to them."""
    sizes = dict(fitted.sizes)
    for labels, shape in zip(fitted.inputs, inputs, strict=True):
        sizes |= {dim[0]: size for dim, size in zip(labels, shape, strict=True) if len(dim) == 1}
    return sizes


def _dim_of(labels: Labels, label: Label) -> int:
    """Returns the position of the dim of a tensor with these `labels` that `label` leads."""
    return next(position for position, dim in enumerate(labels) if dim[:1] == (label,))


def _half(operands: Sequence[Any], labels: Sequence[Labels], label: Label, half: int) -> list[Any]:
    """Returns `operands` with one `half`, 0 or 1, of the dim that `label` leads."""
    return [
        jnp.split(operand, 2, _dim_of(dims, label))[half] if any(label in dim for dim in dims) else operand
        for operand, dims in zip(operands, labels, strict=True)
    ]


def _types(values: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]


def _evaluate(*operands: Any, fn: Callable[..., list[Any]], dims: KernelDims, name: str) -> list[Any]:
    return fn(*operands)


def _result_types(*operands: Any, fn: Callable[..., list[Any]], dims: KernelDims, name: str) -> tuple[list[Any], Any]:
    closed, _ = _compat.trace(fn, *_types(operands))
    results = [_typed(closed.out_avals, operands, dims)] if _are_typed(operands) else [closed.out_avals]
    return list(results[0]), _compat.jaxpr_effects(closed)


def _are_typed(operands: Sequence[Any]) -> bool:
    """Tells whether the types of some operands say over which Explicit mesh axes they lie."""
    meshes = [operand.sharding.mesh for operand in operands]
    return any(AxisType.Explicit in mesh.axis_types for mesh in meshes if not mesh.empty)


def _typed(results: Sequence[Any], operands: Sequence[Any], dims: KernelDims) -> list[ShapedArray]:
    """Returns the types of `results` with the Explicit mesh axes that operands have along the same labels."""
    fitted = dims.fitted([operand.shape for operand in operands], [result.shape for result in results])
    splits = dims.may_split(fitted)
    entries: dict[Label, Any] = {}
    for operand, labels in zip(operands, fitted.inputs, strict=True):
        for dim, entry in zip(labels, operand.sharding.spec, strict=False):
            if dim and entry is not None and dim[0] in splits:
                entries.setdefault(dim[0], entry)
    mesh = next(operand.sharding.mesh for operand in operands if not operand.sharding.mesh.empty)
    return [
        ShapedArray(
            result.shape,
            result.dtype,
            weak_type=result.weak_type,
            sharding=NamedSharding(mesh, PartitionSpec(*(entries.get(dim[0]) if dim else None for dim in labels))),
        )
        for result, labels in zip(results, fitted.outputs, strict=True)
    ]


def _differentiable(*operands: Any, **params: Any) -> list[Any]:
    run = lambda params, operands: kernel_p.bind(*operands, **params)
    return with_derivative(params, _types(operands), run)(*operands)


def with_derivative(
    params: Params, types: Types, run: Callable[[Params, Sequence[Any]], list[Any]]
) -> Callable[..., list[Any]]:
    """Returns the function of a kernel's equation, operands -> results, with its derivative as a `custom_vjp`.

    **Arguments:**

    - `params`: of the equation. `types`: of its operands.
    - `run(params, operands)`: evaluates it, and the equations of the forward and of the backward pass that take its
      place where it is differentiated (`kernel_derivative`).
    """
    rule = functools.cache(lambda: derivative(params["fn"], params["dims"], types))
    name, count = params["name"], len(params["dims"].results)

    @jax.custom_vjp
    def call(*operands: Any) -> list[Any]:
        return list(run(params, operands))

    def forward(*operands: Any) -> tuple[list[Any], Any]:
        fn, dims = rule().forward
        evaluated = list(run({"fn": fn, "dims": dims, "name": name}, operands))
        return evaluated[:count], [*(operands[i] for i in rule().kept), *evaluated[count:]]

    def backward(kept: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        fn, dims = rule().backward
        given = [*kept, *(cotangents[k] for k in rule().results)]
        gradients = iter(run({"fn": fn, "dims": dims, "name": f"{name}_backward"}, given))
        return tuple(
            next(gradients) if i in rule().positions else np.zeros(of.shape, jax.dtypes.float0)
            for i, of in enumerate(types)
        )

    call.defvjp(forward, backward)
    return call


def _batched(places: Sequence[int | None], /, *operands: Any, **params: Any) -> list[Any]:
    """Evaluates a kernel for a batch of operands, as one kernel with a further dim in front."""
    of: KernelDims = params["dims"]
    taken = {label for label in of.notation.replace("(", " ").replace(")", " ").replace(",", " ").split()}
    label = next(name for number in range(len(taken) + 1) if (name := f"batch{number}") not in taken)
    inner: KernelDims = dataclasses.replace(
        of,
        operands=tuple(
            text if dim is None else f"{label} {text}".strip() for text, dim in zip(of.operands, places, strict=True)
        ),
        results=tuple(f"{label} {text}".strip() for text in of.results),
    )
    moved = [value if dim is None else jnp.moveaxis(value, dim, 0) for value, dim in zip(operands, places, strict=True)]
    in_axes = tuple(None if dim is None else 0 for dim in places)
    return kernel_p.bind(*moved, fn=jax.vmap(params["fn"], in_axes=in_axes), dims=inner, name=params["name"])


kernel_p: _compat.Primitive = _compat.define_primitive(KERNEL, _evaluate, _result_types, _differentiable, _batched)
