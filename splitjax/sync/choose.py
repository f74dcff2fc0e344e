"""Chooses a scheme for a sparsity and a link, as `costs.choose` does, with schemes that run as the answer."""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.sync.costs import choose as costs
from splitjax.sync.costs.choose import Candidate, SchemeChoice
from splitjax.sync.costs.schemes import Link, SchemeCosts
from splitjax.sync.profile import Sparsity
from splitjax.sync.running import Scheme
from splitjax.sync.scheme import runnable

__all__ = ["Candidate", "SchemeChoice", "candidates", "choose"]


def candidates(pattern: str = "auto") -> tuple[Scheme, ...]:
    """Returns the schemes that `costs.choose.candidates` returns for `pattern`, as they run. Raises `ExtensionError`
    for a declared scheme that cannot be loaded."""
    return tuple(map(runnable, costs.candidates(pattern)))


def choose(sparsity: Sparsity, link: Link, schemes: Sequence[SchemeCosts] | None = None) -> SchemeChoice:
    """Chooses the cheapest scheme by prediction, by default among `candidates()`.

    `sparsity`, `link` and `schemes` are those of `costs.choose.choose`, which says what comes out, and what is raised.
    """
    return costs.choose(sparsity, link, schemes or candidates())
