"""Makes the equations of the forward and the backward pass of a kernel that is kept whole (`step.kernel`).

A kernel's function, its dims and the types of its operands come in; two functions with dims of their own come out: one
that gives residuals besides the results, and one from residuals and cotangents to gradients. Both are traced again at
the local shapes of a device's part, as the kernel is.

Which dim of a residual runs along which label is found by tracing the derivative once more for each label, with a
smaller size along it. A residual of which that does not tell is not handed on: then the backward pass starts from the
operands, and runs the forward pass once more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from splitjax import _compat
from splitjax.primitives.dims import DimMap, Label, Labels
from splitjax.primitives.foreign.wrapped import KernelDims

Types = Sequence[jax.ShapeDtypeStruct]
Fn = Callable[..., list[Any]]


@dataclasses.dataclass(frozen=True)
class KernelDerivative:
    """Holds the two passes of a kernel's derivative.

    - `forward`: operands -> results and residuals, with dims.
    - `backward`: operands at `kept`, residuals, cotangents of `results` -> gradients of the operands at `positions`,
      with dims.
    - `positions`, `results`, `kept`: positions of floating-point operands and results, and of the operands that the
      backward pass reads.
    """

    forward: tuple[Fn, KernelDims]
    backward: tuple[Fn, KernelDims]
    positions: tuple[int, ...]
    results: tuple[int, ...]
    kept: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Traced:
    """Holds a kernel's derivative, traced at certain types.

    - `forward`: operands -> results and residuals. `backward`: residuals and cotangents of floating-point results ->
      gradients of floating-point operands.
    - `count`: how many results there are. `results`: which of them are floating point.
    """

    forward: Any
    backward: Any
    count: int
    results: tuple[int, ...]

    @property
    def residuals(self) -> list[Any]:
        """The types of the residuals."""
        return list(self.forward.out_avals[self.count :])

    def sources(self) -> list[int | None]:
        """Tells of each residual which operand it is; None where it is none."""
        inner, _ = _compat.open_jaxpr(self.forward)
        position = {var: i for i, var in enumerate(inner.invars)}
        return [None if isinstance(v, _compat.Literal) else position.get(v) for v in inner.outvars[self.count :]]

    def depends(self) -> list[frozenset[int]]:
        """Tells of each residual which operands it depends on."""
        inner, _ = _compat.open_jaxpr(self.forward)
        known: dict[Any, frozenset[int]] = {var: frozenset((i,)) for i, var in enumerate(inner.invars)}
        read = lambda atom: frozenset() if isinstance(atom, _compat.Literal) else known.get(atom, frozenset())
        for eqn in inner.eqns:
            made = frozenset().union(*(read(atom) for atom in eqn.invars))
            known.update((var, made) for var in eqn.outvars)
        return [read(atom) for atom in inner.outvars[self.count :]]


def derivative(fn: Fn, dims: KernelDims, types: Types) -> KernelDerivative:
    """Returns the two passes of the derivative of a kernel.

    **Arguments:** `fn`: operands -> list of results. `dims`: of them. `types`: of the operands, at which it is traced
    here."""
    traced = _trace(fn, types)
    positions = _floating(types)
    fitted = dims.fitted([of.shape for of in types], [of.shape for of in traced.forward.out_avals[: traced.count]])
    found = _residual_dims(fn, dims, types, traced, fitted)
    cotangents = tuple(dims.results[k] for k in traced.results)
    gradients = tuple(dims.operands[i] for i in positions)
    if found is None:
        everything = tuple(range(len(types)))
        back = KernelDims((*dims.operands, *cotangents), gradients, dims.whole, adds=True)
        return KernelDerivative(
            (fn, dims), (functools.partial(_again, fn, len(types)), back), positions, traced.results, everything
        )
    sources = traced.sources()
    new = tuple(k for k, source in enumerate(sources) if source is None)
    kept = tuple(sorted({source for source in sources if source is not None}))
    handed_on = tuple(found[k] for k in new)
    forward = dataclasses.replace(dims, results=(*dims.results, *handed_on))
    back = KernelDims((*(dims.operands[i] for i in kept), *handed_on, *cotangents), gradients, dims.whole, adds=True)
    place = {
        **{("operand", i): at for at, i in enumerate(kept)},
        **{("new", k): len(kept) + at for at, k in enumerate(new)},
    }
    order = tuple(place["new", k] if source is None else place["operand", source] for k, source in enumerate(sources))
    shapes = [
        *(types[i].shape for i in kept),
        *(traced.residuals[k].shape for k in new),
        *(traced.forward.out_avals[k].shape for k in traced.results),
    ]
    pull = _Pullback(fn, tuple(types), fitted, order, back, tuple(tuple(shape) for shape in shapes))
    push = functools.partial(_with_residuals, fn, new)
    return KernelDerivative((push, forward), (pull, back), positions, traced.results, kept)


def _with_residuals(fn: Fn, chosen: Sequence[int], *operands: Any) -> list[Any]:
    """Evaluates a kernel, and returns its results with the residuals at `chosen`."""
    results, residuals, _ = _forward(fn, operands)
    return [*results, *(residuals[k] for k in chosen)]


def _again(fn: Fn, count: int, *operands_and_cotangents: Any) -> list[Any]:
    """Evaluates a kernel once more, on the first `count` values, and pulls the cotangents behind them back."""
    operands, cotangents = operands_and_cotangents[:count], operands_and_cotangents[count:]
    _, residuals, tree = _forward(fn, operands)
    return list(jax.tree.unflatten(tree, residuals)(list(cotangents)))


@dataclasses.dataclass(frozen=True, eq=False)
class _Pullback:
    """Pulls cotangents back from residuals, at the shapes of whatever part it is given.

    - `fn`, `types`, `fitted`: the kernel, the types of its whole operands, and their labels.
    - `order`: of each residual its place among the values that are given.
    - `dims`, `shapes`: of the values that are given, on the whole.
    """

    fn: Fn
    types: tuple[jax.ShapeDtypeStruct, ...]
    fitted: DimMap
    order: tuple[int, ...]
    dims: KernelDims
    shapes: tuple[tuple[int, ...], ...]

    def __call__(self, *values: Any) -> list[Any]:
        traced = _trace(self.fn, self._local_types(values))
        cotangents = values[len(values) - len(traced.results) :]
        return _compat.eval_jaxpr(traced.backward, (), *(values[k] for k in self.order), *cotangents)

    def _local_types(self, values: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of the operands whose residuals and cotangents have the shapes of `values`."""
        gradients = [self.types[i].shape for i in _floating(self.types)]
        labels = self.dims.fitted(self.shapes, gradients).inputs
        part: dict[Label, tuple[int, int]] = {}
        for dims, whole, value in zip(labels, self.shapes, values, strict=True):
            part |= {dim[0]: (value.shape[d], whole[d]) for d, dim in enumerate(dims) if dim}
        return [
            jax.ShapeDtypeStruct(
                tuple(
                    size * part[dim[0]][0] // part[dim[0]][1] if dim and dim[0] in part else size
                    for dim, size in zip(dims, of.shape, strict=True)
                ),
                of.dtype,
            )
            for dims, of in zip(self.fitted.inputs, self.types, strict=True)
        ]


