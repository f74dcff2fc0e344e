"""Where partial backpropagation reaches a loss sooner than the smaller batch of equal cost: by the link's rate, alone and with two jobs on the devices.

Seconds of a step are measured behind real links of the rate, four processes of one thread each, both rivals in turns. Steps to the loss are those of the
runs of the section on quality (its curves are kept in partial.json): its network and images, the mean over its seeds.
"""

from __future__ import annotations

import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

LINKS = ("100mbit", "200mbit", "500mbit", "1000mbit", None)
TASK, OPTIMIZERS = "CIFAR-10 sample", ("sgd", "adam")
ROUNDS, STEPS = 7, 8
LEAST_ROUNDS = 2
RIVAL = "spatial, count"


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section on where it pays. Needs that of quality in benchmarks/results/partial.json."""
    from benchmarks import _partial_quality as quality
    from benchmarks._common import RESULTS
    from benchmarks._sparse_launch import over_workers, run_workers

    file = RESULTS / "partial.json"
    known = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    curves = known.get("quality", {}).get("facts", {})
    task = next(one for one in quality.tasks(False, data_dir) if one.name == TASK)
    settings = {
        "image": list(task.train[0].shape[1:]), "widths": list(task.widths), "smaller": smaller_batch(task), "rounds": LEAST_ROUNDS if quick else ROUNDS,
        "steps": 2 if quick else STEPS,
    }  # fmt: skip
    found, others = {}, []
    for link in LINKS[:1] if quick else LINKS:
        answers = run_workers("_partial_worker", settings, quality.NUM_WORKERS, link)
        others.append(answers.others)
        names = answers.workers[0]["turns"]
        found[link or "unlimited"] = {name: over_workers([worker["turns"][name] for worker in answers.workers]) for name in names}
    return _report(found, curves, others)


def smaller_batch(task: Any) -> int:
    """Examples of the rival's batch, as in the section on quality."""
    from benchmarks import _partial_quality as quality

    cost = quality.Trainer(task, "sgd", quality.variants()[RIVAL], quality.BATCH).cost(quality.start(task, 0))
    return round(quality.BATCH * cost / quality.NUM_WORKERS) * quality.NUM_WORKERS


def steps_to(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """The step at which a curve (step, loss) first reaches a loss, between its points along a line; None if it does not."""
    before = None
    for step, value in curve:
        if value <= loss:
            if before is None or before[1] == value:
                return step
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = step, value
    return None


def common_loss(curves: Sequence[Sequence[Sequence[float]]]) -> float:
    """The lowest loss that all runs reach."""
    return max(min(value for _, value in curve) for curve in curves)


def _report(found: dict[str, Any], curves: dict[str, Any], others: Sequence[float | None]) -> Any:
    from benchmarks import _partial_quality as quality
    from benchmarks._common import table
    from benchmarks._sparse_launch import others_text
    from benchmarks._splitbrain_common import Section

    ratios = {}
    lines = [
        f"{quality.NUM_WORKERS} processes of one thread behind links of the rate; the network of `{TASK}` in the section on quality, {quality.BATCH} examples a step, against full "
        f"backpropagation with the smaller batch of equal cost. Two jobs: both dispatched at once on the same devices, the second half the turns later, so that its shallow "
        f"workers are where the first has its deep ones; seconds until both are done. {others_text(max((one for one in others if one is not None), default=None))}",
        "",
    ]
    for optimizer in OPTIMIZERS:
        both = curves.get(f"{TASK}, {optimizer}")
        if both is None:
            continue
        loss = common_loss([*both[RIVAL], *both[quality.SMALLER]])
        mine, rival = (statistics.fmean(steps_to(curve, loss) for curve in both[name]) for name in (RIVAL, quality.SMALLER))
        ratios[optimizer] = mine / rival
        lines.append(f"- {optimizer}: a training loss of {loss:.3f} takes {mine:.0f} steps, and {rival:.0f} with the smaller batch ({mine / rival:.3f} times as many).")
    rows, facts = [], {}
    for link, by_name in found.items():
        for how in ("alone", "two jobs"):
            mine, rival = by_name[f"{RIVAL}, {how}"], by_name[f"{quality.SMALLER}, {how}"]
            ratio = mine.seconds / rival.seconds
            facts[f"{link}, {how}"] = {"partial_seconds": mine.seconds, "smaller_seconds": rival.seconds, "partial_sent": mine.sent, "smaller_sent": rival.sent}
            mb = lambda one: "" if one.sent is None else f"{one.sent / 1e6:.2f}"
            rows.append([
                link, how, f"{1e3 * rival.seconds:.1f}", f"{1e3 * mine.seconds:.1f}", f"{ratio:.3f}", mb(rival), mb(mine),
                *(f"{'**' if ratio * ratios[name] < 1 else ''}{ratio * ratios[name]:.3f}{'**' if ratio * ratios[name] < 1 else ''}" if name in ratios else "" for name in OPTIMIZERS),
            ])  # fmt: skip
    lines += ["", *table([
        "link", "jobs", "smaller batch, ms a step", "partial, ms a step", "partial over smaller", "MB sent, smaller", "MB sent, partial",
        *(f"time to the loss, {name}" for name in OPTIMIZERS),
    ], rows), "", "Time to the loss: of partial backpropagation over the smaller batch's; in bold where it is sooner.", ""]  # fmt: skip
    return Section("Where it pays", lines, []), {"steps_ratio": ratios, "measured": facts}
