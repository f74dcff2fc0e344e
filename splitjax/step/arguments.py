"""Takes the arguments of a step apart: binding, paths, roles, and the signature that a compiled program serves.

A call's positional and keyword arguments and the decorator's argument numbers come in; a `Bound` comes out: flat leaves
with their paths and roles, and a hashable `Signature`. Everything behind it (tracing, planning, `jax.jit`) works on
flat leaves, and everything that users read names them by path.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath

from splitjax._layout_names import Written, written_names
from splitjax.errors import BatchError, StateError, TraceError
from splitjax.step.positions import ArgumentRoles, Default, step_name, with_static_defaults
from splitjax.trace.flow import Argument

TreeStructure = Any  # `jax.tree_util.PyTreeDef`, which JAX's stubs do not offer as a type
Aval = tuple[tuple[int, ...], str, bool]  # shape, dtype and weak type of an array


@dataclasses.dataclass(frozen=True)
class Signature:
    """Holds what a compiled program depends on.

    **Attributes:**

    - `tree`: the structure of the arguments that are not static.
    - `avals`: shape, dtype and weak type of their leaves.
    - `static`: (position, value) of the static arguments.
    - `written`: (position, what their users wrote) of arguments with boxes of Flax Linen that name layouts; `tree` is
      the same for names of a user's.
    """

    tree: TreeStructure
    avals: tuple[Aval, ...]
    static: tuple[tuple[int, Any], ...]
    written: tuple[tuple[int, tuple[Written, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Bound:
    """Holds the arguments of one call, taken apart: arrays by flat position, static values aside.

    **Attributes:**

    - `args`: the positional arguments, static ones included.
    - `leaves`: the leaves of the arguments that are not static, in order.
    - `spans`: the range of every positional argument among `leaves`; empty for static ones.
    - `signature`: what a program for this call depends on.
    - `arguments`: path and role of every leaf.
    """

    args: tuple[Any, ...]
    leaves: tuple[Any, ...]
    spans: tuple[tuple[int, int], ...]
    signature: Signature
    arguments: tuple[Argument, ...]


def bind(fn: Callable[..., Any], options: ArgumentRoles, args: tuple[Any, ...]) -> Bound:
    """Takes a call of the step `fn` apart. `options`: which of its arguments are what. `args`: the arguments, by
    position.

    Raises `StateError` where a state argument is missing or a static one cannot be hashed,
    `TraceError` for a leaf that is not an array, `BatchError` for such a leaf or a list of numbers in a batch, and
    where batch arrays disagree on the number of examples."""
    args = with_static_defaults(options, args)
    for number in options.state_argnums:
        if number >= len(args) or isinstance(args[number], Default):
            raise StateError(
                f"state argument {number} is missing",
                value=f"{len(args)} arguments",
                place=f"call of {step_name(fn)}",
                remedy="pass the state by position, or correct state_argnums",
            )
    leaves: list[Any] = []
    arguments: list[Argument] = []
    spans, static, written = [], [], []
    for number, arg in enumerate(args):
        start = len(leaves)
        if number in options.static_argnums:
            static.append((number, _hashable(arg, number, fn)))
            spans.append((start, start))
            continue
        is_state, is_batch = number in options.state_argnums, number in options.batch_argnums
        if is_batch:
            check_batch(arg, lambda path, number=number: leaf_path(options, number, path))
        for path, leaf in jax.tree_util.tree_leaves_with_path(arg):
            arguments.append(Argument(leaf_path(options, number, path), is_state, is_batch))
            leaves.append(leaf)
        spans.append((start, len(leaves)))
        if names := written_names(arg):
            written.append((number, names))
    tree = jax.tree.structure([arg for number, arg in enumerate(args) if number not in options.static_argnums])
    avals = tuple(describe(leaf, argument.path) for leaf, argument in zip(leaves, arguments, strict=True))
    signature = Signature(tree, avals, tuple(static), tuple(written))
    return Bound(tuple(args), tuple(leaves), tuple(spans), signature, tuple(arguments))


def check_batch(batch: Any, path_of: Callable[[KeyPath], str], static: bool = False) -> None:
    """Raises `BatchError` for what cannot hold examples: a list of Python numbers, which is a pytree of scalars and no
    array, and leaves that are neither arrays nor numbers.

    **Arguments:** `batch`: an argument of a step. `path_of`: gives the path of a leaf for a message, from its key path
    in `batch`. `static`: leaves that are neither are part of the program, as in steps over modules, and pass."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_list_of_numbers):
        if isinstance(leaf, list):
            raise BatchError(
                "a list of numbers in a batch is no array, but as many scalars",
                value=leaf,
                place=path_of(path),
                remedy="make it an array: numpy.asarray(...); lists of arrays may stay",
            )
        if not static and (
            isinstance(leaf, (str, bytes)) or (isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "US")
        ):
            raise BatchError(
                "a batch holds text, which no device takes",
                value=leaf,
                place=path_of(path),
                remedy="give arrays of numbers, such as ids of words or of classes, and leave names out of the batch",
            )


def _is_list_of_numbers(node: object) -> bool:
    """Returns whether a node of a pytree is a list of numbers, or of such lists."""
    return (
        isinstance(node, list)
        and bool(node)
        and all(isinstance(item, (int, float, complex, np.generic)) or _is_list_of_numbers(item) for item in node)
    )


