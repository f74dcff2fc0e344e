"""Counts what a sum over some of the workers sends: who takes part in it, who is handed the result, and how many bytes
that is.

Workers that end their backward pass early do not contribute to the gradients of the layers before. `lower.partial`
evaluates such sums (`allreduce`), plans and advice predict them; both read these figures.
"""

from __future__ import annotations

from collections.abc import Sequence

# A TPU's collectives want groups of equal size. There everybody takes part, with zeros.
_EQUAL_GROUPS = ("tpu",)


def in_groups(axes: Sequence[str], platform: str) -> bool:
    """Tells whether only the contributors take part in a sum over workers.

    They make a group of the collective, which can be named along a single mesh axis, on devices that have groups of
    unequal size.

    **Arguments:** `axes`: the mesh axes of the workers. `platform`: that of the mesh's devices.
    """
    return len(axes) == 1 and platform not in _EQUAL_GROUPS


def handing(contributors: Sequence[int], num_workers: int) -> list[list[tuple[int, int]]]:
    """Plans how a sum reaches the workers that lack it.

    **Arguments:** `contributors`: the numbers of the workers that have it. `num_workers`: of all workers.

    Returns rounds of (from, to): in each, every worker that has the sum hands it to a worker that has not.
    """
    have, rounds = list(contributors), []
    lack = [worker for worker in range(num_workers) if worker not in contributors]
    while lack:
        pairs = list(zip(have, lack, strict=False))
        have += [to for _, to in pairs]
        lack = lack[len(pairs) :]
        rounds.append(pairs)
    return rounds


def sent_bytes(num_bytes: int, num_contributors: int, num_workers: int) -> tuple[float, float]:
    """Gives the mean bytes that a worker sends for a value of `num_bytes`: to add it up, and to hand it on.

    **Arguments:** `num_bytes`: of the value. `num_contributors`: the workers that add to it. `num_workers`: of all.
    """
    if num_contributors == 0:
        return 0.0, 0.0
    return 2 * (num_contributors - 1) * num_bytes / num_workers, (
        num_workers - num_contributors
    ) * num_bytes / num_workers
