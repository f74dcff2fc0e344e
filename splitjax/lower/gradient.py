"""Offers the users' `value_and_grad` and `grad`: those of JAX, in a boundary that a parallel step can see.

A loss function comes in, as for `jax.value_and_grad`; a function of the same meaning comes out. Inside a trace
(`jax.jit`, `jax.make_jaxpr`, `parallelize`) a call of it binds the equation of `step.boundary`. With no tracer among
its arguments the call is plainly `jax.value_and_grad`. What JAX refuses is refused here in the same cases, before the
equation is bound.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer

from splitjax import _compat
from splitjax.errors import GradientError
from splitjax.step.boundary import value_and_grad_p
from splitjax.step.positions import traced_as

_IN_SPLITJAX = "splitjax.value_and_grad"


class GradientTypeError(GradientError, TypeError):
    """Reports what `jax.value_and_grad` reports as a `TypeError`: an argument or result of a wrong type, dtype or
    shape."""


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    microbatches: int | None = None,
) -> Callable[..., tuple[Any, Any]]:
    """Differentiates as `jax.value_and_grad` does, in a boundary that a parallel step can see.

    The numbers are those of JAX's function, in any transformation. Where no leaf of the call's arguments is traced, it
    is JAX's function that runs.

    **Arguments:** as `jax.value_and_grad`, and `microbatches`.

    - `fun`: the function to differentiate, with a scalar result; with `has_aux`, a pair (scalar, auxiliary data).
    - `argnums`: the position of the differentiated argument, or the positions of several.
    - `has_aux`: whether `fun` returns auxiliary data beside its value.
    - `holomorphic`: whether `fun` is complex-differentiable; its arguments and result are complex then.
    - `allow_int`: whether integer arguments may be differentiated; their gradients have dtype `float0`.
    - `reduce_axes`: is handed to `jax.value_and_grad` where that runs.
    - `microbatches`: inside a parallel step, accumulate the gradient over this many slices of the batch, with one
      gradient exchange at the end. Never changes the numbers, and has no effect elsewhere.

    Returns a function of the arguments of `fun` that gives (value, gradient), or ((value, aux), gradient) with
    `has_aux`; the gradient has the structure of the differentiated argument, or is a tuple where `argnums` is one.

    Arguments that are not traced and not differentiated (flags, strings, functions) reach `fun` as they are; auxiliary
    leaves that are not traced come back as they are.

    Raises `GradientTypeError` (a `TypeError`) where JAX raises `TypeError`; `GradientError` for a wrong `microbatches`.
    """
    plain = jax.value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, reduce_axes)
    _check_microbatches(microbatches)

    @functools.wraps(plain)
    def value_and_grad_f(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        if not any(_compat.is_abstract(leaf) for leaf in jax.tree.leaves((args, kwargs))):
            return plain(*args, **kwargs)
        call = _Call(fun, argnums, has_aux, holomorphic, allow_int, microbatches)
        return _bind(call, args, kwargs)

    return value_and_grad_f


def grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    reduce_axes: Sequence[Any] = (),
    *,
    microbatches: int | None = None,
) -> Callable[..., Any]:
    """Differentiates as `jax.grad` does, in a boundary that a parallel step can see.

    `fun`, `argnums`, `has_aux`, `holomorphic`, `allow_int`, `reduce_axes` and `microbatches` are those of
    `value_and_grad`, and so is what is raised. Returns a function that gives the gradient, or (gradient, aux) with
    `has_aux`.
    """
    plain = jax.grad(fun, argnums, has_aux, holomorphic, allow_int, reduce_axes)
    full = value_and_grad(fun, argnums, has_aux, holomorphic, allow_int, reduce_axes, microbatches=microbatches)

    @functools.wraps(plain)
    def grad_f(*args: Any, **kwargs: Any) -> Any:
        value, gradient = full(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return grad_f


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of `value_and_grad`, as they apply to a call of the function that it returned."""

    fun: Callable[..., Any]
    argnums: int | Sequence[int]
    has_aux: bool
    holomorphic: bool
    allow_int: bool
    microbatches: int | None

    @property
    def name(self) -> str:
        return getattr(self.fun, "__name__", None) or type(self.fun).__name__


