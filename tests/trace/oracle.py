"""An oracle for dim rules that knows no primitive: dims with one label run along each other, so permuting all of them
among the operands permutes them among the results, `f(perm(x)) == perm(f(x))`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from splitjax import _compat
from splitjax.primitives.calls import call_body
from splitjax.primitives.dims import DimMap
from splitjax.primitives.table import OPERATIONS

# Values move along a dim, or are mixed, and it stays what it is: splitting it is meaningful, permuting it is not.
MOVES = {
    "cumsum": lambda params: (params["axis"],),
    "cumprod": lambda params: (params["axis"],),
    "cummax": lambda params: (params["axis"],),
    "cummin": lambda params: (params["axis"],),
    "cumlogsumexp": lambda params: (params["axis"],),
    "rev": lambda params: params["dimensions"],
    "sort": lambda params: (params["dimension"],),
    "fft": lambda params: range(-len(params["fft_lengths"]), 0),
    "pad": lambda params: [d for d, low_high_inner in enumerate(params["padding_config"]) if any(low_high_inner)],
}
# What an element becomes depends on its place, and on no other element along the dim.
LOCAL = {
    "scatter",
    "scatter-add",
    "scatter-sub",
    "scatter-mul",
    "scatter-min",
    "scatter-max",
    "dynamic_update_slice",
    "random_gamma",
    "ragged_dot_general",
}
# What a permutation of a matrix or a linear solver does is opaque: dims that run along each other, and that no rule
# links.
UNLINKED = {"lu", "custom_linear_solve"}
# Labels that tie storage without being a permutation symmetry: rows are dealt to experts in the order of the group
# sizes.
STORAGE = {("ragged_dot_general", "g"), ("ragged_dot_general", ("rows", 0)), ("rng_bit_generator", ("key", 0))}


@dataclasses.dataclass(frozen=True)
class Equation:
    """One equation of a program with the operands that it got and what it makes of them."""

    name: str
    params: dict[str, Any]
    operands: tuple[Any, ...]
    results: tuple[Any, ...]
    run: Callable[..., list[Any]]

    @property
    def dim_map(self) -> DimMap:
        shapes = [tuple(np.shape(v)) for v in self.operands], [tuple(np.shape(v)) for v in self.results]
        return OPERATIONS[self.name].dims(*shapes, self.params)

    @property
    def signature(self) -> Any:
        shapes = tuple((np.shape(v), str(getattr(v, "dtype", ""))) for v in self.operands)
        return self.name, repr(self.params), shapes


def equations(fn: Callable, *args: Any) -> list[Equation]:
    """Runs a program and returns its equations, those inside calls too, without repetitions."""
    found: dict[Any, Equation] = {}
    _walk(jax.make_jaxpr(fn)(*args), jax.tree.leaves(args), found)
    return list(found.values())


def plain(value: Any) -> Any:
    """A numpy array, or an array of keys."""
    return value if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key) else np.asarray(value)


def _walk(jaxpr: Any, leaves: Sequence[Any], found: dict[Any, Equation]) -> list[Any]:
    inner, consts = _compat.open_jaxpr(jaxpr)
    env = dict(zip(inner.constvars, consts, strict=True)) | dict(zip(inner.invars, leaves, strict=True))

    def read(atom):
        return np.asarray(atom.val, atom.aval.dtype) if isinstance(atom, _compat.Literal) else env[atom]

    for eqn in inner.eqns:
        values = [read(a) for a in eqn.invars]
        body = call_body(eqn)
        if body is not None:
            results = _walk(body, values, found)
        else:
            run = functools.partial(lambda eqn, *values: [plain(v) for v in _compat.bind_equation(eqn, values)], eqn)
            results = run(*values)
            one = Equation(eqn.primitive.name, eqn.params, tuple(values), tuple(results), run)
            found.setdefault(one.signature, one)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in inner.outvars]


Place = tuple[int, int, int]  # tensor, dim, factor


def places(dim_map: DimMap) -> tuple[dict[Any, list[Place]], dict[Any, list[Place]]]:
    """Per label, where it stands among the operands and among the results."""
    sides = []
    for tensors in (dim_map.inputs, dim_map.outputs):
        side: dict[Any, list[Place]] = {}
        for t, labels in enumerate(tensors):
            for d, dim in enumerate(labels):
                for f, label in enumerate(dim):
                    side.setdefault(label, []).append((t, d, f))
        sides.append(side)
    return sides[0], sides[1]


def label_size(
    label: Any, where: Sequence[Place], labels: Sequence[Any], values: Sequence[Any], dim_map: DimMap
) -> int:
    t, d, _ = where[0]
    return dim_map.sizes[label] if len(labels[t][d]) > 1 else np.shape(values[t])[d]


def permuted(value: Any, dim: int, factor: int, labels: Sequence[Any], dim_map: DimMap, order: np.ndarray) -> Any:
    """A tensor with one factor of one dim permuted."""
    shape = np.shape(value)
    if len(labels) < 2:
        return value[(slice(None),) * dim + (order,)]
    sizes = [dim_map.sizes[label] for label in labels]
    assert int(np.prod(sizes)) == shape[dim], f"factors {sizes} of a dim of size {shape[dim]}"
    spread = value.reshape(*shape[:dim], *sizes, *shape[dim + 1 :])
    return permuted(spread, dim + factor, 0, (), dim_map, order).reshape(shape)


def apply(
    values: Sequence[Any], where: Sequence[Place], labels: Sequence[Any], dim_map: DimMap, order: np.ndarray
) -> list[Any]:
    out = list(values)
    for t, d, f in where:
        out[t] = permuted(out[t], d, f, labels[t][d], dim_map, order)
    return out


def close(a: Any, b: Any) -> bool:
    if jax.dtypes.issubdtype(getattr(a, "dtype", None), jax.dtypes.prng_key):
        a, b = jax.random.key_data(a), jax.random.key_data(b)
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype.kind in "fcV":
        a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
        return bool(np.allclose(a, b, rtol=2e-4, atol=2e-5, equal_nan=True))
    return bool((a == b).all())


@dataclasses.dataclass(frozen=True)
class Trial:
    """An equation on changed operands, and what is then said of its results."""

    equation: Equation
    operands: tuple[Any, ...]
    judge: Callable[[Sequence[Any]], list[str]]


def problems(found: Sequence[Equation]) -> list[str]:
    """What the dim maps of equations get wrong: labels that do not run along each other, dims without one that do."""
    trials = [trial for one in found for trial in (*violations(one), *missing(one))]
    return [text for trial in trials for text in trial.judge(trial.equation.run(*trial.operands))]


def violations(one: Equation) -> Iterator[Trial]:
    """Trials of all labels of an equation's dim map."""
    dim_map = one.dim_map
    sources, targets = places(dim_map)
    rank = len(dim_map.inputs[0]) if dim_map.inputs else 0
    moved = {d % rank if rank else d for d in MOVES.get(one.name, lambda params: ())(one.params)}  # also from the end
    for label, where in sources.items():
        into = targets.get(label, [])
        size = label_size(label, where, dim_map.inputs, one.operands, dim_map)
        if (
            (not into and len(where) < 2)
            or size < 2
            or any(d in moved for _, d, _ in where)
            or (one.name, label) in STORAGE
        ):
            continue
        order = np.roll(np.arange(size), 1)
        order[:2] = order[:2][::-1] if size > 2 else order[:2]
        want = apply(one.results, into, dim_map.outputs, dim_map, order)

        def judge(made, want=want, where=where, into=into, label=label):
            if all(map(close, made, want)) or (one.name in LOCAL and is_local(one, where, into)):
                return []
            return [f"{one.name}: label {label!r} at operands {where} and results {into}"]

        yield Trial(one, tuple(apply(one.operands, where, dim_map.inputs, dim_map, order)), judge)


