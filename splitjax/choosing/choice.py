"""Holds what was chosen for a step, among what, and how good it is proven to be.

It prints as a table of everything that was compared (`report.prediction.choice` makes it), and gives the lines that a
plan notes of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from splitjax.choosing.axis_orders import Crossing, told
from splitjax.choosing.candidate import Answer, Candidate, Refused, Variable
from splitjax.display import registry
from splitjax.display.figures import bytes_text
from splitjax.mesh import MeshShape
from splitjax.rules.ruleset import RuleSet

# Stands for the solver where no search was made, or none found what fits.
NO_SOLVER = "none"
_SHOWN = 7  # of the candidates in a plan
STATE, MICROBATCHES, REMAT = "shard_state", "microbatches", "remat"


@dataclasses.dataclass(frozen=True, repr=False)
class Choice:
    """Is what was chosen, such as the mesh and the rules, with all that was compared. It prints as a table.

    **Attributes:**

    - `best`: the rules and the mesh that were taken, with their seconds and bytes.
    - `candidates`: what was compared by its whole prediction, the fastest as a sum first: the answers of the search,
      and the shipped rule sets, also those that do not fit; where rules were given, these on every mesh.
    - `answers`: those of the search, one a mesh and a way to lay the batch. None where the rules were given.
    - `refused`: the rule sets that this step or a mesh does not take.
    - `meshes`: those among which it was chosen. `dropped`: those of them that were not searched, as their lower bound
      is above `best`. `passed_over`: those with a third axis that were not searched, as others promised more: the
      number of these is limited.
    - `budget_bytes`: of a device; infinity without one.
    - `given`: the name of the rules where they were given; empty where they were chosen.
    - `also`: the other options that were left to be chosen: `shard_state`, `remat`, `microbatches`.
    - `crossings`: which axes of a mesh cross slow links, between hosts, slices or processes; empty where none do.
    """

    best: Candidate
    candidates: tuple[Candidate, ...]
    answers: tuple[Answer, ...]
    refused: tuple[Refused, ...]
    meshes: tuple[MeshShape, ...]
    dropped: tuple[MeshShape, ...] = ()
    passed_over: tuple[MeshShape, ...] = ()
    budget_bytes: float = math.inf
    given: str = ""
    also: tuple[str, ...] = ()
    crossings: tuple[Crossing, ...] = ()

    @property
    def options(self) -> tuple[str, ...]:
        """The options that were left to be chosen, by name."""
        rules = () if self.given else ("rules",)
        return (*(("mesh",) if len(self.meshes) > 1 else ()), *rules, *self.also) or ("mesh",)

    @property
    def rules(self) -> RuleSet:
        """The rules that were chosen: a plan by them is the chosen one."""
        return self.best.rules

    @property
    def mesh(self) -> MeshShape:
        """The mesh that was chosen."""
        return self.best.mesh

    @property
    def proof(self) -> Answer | None:
        """The answer of the search that was taken, however it runs, or the best on that mesh; None where nothing was
        searched there."""
        here = [each for each in self.answers if each.candidate.mesh == self.mesh]
        taken = next((each for each in here if each.candidate.stores_as(self.best)), None)
        return taken or min(here, key=lambda each: each.candidate.seconds, default=None)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The decisions of the search on the mesh that was taken; those of shipped sets are points of the same kind."""
        return () if self.proof is None else self.proof.variables

    @property
    def gap(self) -> float:
        """How much cheaper the best assignment of the search's problem could be, relative to its answer; 0 is proven
        best, infinity that nothing is known."""
        return math.inf if self.proof is None else self.proof.gap

    @property
    def solver(self) -> str:
        """Who proved the gap."""
        return NO_SOLVER if self.proof is None else self.proof.solver

    @property
    def clock_struck(self) -> bool:
        """Whether the clock and not the limit of work ended a search."""
        return any(each.clock_struck for each in self.answers)

    def __repr__(self) -> str:
        return f"<Choice of {self.best.name} on {self.mesh} among {len(self.candidates)} candidates>"

    def __str__(self) -> str:
        return registry.show(self)

    def _repr_html_(self) -> str:
        return registry.html(self)

    def taking(self, taken: Candidate, lowered: Sequence[Candidate]) -> Choice:
        """Returns the choice with what is `taken` in the end. `lowered`: the candidates of which it was found out what
        a device needs at most; those that run otherwise, in microbatches, say, come to the others."""
        known = lambda each: next((other for other in lowered if other.is_as(each)), each)
        more = [each for each in lowered if not any(each.is_as(other) for other in self.candidates)]
        candidates = sorted((*map(known, self.candidates), *more), key=lambda each: each.seconds)
        return dataclasses.replace(self, best=taken, candidates=tuple(candidates))

    def best_of(self, mesh: MeshShape) -> Candidate | None:
        """Returns the fastest candidate on a mesh, whether it fits or not; None where there is none."""
        return next((each for each in self.candidates if each.mesh == mesh), None)

    def verdict(self, candidate: Candidate) -> str:
        """Returns why a candidate was taken, or was not."""
        if candidate.is_as(self.best):
            return "taken"
        if candidate.compiled is not None and candidate.compiled.fits is False:
            return "needs more than there is, as compiled"
        if math.isinf(self.budget_bytes) or candidate.fits(self.budget_bytes):
            return self._how_fast(candidate)
        if candidate.bound_bytes is not None:
            return "needs more than the budget"
        if candidate.state_bytes > self.budget_bytes:
            return "its states alone need more than the budget"
        return "slower, and needs more than the budget by the sum"

    def _how_fast(self, candidate: Candidate) -> str:
        best = self.best
        if best.program_seconds is None and best.compiled is None:
            return "slower" if candidate.seconds > best.seconds else "as fast"
        if best.program_seconds is not None and candidate.program_seconds is None:
            return "not lowered"
        if candidate.best_known_seconds > best.best_known_seconds:
            return "slower"
        return "as fast" if best.compiled is None or candidate.compiled is not None else "not compiled"

    def lines(self) -> Iterator[str]:
        """Yields what a plan notes of it, a line each."""
        best, (first, *others) = self.best, [f'{option}="auto"' for option in self.options]
        chosen = f"{first} with {listed(others)}" if others else first
        by = f"{best.mesh} for rules {best.name}" if self.given else f"{best.name} on {best.mesh}"
        yield f"{chosen} chose {by}: predicted {_told(best)}"
        if len(self.meshes) > 1:
            yield from self._about_meshes()
            yield from self._about_order()
        if not self.given:
            yield from self._about_rules()
        yield from self._about_compiled()
        if STATE in self.also:
            yield self._about_state()
        if REMAT in self.also:
            yield self._about_remat()
        if MICROBATCHES in self.also:
            yield self._about_microbatches()
        yield from self._about_budget()

    def _about_meshes(self) -> Iterator[str]:
        found = {mesh: self.best_of(mesh) for mesh in self.meshes if mesh != self.mesh}
        named = [
            f"{mesh} {_told(best)}" + (f" by {best.name}" if not self.given else "")
            for mesh, best in found.items()
            if best is not None
        ]
        if named:
            yield f"other meshes: {'; '.join(named)}"
        if self.passed_over:
            yield f"{len(self.passed_over)} meshes with a third axis were not searched: others promised more"
        for mesh, best in found.items():
            if best is None and mesh not in self.passed_over:
                why = next((each.why for each in self.refused if each.mesh == mesh), "it takes no rules")
                yield f"no layout on {mesh}: {why}"

    @property
    def slow_axes(self) -> tuple[str, ...]:
        """The axes of the mesh that was taken that cross slow links, between hosts, slices or processes."""
        return dict(self.crossings).get(self.mesh, ())

    def _about_order(self) -> Iterator[str]:
        """Says which axes cross the slow links, and what the best of the other orders of the same axes takes."""
        if not self.slow_axes:
            return
        crossings = dict(self.crossings)
        others = (each for each in crossings if each != self.mesh and sorted(each.axes) == sorted(self.mesh.axes))
        found = [each for each in map(self.best_of, others) if each is not None]
        named = (
            f"{told(each.mesh, crossings[each.mesh])} on {each.mesh}, {_told(each)}"
            + (f" by {each.name}" if not self.given else "")
            for each in found
        )
        yield "; ".join((f"order of the axes: {told(self.mesh, self.slow_axes)}", *named))

    def _about_rules(self) -> Iterator[str]:
        best, proof = self.best, self.proof
        others = [each for each in self.candidates if each.mesh == best.mesh and not each.is_as(best)]
        if others:
            listed = ", ".join(f"{each.name} {_told(each)}" for each in others[:_SHOWN])
            yield f"compared with {listed}"
        if proof is None:
            return
        ended = ", ended by the clock" if proof.clock_struck else ""
        limit = proof.within_bytes
        within = "" if math.isinf(limit) else f" that stores at most {bytes_text(int(limit))} as a sum"
        yield (
            f"the search decided {len(proof.variables)} variables by {proof.solver}{ended}, with a certified gap of"
            f" {100 * proof.gap:.3g} %: no assignment{within} has a sum of seconds over layers and pairs of neighbours"
            " that is smaller by more than that"
        )
        if not any(each.candidate.stores_as(best) for each in self.answers):
            yield "a shipped rule set is taken, not the search's answer, whose values follow"
        for each in proof.variables:
            more = f" and {len(each.layers) - 1} like it" if len(each.layers) > 1 else ""
            rest = "; ".join(value for value in each.values if value != each.chosen)
            yield f"{each.name}{more}: {each.chosen}" + (f" (it could be: {rest})" if rest else "")

    @property
    def compiled(self) -> tuple[Candidate, ...]:
        """The candidates that were compiled ahead of time, the fastest as a sum first."""
        return tuple(each for each in self.candidates if each.compiled is not None)

    def _about_compiled(self) -> Iterator[str]:
        """Says what the compiler of the machine made of the candidates that were compiled."""
        for each in self.compiled:
            found = each.compiled
            assert found is not None, "it was compiled"
            needs = "" if found.needed_bytes is None else f" needs {bytes_text(found.needed_bytes)} a device"
            fits = {True: ", which fits", False: ", which does not fit", None: ""}[found.fits]
            sent = found.sent_bytes
            sends = "" if sent is None else (
                f"; sends {bytes_text(sent)} a step, planned {bytes_text(found.planned_bytes)}"
            )  # fmt: skip
            yield f"compiled ahead of time: {each.name} on {each.mesh}{needs}{fits}{sends} ({self.verdict(each)})"

    def _about_state(self) -> str:
        """Says how optimizer state lies, and what the other way would take."""
        best = self.best
        others = (each for each in self.candidates if each.lies_as(best) and each.shards_state != best.shards_state)
        other = min(others, key=lambda each: abs(each.microbatches - best.microbatches), default=None)
        if other is None:
            return (
                f"{STATE}: it changes nothing: these rules split what is trained over the axes of the batch already, or"
                " nothing of it divides further"
            )
        lies = "optimizer state and summed gradients lie in parts over the axes of the batch"
        how = (lies, "whole") if best.shards_state else ("optimizer state lies as its parameters do", "sharded")
        return f"{STATE}: {how[0]}: {self._figures(best)}; {how[1]}: {self._figures(other)} ({self.verdict(other)})"

    def _about_remat(self) -> str:
        """Says which blocks are computed again, and why."""
        best, limit = self.best, self.budget_bytes
        refused = next((each for each in self.refused if each.rules == f"any with {REMAT}"), None)
        if refused is not None:
            return f"{REMAT}: nothing is computed again: {refused.why}"
        if math.isinf(limit):
            return f"{REMAT}: everything is kept as the step is written, as no budget asks for less"
        if not best.remat:
            return f"{REMAT}: everything is kept as the step is written: it fits, and what is computed again takes time"
        others = (each for each in self.candidates if each.stores_as(best) and each.microbatches == best.microbatches)
        told = [
            f"{each.kept} {bytes_text(each.needed_bytes)} at most, {_told(each)}"
            for each in others
            if not each.is_as(best) and each.bound_bytes is not None
        ]
        return f"{REMAT}: {'; '.join((f'{best.kept}: {self._figures(best)}', *told))}"

    def _about_microbatches(self) -> str:
        """Says in how many parts a device differentiates its examples, and why."""
        best, limit = self.best, self.budget_bytes
        if best.microbatches > 1:
            fewer = [each for each in self.candidates if each.holds_as(best) and each.microbatches < best.microbatches]
            needed = [
                f"in {each.microbatches} {bytes_text(each.needed_bytes)} at most, {_told(each)}"
                for each in sorted(fewer, key=lambda each: each.microbatches)
            ]
            return (
                f"{MICROBATCHES}: {best.microbatches}, the fewest of this layout within {bytes_text(int(limit))}:"
                f" {self._figures(best)}; {'; '.join(needed)}"
            )
        if math.isinf(limit):
            return f"{MICROBATCHES}: 1, as no budget asks for more, and each more takes time"
        refused = next((each for each in self.refused if each.rules.endswith(f" {MICROBATCHES}")), None)
        why = "" if refused is None else f"; {refused.rules}: {refused.why}"
        return f"{MICROBATCHES}: 1, which is within the budget, and each more takes time{why}"

    def _figures(self, each: Candidate) -> str:
        at_most = "" if each.bound_bytes is None else f", {bytes_text(each.bound_bytes)} a device at most"
        return f"{_told(each)}, {bytes_text(each.state_bytes)} of states a device{at_most}"

    def _about_budget(self) -> Iterator[str]:
        too_large = [
            each
            for each in self.candidates
            if each.bound_bytes is not None and not each.fits(self.budget_bytes) and each.seconds <= self.best.seconds
        ]
        if too_large:
            on = (lambda each: f" on {each.mesh}") if len(self.meshes) > 1 else (lambda _: "")
            told = [f"{each.name}{on(each)} at most {bytes_text(each.needed_bytes)}" for each in too_large]
            named = ", ".join(told[:_SHOWN]) + (f", and {len(told) - _SHOWN} more" if len(told) > _SHOWN else "")
            yield f"faster, and not within {bytes_text(int(self.budget_bytes))}: {named}"


def listed(words: Sequence[str]) -> str:
    """Returns words in a row, as a sentence has them: `mesh, rules and shard_state`."""
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def _told(candidate: Candidate) -> str:
    """Returns what a candidate is predicted to take, in words."""
    as_sum = f"{1e3 * candidate.seconds:.4g} ms"
    if candidate.program_seconds is None:
        return as_sum
    return f"{1e3 * candidate.program_seconds:.4g} ms as a program ({as_sum} as a sum)"
