"""`value_and_grad` and `grad` over NNX objects, as gradient boundaries: split, differentiate a pure function, merge.

What the function changes in its objects (batch statistics, random counts, static attributes, sown values) reaches the
caller's objects, as with `nnx.value_and_grad`. The bookkeeping is NNX's own `update_context`. Only values that changed
are results of the boundary: a parameter that merely passes through would look like an auxiliary result of the loss.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
from flax import nnx
from jax.tree_util import KeyPath

from splitjax import _compat
from splitjax._nnx_graph import attribute_text
from splitjax.errors import GradientError
from splitjax.lower import gradient
from splitjax.step.positions import positional

_TAG = "splitjax_value_and_grad"


def value_and_grad(
    f: Callable | None = None,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    microbatches: int | None = None,
) -> Callable:
    """Differentiates as `nnx.value_and_grad` does, as a boundary that a parallel step can see
    (`splitjax.value_and_grad`).

    Outside a trace it is `nnx.value_and_grad`.

    **Arguments:** `f`, `argnums`, `has_aux`, `holomorphic` and `allow_int` as of `nnx.value_and_grad`, and

    - `microbatches`: as `splitjax.value_and_grad`.
    """
    keywords = {"argnums": argnums, "has_aux": has_aux, "holomorphic": holomorphic, "allow_int": allow_int}
    if f is None:
        return functools.partial(value_and_grad, **keywords, microbatches=microbatches)
    plain = nnx.value_and_grad(f, **keywords)
    wanted = _wanted(argnums)
    single = isinstance(argnums, (int, nnx.DiffState))
    bounded = functools.partial(
        gradient.value_and_grad,
        argnums=tuple(wanted),
        has_aux=True,
        holomorphic=holomorphic,
        allow_int=allow_int,
        microbatches=microbatches,
    )
    bounded(f)  # a wrong value of microbatches is an error here

    @functools.wraps(f)
    def value_and_grad_f(*args: Any, **kwargs: Any) -> Any:
        if not any(_compat.is_abstract(leaf) for leaf in _array_leaves((args, kwargs))):
            return plain(*args, **kwargs)
        args = positional(f, args, kwargs)
        value, aux, gradients = _differentiate(
            f, args, {n % len(args): only for n, only in wanted.items()}, has_aux, bounded
        )
        return ((value, aux) if has_aux else value), gradients[0] if single else gradients

    return value_and_grad_f


def grad(
    f: Callable | None = None,
    *,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    microbatches: int | None = None,
) -> Callable:
    """Differentiates as `nnx.grad` does, as a boundary that a parallel step can see. `f`, `argnums`, `has_aux`,
    `holomorphic`, `allow_int` and `microbatches` are those of `value_and_grad`.

    Returns a function that gives the gradient, or (gradient, aux) with `has_aux`.
    """
    keywords = {"argnums": argnums, "has_aux": has_aux, "holomorphic": holomorphic, "allow_int": allow_int,
                "microbatches": microbatches}  # fmt: skip
    if f is None:
        return functools.partial(grad, **keywords)
    full = value_and_grad(f, **keywords)

    @functools.wraps(f)
    def grad_f(*args: Any, **kwargs: Any) -> Any:
        value, gradients = full(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return grad_f


def _wanted(argnums: Any) -> dict[int, Any]:
    """Differentiated argument number -> filter of the variables that are, in order."""
    chosen = (argnums,) if isinstance(argnums, (int, nnx.DiffState)) else tuple(argnums)
    wanted: dict[int, Any] = {}
    for choice in chosen:
        number, only = (choice.argnum, choice.filter) if isinstance(choice, nnx.DiffState) else (int(choice), nnx.Param)
        if number in wanted:
            raise GradientError(
                "argnums names an argument twice",
                value=number,
                place="splitjax.nnx.value_and_grad, argnums",
                remedy="join the two filters with nnx.Any",
            )
        wanted[number] = only
    return wanted


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where an array stands in an object, as a key of a pytree that reads as the user's source has it: `.o.bias`."""

    path: KeyPath

    def __str__(self) -> str:
        # A variable's value is an attribute of it, and its source name is the variable's.
        parts = [getattr(key, "key", key) for key in self.path if not isinstance(key, jax.tree_util.GetAttrKey)]
        return attribute_text(parts)


@jax.tree_util.register_pytree_with_keys_class
class _Part:
    """An object among the arguments of the pure function: the variables that are differentiated, and what it was."""

    def __init__(self, state: Any, number: int) -> None:
        self.state, self.number = state, number

    def tree_flatten_with_keys(self) -> tuple[list, Any]:
        leaves, tree = jax.tree_util.tree_flatten_with_path(self.state)
        return [(_Place(path), leaf) for path, leaf in leaves], (tree, self.number)

    def tree_flatten(self) -> tuple[list, Any]:
        leaves, tree = jax.tree.flatten(self.state)
        return leaves, (tree, self.number)

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Sequence[Any]) -> _Part:
        tree, number = aux
        return cls(jax.tree.unflatten(tree, leaves), number)


def _is_object(value: Any) -> bool:
    return isinstance(value, nnx.Pytree | nnx.Variable)


def _is_part(value: Any) -> bool:
    return isinstance(value, _Part)


def _map_objects(fn: Callable, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: fn(leaf) if _is_object(leaf) else leaf, tree, is_leaf=_is_object)


def _array_leaves(tree: Any) -> list[Any]:
    arrays: list[Any] = []
    for leaf in jax.tree.leaves(tree, is_leaf=_is_object):
        arrays += jax.tree.leaves(nnx.flatten(leaf, with_paths=False)[1]) if _is_object(leaf) else [leaf]
    return arrays


