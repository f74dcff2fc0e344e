"""States onto the plan: created sharded, moved, or described."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from splitjax.compile.entry import Entry, Recipe
from splitjax.errors import StateError
from splitjax.lower.products.interpret import named_sharding
from splitjax.step.arguments import Options
from splitjax.step.processes import on_mesh


def init_state(
    entry_for: Callable[[tuple], Entry],
    recipe: Recipe,
    mesh: Mesh,
    init_fn: Callable,
    init_args: tuple,
    example: Sequence[Any],
) -> Any:
    """See `ParallelStep.init`."""
    abstract, shardings = _planned(entry_for, recipe, mesh, init_fn, init_args, example)

    def create(*args):
        # Weak types (Python numbers in the state) would make the second call another program.
        return jax.tree.map(
            lambda x: jnp.asarray(x, dtype=x.dtype) if hasattr(x, "dtype") else jnp.asarray(x), init_fn(*args)
        )

    del abstract
    return jax.jit(create, out_shardings=shardings)(*init_args)


def abstract_state(
    entry_for, recipe: Recipe, mesh: Mesh, init_fn: Callable, init_args: tuple, example: Sequence[Any]
) -> Any:
    """See `ParallelStep.abstract_state`."""
    abstract, shardings = _planned(entry_for, recipe, mesh, init_fn, init_args, example)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def place_state(entry_for, recipe: Recipe, mesh: Mesh, states: tuple, example: Sequence[Any]) -> Any:
    """See `ParallelStep.place`."""
    numbers = recipe.options.state_argnums
    if len(states) != len(numbers):
        raise StateError(
            f"place got {len(states)} states, the step has {len(numbers)}",
            value=numbers,
            place=f"{recipe.name}.place",
            remedy="pass one state per state argument, in state_argnums order",
        )
    shardings = _shardings(entry_for(_arguments(recipe.options, states, example)), recipe, mesh)
    moved = tuple(jax.tree.map(_copy_to, state, where) for state, where in zip(states, shardings, strict=True))
    return moved[0] if len(moved) == 1 else moved


def _copy_to(leaf: Any, where: Any) -> jax.Array:
    moved = on_mesh([leaf], [where])[0] if where.mesh.is_multi_process else jax.device_put(leaf, where)
    # device_put hands on the buffer of a device that holds the right part already, and the first step would donate it.
    return jnp.copy(moved) if isinstance(leaf, jax.Array) else moved


def unshare(args: tuple, state_argnums: Sequence[int]) -> tuple:
    """The arguments with a copy in place of every array that occurs in the states a second time (averaged parameters
    that start as the parameters themselves): one buffer cannot be donated twice."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return tuple(jax.tree.map(own, arg) if number in state_argnums else arg for number, arg in enumerate(args))


def _planned(entry_for, recipe: Recipe, mesh: Mesh, init_fn: Callable, init_args: tuple, example) -> tuple[Any, Any]:
    abstract = jax.eval_shape(init_fn, *init_args)
    single = len(recipe.options.state_argnums) == 1
    if not single and (not isinstance(abstract, (tuple, list)) or len(abstract) != len(recipe.options.state_argnums)):
        raise StateError(
            f"init_fn must return the {len(recipe.options.state_argnums)} states in state_argnums order",
            value=jax.tree.structure(abstract),
            place=f"{recipe.name}.init",
            remedy="return a tuple with one state per state argument",
        )
    strong = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract)
    states = (strong,) if single else tuple(strong)
    shardings = _shardings(entry_for(_arguments(recipe.options, states, example)), recipe, mesh)
    return strong, shardings[0] if single else type(abstract)(shardings)


def _arguments(options: Options, states: tuple, example: Sequence[Any]) -> tuple:
    """The step's whole argument list: states in their places, the example's arguments in the others."""
    if isinstance(example, dict) or not isinstance(example, (tuple, list)):
        raise StateError(
            "example is the tuple of all non-state arguments",
            value=type(example).__name__,
            place="example=",
            remedy="write example=(batch,), with arrays or ShapeDtypeStructs",
        )
    count = len(states) + len(example)
    if max(options.state_argnums, default=0) >= count:
        raise StateError(
            f"the example has {len(example)} arguments, too few to reach state argument {max(options.state_argnums)}",
            value=len(example),
            place="example=",
            remedy="give all non-state arguments of the step, in order",
        )
    rest = iter(example)
    by_number = dict(zip(options.state_argnums, states, strict=True))
    return tuple(by_number[n] if n in by_number else next(rest) for n in range(count))


def _shardings(entry: Entry, recipe: Recipe, mesh: Mesh) -> tuple[Any, ...]:
    out = []
    for number in recipe.options.state_argnums:
        leaves = entry.plan.leaves[slice(*entry.bound.spans[number])]
        tree = jax.tree.structure(entry.bound.args[number])
        out.append(jax.tree.unflatten(tree, [named_sharding(mesh, leaf.spec) for leaf in leaves]))
    return tuple(out)
