"""Brings states onto a plan: creates them sharded, moves them there, or describes them.

A function that makes states, or states, and an example of the step's remaining arguments come in; arrays (or their
descriptions) in the plan's layout come out, so that the first call of the step has nothing to move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from splitjax import _compat
from splitjax.compile.boxes import name_layout
from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.errors import StateError
from splitjax.mesh import with_devices
from splitjax.planning.sites.layout import named_sharding
from splitjax.step.padding.stored import stored_array, with_padding
from splitjax.step.positions import with_states
from splitjax.step.processes import on_mesh
from splitjax.step.traced import naming_axes

Arguments = tuple[Any, ...]
EntryFor = Callable[[Arguments], CompiledEntry]  # the entry of a step for positional arguments


def init_state(
    entry_for: EntryFor,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    init_fn: Callable[..., Any],
    init_args: Arguments,
    example: Sequence[Any],
) -> Any:
    """Creates the states of a step, sharded as the plan says (`ParallelStep.init`).

    **Arguments:**

    - `entry_for`: gives the entry of the step for positional arguments. `recipe`: the step. `mesh`: its devices.
    - `init_fn`, `init_args`: `init_fn(*init_args)` makes the state, or a tuple of all states in `state_argnums` order.
    - `example`: all arguments of the step that are no states, in order: arrays or `ShapeDtypeStruct`s.

    Raises `StateError` where states or example are not as many as the step takes, `MeshError` for an abstract mesh."""
    with_devices(mesh, f"{recipe.name}.init")
    _, stored = _planned(entry_for, recipe, mesh, init_fn, init_args, example)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, stored)

    def create(*args: Any) -> Any:
        # Weak types (Python numbers in the state) would make the second call another program.
        strong = lambda x: jnp.asarray(x, dtype=x.dtype) if hasattr(x, "dtype") else jnp.asarray(x)
        made = naming_axes(init_fn, mesh)(*args)
        made = jax.tree.map(lambda x: _compat.forget_mesh(strong(x), explicit_only=True), made)
        return jax.tree.map(with_padding, made, stored)

    return name_layout(jax.jit(create, out_shardings=shardings)(*init_args), shardings)


def abstract_state(
    entry_for: EntryFor,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    init_fn: Callable[..., Any],
    init_args: Arguments,
    example: Sequence[Any],
) -> Any:
    """Describes the states that `init_state` would create as `ShapeDtypeStruct`s with shardings
    (`ParallelStep.abstract_state`). `entry_for`, `recipe`, `mesh`, `init_fn`, `init_args`, `example`: as there."""
    abstract, stored = _planned(entry_for, recipe, mesh, init_fn, init_args, example)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, stored)
    described = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(s.shape, x.dtype, sharding=s.sharding), abstract, stored)
    return name_layout(described, shardings)


def place_state(
    entry_for: EntryFor, recipe: Recipe, mesh: Mesh | AbstractMesh, states: Arguments, example: Sequence[Any]
) -> Any:
    """Copies `states`, in `state_argnums` order, to where the plan wants them (`ParallelStep.place`). `entry_for`,
    `recipe`, `mesh`, `example`: as for `init_state`. Returns the state, or the tuple of all states.

    Raises `StateError` where states or example are not as many as the step takes, `MeshError` for an abstract mesh."""
    with_devices(mesh, f"{recipe.name}.place")
    numbers = recipe.options.state_argnums
    if len(states) != len(numbers):
        raise StateError(
            f"place got {len(states)} states, the step has {len(numbers)}",
            value=numbers,
            place=f"{recipe.name}.place",
            remedy="pass one state per state argument, in state_argnums order",
        )
    # Where the states lie now pins nothing: they are to be moved.
    bare = tuple(jax.tree.map(_anywhere, state) for state in states)
    arguments = with_states(recipe.fn, recipe.options.state_argnums, bare, example)
    moved = []
    for state, stored in zip(states, _stored(entry_for(arguments), recipe, mesh), strict=True):
        where = jax.tree.map(lambda leaf: leaf.sharding, stored)
        moved.append(name_layout(jax.tree.map(_copy_to, state, stored), where))
    return moved[0] if len(moved) == 1 else tuple(moved)


def _anywhere(leaf: Any) -> Any:
    """Returns the description of an array without its sharding; any other leaf as it is."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def _copy_to(leaf: Any, stored: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns a copy of a leaf as it is stored, padded where it is larger then, and laid out."""
    where = stored.sharding
    assert isinstance(where, NamedSharding), "the plan says where every leaf lies"
    if tuple(jnp.shape(leaf)) != stored.shape:
        return stored_array(leaf, stored.shape, where)
    moved = on_mesh([leaf], [where])[0] if where.mesh.is_multi_process else jax.device_put(leaf, where)
    # device_put hands on the buffer of a device that holds the right part already, and the first step would donate it.
    return jnp.copy(moved) if isinstance(leaf, jax.Array) else moved


def unshare(args: Arguments, state_argnums: Sequence[int]) -> Arguments:
    """Returns the arguments `args` with a copy in place of every array that occurs a second time in the states, which
    stand at `state_argnums` (averaged parameters that start as the parameters themselves): a buffer cannot be donated
    twice."""
    seen: set[int] = set()

    def own(leaf: Any) -> Any:
        if isinstance(leaf, jax.Array) and id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return tuple(jax.tree.map(own, arg) if number in state_argnums else arg for number, arg in enumerate(args))


def _planned(
    entry_for: EntryFor,
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    init_fn: Callable[..., Any],
    init_args: Arguments,
    example: Sequence[Any],
) -> tuple[Any, Any]:
    """Returns what `init_fn` makes, as `ShapeDtypeStruct`s without weak types, and how it is stored, with shardings."""
    abstract = jax.eval_shape(naming_axes(init_fn, mesh), *init_args)
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
    stored = _stored(entry_for(with_states(recipe.fn, recipe.options.state_argnums, states, example)), recipe, mesh)
    return strong, stored[0] if single else type(abstract)(stored)


def _stored(entry: CompiledEntry, recipe: Recipe, mesh: Mesh | AbstractMesh) -> tuple[Any, ...]:
    """Returns how every state is stored, as a pytree of `ShapeDtypeStruct`s with the plan's shardings each."""
    out = []
    for number in recipe.options.state_argnums:
        start, stop = entry.bound.spans[number]
        tree = jax.tree.structure(entry.bound.args[number])
        described = [
            jax.ShapeDtypeStruct(leaf.shape, aval.dtype, sharding=named_sharding(mesh, leaf.spec))
            for leaf, aval in zip(entry.plan.leaves[start:stop], entry.described[start:stop], strict=True)
        ]
        out.append(jax.tree.unflatten(tree, described))
    return tuple(out)
