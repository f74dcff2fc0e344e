"""How many examples each worker takes so that all finish together (Kumar et al., arXiv 2111.10672, leave the shallow ones waiting)."""

from __future__ import annotations

from splitjax.errors import BatchError
from splitjax.partial.depths import Depths


def balanced_examples(depths: Depths, num_examples: int, place: str) -> tuple[int, ...]:
    """Examples by slot, in inverse proportion to the time that its depth takes for one of them; whole numbers, largest remainders first.

    Raises `BatchError` for fewer examples than workers.
    """
    if num_examples < depths.num_slots:
        raise BatchError(
            f"{num_examples} examples cannot be balanced among {depths.num_slots} workers", value=num_examples, place=place,
            remedy=f"use {depths.num_slots} examples or more",
        )
    rates = [1 / (depths.forward + depths.backward(slot)) for slot in range(depths.num_slots)]
    ideal = [num_examples * rate / sum(rates) for rate in rates]
    shares = [max(1, int(one)) for one in ideal]
    while sum(shares) > num_examples:  # where the least of one example was more than its part
        shares[max(range(len(shares)), key=lambda slot: shares[slot] - ideal[slot])] -= 1
    for slot in sorted(range(len(shares)), key=lambda slot: shares[slot] - ideal[slot])[: num_examples - sum(shares)]:
        shares[slot] += 1
    return tuple(shares)
