"""Parallel training steps over Equinox modules, or any pytrees that hold functions, flags and strings beside their
arrays.

As in Equinox's filtered transformations, arrays (JAX's and NumPy's) are traced, and every other leaf (activation
functions, Python numbers, strings) is part of the program: a call that differs in one is planned and compiled anew.
Equinox itself is not imported: all of this holds for any pytree.

```python
@splitjax.equinox.parallelize(mesh={"data": 2, "model": 4})
def train_step(model, opt_state, batch):
    loss, grads = splitjax.equinox.value_and_grad(loss_fn)(model, batch)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), opt_state, loss

model, opt_state = train_step.init(make_states, key, example=(batch,))
model, opt_state, loss = train_step(model, opt_state, batch)
```
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, Unpack, overload

import jax
import jax.numpy as jnp

from splitjax._filtered.call import Call, attach, detach, signature
from splitjax._filtered.options import read_options
from splitjax._filtered.step import FilteredStep
from splitjax._static import ARRAY, Fixed, Half, Static, is_array, partition
from splitjax.lower import gradient
from splitjax.step.arguments import check_batch, leaf_path
from splitjax.step.keywords import ParallelizeOptions, Positions, complete, show_signature
from splitjax.step.positions import Default, call_with, make_options, with_static_defaults

__all__ = ["EquinoxStep", "grad", "parallelize", "value_and_grad"]

P = ParamSpec("P")
R = TypeVar("R")
Q = ParamSpec("Q")
S = TypeVar("S")


_OWN: ParallelizeOptions = {"state_argnums": (0, 1), "batch_argnums": (2,)}


@overload
def parallelize(fn: Callable[P, R], **options: Unpack[ParallelizeOptions]) -> EquinoxStep[P, R]: ...


@overload
def parallelize(
    fn: None = None, **options: Unpack[ParallelizeOptions]
) -> Callable[[Callable[P, R]], EquinoxStep[P, R]]: ...


def parallelize(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Decorates, as `splitjax.parallelize` does, steps whose arguments hold more than arrays, such as Equinox modules.

    **Arguments:** `fn` and `options` as of `splitjax.parallelize`, but for the defaults of `state_argnums` and
    `batch_argnums`, which suit `step(model, opt_state, batch) -> (model, opt_state, loss)`. For
    `step(model, opt_state, x, y)` give `batch_argnums=(2, 3)`; with an `eqx.nn.State`,
    `step(model, state, opt_state, batch)`, give `state_argnums=(0, 1, 2)` and `batch_argnums=3`. States are found again
    among the results by structure, whatever their order.

    **Returns** an `EquinoxStep`, called like the step itself. Results that are not arrays come back as they were
    traced.
    """
    given = complete("parallelize", options, _OWN)
    if fn is None:
        return functools.partial(parallelize, **options)
    positions, keywords = read_options(fn, given)
    step: EquinoxStep[..., Any] = EquinoxStep(fn, positions, keywords, given["state_outnums"])
    return step._as_method(functools.partial(parallelize, **options))


show_signature(parallelize, _OWN)


class _StaticHalves(Static):
    """The static argument of a step over modules, with the static half of each of its arguments."""

    halves: tuple[Half, ...]


class EquinoxStep(FilteredStep[P, R]):
    """A decorated step over modules. Call it like the function it wraps; the methods show, place, compile and reuse its
    plan."""

    def place(self, *states: Any, example: Sequence[Any]) -> Any:
        """Puts existing `states` onto the plan (copies: the originals stay usable). `example`: all other arguments of
        the step, in order. Returns one state, or a tuple of them."""
        call = self._pack(self._arguments(states, example))
        moved = call.step.place(*(call.args[n] for n in call.state_numbers), example=call.example)
        placed = call.rebuild(jax.tree.leaves(moved))
        return placed[0] if len(placed) == 1 else placed

    def like(
        self,
        fn: Callable[Q, S],
        *,
        state_argnums: Positions = (0,),
        batch_argnums: Positions = (1,),
        static_argnums: Positions = (),
        static_argnames: str | Sequence[str] = (),
    ) -> EquinoxStep[Q, S]:
        """Makes a step of `fn` on the same mesh and layouts that returns no state (evaluation, prediction). Nothing is
        donated.

        The defaults of `state_argnums` and `batch_argnums` suit `evaluate(model, batch)`; with an `eqx.nn.State`,
        `evaluate(model, state, batch)`, give `state_argnums=(0, 1)` and `batch_argnums=2`. `static_argnums` and
        `static_argnames` are as in `jax.jit`. The layouts are those of the plan that this step used last.
        """
        options = make_options(fn, state_argnums, batch_argnums, static_argnums, static_argnames, None)
        return EquinoxStep(fn, options, self._keywords, parent=self)

    def _pack(self, args: tuple) -> Call:
        dynamic, halves = [], []
        args = with_static_defaults(self._options, args)
        for number, arg in enumerate(args):
            if number in self._options.static_argnums or isinstance(arg, Default):
                arrays, half = None, _whole(arg)
            else:
                arrays, half = partition(arg)
                if number in self._options.batch_argnums and any(leaf is not ARRAY for leaf in half.leaves):
                    check_batch(arg, functools.partial(leaf_path, self._options, number), static=True)
            dynamic.append(arrays)
            halves.append(half)
        key = tuple((half.tree, half.leaves) for half in halves)
        names = self._options.names
        static = _StaticHalves(key, self._name, lambda: _static_leaves(halves, names))
        static.halves = tuple(halves)
        step = self._step(len(args), lambda: self._over_arrays(len(args)))
        numbers = tuple(n + 1 for n in self._options.state_argnums if n < len(args))

        def rebuild(leaves: Sequence[Any]) -> tuple:
            remaining = iter(leaves)
            mine = [halves[n - 1] for n in numbers]
            return tuple(half.combine([next(remaining) for leaf in half.leaves if leaf is ARRAY]) for half in mine)

        return Call(step, (static, *dynamic), numbers, rebuild)

    def _arranged(self, call: Call, shardings: tuple[Any, ...]) -> tuple[Any, ...]:
        return shardings[1:]

    def _over_states(self, states: tuple[Any, ...], change: Callable[[int, Any], Any]) -> tuple[Any, ...]:
        out = []
        for number, state in zip(self._options.state_argnums, states, strict=True):
            arrays, half = partition(state)
            out.append(half.combine(jax.tree.leaves(change(number + 1, arrays))))
        return tuple(out)

    def _unpack(self, call: Call, result: Any) -> Any:
        return detach(result)

    def _over_arrays(self, num_args: int) -> tuple[Callable, dict[str, Any]]:
        fn, keywords, options = self._fn, self._keyword_only, self._options

        def over_arrays(static: _StaticHalves, *dynamic: Any) -> tuple:
            args = [half.combine(arrays) for half, arrays in zip(static.halves, dynamic, strict=True)]
            return attach(call_with(fn, keywords, args))

        over_arrays.__signature__ = signature(("static",), fn, num_args)
        return over_arrays, {
            "state_argnums": tuple(n + 1 for n in options.state_argnums),
            "batch_argnums": tuple(n + 1 for n in options.batch_argnums),
            "static_argnums": (0,),
            "state_outnums": self._state_outnums,
        }


