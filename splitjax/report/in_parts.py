"""Shares a planned collective among the compiled ones that realise it together.

A planned collective and the evidence of compiled ones go in; which of these add up to it, and the part of it that each
realises, come out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from splitjax.plan import Collective
from splitjax.report.evidence import Evidence


def dealt(planned: Collective, positions: Sequence[int], evidence: Sequence[Evidence]) -> dict[int, Collective]:
    """Deals a planned collective out to those at `positions` of `evidence` that realise it together: each is beside its
    own bytes, and the largest beside what the others leave of the plan's."""
    if not positions:
        return {}
    sizes = {position: evidence[position].collective.bytes for position in positions}
    largest = max(positions, key=sizes.__getitem__)
    rest = planned.bytes - sum(size for position, size in sizes.items() if position != largest)
    return {
        position: dataclasses.replace(planned, bytes=max(rest, 0) if position == largest else size)
        for position, size in sizes.items()
    }


def adding_up(positions: Sequence[int], evidence: Sequence[Evidence], num_bytes: int) -> tuple[int, ...]:
    """Returns those of `positions`, taken in their order where they fit, that send `num_bytes` together; none where
    they do not add up."""
    parts: list[int] = []
    for position in positions:
        if evidence[position].collective.bytes <= num_bytes:
            parts.append(position)
            num_bytes -= evidence[position].collective.bytes
        if not num_bytes:
            return tuple(parts)
    return ()
