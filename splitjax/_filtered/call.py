"""Takes a call over objects apart, and puts its result together again.

A frontend makes a `Call` of its arguments: the plain step that runs it, arrays for that step, and how to rebuild the
user's states. Inside the trace `attach` splits what the step returns into arrays and a static half, which travels in
the result's tree structure (`Extra`), the only thing about a traced result that is not an array; `detach` undoes it
after the call.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from splitjax._static import Half, partition
from splitjax.parallel_step import ParallelStep
from splitjax.step.positions import parameter_names


@jax.tree_util.register_pytree_node_class
class Extra:
    """The static half of a step's result; a pytree node without leaves, so that it survives tracing."""

    def __init__(self, half: Half, in_place: bool, more: Any = None) -> None:
        self.half, self.in_place, self.more = half, in_place, more

    def tree_flatten(self) -> tuple[tuple, Any]:
        """Returns no children, and itself as static data, as JAX asks of a pytree node."""
        return (), self

    @classmethod
    def tree_unflatten(cls, aux: Extra, children: Any) -> Extra:
        """Returns `aux`, which is the whole of it: there are no `children`."""
        return aux


def attach(result: Any, more: Any = None, is_leaf: Callable[[Any], bool] | None = None) -> tuple:
    """Returns a step's `result` as a tuple of pytrees of arrays, ending with its static half; a returned tuple keeps
    its positions. `more`: what else a frontend wants back. `is_leaf`: as of `jax.tree.flatten`."""
    dynamic, half = partition(result, is_leaf)
    in_place = type(result) in (tuple, list)
    return (*dynamic, Extra(half, in_place, more)) if in_place else (dynamic, Extra(half, in_place, more))


def detach(result: Sequence[Any]) -> Any:
    """Puts `result`, arrays that end with what `attach` made of the static half, together again."""
    return result[-1].half.combine(result[:-1])


@dataclasses.dataclass
class Call:
    """A call taken apart: the plain step, its arguments, and what is needed to put things together again."""

    step: ParallelStep
    args: tuple
    state_numbers: tuple[int, ...]  # positions in `args`
    rebuild: Callable[[Sequence[Any]], tuple]  # made arrays -> the user's states, new ones
    more: Any = None
    made_numbers: tuple[int, ...] | None = None  # positions in `args` of all that `init` makes; None: of the states

    @property
    def made(self) -> tuple[int, ...]:
        """Returns the positions in `args` of all that `init` makes."""
        return self.state_numbers if self.made_numbers is None else self.made_numbers

    @property
    def made_leaves(self) -> list[Any]:
        """Returns the arrays of all that `init` makes."""
        return jax.tree.leaves([self.args[n] for n in self.made])

    @property
    def example(self) -> tuple:
        """Returns the arguments that are no states."""
        return tuple(arg for n, arg in enumerate(self.args) if n not in self.state_numbers)

    def unshared(self) -> tuple:
        """The arguments, with a copy of every state array that also stands in another argument (a teacher that starts
        as the student): using a buffer that the same call donates is an error of XLA's, and crashes jax 0.10 on virtual
        CPU devices. The plain step itself sees to states that share arrays with each other."""
        others = set(map(id, jax.tree.leaves(self.example)))
        if others.isdisjoint(id(leaf) for n in self.state_numbers for leaf in jax.tree.leaves(self.args[n])):
            return self.args

        def own(leaf: Any) -> Any:
            if id(leaf) not in others or not isinstance(leaf, jax.Array):
                return leaf
            copied = jnp.copy(leaf)  # not committed where the original is not
            return copied if copied.sharding == leaf.sharding else jax.device_put(copied, leaf.sharding)

        return tuple(jax.tree.map(own, arg) if n in self.state_numbers else arg for n, arg in enumerate(self.args))

    def first_deleted(self) -> str | None:
        """The path of the first state array that an earlier call consumed."""
        for number in self.state_numbers:
            for path, leaf in jax.tree_util.tree_leaves_with_path(self.args[number]):
                if isinstance(leaf, jax.Array) and leaf.is_deleted():
                    return jax.tree_util.keystr(path, simple=True, separator="/")
        return None

    def shardings(self, numbers: Sequence[int]) -> list[jax.sharding.NamedSharding]:
        """Returns the plan's sharding of every array in the arguments at the positions `numbers`."""
        entry = self.step._programs.entry(self.args)
        return [where for n in numbers for where in entry.shardings[slice(*entry.bound.spans[n])]]

    def stored(self, numbers: Sequence[int]) -> list[jax.ShapeDtypeStruct]:
        """Describes how every array in the arguments at the positions `numbers` is stored, with the plan's sharding."""
        entry = self.step._programs.entry(self.args)
        pairs = zip(entry.described, entry.shardings, strict=True)
        described = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where) for leaf, where in pairs]
        return [leaf for n in numbers for leaf in described[slice(*entry.bound.spans[n])]]


def signature(names: Sequence[str], fn: Callable, num_args: int) -> inspect.Signature:
    """Returns a signature for a function over arrays: `names`, then the first `num_args` parameters of `fn`, so that
    paths read as the user wrote them."""
    own = list(parameter_names(fn))[:num_args]
    own += [f"arg{n}" for n in range(len(own), num_args)]
    taken = set(own)
    first = [name + "_" * (name in taken) for name in names]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in (*first, *own)])
