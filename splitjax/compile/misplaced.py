"""Says which arguments of a call lie where the plan of the step does not want them.

What `jax.jit` raised, an entry and the call's arguments come in; a `StateError` that names the arrays comes out.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from splitjax.compile.entry import CompiledEntry, Recipe
from splitjax.errors import StateError
from splitjax.mesh import MeshShape
from splitjax.step.arguments import source_names
from splitjax.step.said import placed_spec
from splitjax.trace.flow import Argument

_MOST = 3  # arrays that a message names


def is_of_placement(error: Exception) -> bool:
    """Returns whether `jax.jit` raised this `error` because an argument lies elsewhere than its program wants it."""
    return any(part in str(error) for part in ("does not match the sharding", "incompatible devices"))


def misplaced(recipe: Recipe, entry: CompiledEntry, args: tuple[Any, ...], error: Exception) -> StateError:
    """Returns the typed error for an `error` of `jax.jit` that `is_of_placement`.

    **Arguments:** `recipe`: the step that was called. `entry`: of it, for the call. `args`: the call's, by position."""
    bound, found = entry.bound, list[tuple[Argument, str]]()
    given = entry.laid_out(recipe, args)  # what is moved by itself is no mistake
    leaves = jax.tree.leaves([arg for n, arg in enumerate(given) if n not in recipe.options.static_argnums])
    names = source_names(recipe.options, bound)
    for leaf, name, argument, planned in zip(leaves, names, bound.arguments, entry.shardings, strict=True):
        if isinstance(leaf, jax.Array) and leaf.committed and not leaf.sharding.is_equivalent_to(planned, leaf.ndim):
            place = _place(leaf, entry.mesh)
            found.append((argument, f"{name} {np.shape(leaf)} lies {place}, planned {planned.spec}"))
    more = f" and {len(found) - _MOST} more" if len(found) > _MOST else ""
    shown = "; ".join(text for _, text in found[:_MOST]) + more or " ".join(str(error).splitlines())
    path = next((repr(argument.path) for argument, _ in found if argument.is_batch), "path of the array")
    return StateError(
        f"an argument already lives on devices or in a sharding other than the plan's: {shown}",
        value=[argument.path for argument, _ in found[:_MOST]] or None,
        place=f"call of {recipe.name} on mesh {MeshShape.of(entry.mesh)}",
        remedy=(
            "create the state with step.init(...), or move it with step.place(state, example=...); leave a batch as"
            f" NumPy arrays, or put it on the step's mesh by plan.spec({path})"
        ),
    )


def _place(leaf: jax.Array, mesh: Mesh | AbstractMesh) -> str:
    """Says in words where the array `leaf` lies, beside a plan for `mesh`."""
    where = leaf.sharding
    if isinstance(where, NamedSharding):
        return f"at {where.spec}" + ("" if placed_spec(leaf, mesh) is not None else f" of another mesh, {where.mesh}")
    return f"on {', '.join(map(str, sorted(where.device_set, key=lambda device: device.id)))}"
