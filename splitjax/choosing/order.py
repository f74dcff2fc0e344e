"""Orders the candidates of a choice in which they are lowered, one after the other, to find out what each takes.

A choice that was made by sums, and what was lowered of it so far, come in; the next candidate comes out. Whoever lowers
it adds it to what was lowered, with its upper bound of memory, before the next is asked for.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from splitjax.choosing.candidate import Candidate
from splitjax.choosing.choice import Choice

# So many candidates are lowered for the time of their programs, the best as a sum first, of meshes of two axes and of
# each kind of third axis; with the best of every shipped rule set, and what comes after the fastest.
_FEW, _FEW_OF_THREE_AXES = 4, 2


def in_turn(
    choice: Choice, lowered: list[Candidate], most: int | None, otherwise: Callable[[Candidate], list[Candidate]]
) -> Iterator[Candidate]:
    """Yields the candidates in the order in which they are lowered, the fastest as a sum first, until enough of those
    that were `lowered` fit: one, or where they are timed, the best few and the best of every rule set, `most` in all.
    Where none fits, those whose states alone are over the budget come last, to tell which of all needs least; what
    cannot be that any more is left out. `otherwise`: returns how else a candidate can run for less memory, in
    microbatches and with blocks computed again; these come in the same order, where the candidate does not fit and they
    may."""
    budget, waiting = choice.budget_bytes, _Waiting(choice.budget_bytes, lowered)
    for candidate in choice.candidates if most is None else _distinct(choice.candidates):
        yield from waiting.until(candidate.seconds, most)
        fitting = [each for each in lowered if each.fits(budget)]
        if fitting and (most is None or len(lowered) >= most):
            return
        is_first_of_its_name = candidate.rules.name not in {each.rules.name for each in fitting}
        alike = sum(set(each.mesh.names) == set(candidate.mesh.names) for each in fitting)
        is_among_few = alike < (_FEW if len(candidate.mesh.names) < 3 else _FEW_OF_THREE_AXES)
        if candidate.state_bytes <= budget and (is_among_few or is_first_of_its_name):
            yield candidate
            if any(each.is_as(candidate) and not each.fits(budget) for each in lowered):
                waiting.add(otherwise(candidate))
    if not any(each.fits(budget) for each in lowered):
        yield from waiting.until(math.inf, None)
    if any(each.fits(budget) for each in lowered):
        yield from _following(choice, lowered, most or 0)
        return
    hopeless = [each for each in choice.candidates if each.state_bytes > budget]
    for candidate in sorted(hopeless, key=lambda each: each.state_bytes):
        least = min((each.needed_bytes for each in lowered), default=math.inf)
        if candidate.state_bytes < least:
            yield candidate


def may_fit(candidate: Candidate, lowered: Iterable[Candidate], budget_bytes: float) -> bool:
    """Whether a candidate that runs otherwise for less memory may fit, by what was `lowered`. Where the same fits that
    keeps more in the backward pass it is not needed, and neither is one in microbatches where it fits in fewer. The
    first with blocks computed again has as many microbatches as the layout that it comes from, which are several where
    a step asks for them, and is known by its states alone.

    All that is stored beside the states is at most divided by their number. What a moment of the loop over microbatches
    stores is a part that is divided and one that is not, and the peak is the most of all moments: it is convex in one
    over their number, and lies above the line through two known points. (A step without the loop is another program.)
    """
    alike = [each for each in lowered if each.stores_as(candidate) and each.microbatches <= candidate.microbatches]
    if any(each.fits(budget_bytes) and each.seconds <= candidate.seconds for each in alike):
        return False
    fewer = [each for each in alike if each.holds_as(candidate) and each.microbatches < candidate.microbatches]
    if not fewer:
        is_first = any(each.microbatches == candidate.microbatches for each in alike)
        return bool(candidate.remat) and is_first and candidate.state_bytes <= budget_bytes
    share = lambda each: 1 / each.microbatches
    least = [
        each.state_bytes + (each.needed_bytes - each.state_bytes) * share(candidate) / share(each) for each in fewer
    ]
    for one, other in itertools.pairwise(sorted((each for each in fewer if each.microbatches > 1), key=share)):
        slope = (other.needed_bytes - one.needed_bytes) / (share(other) - share(one))
        least.append(one.needed_bytes - slope * (share(one) - share(candidate)))
    return max(least) <= budget_bytes


class _Waiting:
    """Candidates that run otherwise for less memory than what does not fit, the fastest as a sum first.

    **Arguments:** `budget_bytes`: of a device. `lowered`: what was lowered so far, which grows.
    """

    def __init__(self, budget_bytes: float, lowered: Sequence[Candidate]) -> None:
        self._budget_bytes, self._lowered = budget_bytes, lowered
        self._candidates: list[Candidate] = []

    def add(self, candidates: Iterable[Candidate]) -> None:
        """Takes further candidates in."""
        self._candidates = sorted((*self._candidates, *candidates), key=lambda each: each.seconds)

    def until(self, seconds: float, most: int | None) -> Iterator[Candidate]:
        """Yields those that may fit and take no more than `seconds`, until one does and `most` were lowered; with None,
        until one does."""
        while self._candidates and self._candidates[0].seconds <= seconds:
            if any(each.fits(self._budget_bytes) for each in self._lowered):
                if most is None or len(self._lowered) >= most:
                    return
            candidate = self._candidates.pop(0)
            if may_fit(candidate, self._lowered, self._budget_bytes):
                yield candidate


def _following(choice: Choice, lowered: list[Candidate], most: int) -> Iterator[Candidate]:
    """Yields, on further meshes of the same axes, what those rules are that the fastest program so far has, until one
    is not faster."""
    seconds = lambda: min(each.best_known_seconds for each in lowered if each.fits(choice.budget_bytes))
    found, before = True, math.inf
    while found and seconds() < before and len(lowered) < most:
        found, before = False, seconds()
        fitting = (each for each in lowered if each.fits(choice.budget_bytes))
        fastest = next(each for each in fitting if each.best_known_seconds == before)
        for candidate in _distinct(choice.candidates):
            known = any(candidate.is_as(each) for each in lowered)
            alike = candidate.name == fastest.name and set(candidate.mesh.names) == set(fastest.mesh.names)
            if alike and not known and candidate.state_bytes <= choice.budget_bytes:
                found = True
                yield candidate
                break


def _distinct(candidates: Iterable[Candidate]) -> Iterator[Candidate]:
    """Yields the first of candidates that are one layout under several names: equal in all that is predicted."""
    seen: set[tuple[float, int, int]] = set()
    for each in candidates:
        predicted = each.seconds, each.state_bytes, each.peak_bytes
        if predicted not in seen:
            seen.add(predicted)
            yield each
