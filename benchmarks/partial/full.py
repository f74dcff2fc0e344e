"""Partial backpropagation against full backpropagation of the whole batch: the loss at equal steps, and the steps to
equal loss.

The curves are those that the part on quality kept (partial.json): the same networks, starts, orders of examples and
learning rates, in pairs. Here only costs are planned; nothing is trained, and nothing is timed.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

FULL = "full"
SHARES = (0.25, 0.5, 0.75, 1.0)  # of the steps, at which losses are compared

Curve = Sequence[Sequence[float]]  # (step, loss) after some steps each


def measure(quick: bool, data_dir: pathlib.Path) -> dict[str, Any]:
    """By task the cost of every variant: predicted device time over that of full backpropagation."""
    from benchmarks.partial import quality

    found: dict[str, Any] = {}
    for task in quality.tasks(quick, data_dir):
        params = quality.start(task, 1)
        found[task.name] = {
            name: quality.Trainer(task, "adam", backprop, quality.BATCH).cost(params)
            for name, backprop in quality.variants().items()
            if name != quality.SMALLER
        }
    return {"costs": found}


def render(facts: Mapping[str, Any], kept: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """The section, of the costs that were planned (`measure`) and the curves that the part on quality kept."""
    from benchmarks._common import table
    from benchmarks.partial import quality
    from benchmarks.splitbrain.common import Section

    curves = kept.get("quality", {}).get("facts", {})
    rows, later, worse = [], [], []
    for key, runs in curves.items():
        task, _, optimizer = key.rpartition(", ")
        for variant, cost in facts["costs"].get(task, {}).items():
            if variant == FULL or variant not in runs:
                continue
            steps = steps_to_equal_loss(runs[variant], runs[FULL])
            ratio, half = quality.interval(steps)
            later.append(ratio * cost > 1)
            middle, around = _difference(runs[variant], runs[FULL], SHARES[-1])
            worse.append(middle > around)
            rows.append(
                [
                    task, optimizer, variant, f"{cost:.3f}",
                    *("{:+.3f} ± {:.3f}".format(*_difference(runs[variant], runs[FULL], share)) for share in SHARES),
                    f"{ratio:.2f} ± {half:.2f}", f"**{ratio * cost:.2f}**",
                ]
            )  # fmt: skip
    lines = [
        (
            "**After as many steps the training loss is above that of full backpropagation in"
            f" {sum(worse)} of {len(worse)} cells, beyond the 95 % interval; the device time to the loss that both"
            f" reach is more than that of full backpropagation in {sum(later)} of {len(later)} cells.**"
        ),
        "",
        (
            "The runs of the section on quality, partial backpropagation beside full backpropagation with the whole"
            " batch. *Loss at* a share of the steps: that of partial backpropagation less that of full, over the first"
            " 1024 training images, in the mean of the seeds' pairs with 95 % intervals. *Steps*: to the lowest loss"
            " that both runs of a pair reach, over those of full backpropagation (curves are known every"
            f" {quality.CURVE_STEPS} steps, straight between them). *Device time*: these steps times the cost, which is"
            " the predicted device time of a step over that of full backpropagation."
        ),
        "",
        *table(
            [
                "task", "optimizer", "variant", "cost", *(f"loss at {share:.0%}" for share in SHARES), "steps",
                "device time",
            ],
            rows,
        ),
        "",
    ]  # fmt: skip
    return Section("Against full backpropagation", lines, []), {}


def steps_to_equal_loss(mine: Sequence[Curve], full: Sequence[Curve]) -> list[float]:
    """By pair of runs, the steps to the lowest loss that both reach, over those of the second."""
    from benchmarks.partial.pays import common_loss, steps_to

    found = []
    for one, other in zip(mine, full, strict=True):
        loss = common_loss([one, other])
        found.append((steps_to(one, loss) or one[-1][0]) / (steps_to(other, loss) or other[-1][0]))
    return found


def _difference(mine: Sequence[Curve], full: Sequence[Curve], share: float) -> tuple[float, float]:
    """Of losses after a share of the steps, with half of its interval."""
    from benchmarks.partial import quality

    place = max(round(share * len(full[0])) - 1, 0)
    return quality.interval([one[place][1] - other[place][1] for one, other in zip(mine, full, strict=True)])
