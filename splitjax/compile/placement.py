"""Brings states onto a plan: creates them sharded, moves them there, or describes them.

A function that makes states, or states, and an example of the step's remaining arguments come in; arrays (or their
descriptions) in the plan's layout come out, so that the first call of the step has nothing to move.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

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
from splitjax.step.positions import traced_as, with_states
from splitjax.step.processes import on_mesh
from splitjax.step.traced import naming_axes

Arguments = tuple[Any, ...]


class Planner(Protocol):
    """Names what placing asks of the programs of a step (`compile.step_programs`)."""

    @property
    def recipe(self) -> Recipe:
        """Returns the step and its options."""
        ...

    @property
    def mesh(self) -> Mesh | AbstractMesh:
        """Returns its mesh. One that is to be chosen is there once a call was planned."""
        ...

    @property
    def nameable(self) -> Mesh | AbstractMesh:
        """Returns a mesh with the axes of the step's, at any time."""
        ...

    def decide(self, args: Arguments) -> None:
        """Chooses the mesh by positional arguments of the step, where it is left to be chosen."""
        ...

    def entry(self, args: Arguments) -> CompiledEntry:
        """Returns the entry of the step for positional arguments."""
        ...

    def agree_on_choice(self) -> None:
        """Compares what the processes of a run chose, once. Raises `ProcessError` where that differs."""
        ...


def init_state(programs: Planner, init_fn: Callable[..., Any], init_args: Arguments, example: Sequence[Any]) -> Any:
    """Creates the states of a step, sharded as the plan says (`ParallelStep.init`).

    **Arguments:**

    - `programs`: of the step.
    - `init_fn`, `init_args`: `init_fn(*init_args)` makes the state, or a tuple of all states in `state_argnums` order.
    - `example`: all arguments of the step that are no states, in order: arrays or `ShapeDtypeStruct`s.

    Raises `StateError` where states or example are not as many as the step takes, `MeshError` for an abstract mesh."""
    made, arguments = _described(programs, init_fn, init_args, example)
    programs.decide(arguments)
    mesh = with_devices(programs.mesh, f"{programs.recipe.name}.init")
    stored = _as_made(made, _stored(programs, arguments))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, stored)
    programs.agree_on_choice()

    def create(*args: Any) -> Any:
        # Weak types (Python numbers in the state) would make the second call another program.
        strong = lambda x: jnp.asarray(x, dtype=x.dtype) if hasattr(x, "dtype") else jnp.asarray(x)
        made = naming_axes(init_fn, mesh, f"{programs.recipe.name}.init")(*args)
        made = jax.tree.map(lambda x: _compat.forget_mesh(strong(x), explicit_only=True), made)
        return jax.tree.map(with_padding, made, stored)

    return name_layout(jax.jit(create, out_shardings=shardings)(*init_args), shardings)


def abstract_state(programs: Planner, init_fn: Callable[..., Any], init_args: Arguments, example: Sequence[Any]) -> Any:
    """Describes the states that `init_state` would create as `ShapeDtypeStruct`s with shardings
    (`ParallelStep.abstract_state`). `programs`, `init_fn`, `init_args`, `example`: as there."""
    made, arguments = _described(programs, init_fn, init_args, example)
    stored = _as_made(made, _stored(programs, arguments))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, stored)
    described = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(s.shape, x.dtype, sharding=s.sharding), made, stored)
    return name_layout(described, shardings)


def place_state(programs: Planner, states: Arguments, example: Sequence[Any]) -> Any:
    """Copies `states`, in `state_argnums` order, to where the plan wants them (`ParallelStep.place`). `programs`,
    `example`: as for `init_state`. Returns the state, or the tuple of all states.

    Raises `StateError` where states or example are not as many as the step takes, `MeshError` for an abstract mesh."""
    recipe = programs.recipe
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
    arguments = with_states(recipe.fn, numbers, bare, example)
    programs.decide(arguments)
    with_devices(programs.mesh, f"{recipe.name}.place")
    wanted = _stored(programs, arguments)
    programs.agree_on_choice()
    moved = []
    for state, stored in zip(states, wanted, strict=True):
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


def _described(
    programs: Planner, init_fn: Callable[..., Any], init_args: Arguments, example: Sequence[Any]
) -> tuple[Any, Arguments]:
    """Returns what `init_fn` makes, as `ShapeDtypeStruct`s without weak types, and the positional arguments of the step
    with it."""
    recipe = programs.recipe
    numbers = recipe.options.state_argnums
    named = naming_axes(init_fn, programs.nameable, f"{recipe.name}.init")
    abstract = jax.eval_shape(traced_as(init_fn, named), *init_args)
    single = len(numbers) == 1
    if not single and (not isinstance(abstract, (tuple, list)) or len(abstract) != len(numbers)):
        raise StateError(
            f"init_fn must return the {len(numbers)} states in state_argnums order",
            value=jax.tree.structure(abstract),
            place=f"{recipe.name}.init",
            remedy="return a tuple with one state per state argument",
        )
    made = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), abstract)
    return made, with_states(recipe.fn, numbers, (made,) if single else tuple(made), example)


def _as_made(made: Any, states: Arguments) -> Any:
    """Returns the `states` as a function that makes states returns them: one alone as it is, several as a tuple or a
    list like `made`."""
    return states[0] if len(states) == 1 else type(made)(states)


def _stored(programs: Planner, arguments: Arguments) -> Arguments:
    """Returns how every state among the `arguments` is stored, as a pytree of `ShapeDtypeStruct`s with the plan's
    shardings each."""
    entry, out = programs.entry(arguments), []
    for number in programs.recipe.options.state_argnums:
        start, stop = entry.bound.spans[number]
        tree = jax.tree.structure(entry.bound.args[number])
        described = [
            jax.ShapeDtypeStruct(leaf.shape, aval.dtype, sharding=named_sharding(programs.mesh, leaf.spec))
            for leaf, aval in zip(entry.plan.leaves[start:stop], entry.described[start:stop], strict=True)
        ]
        out.append(jax.tree.unflatten(tree, described))
    return tuple(out)