@dataclasses.dataclass(frozen=True)
class _Leaves:
    """The flat arguments of a call, split into operands and what stays in Python."""

    values: tuple[Any, ...]
    tree: Any
    names: tuple[str, ...]
    # per differentiated argument, in the order of argnums, its flat positions
    argument_leaves: tuple[tuple[int, ...], ...]
    argument_trees: tuple[Any, ...]
    differentiated: tuple[int, ...]  # flat positions with a gradient, ascending
    dynamic: tuple[int, ...]  # flat positions that become operands, ascending

    def merge(self, operands: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns (args, kwargs) with `operands` in the places of the dynamic leaves."""
        values = list(self.values)
        for i, operand in zip(self.dynamic, operands, strict=True):
            values[i] = operand
        return jax.tree.unflatten(self.tree, values)


def _bind(call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Binds the boundary's equation for a call with traced arguments, and gives its results JAX's structure."""
    place = _compat.user_frame()
    leaves = _split(call, args, kwargs, place)
    operands = [
        value if isinstance(value, jax.Array) else jnp.asarray(value)
        for value in (leaves.values[i] for i in leaves.dynamic)
    ]
    closed, aux_tree, aux_leaves = _trace_forward(call, leaves, operands, place)
    forward, captured = _compat.detach_consts(closed)
    results = value_and_grad_p.bind(
        *captured,
        *operands,
        forward=forward,
        positions=tuple(len(captured) + leaves.dynamic.index(i) for i in leaves.differentiated),
        holomorphic=call.holomorphic,
        microbatches=None if call.microbatches is None else int(call.microbatches),
        label=f"{call.name} at {place}" if place else call.name,
        names=("captured",) * len(captured) + tuple(leaves.names[i] for i in leaves.dynamic),
    )
    num_aux = len(forward.out_avals) - 1
    value, traced_aux, grads = results[0], iter(results[1 : 1 + num_aux]), results[1 + num_aux :]
    gradient = _gradient_tree(call, leaves, dict(zip(leaves.differentiated, grads, strict=True)))
    if not call.has_aux:
        return value, gradient
    aux = jax.tree.unflatten(aux_tree, [next(traced_aux) if leaf is _TRACED else leaf for leaf in aux_leaves])
    return (value, aux), gradient


def _gradient_tree(call: _Call, leaves: _Leaves, grads: dict[int, Any]) -> Any:
    """Puts the gradients, by flat position, into the structure of the arguments; integers have JAX's empty derivative
    type."""
    trees = []
    for positions, tree in zip(leaves.argument_leaves, leaves.argument_trees, strict=True):
        flat = [grads[i] if i in grads else np.zeros(np.shape(leaves.values[i]), jax.dtypes.float0) for i in positions]
        trees.append(jax.tree.unflatten(tree, flat))
    return trees[0] if isinstance(call.argnums, SupportsIndex) else tuple(trees)


def _split(call: _Call, args: tuple[Any, ...], kwargs: dict[str, Any], place: str) -> _Leaves:
    """Flattens the arguments of a call and says which leaves are differentiated, and which become operands."""
    chosen = _argument_positions(call.argnums, len(args))
    paths, tree = jax.tree_util.tree_flatten_with_path((args, kwargs))
    values = tuple(value for _, value in paths)
    names = _leaf_names(call.fun, [path for path, _ in paths])
    starts = np.cumsum([0, *(len(jax.tree.leaves(arg)) for arg in args)])
    argument_leaves = tuple(tuple(range(int(starts[i]), int(starts[i + 1]))) for i in chosen)
    wanted = sorted({i for positions in argument_leaves for i in positions})
    differentiated = tuple(i for i in wanted if _check_input(values[i], call, names[i], place))
    dynamic = tuple(i for i, value in enumerate(values) if isinstance(value, Tracer) or i in differentiated)
    trees = tuple(jax.tree.structure(args[i]) for i in chosen)
    return _Leaves(values, tree, names, argument_leaves, trees, differentiated, dynamic)


def _trace_forward(
    call: _Call, leaves: _Leaves, operands: list[jax.Array], place: str
) -> tuple[_compat.ClosedJaxpr, Any, list[Any]]:
    """Traces the forward: its closed jaxpr, the tree of aux, and the leaves of aux with `_TRACED` where a result of the
    jaxpr goes."""
    seen: list[tuple[Any, list[Any]]] = []

    def forward(*traced_args: Any, **traced_kwargs: Any) -> tuple[Any, ...]:
        args, kwargs = leaves.merge(jax.tree.leaves((traced_args, traced_kwargs)))
        result = call.fun(*args, **kwargs)
        value, aux = _split_aux(result, call, place)
        _check_output(value, call, place)
        flat, tree = jax.tree.flatten(aux)
        traced = [isinstance(leaf, Tracer) for leaf in flat]
        seen.append((tree, [_TRACED if here else leaf for here, leaf in zip(traced, flat, strict=True)]))
        return (value, *(leaf for here, leaf in zip(traced, flat, strict=True) if here))

    # The operands at their places among the arguments, and nothing at the others: JAX names them as the user does.
    by_position = dict(zip(leaves.dynamic, operands, strict=True))
    args, kwargs = jax.tree.unflatten(leaves.tree, [by_position.get(i) for i in range(len(leaves.values))])
    closed, _ = _compat.trace(traced_as(call.fun, forward), *args, **kwargs)
    tree, flat = seen[-1]
    return closed, tree, flat


class _Traced:
    """Stands for an aux leaf that is a result of the equation."""


_TRACED = _Traced()


def _argument_positions(argnums: int | Sequence[int], num_args: int) -> tuple[int, ...]:
    """Returns the differentiated arguments of a call with `num_args` positional ones, counted from 0."""
    chosen = (operator.index(argnums),) if isinstance(argnums, SupportsIndex) else tuple(argnums)
    for argnum in chosen:
        if not -num_args <= argnum < num_args:
            raise GradientTypeError(
                f"differentiating with respect to argnums={argnums} needs more positional arguments than the {num_args}"
                " given",
                value=argnums,
                place=f"{_IN_SPLITJAX}, argnums",
                remedy="pass the differentiated arguments by position",
            )
    return tuple(int(argnum) % num_args for argnum in chosen)


def _leaf_names(fun: Callable, paths: Sequence[Any]) -> tuple[str, ...]:
    """Names each leaf by its parameter and its path within, such as `params['w']`; `args[i]` where the signature does
    not say."""
    try:
        declared = [
            p.name
            for p in inspect.signature(fun).parameters.values()
            if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
    except (TypeError, ValueError):
        declared = []

    def name(path: Sequence[Any]) -> str:
        is_keyword, which, rest = path[0].idx == 1, path[1], path[2:]
        if is_keyword:
            head = str(which.key)
        else:
            head = declared[which.idx] if which.idx < len(declared) else f"args[{which.idx}]"
        return head + jax.tree_util.keystr(tuple(rest))

    return tuple(name(path) for path in paths)


def _check_microbatches(microbatches: Any) -> None:
    if microbatches is None:
        return
    if isinstance(microbatches, bool) or not isinstance(microbatches, (int, np.integer)) or microbatches < 1:
        raise GradientError(
            "microbatches must be a positive whole number, or None",
            value=microbatches,
            place=f"{_IN_SPLITJAX}, microbatches",
            remedy="give the number of slices to accumulate over",
        )


def _check_input(value: Any, call: _Call, name: str, place: str) -> bool:
    """Returns whether a differentiated leaf has a gradient. Raises `GradientTypeError` where JAX refuses it."""
    where = f"{name} of {call.name}, {place}"
    try:
        aval = jax.typeof(value)
    except TypeError as error:
        raise GradientTypeError(
            "a differentiated argument is not an array",
            value=value,
            place=where,
            remedy="choose the arrays with argnums, and close over the rest",
        ) from error
    dtype = getattr(aval, "dtype", None)
    if dtype is None or not isinstance(aval, ShapedArray):
        raise GradientTypeError(
            "a differentiated argument is not an array", value=aval, place=where, remedy="pass an array"
        )
    if call.holomorphic and not jnp.issubdtype(dtype, np.complexfloating):
        raise GradientTypeError(
            f"holomorphic=True requires complex inputs, but got {dtype}",
            value=dtype,
            place=where,
            remedy="convert the argument to a complex dtype",
        )
    if jnp.issubdtype(dtype, np.inexact):
        return True
    if not call.allow_int:
        raise GradientTypeError(
            f"gradients require real- or complex-valued inputs, but got {dtype}",
            value=dtype,
            place=where,
            remedy="choose the floating-point arguments with argnums, or set allow_int=True",
        )
    return False


def _split_aux(result: Any, call: _Call, place: str) -> tuple[Any, Any]:
    """Returns the value and the auxiliary data of a result of the differentiated function."""
    if not call.has_aux:
        return result, ()
    if not isinstance(result, (list, tuple)) or len(result) != 2:
        raise GradientTypeError(
            "with has_aux=True the function must return a pair (value, aux)",
            value=type(result).__name__,
            place=f"{call.name}, {place}",
            remedy="return (loss, aux)",
        )
    return result[0], result[1]


def _check_output(value: Any, call: _Call, place: str) -> None:
    """Raises `GradientTypeError` unless the value is a scalar of a type that has a gradient."""
    where = f"{call.name}, {place}"
    try:
        aval = jax.typeof(value)
    except TypeError as error:
        raise GradientTypeError(
            "gradients are only defined for functions with a scalar result",
            value=type(value).__name__,
            place=where,
            remedy="return one scalar, and the rest through has_aux=True",
        ) from error
    if getattr(aval, "shape", None) != ():
        raise GradientTypeError(
            "gradients are only defined for functions with a scalar result, and this one has shape"
            f" {getattr(aval, 'shape', None)}",
            value=aval,
            place=where,
            remedy="reduce the result, as with .mean() or .sum()",
        )
    wanted, words = (np.complexfloating, "complex") if call.holomorphic else (np.floating, "real floating-point")
    if not jnp.issubdtype(aval.dtype, wanted):
        raise GradientTypeError(
            f"the differentiated function must have a {words} result, but got {aval.dtype}",
            value=aval.dtype,
            place=where,
            remedy="pass holomorphic=True for a complex result of complex inputs"
            if not call.holomorphic
            else "return a complex value",
        )
