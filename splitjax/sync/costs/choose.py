"""Chooses a scheme for a sparsity and a link: evaluates the cost formulas of all, and takes the cheapest with the
reason.

Pure arithmetic on a profile; Zen's choice (Wang et al., arXiv 2309.13254, section 3.4: profile the first
iterations, then keep the best) over more candidates. Bytes are those of the capacities that each scheme would
get, padding included, as `SchemeCosts.predicted_bytes`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from splitjax.errors import SyncError
from splitjax.sync.costs.all_gather import AllGatherCosts
from splitjax.sync.costs.blocks import BlocksCosts
from splitjax.sync.costs.capacities import Capacities
from splitjax.sync.costs.dense import DenseCosts
from splitjax.sync.costs.hierarchical import HierarchicalCosts
from splitjax.sync.costs.parameter_server import ParameterServerCosts
from splitjax.sync.costs.recursive_doubling import RecursiveDoublingCosts
from splitjax.sync.costs.registry import COSTS
from splitjax.sync.costs.row_exchange import RowExchangeCosts
from splitjax.sync.costs.schemes import Link, SchemeCosts
from splitjax.sync.costs.zen import ZenCosts
from splitjax.sync.profile import Sparsity

# A little faster is not worth a scheme with more parts: the earlier of these wins within this share.
_CLEARLY = 0.98


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A scheme with its capacities, and what it would cost: seconds a step, bytes that a worker sends, messages one
    after the other."""

    scheme: SchemeCosts
    capacities: Capacities
    seconds: float
    sent_bytes: int
    num_messages: int


@dataclasses.dataclass(frozen=True)
class SchemeChoice:
    """The chosen candidate, why, and all of them, cheapest first."""

    best: Candidate
    reason: str
    table: tuple[Candidate, ...]

    @property
    def scheme(self) -> SchemeCosts:
        """The chosen scheme."""
        return self.best.scheme


def candidates(pattern: str = "auto") -> tuple[SchemeCosts, ...]:
    """Returns all schemes with the options worth weighing: splitjax's own, the simplest first, then those that others
    have registered or that installed packages declare (`SchemeCosts.variants`), in order.

    `pattern`: how those with owners push, see `costs.messages.PATTERNS`. Zen goes by running counts, which send what
    its hashes send, sooner. Raises `ExtensionError` for a declared scheme that cannot be loaded.
    """
    COSTS.load_all()
    shipped: tuple[SchemeCosts, ...] = (
        DenseCosts(),
        AllGatherCosts(),
        RecursiveDoublingCosts(),
        HierarchicalCosts(),
        RowExchangeCosts(pattern=pattern),
        RowExchangeCosts(hot=True, pattern=pattern),
        ZenCosts(partition="pack", pattern=pattern),
        ZenCosts("row", "pack", pattern=pattern),
        ParameterServerCosts(pattern),
        BlocksCosts(pattern=pattern),
    )
    names = {scheme.name for scheme in shipped}
    others = (cls.variants(pattern) for name, cls in COSTS.items() if name not in names)
    return (*shipped, *itertools.chain.from_iterable(others))


def choose(sparsity: Sparsity, link: Link, schemes: Sequence[SchemeCosts] | None = None) -> SchemeChoice:
    """Chooses the cheapest scheme by prediction.

    **Arguments:**

    - `sparsity`: as `measure` found it in the first steps, with its samples.
    - `link`: as measured between the workers.
    - `schemes`: what to choose from, simplest first; by default `candidates()`.

    **Returns:** a `SchemeChoice`. One worker alone exchanges nothing: the first scheme that leaves its rows as they
    are.

    Raises `SyncError` for a sparsity without samples, such as one that was read from JSON: capacities come from
    them.
    """
    if not sparsity.samples:
        raise SyncError(
            "the sparsity has no samples, from which schemes take their capacities",
            value=sparsity.table,
            place="choose(sparsity)",
            remedy="pass what `measure` or `step.profile(...)` found in this process, not what was read from JSON",
        )
    table: list[Candidate] = []
    for scheme in schemes or candidates():
        if not scheme.takes(sparsity.table):
            continue
        capacities, n = scheme.plan(sparsity), sparsity.num_workers
        sent = scheme.predicted_bytes(capacities, sparsity.table) if n > 1 else 0
        messages = scheme.num_messages(capacities, sparsity.table) if n > 1 else 0
        table.append(
            Candidate(
                scheme,
                capacities,
                scheme.predicted_seconds(sparsity, link, capacities) if n > 1 else 0.0,
                sent,
                messages,
            )
        )
    best = table[0]
    if sparsity.num_workers == 1:  # nothing is sent, but a dense gradient has the table's size
        best = next((candidate for candidate in table if not isinstance(candidate.scheme, DenseCosts)), best)
    for candidate in table[1:]:
        if candidate.seconds < best.seconds * _CLEARLY:
            best = candidate
    ranking = tuple(sorted(table, key=lambda candidate: candidate.seconds))
    return SchemeChoice(best, _reason(best, ranking, sparsity), ranking)


def _reason(best: Candidate, table: Sequence[Candidate], sparsity: Sparsity) -> str:
    if sparsity.num_workers == 1:
        return "one worker: nothing to exchange"
    second = next((candidate for candidate in table if candidate.scheme.name != best.scheme.name), None)
    facts = f"density {sparsity.density:.3g}, densification {sparsity.densification(sparsity.num_workers):.3g}"
    text = f"{best.seconds:.3g} s a step predicted for {_sent(best)} ({facts})"
    # Who sees more bytes than of an all-reduce, or a faster candidate, asks why.
    dense = next(
        (
            candidate
            for candidate in table
            if isinstance(candidate.scheme, DenseCosts)
            and candidate.sent_bytes < best.sent_bytes
            and candidate.seconds > best.seconds
        ),
        None,
    )
    if dense is not None:
        more = "in more messages that wait for each other " if dense.num_messages > best.num_messages else ""
        text += f"; dense sends fewer bytes, but {more}and takes longer: {_costs(dense)}"
    if second is None or second is dense:
        return text
    text += f"; next: {second.scheme.name}, {_costs(second)}"
    return (
        text
        if second.seconds >= best.seconds
        else f"{text}, not {100 * (1 - _CLEARLY):.0f} % faster: the simpler scheme is kept"
    )


def _costs(candidate: Candidate) -> str:
    return f"{candidate.seconds:.3g} s for {_sent(candidate)}"


def _sent(candidate: Candidate) -> str:
    plural = "s" * (candidate.num_messages != 1)
    return f"{candidate.sent_bytes:,} bytes in {candidate.num_messages} message{plural}"
