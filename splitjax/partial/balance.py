"""How many examples each worker takes so that all finish together (Kumar et al., arXiv 2111.10672, leave the shallow
ones waiting)."""

from __future__ import annotations

from splitjax.errors import BatchError
from splitjax.partial.depths import Depths


def balanced_examples(depths: Depths, num_examples: int, place: str, unit: int = 1) -> tuple[int, ...]:
    """Examples by slot, in inverse proportion to the time that its depth takes for one of them; multiples of `unit`
    (the devices that share those of a worker, which `num_examples` is a multiple of), largest remainders first.

    Raises `BatchError` for fewer examples than workers, or than their devices.
    """
    num_units, least = num_examples // unit, depths.num_slots * unit
    if num_examples < least:
        raise BatchError(
            f"{num_examples} examples cannot be balanced among {depths.num_slots} workers"
            + (f" of {unit} devices" if unit > 1 else ""),
            value=num_examples,
            place=place,
            remedy=f"use {least} examples or more",
        )
    rates = [1 / (depths.forward + depths.backward(slot)) for slot in range(depths.num_slots)]
    ideal = [num_units * rate / sum(rates) for rate in rates]
    shares = [max(1, int(one)) for one in ideal]
    while sum(shares) > num_units:  # where the least of one was more than its part
        shares[
            max((slot for slot, share in enumerate(shares) if share > 1), key=lambda slot: shares[slot] - ideal[slot])
        ] -= 1
    for slot in sorted(range(len(shares)), key=lambda slot: shares[slot] - ideal[slot])[: num_units - sum(shares)]:
        shares[slot] += 1
    return tuple(unit * one for one in shares)