def leaf_path(options: ArgumentRoles, number: int, path: KeyPath) -> str:
    """Returns the path of a leaf of the argument at position `number`: without the argument's name for a lone state
    argument, with it for all others.

    `options`: names and roles of the arguments. `path`: the leaf's key path (`jax.tree_util`) in its argument."""
    name = options.names[number] if number < len(options.names) else f"arg{number}"
    inner = jax.tree_util.keystr(path, simple=True, separator="/")
    if number in options.state_argnums and len(options.state_argnums) == 1:
        return inner or name
    return f"{name}/{inner}" if inner else name


def source_names(options: ArgumentRoles, bound: Bound) -> list[str]:
    """Returns the name of every array among the arguments of the call `bound` as the user's source has it, in order:
    `state['params']['kernel']`. An argument that a frontend made of the user's says these itself. `options`: names and
    roles of the arguments."""
    names: list[str] = []
    for number, arg in enumerate(bound.args):
        if hasattr(arg, "splitjax_source_names"):
            names += arg.splitjax_source_names()
        elif number not in options.static_argnums:
            name = options.names[number] if number < len(options.names) else f"arg{number}"
            names += [name + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(arg)]
    return names


def argument_names(bound: Bound, num_before: int = 0) -> dict[str, str]:
    """Maps JAX's name of every array among a call's arguments, as compiled programs have it
    (`args[0]['params']['kernel']`), to its path.

    `bound`: the call. `num_before`: how many operands the program takes before the call's arguments."""
    names: list[str] = []
    for number, (start, stop) in enumerate(bound.spans):
        if start < stop:
            paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(bound.args[number])]
            names += [f"args[{num_before + number}]{jax.tree_util.keystr(path)}" for path in paths]
    return {name: argument.path for name, argument in zip(names, bound.arguments, strict=True)}


def describe(leaf: Any, path: str) -> Aval:
    """Returns shape, dtype and weak type of a `leaf`: an array, a number or a `ShapeDtypeStruct`. Raises `TraceError`,
    at its `path`, for anything else."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return tuple(leaf.shape), str(_canonical(leaf.dtype)), bool(getattr(leaf, "weak_type", False))
    try:
        aval = jax.typeof(leaf)
        return tuple(aval.shape), str(aval.dtype), bool(getattr(aval, "weak_type", False))
    except (TypeError, AttributeError):
        raise TraceError(
            "an argument of a parallel step holds something that is not an array",
            value=leaf,
            place=path,
            remedy=(
                "mark the argument with static_argnums; for Equinox modules use splitjax.equinox.parallelize, for NNX"
                " modules splitjax.nnx.parallelize"
            ),
        ) from None


def abstract(leaves: Sequence[Any], avals: Sequence[Aval]) -> list[jax.ShapeDtypeStruct]:
    """Returns the `leaves`, whose shapes, dtypes and weak types are `avals`, as `ShapeDtypeStruct`s."""
    return [
        jax.ShapeDtypeStruct(shape, _canonical(leaf.dtype) if hasattr(leaf, "dtype") else dtype, weak_type=weak)
        for leaf, (shape, dtype, weak) in zip(leaves, avals, strict=True)
    ]


def _canonical(dtype: Any) -> Any:
    """Returns the dtype that JAX gives an array of this dtype: float64 is float32 unless x64 is on; key types stay."""
    return dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)


def _hashable(value: Any, number: int, fn: Callable[..., Any]) -> Any:
    """Returns the value of the static argument at position `number`; raises `StateError` where it has no hash."""
    try:
        hash(value)
    except TypeError:
        raise StateError(
            "a static argument must be hashable",
            value=value,
            place=f"argument {number} of {step_name(fn)}",
            remedy="pass a tuple, a frozen dataclass or a number, or drop it from static_argnums",
        ) from None
    return value


def difference(new: Bound, old: Bound) -> tuple[int, str]:
    """Compares the signatures of a `new` and an `old` call of a step. Returns the number of differences, and the first
    in words."""
    changes = []
    before, after = dict(old.signature.static), dict(new.signature.static)
    changes += [_static_text(n, before.get(n), v) for n, v in after.items() if before.get(n) != v]
    olds = {a.path: d for a, d in zip(old.arguments, old.signature.avals, strict=True)}
    news = {a.path: d for a, d in zip(new.arguments, new.signature.avals, strict=True)}
    changes += [f"{path} is new" for path in news.keys() - olds.keys()]
    changes += [f"{path} is gone" for path in olds.keys() - news.keys()]
    changes += [
        f"{path}: {_text(olds[path])} -> {_text(d)}" for path, d in news.items() if path in olds and olds[path] != d
    ]
    if not changes:
        changes.append("the structure of the arguments changed (a static field of a pytree node)")
    return len(changes), changes[0] + (f" and {len(changes) - 1} more" if len(changes) > 1 else "")


def _static_text(number: int, old: Any, new: Any) -> str:
    """Describes a changed static argument; the frontends' own arguments say what in them changed."""
    say = getattr(new, "splitjax_difference", None)
    return say(old) if say is not None and type(old) is type(new) else f"static argument {number}: {old!r} -> {new!r}"


def _text(aval: Aval) -> str:
    shape, dtype, weak = aval
    return f"{dtype}[{','.join(map(str, shape))}]" + (" (weak type)" if weak else "")
