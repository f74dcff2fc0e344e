"""Wraps the evaluators of a signature of a step for `jax.jit`.

Evaluators of flat leaves (`splitjax.lower`), a plan and a mesh come in; jitted programs over the step's own arguments
come out, with the plan's shardings and donation. Their trace ends where the arguments are not those that were planned
for, so that the caller can look for another program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from splitjax import _compat
from splitjax.compile.kept import kept
from splitjax.mesh import inside_mesh, platform_of, with_devices
from splitjax.plan import Plan
from splitjax.planning.sites.gradients import updated_in_parts
from splitjax.planning.sites.layout import named_sharding, shardings_of
from splitjax.step.arguments import Bound, bind
from splitjax.step.positions import ArgumentRoles


class StepProgram(Protocol):
    """Names what a program of a step can do: run, and be lowered."""

    def __call__(self, *args: Any) -> Any:
        """Runs the program on its operands `args` and returns its result."""
        ...

    def lower(self, *args: Any) -> Any:
        """Lowers the program for operands `args` (arrays or `ShapeDtypeStruct`s), as `jax.jit(fn).lower` does."""
        ...


@dataclasses.dataclass(frozen=True, eq=False)
class AbstractProgram:
    """Is a program over an abstract mesh: it can be lowered, for the platform that its plan was made for, and not run.

    **Attributes:** `jitted`: the program. `mesh`: the abstract mesh. `name`: of the step, for messages.
    """

    jitted: Any
    mesh: Mesh | AbstractMesh
    name: str

    def __call__(self, *args: Any) -> Any:
        """Raises `MeshError`: there are no devices for the operands `args`."""
        with_devices(self.mesh, f"call of {self.name}")

    def lower(self, *args: Any) -> Any:
        """Lowers the program for operands `args`, as `jax.jit(fn).trace(...).lower(lowering_platforms=...)` does."""
        lowered = self.jitted.trace(*args).lower(lowering_platforms=(platform_of(self.mesh),))
        return AbstractLowered(lowered, self.mesh, self.name)


class AbstractLowered(jax.stages.Lowered):
    """Is a program over an abstract mesh, lowered, whose `compile` needs devices.

    **Arguments:** `lowered`: what JAX lowered. `mesh`, `name`: as of `AbstractProgram`.
    """

    def __init__(self, lowered: jax.stages.Lowered, mesh: Mesh | AbstractMesh, name: str) -> None:
        _compat.become(self, lowered)
        self._mesh, self._name = mesh, name

    def compile(self, compiler_options: Any = None, *, device_assignment: tuple[Any, ...] | None = None) -> Any:
        """Compiles the program for the devices `device_assignment`, as `jax.stages.Lowered.compile` does. Raises
        `MeshError` without them."""
        if device_assignment is None:
            with_devices(self._mesh, f"lower(...).compile() of {self._name}", runs=False)
        return super().compile(compiler_options, device_assignment=device_assignment)


class DecoratedFunction(Protocol):
    """Names what programs depend on of `entry.Recipe`."""

    @property
    def fn(self) -> Callable[..., Any]:
        """Returns the step as the user wrote it."""
        ...

    @property
    def options(self) -> ArgumentRoles:
        """Returns which of its arguments are state, batch and static."""
        ...

    @property
    def donate(self) -> bool:
        """Returns whether a call consumes its states."""
        ...

    @property
    def name(self) -> str:
        """Returns the name of the step, for programs and messages."""
        ...


class SignatureChanged(Exception):
    """Is raised while `jax.jit` traces a call whose signature is not that of the program: the caller then looks for
    another program."""


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Makes programs of a signature of a step. They take further operands of their own, residuals where there are any,
    then the step's arguments.

    **Attributes:**

    - `recipe`: what was decorated. `bound`: the call that the programs are for, taken apart.
    - `mesh`: the user's mesh, on which arrays come and go. Within a program every axis is of type Auto.
    - `plan`: its plan. `jaxpr`: the traced step. `result`: its result, as a pytree of `ShapeDtypeStruct`s.
    - `matched`: flat argument of a state leaf -> its flat result.
    - `observes`: whether programs return what was observed of tables beside the result.
    - `residuals`: by table that is rounded on the wire, the sharding of what rounding took away; where there are any,
      programs take and return these arrays too.
    """

    recipe: DecoratedFunction
    mesh: Mesh | AbstractMesh
    bound: Bound
    plan: Plan
    jaxpr: _compat.ClosedJaxpr
    result: Any
    matched: Mapping[int, int]
    observes: bool
    residuals: Mapping[str, NamedSharding]

    def whole(
        self,
        evaluate_step: Callable[..., tuple[list[Any], Any, Any]],
        extra: tuple[Any, ...] = (),
        donate_extra: tuple[int, ...] = (),
    ) -> StepProgram:
        """Makes the program of the whole step.

        **Arguments:** `evaluate_step`: (flat arguments, residuals, further operands) -> flat results, what was
        observed, and residuals. `extra`: shardings of the further operands. `donate_extra`: positions of those further
        operands that a call consumes."""
        updated = updated_in_parts(self.jaxpr, self.plan.leaves, self.matched)
        tree, inside = jax.tree.structure(self.result), inside_mesh(self.mesh)

        def run(leaves: list[Any], residuals: Any, *further: Any) -> Any:
            results, observed, residuals = evaluate_step(leaves, residuals, *further)
            for number, spec in updated.items():
                results[number] = jax.lax.with_sharding_constraint(results[number], named_sharding(inside, spec))
            whole = jax.tree.unflatten(tree, results)
            return (whole, observed, residuals) if self.residuals else (whole, observed) if self.observes else whole

        shardings = shardings_of(self.mesh, self.plan.leaves)
        out: list[Any] = [None] * tree.num_leaves
        for source, target in self.matched.items():
            out[target] = shardings[source]
        placed = jax.tree.unflatten(tree, out) if self.matched else None
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        results = (
            (placed, everywhere, dict(self.residuals))
            if self.residuals
            else (placed, everywhere)
            if self.observes
            else placed
        )
        first = len(extra) + bool(self.residuals)
        consumed = (
            *([len(extra)] if self.residuals else ()),
            *(first + number for number in self.recipe.options.state_argnums),
        )
        return self._jit(run, results, extra, (*donate_extra, *consumed) if self.recipe.donate else donate_extra)

    @property
    def layouts(self) -> Sequence[NamedSharding]:
        """The layouts of the flat arguments of the step, on the user's mesh."""
        return self._layouts

    @functools.cached_property
    def _layouts(self) -> Sequence[NamedSharding]:
        return shardings_of(self.mesh, self.plan.leaves)

    def leaves(self, args: Sequence[Any]) -> list[Any]:
        """Returns the flat arguments of the step among the operands `args` of a program from `part`."""
        return self._leaves(args[bool(self.residuals) :])

    def _leaves(self, args: Sequence[Any]) -> list[Any]:
        """Returns the flat arguments of a call of the step with `args`."""
        static = self.recipe.options.static_argnums
        return jax.tree.leaves([arg for number, arg in enumerate(args) if number not in static])

    def part(self, evaluate_part: Callable[[list[Any], Any], Any], out_shardings: Any) -> StepProgram:
        """Makes a program that takes the step's operands and consumes none. `evaluate_part`: (flat arguments,
        residuals) -> its result. `out_shardings`: of that result, as `jax.jit` takes them."""
        return self._jit(evaluate_part, out_shardings, (), ())

    def _jit(
        self, evaluate_leaves: Callable[..., Any], out_shardings: Any, extra: tuple[Any, ...], donated: tuple[int, ...]
    ) -> StepProgram:
        """Wraps an evaluator of flat leaves: `extra`: shardings of further operands; `donated`: positions of the
        operands that a call consumes."""
        recipe, bound, count = self.recipe, self.bound, len(extra)
        extra, out_shardings = self._given(extra), self._given(out_shardings)
        shardings = shardings_of(self.mesh, self.plan.leaves)
        given = (*extra, dict(self.residuals)) if self.residuals else extra
        is_auto = inside_mesh(self.mesh) is self.mesh

        def run(*args: Any) -> Any:
            residuals, args, further = (args[count] if self.residuals else {}), args[len(given) :], args[:count]
            # jax.jit calls this only when it traces. A trace for other arguments than the plan's must not pass
            # silently.
            if args_signature(recipe, args) != signature_key(bound):
                raise SignatureChanged
            leaves = self._leaves(args)
            # Types that split dims over Explicit axes stay outside: here XLA places what the plan leaves open.
            untyped = functools.partial(_compat.forget_meshes, explicit_only=True)
            results = evaluate_leaves(untyped(leaves), untyped(residuals), *untyped(further))
            # What names no mesh comes back on that of the operands.
            return results if is_auto else _compat.forget_meshes(results)

        run.__name__ = run.__qualname__ = recipe.name
        in_shardings = [
            jax.tree.unflatten(jax.tree.structure(arg), shardings[slice(*bound.spans[number])])
            for number, arg in enumerate(bound.args)
            if number not in recipe.options.static_argnums
        ]
        static = tuple(len(given) + number for number in recipe.options.static_argnums)
        program = jax.jit(
            run,
            in_shardings=(*given, *in_shardings),
            out_shardings=out_shardings,
            donate_argnums=donated,
            static_argnums=static,
        )
        if not isinstance(self.mesh, Mesh):
            return AbstractProgram(program, self.mesh, recipe.name)
        return kept(program, self.mesh, bool(static))

    def _given(self, shardings: Any) -> Any:
        """Returns the same `shardings`, a pytree as `jax.jit` takes it, on the user's mesh."""
        on_given = lambda s: NamedSharding(self.mesh, s.spec) if isinstance(s, NamedSharding) else s
        return jax.tree.map(on_given, shardings)


def signature_key(bound: Bound) -> tuple[Hashable, ...]:
    """Returns the signature of the call `bound` up to weak types, which change no program that is already traced."""
    return bound.signature.tree, tuple(aval[:2] for aval in bound.signature.avals), bound.signature.static


def args_signature(recipe: DecoratedFunction, args: tuple[Any, ...]) -> tuple[Hashable, ...]:
    """Returns `signature_key` of a call with the positional arguments `args` of the step that `recipe` describes."""
    return signature_key(bind(recipe.fn, recipe.options, args))
