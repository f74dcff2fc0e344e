"""Recommends a way to train by the rows of an advice.

Rows go in; what is recommended, the aim under which something else would be, and in which respects partial
backpropagation does better come out as sentences.
"""

from __future__ import annotations

from collections.abc import Sequence

from splitjax.partial.advice import (
    FULL,
    SMALLER,
    AdviceRow,
    Recommendation,
    compute_to_progress,
    time_to_progress,
)

# Gradients are estimated from few batches: a difference of this share is none.
_MARGIN = 0.02


def uniform_is_optimal(noise: Sequence[float], costs: Sequence[float]) -> bool:
    """Tells whether contributors in proportion to sqrt(noise / cost) come out alike for all segments, given that their
    number can only stay or grow from the input to the loss: then no assignment beats a smaller batch.

    **Arguments:** `noise`: per segment, input side first, the variance of one worker's gradient. `costs`: per segment
    the time that one worker spends; the last with the forward pass.
    """
    blocks: list[tuple[float, float]] = []
    for variance, cost in zip(noise, costs, strict=True):
        blocks.append((variance, cost))
        while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] >= blocks[-1][0] * blocks[-2][1]:
            (a, b), (c, d) = blocks[-2:]
            blocks[-2:] = [(a + c, b + d)]
    return len(blocks) == 1


def recommend(rows: Sequence[AdviceRow], is_uniform: bool) -> Recommendation:
    """Recommends the smaller batch unless some partial backpropagation needs less compute for the same progress.

    **Arguments:** `rows`: all ways to train, `FULL` and `SMALLER` among them. `is_uniform`: see `uniform_is_optimal`.
    """
    full, smaller = (next(row for row in rows if row.name == name) for name in (FULL, SMALLER))
    partial = [row for row in rows if row.name not in (FULL, SMALLER)]
    scored = [(score, row) for row in partial if (score := compute_to_progress(row, full)) is not None]
    best = min(scored, key=lambda pair: pair[0], default=None)
    reasons: list[str] = []
    if best is not None and best[0] < 1 - _MARGIN:
        option = best[1].name
        reasons.append(
            f"Partial backpropagation ({option}) is worth its compute here: to the same progress it needs"
            f" {100 * best[0]:.1f} % of the device time of full backpropagation, and of a smaller batch, which needs as"
            " much."
        )
    else:
        option = SMALLER
        reasons.append(
            f"Full backpropagation with a smaller batch ({smaller.what}) has at equal compute a gradient that is at"
            " least as good."
        )
        if best is not None:
            reasons.append(
                f"The best partial backpropagation here ({best[1].name}) needs {100 * best[0]:.1f} % of its device time"
                " to the same progress."
            )
        if is_uniform:
            reasons.append(
                "With the forward pass charged to the last layers, the square-root rule gives every layer the same"
                " contributors, which is a smaller batch."
            )
    timed = [(score, row) for row in rows if (score := time_to_progress(row, full)) is not None]
    shortest, fastest = min(timed, key=lambda pair: (pair[0], pair[1] is not smaller))
    unless = ""
    if fastest.name != option:
        own = next(score for score, row in timed if row.name == option)
        rival = f"the {option}" if option == SMALLER else option
        share = (
            f"takes {100 * shortest / own:.1f} % of the time of {rival}" if own > 0 else f"takes less time than {rival}"
        )
        unless = (
            "This goes by the device time of all workers. Only if the time until this job is done is all that counts,"
            f" and the job has its workers and their link to itself, {fastest.name} ({fastest.what}) is better: with"
            f" the exchange counted it {share}."
        )
    return Recommendation(option, fastest.name, tuple(reasons), _wins(partial, smaller), unless)


def _wins(partial: Sequence[AdviceRow], smaller: AdviceRow) -> tuple[str, ...]:
    """Says in which respects partial backpropagation does better than the smaller batch, whatever is recommended."""
    wins = []
    for row in partial:
        gains = []
        if row.sent_bytes < (1 - _MARGIN) * smaller.sent_bytes:
            slower = row.communication_seconds > (1 + _MARGIN) * smaller.communication_seconds
            gains.append(
                f"{_less(row.sent_bytes, smaller.sent_bytes, 'fewer')} bytes sent"
                + (", though in more time (group after group, then sums are handed on)" if slower else "")
            )
        if row.communication_seconds < (1 - _MARGIN) * smaller.communication_seconds:
            gains.append(f"{_less(row.communication_seconds, smaller.communication_seconds)} time for the exchange")
        if row.mean_memory_bytes < (1 - _MARGIN) * smaller.mean_memory_bytes:
            gains.append(f"{_less(row.mean_memory_bytes, smaller.mean_memory_bytes)} memory on the mean worker")
        if row.busiest_seconds > (1 + _MARGIN) * row.compute_seconds:
            gains.append(
                f"room for another job: workers are idle {100 * (1 - row.compute_seconds / row.busiest_seconds):.0f} %"
                " of the time"
            )
        if gains:
            wins.append(f"Compared with the smaller batch, {row.name} has {', '.join(gains)}.")
    return tuple(wins) or ("In no other respect does partial backpropagation do better here.",)


def _less(here: float, there: float, word: str = "less") -> str:
    return f"{100 * (1 - here / there):.0f} % {word}"
