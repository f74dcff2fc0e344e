"""Holds what was chosen for a step, among what, and how good it is proven to be."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from splitjax.mesh import MeshShape
from splitjax.rules.ruleset import AUTO, RuleSet

# Stands for the solver where no search was made, or none found what fits.
NO_SOLVER = "none"
_SHOWN = 7  # of the candidates in a plan


@dataclasses.dataclass(frozen=True)
class Variable:
    """Is one decision: how a layer is laid out, or all layers that repeat it.

    **Attributes:** `name`: of the first layer. `layers`: all of them. `values`: what it could have been, in words.
    `chosen`: which of these it is.
    """

    name: str
    layers: tuple[str, ...]
    values: tuple[str, ...]
    chosen: str


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Is a rule set on a mesh with what it was predicted to take.

    **Attributes:** `seconds`: of a step. `state_bytes`: of a device's states, exactly. `peak_bytes`: of a device, as a
    sum of all that the step stores.
    """

    rules: RuleSet
    mesh: MeshShape
    seconds: float
    state_bytes: int
    peak_bytes: int

    @property
    def name(self) -> str:
        """The name of the rule set, and what tells answers of the search from each other."""
        if self.rules.name != AUTO:
            return self.rules.name
        over = "all devices" if self.rules.replicated_batch == "all" else "data"
        return f"{AUTO} (examples of whole layers over {over})"

    def fits(self, budget_bytes: float) -> bool:
        """Whether a device needs at most `budget_bytes`."""
        return self.peak_bytes <= budget_bytes


@dataclasses.dataclass(frozen=True)
class Choice:
    """Is what a search chose.

    **Attributes:**

    - `best`: the rules and the mesh, with their seconds and bytes.
    - `candidates`: what was compared by its whole prediction, the fastest first: the answers of the search, and the
      shipped rule sets, also those that do not fit.
    - `answers`: those of the search, one a mesh and a way to lay the batch.
    - `refused`: (rule set, why) of those that this step or mesh does not take.
    - `variables`: of the last search on the mesh of `best`; those of the shipped sets are points of the same kind.
    - `network_seconds`, `bound_seconds`: what the search's answer costs as a sum over layers and neighbours, and what
      no assignment that fits costs less than. `solver`: who proved it.
    - `clock_struck`: whether the clock and not the limit of work ended the search.
    - `dropped`: meshes that were not searched, as their lower bound is above `best`.
    - `budget_bytes`: of a device; infinity without one.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    answers: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]
    variables: tuple[Variable, ...]
    network_seconds: float
    bound_seconds: float
    solver: str
    clock_struck: bool
    dropped: tuple[MeshShape, ...] = ()
    budget_bytes: float = math.inf

    @property
    def rules(self) -> RuleSet:
        """The rules that were chosen: a plan by them is the chosen one."""
        return self.best.rules

    @property
    def gap(self) -> float:
        """How much cheaper the best assignment of the search's problem could be, relative to its answer; 0 is proven
        best, infinity that nothing is known."""
        if self.solver == NO_SOLVER:
            return math.inf
        if not self.network_seconds > self.bound_seconds:
            return 0.0
        return (self.network_seconds - self.bound_seconds) / self.network_seconds

    def lines(self, taken: Candidate | None = None) -> Iterator[str]:
        """Yields what a plan notes of it, a line each. `taken`: of the candidates, which the plan is by; None: the
        best."""
        taken = self.best if taken is None else taken
        yield f'rules="auto" chose {taken.name} on {taken.mesh}: predicted {1e3 * taken.seconds:.4g} ms'
        others = [f"{each.name} {1e3 * each.seconds:.4g} ms" for each in self.candidates if each != taken]
        if others:
            yield f"compared with {', '.join(others[:_SHOWN])}"
        ended = ", ended by the clock" if self.clock_struck else ""
        yield (
            f"the search decided {len(self.variables)} variables by {self.solver}{ended}, with a certified gap of"
            f" {100 * self.gap:.3g} %: no assignment has a sum of seconds over layers and pairs of neighbours that is"
            " smaller by more than that"
        )
        if taken not in self.answers:
            yield "a shipped rule set is taken, not the search's answer, whose values follow"
        for each in self.variables:
            more = f" and {len(each.layers) - 1} like it" if len(each.layers) > 1 else ""
            rest = "; ".join(value for value in each.values if value != each.chosen)
            yield f"{each.name}{more}: {each.chosen}" + (f" (it could be: {rest})" if rest else "")
