"""Says beforehand which steps may be refused under which rule set, and why.

Whatever else is refused, by an error however clear, counts against the step.
"""

from __future__ import annotations

import dataclasses

from benchmarks.modern.steps.case import ModernStep

# Words of `ModernStep.has` that decide whether a step may be refused.
TABLE, BOUNDARY = "table", "splitjax gradient"


@dataclasses.dataclass(frozen=True)
class MayRefuse:
    """`rules`: the set. `lacks`: steps that do not have this word in `has`. `error`: the type. `why`: for readers."""

    rules: str
    lacks: str
    error: str
    why: str


MAY_REFUSE: tuple[MayRefuse, ...] = (
    MayRefuse(
        "embedding_owner",
        TABLE,
        "RuleError",
        "the set splits tables by rows, and the step has none: nothing would be split",
    ),
    MayRefuse(
        "embedding_owner",
        BOUNDARY,
        "SyncError",
        "rows of tables are pulled and pushed by `splitjax.value_and_grad`, and the step takes its gradient with plain"
        " `jax.value_and_grad`",
    ),
)


def expected(step: ModernStep, rules: str, text: str) -> str:
    """Returns why a step may be refused under a rule set by an error of this text, which begins with its type; empty
    where it may not."""
    return next(
        (
            may.why
            for may in MAY_REFUSE
            if may.rules == rules and may.lacks not in step.has and text.startswith(f"{may.error}:")
        ),
        "",
    )
