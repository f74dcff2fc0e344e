"""The options of the decorators of the NNX and Equinox frontends: they are checked when these decorate, and what they
leave to be chosen is chosen once for all plain steps of a step over modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from splitjax.choosing import AutoMesh, Choice, mesh_asked_for
from splitjax.compile.choosing import mesh_not_chosen, nameable_mesh
from splitjax.compile.devices import mesh_for
from splitjax.compile.recipes import read_target
from splitjax.parallel_step import ParallelStep
from splitjax.parallelize import parallelize as parallelize_arrays
from splitjax.rules.ruleset import AUTO
from splitjax.step.positions import ArgumentRoles, make_options

# Options that the frontends read themselves: positions among the user's arguments, not among the arrays.
_NUMBERS = ("state_argnums", "batch_argnums", "static_argnums", "static_argnames")


def read_options(fn: Callable[..., Any], given: Mapping[str, Any]) -> tuple[ArgumentRoles, dict[str, Any]]:
    """Checks what a frontend's decorator was told, when it runs.

    **Arguments:**

    - `fn`: the step.
    - `given`: every option with its value (`splitjax.step.keywords.complete`).

    Returns the argument numbers, and the options for the plain step. Raises what a wrong value deserves, as
    `splitjax.parallelize` does."""
    keywords = {name: value for name, value in given.items() if name not in (*_NUMBERS, "state_outnums")}
    parallelize_arrays(fn, **keywords, state_argnums=(), batch_argnums=())
    options = make_options(
        fn,
        given["state_argnums"],
        given["batch_argnums"],
        given["static_argnums"],
        given["static_argnames"],
        None,
    )
    return options, keywords


class SharedChoice:
    """The mesh, and rules where they are chosen, of all plain steps of a step over modules: there is one for every
    arrangement of arguments, and the first that is planned decides.

    **Arguments:** `name`: of the step. `keywords`: its options, as `read_options` returns them. `steps`: the plain
    steps, which come by and by.
    """

    def __init__(self, name: str, keywords: Mapping[str, Any], steps: Mapping[Any, ParallelStep[..., Any]]) -> None:
        self._name, self._told, self._steps = name, keywords, steps
        self._asked = mesh_asked_for(keywords["mesh"])
        self._made: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None

    @property
    def choice(self) -> Choice | None:
        """What was chosen; None where nothing was, and before a call was planned."""
        return next((step.choice for step in self._steps.values() if step.choice is not None), None)

    @property
    def mesh(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
        """The mesh, made when it is first needed. Raises `MeshError` where it is to be chosen, and no call was planned
        yet."""
        if self._made is not None:
            return self._made
        if isinstance(self._asked, AutoMesh):
            step = self._decided or next(iter(self._steps.values()), None)
            if step is None:
                raise mesh_not_chosen(self._name)
            self._made = step.mesh
        else:
            self._made = mesh_for(self._asked, read_target(self._told["target"], f"{self._name}, target"))
        return self._made

    @property
    def nameable(self) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
        """A mesh whose axes functions may name that make states, at any time."""
        if isinstance(self._asked, AutoMesh) and self._decided is None:
            return nameable_mesh(self._asked)
        return self.mesh

    @property
    def keywords(self) -> dict[str, Any]:
        """The options of the next plain step: what was chosen stays."""
        decided = self._decided
        if decided is not None and decided.choice is not None:
            best = decided.choice.best
            chosen: dict[str, Any] = {
                "rules": decided.rules, "shard_state": best.shards_state, "microbatches": best.microbatches,
            }  # fmt: skip
            # A policy of the user is no part of what was compared, and stays as it was given.
            if isinstance(self._told["remat"], str) and self._told["remat"] == AUTO:
                chosen["remat"] = {each.name: each.keeps for each in best.remat}
            return {**self._told, **chosen, "mesh": self.mesh, "memory_budget": None, "compile_best": 0}
        return {**self._told, "mesh": self._asked if isinstance(self._asked, AutoMesh) else self.mesh}

    @property
    def _decided(self) -> ParallelStep[..., Any] | None:
        """The plain step that chose."""
        return next((step for step in self._steps.values() if step.choice is not None), None)
