"""Programs of one signature of a step, for `jax.jit`: with the plan's shardings, donation, and an end to traces for
other arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from splitjax.lower.products.interpret import named_sharding
from splitjax.lower.products.scatter import updated_in_parts
from splitjax.plan import Plan
from splitjax.step.arguments import Bound, bind


class SignatureChanged(Exception):
    """Raised while `jax.jit` traces a call whose signature is not the program's: the caller then looks for another
    one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """Makes programs of one signature of a step. They take further operands of their own, residuals where there are
    any, then the step's arguments.

    - `recipe`: `entry.Recipe`. `matched`: flat argument of a state leaf -> its flat result.
    - `observes`: they return what was observed of tables beside the result. `residuals`: by table the sharding of what
      rounding took away, which they then take and return too.
    """

    recipe: Any
    mesh: Mesh
    bound: Bound
    plan: Plan
    jaxpr: Any
    result: Any
    matched: Mapping[int, int]
    observes: bool
    residuals: Mapping[str, NamedSharding]

    def whole(
        self,
        evaluate_step: Callable[..., tuple[list[Any], Any, Any]],
        extra: tuple[Any, ...] = (),
        donate_extra: tuple[int, ...] = (),
    ) -> Any:
        """The step. `evaluate_step(leaves, residuals, *extra) -> flat results, what was observed, residuals`. `extra`:
        shardings of its further operands."""
        updated = updated_in_parts(self.jaxpr, self.plan.leaves, self.matched)
        tree = jax.tree.structure(self.result)

        def run(leaves: list[Any], residuals: Any, *further: Any) -> Any:
            results, observed, residuals = evaluate_step(leaves, residuals, *further)
            for number, spec in updated.items():
                results[number] = jax.lax.with_sharding_constraint(results[number], named_sharding(self.mesh, spec))
            whole = jax.tree.unflatten(tree, results)
            return (whole, observed, residuals) if self.residuals else (whole, observed) if self.observes else whole

        shardings = [named_sharding(self.mesh, leaf.spec) for leaf in self.plan.leaves]
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

    def part(self, evaluate_part: Callable[[list[Any], Any], Any], out_shardings: Any) -> Any:
        """A program that takes the step's operands and consumes none."""
        return self._jit(evaluate_part, out_shardings, (), ())

    def _jit(
        self, evaluate_leaves: Callable[..., Any], out_shardings: Any, extra: tuple[Any, ...], donated: tuple[int, ...]
    ) -> Any:
        recipe, bound, count = self.recipe, self.bound, len(extra)
        shardings = [named_sharding(self.mesh, leaf.spec) for leaf in self.plan.leaves]
        given = (*extra, dict(self.residuals)) if self.residuals else extra

        def run(*args: Any) -> Any:
            residuals, args, further = (args[count] if self.residuals else {}), args[len(given) :], args[:count]
            # jax.jit calls this only when it traces. A trace for other arguments than the plan's must not pass
            # silently.
            if args_signature(recipe, args) != signature_key(bound):
                raise SignatureChanged
            leaves = jax.tree.leaves([arg for n, arg in enumerate(args) if n not in recipe.options.static_argnums])
            return evaluate_leaves(leaves, residuals, *further)

        run.__name__ = run.__qualname__ = recipe.name
        into = [
            jax.tree.unflatten(jax.tree.structure(arg), shardings[slice(*bound.spans[number])])
            for number, arg in enumerate(bound.args)
            if number not in recipe.options.static_argnums
        ]
        static = tuple(len(given) + number for number in recipe.options.static_argnums)
        return jax.jit(
            run,
            in_shardings=(*given, *into),
            out_shardings=out_shardings,
            donate_argnums=donated,
            static_argnums=static,
        )


def signature_key(bound: Bound) -> Any:
    """A signature up to weak types, which change no program that is already traced."""
    return bound.signature.tree, tuple(aval[:2] for aval in bound.signature.avals), bound.signature.static


def args_signature(recipe: Any, args: tuple) -> Any:
    return signature_key(bind(recipe.fn, recipe.options, args))