def _whole(value: Any) -> Half:
    """An argument that is static as a whole."""
    return Half(jax.tree.structure(0), (Fixed(value),))


def _static_leaves(halves: Sequence[Half], names: Sequence[str]) -> dict[str, Any]:
    """Path -> static leaf."""
    by_path = {}
    for number, half in enumerate(halves):
        name = names[number] if number < len(names) else f"arg{number}"
        tree = jax.tree.unflatten(half.tree, half.leaves)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            inner = jax.tree_util.keystr(path, simple=True, separator="/")
            by_path[f"{name}/{inner}" if inner else name] = leaf
    return by_path


def value_and_grad(fun: Callable | None = None, has_aux: bool = False, *, microbatches: int | None = None) -> Callable:
    """Differentiates as `eqx.filter_value_and_grad` does, as a boundary that a parallel step can see
    (`splitjax.value_and_grad`).

    Differentiates `fun` with respect to the floating-point arrays of the first argument. The gradient has that
    argument's structure, with None in place of everything else. With `has_aux`, `fun` returns (value, auxiliary
    results), which may hold anything. `microbatches`: as `splitjax.value_and_grad`.
    """
    if fun is None:
        return functools.partial(value_and_grad, has_aux=has_aux, microbatches=microbatches)
    gradient.value_and_grad(fun, microbatches=microbatches)  # a wrong value is an error here

    @functools.wraps(fun)
    def value_and_grad_f(first: Any, /, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten(first)
        chosen = [is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves]
        differentiated = jax.tree.unflatten(
            tree, [leaf if here else None for here, leaf in zip(chosen, leaves, strict=True)]
        )
        others = [leaf for here, leaf in zip(chosen, leaves, strict=True) if not here]
        halves: list[Half] = []

        @functools.wraps(fun)
        def of_arrays(differentiated: Any, *args: Any, **kwargs: Any) -> Any:
            mine, rest = iter(jax.tree.leaves(differentiated)), iter(others)
            whole = jax.tree.unflatten(tree, [next(mine) if here else next(rest) for here in chosen])
            result = fun(whole, *args, **kwargs)
            if not has_aux or not isinstance(result, (tuple, list)) or len(result) != 2:
                return result  # the boundary says what is wrong with it
            aux, half = partition(result[1])
            halves.append(half)
            return result[0], aux

        boundary = gradient.value_and_grad(of_arrays, has_aux=has_aux, microbatches=microbatches)
        value, gradients = boundary(differentiated, *args, **kwargs)
        return ((value[0], halves[-1].combine(value[1])) if has_aux else value), gradients

    return value_and_grad_f


def grad(fun: Callable | None = None, has_aux: bool = False, *, microbatches: int | None = None) -> Callable:
    """Differentiates as `eqx.filter_grad` does, as a boundary that a parallel step can see. `fun`, `has_aux` and
    `microbatches` are those of `value_and_grad`.

    Returns a function that gives the gradient, or (gradient, aux) with `has_aux`.
    """
    if fun is None:
        return functools.partial(grad, has_aux=has_aux, microbatches=microbatches)
    full = value_and_grad(fun, has_aux, microbatches=microbatches)

    @functools.wraps(fun)
    def grad_f(first: Any, /, *args: Any, **kwargs: Any) -> Any:
        value, gradients = full(first, *args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return grad_f