def _differentiate(
    f: Callable, args: tuple, wanted: dict[int, Any], has_aux: bool, bounded: Callable
) -> tuple[Any, Any, tuple]:
    """Value, aux, and one gradient per wanted argument."""
    _check_sharing(f, args, wanted)
    graphs: list[Any] = []
    rest: list[tuple] = []  # per object, the states that are not differentiated
    traced: list[_Outside] = []

    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as entered:
            splitting = cast("nnx.SplitContext", entered)  # Flax does not say which

            def split(value: Any, number: int) -> _Part:
                states: tuple
                if number not in wanted:
                    graphdef, *others = splitting.split(value)
                    state, states = None, tuple(others)
                elif isinstance(value, nnx.Variable):
                    graphdef, state = splitting.split(value)
                    states = ()
                else:
                    graphdef, state, fixed = splitting.split(value, wanted[number], ...)
                    states = (fixed,)
                graphs.append(graphdef)
                rest.append(states)
                return _Part(state, len(graphs) - 1)

            parts = [_map_objects(lambda value, n=n: split(value, n), arg) for n, arg in enumerate(args)]

        @functools.wraps(f)
        def pure(*inner: Any) -> Any:
            known = dict(zip(map(id, jax.tree.leaves((inner, rest))), jax.tree.leaves((parts, rest)), strict=True))
            objects: list[Any] = []
            with nnx.merge_context(_TAG, inner=True) as entered:
                merging = cast("nnx.MergeContext", entered)

                def merge(part: _Part) -> Any:
                    states = (*rest[part.number], *(() if part.state is None else (part.state,)))
                    objects.append(merging.merge(graphs[part.number], *states))
                    return objects[-1]

                merged = [
                    jax.tree.map(lambda leaf: merge(leaf) if _is_part(leaf) else leaf, arg, is_leaf=_is_part)
                    for arg in inner
                ]
            result = f(*merged)
            if has_aux and (not isinstance(result, (tuple, list)) or len(result) != 2):
                return result  # the boundary says what is wrong with it
            value, aux = result if has_aux else (result, None)
            with nnx.split_context(_TAG) as entered:
                outside = _Outside.of(objects, aux, known, cast("nnx.SplitContext", entered))
            traced.append(outside)
            return value, outside.values

        (value, new), gradients = bounded(pure)(*parts)
        with nnx.merge_context(_TAG, inner=False) as context:
            aux = traced[-1].merge(new, context)
    gradients = tuple(
        jax.tree.map(lambda leaf: leaf.state if _is_part(leaf) else leaf, gradient, is_leaf=_is_part)
        for gradient in gradients
    )
    return value, aux, gradients


class _Outside:
    """Holds what a function leaves behind, split: the states of its objects after it, and its auxiliary result."""

    def __init__(self, graphs: list[Any], num_arguments: int, tree: Any, old: list[Any], values: list[Any]) -> None:
        self.graphs, self.num_arguments, self.tree, self.old, self.values = graphs, num_arguments, tree, old, values

    @classmethod
    def of(cls, objects: Sequence[Any], aux: Any, known: dict[int, Any], context: Any) -> _Outside:
        """`known`: identity of a value inside the trace -> the value outside that it is."""
        graphs: list[Any] = []

        def split(value: Any) -> _Part:
            graphdef, state = context.split(value)
            graphs.append(graphdef)
            return _Part(state, len(graphs) - 1)

        after = [split(node) for node in objects]
        aux = _map_objects(split, aux)
        leaves, tree = jax.tree.flatten((after, aux))
        values = [leaf for leaf in leaves if id(leaf) not in known]
        old = [(known[id(leaf)],) if id(leaf) in known else None for leaf in leaves]
        return cls(graphs, len(objects), tree, old, values)

    def merge(self, new: Sequence[Any], context: Any) -> Any:
        """Updates the caller's objects, and returns the auxiliary result."""
        values = iter(new)
        after, aux = jax.tree.unflatten(self.tree, [next(values) if old is None else old[0] for old in self.old])
        for part in after:
            context.merge(self.graphs[part.number], part.state)
        return jax.tree.map(
            lambda leaf: context.merge(self.graphs[leaf.number], leaf.state) if _is_part(leaf) else leaf,
            aux,
            is_leaf=_is_part,
        )


def _check_sharing(f: Callable, args: tuple, wanted: dict[int, Any]) -> None:
    """Raises `GradientError` where a variable is differentiated in one place and held fixed in another."""
    seen: dict[int, tuple[bool, str]] = {}
    for number, arg in enumerate(args):
        matches = nnx.filterlib.to_predicate(wanted[number]) if number in wanted else (lambda path, value: False)
        for leaf in jax.tree.leaves(arg, is_leaf=_is_object):
            for path, value in nnx.iter_graph(leaf) if _is_object(leaf) else ():
                if isinstance(value, nnx.Variable):
                    chosen = number in wanted and (leaf is value or matches(path, value))
                    place = f"argument {number}" + "".join(f"/{part}" for part in path)
                    before, where = seen.setdefault(id(value), (chosen, place))
                    if before != chosen:
                        raise GradientError(
                            "a variable is differentiated in one argument and held fixed in another",
                            value=[where, place],
                            place=f"splitjax.nnx.value_and_grad of {getattr(f, '__name__', f)}",
                            remedy="pass the object once, or name both arguments in argnums",
                        )