def is_local(one: Equation, where: Sequence[Place], into: Sequence[Place]) -> bool:
    """Whether changing a slice of the operands along a label changes only that slice of the results."""
    size = np.shape(one.operands[where[0][0]])[where[0][1]]
    chosen = size // 2
    operands = list(one.operands)
    for t, d, _ in where:
        value = np.array(operands[t])
        at = (slice(None),) * d + (chosen,)
        value[at] = value[at] + 1 if value.dtype.kind in "iu" else value[at] * 1.5 + 0.25
        operands[t] = value
    got = one.run(*operands)
    for u, result in enumerate(one.results):
        dims = [d for t, d, _ in into if t == u]
        if len(dims) != 1:
            return False
        rest = [k for k in range(size) if k != chosen]
        if not close(np.take(got[u], rest, dims[0]), np.take(result, rest, dims[0])):
            return False
    return bool(into)


def missing(one: Equation) -> Iterator[Trial]:
    """Trials of dims without a link: does permuting an operand's dim permute a result's?"""
    dim_map = one.dim_map
    sources, targets = places(dim_map)
    linked = {(t, d) for label, where in targets.items() for t, d, _ in where if label in sources}
    for t, labels in enumerate(dim_map.inputs):
        for d, dim in enumerate(labels):
            size = np.shape(one.operands[t])[d]
            if size < 2 or any(label in targets or len(sources[label]) > 1 for label in dim):
                continue
            order = np.roll(np.arange(size), 1)
            operands = list(one.operands)
            operands[t] = permuted(operands[t], d, 0, (), dim_map, order)
            free = [
                (u, e)
                for u, result in enumerate(one.results)
                for e in range(np.ndim(result))
                if (u, e) not in linked and np.shape(result)[e] == size
            ]
            if not free or all(map(close, operands, one.operands)):
                continue  # no candidate, or constant along the dim

            def judge(made, t=t, d=d, order=order, free=free):
                texts = []
                for u, e in free:
                    want = permuted(one.results[u], e, 0, (), dim_map, order)
                    if close(made[u], want) and not close(want, one.results[u]):
                        texts.append(f"{one.name}: dim {d} of operand {t} runs along dim {e} of result {u}")
                return texts if one.name not in UNLINKED else []

            yield Trial(one, tuple(operands), judge)
