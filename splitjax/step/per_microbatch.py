"""Marks functions of a loss that are taken over the examples of one microbatch: `splitjax.per_microbatch`.

A function of arrays comes in; one that does the same comes out. Under `jax.jit` it is one call with a name of its own,
so that every transformation of JAX and every room of splitjax that looks into calls treats it as any call; the loop
over microbatches finds it by that name (`is_per_microbatch`). It exists because a balance loss of experts multiplies
means over the batch: it is no sum over examples, and cannot be accumulated with the numbers of the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")
_NAME = "splitjax_per_microbatch_"  # and the function's own


def per_microbatch(fun: Callable[P, R]) -> Callable[P, R]:
    """Marks a function within a loss as one that `microbatches=` takes over each microbatch's own examples.

    Without microbatches it is just the function, over the whole batch. With `value_and_grad(loss_fn, microbatches=N)`
    each worker evaluates it on the examples that it differentiates at a time, and its result is the mean of these: over
    the `N` microbatches and over the workers. The boundary's line in the plan says of how many. These are other numbers
    than those of the whole batch, which is why they have to be asked for.

    **Arguments:**

    - `fun`: takes arrays, or pytrees of them, that hold examples or none (activations, weights), and returns arrays
      without a dim of examples, of floating point: a balance loss of experts, an entropy of a mean.

    A loss that gives it sums over examples, numbers that were computed from the size of the batch, or that expects
    values of single examples back is a `MicrobatchError`: compute the sums inside of it.
    """

    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        return fun(*args, **kwargs)

    named.__name__ = named.__qualname__ = _NAME + getattr(fun, "__name__", type(fun).__name__)
    jitted = jax.jit(named)

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return jitted(*args, **kwargs)

    return call


def is_per_microbatch(eqn: Any) -> bool:
    """Returns whether the equation `eqn` is the call of a function that is marked so."""
    return str(eqn.params.get("name", "")).startswith(_NAME)


def marked_name(eqn: Any) -> str:
    """Returns the name of the function that is marked so, of its call `eqn`."""
    return str(eqn.params["name"]).removeprefix(_NAME)