def _forward(fn: Fn, operands: Sequence[Any]) -> tuple[list[Any], list[Any], Any]:
    """Evaluates a kernel, and returns its results, its residuals, and the structure of its pullback."""
    positions = _floating(operands)

    def function(*differentiated: Any) -> tuple[list[Any], list[Any]]:
        merged = list(operands)
        for i, value in zip(positions, differentiated, strict=True):
            merged[i] = value
        outputs = fn(*merged)
        floating = _floating(outputs)
        return [outputs[k] for k in floating], outputs

    _, pull, results = jax.vjp(function, *(operands[i] for i in positions), has_aux=True)
    residuals, tree = jax.tree.flatten(pull)
    return list(results), residuals, tree


def _trace(fn: Fn, types: Types) -> _Traced:
    """Traces the derivative of a kernel for operands of `types`."""
    found: list[Any] = []

    def forward(*operands: Any) -> list[Any]:
        results, residuals, tree = _forward(fn, operands)
        found[:] = [tree, len(results)]
        return [*results, *residuals]

    closed, shapes = _compat.trace(forward, *types)
    tree, count = found
    floating = _floating(shapes[:count])
    backward, _ = _compat.trace(
        lambda *values: jax.tree.unflatten(tree, values[: len(shapes) - count])(list(values[len(shapes) - count :])),
        *shapes[count:],
        *(shapes[k] for k in floating),
    )
    return _Traced(closed, backward, count, floating)


def _residual_dims(fn: Fn, dims: KernelDims, types: Types, traced: _Traced, fitted: DimMap) -> list[str] | None:
    """Returns the dims of each residual as a group of a notation; None where some residual's cannot be told."""
    shapes = [tuple(of.shape) for of in traced.residuals]
    labels = [["_"] * len(shape) for shape in shapes]
    sources, depends = traced.sources(), traced.depends()
    for label in dims.may_split(fitted):
        having = {i for i, tensor in enumerate(fitted.inputs) if any(label in dim for dim in tensor)}
        size = _size(fitted, label, types)
        smaller = _at(types, fitted.inputs, label, _smallest_factor(size))
        try:
            other = [tuple(of.shape) for of in _trace(fn, smaller).residuals]
        except Exception:  # whatever the kernel raises of a size that it does not take
            return None
        if [len(shape) for shape in other] != [len(shape) for shape in shapes]:
            return None
        for k, (before, after) in enumerate(zip(shapes, other, strict=True)):
            if sources[k] is not None:
                continue
            changed = [d for d, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
            if len(changed) > 1 or any(before[d] != size or labels[k][d] != "_" for d in changed):
                return None
            if not changed and depends[k] & having:
                return None
            for d in changed:
                labels[k][d] = str(label)
    return [" ".join(tensor) for tensor in labels]


def _size(fitted: DimMap, label: Label, types: Types) -> int:
    """Returns the size of a label that leads some dim of an operand."""
    for tensor, of in zip(fitted.inputs, types, strict=True):
        for dim, size in zip(tensor, of.shape, strict=True):
            if dim[:1] == (label,):
                return size if len(dim) == 1 else fitted.sizes[label]
    raise AssertionError(f"no operand has {label!r}")


def _at(types: Types, labels: Sequence[Labels], label: Label, factor: int) -> list[jax.ShapeDtypeStruct]:
    """Returns `types` with the dims that `label` leads smaller by `factor`."""
    return [
        jax.ShapeDtypeStruct(
            tuple(size // factor if dim[:1] == (label,) else size for dim, size in zip(dims, of.shape, strict=True)),
            of.dtype,
        )
        for dims, of in zip(labels, types, strict=True)
    ]


def _smallest_factor(size: int) -> int:
    return next(factor for factor in range(2, size + 1) if size % factor == 0)


def _floating(values: Sequence[Any]) -> tuple[int, ...]:
    return tuple(i for i, value in enumerate(values) if jnp.issubdtype(value.dtype, jnp.inexact))
