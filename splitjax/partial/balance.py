"""Gives workers of different depths unequal shares of the examples, so that all finish a step together.

`Depths` and the number of examples go in, a number of examples per slot comes out. Without it, workers that
differentiate little wait for those that differentiate everything, as in Kumar et al. (arXiv 2111.10672).
"""

from __future__ import annotations

from splitjax.errors import BatchError
from splitjax.partial.depths import Depths


def balanced_examples(depths: Depths, num_examples: int, place: str, unit: int = 1) -> tuple[int, ...]:
    """Divides the examples among the slots in inverse proportion to the time that a slot's depth takes per example.

    **Arguments:**

    - `depths`: the depths whose times count.
    - `num_examples`: the examples of the whole batch, a multiple of `unit`.
    - `place`: what an error names as its place.
    - `unit`: the devices that share the examples of a worker in equal parts: every share is a multiple of it.

    Returns the number of examples by slot, rounded by largest remainders. Raises `BatchError` for fewer examples than
    workers, or than their devices.
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
    shares = [max(1, int(share)) for share in ideal]
    while sum(shares) > num_units:  # where a share of one unit was more than its part
        shares[
            max((slot for slot, share in enumerate(shares) if share > 1), key=lambda slot: shares[slot] - ideal[slot])
        ] -= 1
    for slot in sorted(range(len(shares)), key=lambda slot: shares[slot] - ideal[slot])[: num_units - sum(shares)]:
        shares[slot] += 1
    return tuple(unit * share for share in shares)
