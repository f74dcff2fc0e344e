"""Where partial backpropagation reaches a loss sooner than the smaller batch of equal cost: by the link's rate, alone
and with two jobs on the devices.

Seconds of a step are measured behind real links of the rate, four devices of one thread each, both rivals in turns.
Steps to the loss are those of the runs of the section on quality (its curves are kept in partial.json): its network and
images, its seeds in pairs. Time to the loss is their product. Bytes are those of the workers' network devices, of a
wider network, beside the plan's.
"""

from __future__ import annotations

import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.partial.worker import ALONE, RIVAL, SHARED

LINKS = ("100mbit", "200mbit", "500mbit", "1000mbit", None)
UNLIMITED = "unlimited"
TASK, OPTIMIZERS = "CIFAR-10 sample", ("sgd", "adam")
ROUNDS, STEPS = 9, 8  # steps: whole turns of the depths
WIDER, BYTES_LINK, BYTES_ROUNDS = 4, "1000mbit", 3
MOST_OFF_PLAN = 0.05  # of the bytes: headers, acknowledgements, messages of gloo, and a loss
PICTURE = "partial-pays.svg"


def measure(quick: bool, data_dir: pathlib.Path) -> dict[str, Any]:
    """What is measured, as JSON values."""
    from benchmarks.partial import device, quality
    from benchmarks.sparse.launch import over_workers, run_workers

    task = next(one for one in quality.tasks(False, data_dir) if one.name == TASK)
    share, smaller = device.core_share(quality.NUM_WORKERS), smaller_batch(task)
    image, widths = list(task.train[0].shape[1:]), list(task.widths)
    settings = {
        "what": "steps", "image": image, "widths": widths, "smaller": smaller, "share": share,
        "rounds": 2 if quick else ROUNDS, "steps": 4 if quick else STEPS,
    }  # fmt: skip
    found, others, is_held = {}, [], True
    for link in LINKS[:1] if quick else LINKS:
        with device.groups() as group:
            answers = run_workers("partial.worker", {**settings, "group": group}, quality.NUM_WORKERS, link)
        others.append(answers.others)
        is_held = is_held and group is not None
        for key in answers.workers[0]["turns"]:
            one = over_workers([worker["turns"][key] for worker in answers.workers])
            found[f"{link or UNLIMITED}, {key}"] = {
                "seconds": one.seconds,
                "low": one.low,
                "high": one.high,
                "sent": one.sent,
            }
        print(f"{link or UNLIMITED}: measured", flush=True)
    settings = {
        "what": "bytes",
        "image": image,
        "widths": [WIDER * width for width in widths],
        "rounds": 1 if quick else BYTES_ROUNDS,
        "steps": 4 if quick else STEPS,
    }
    answers = run_workers("partial.worker", settings, quality.NUM_WORKERS, BYTES_LINK)
    ways = {
        name: {**one, "sent": _mean_sent([worker["ways"][name] for worker in answers.workers])}
        for name, one in answers.workers[0]["ways"].items()
    }
    known = [one for one in others if one is not None]
    return {
        "steps": found, "smaller": smaller, "share": share if is_held else None, "others": max(known, default=None),
        "bytes": {name: {key: value for key, value in one.items() if key != "turns"} for name, one in ways.items()},
    }  # fmt: skip


def _mean_sent(workers: Sequence[Mapping[str, Any]]) -> float:
    """Bytes that a mean worker sent in a step."""
    return statistics.fmean(statistics.median(turn["sent"] for turn in worker["turns"]) for worker in workers)


def smaller_batch(task: Any) -> int:
    """Examples of the rival's batch, as in the section on quality."""
    from benchmarks.partial import quality

    cost = quality.Trainer(task, "sgd", quality.variants()[RIVAL], quality.BATCH).cost(quality.start(task, 0))
    return round(quality.BATCH * cost / quality.NUM_WORKERS) * quality.NUM_WORKERS


def steps_to(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """The step at which a curve (step, loss) first reaches a loss, between its points along a line; None if it does
    not."""
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


def steps_by_seed(runs: Mapping[str, Sequence[Any]]) -> tuple[float, list[float], list[float]]:
    """The stated loss, and by seed the steps to it of partial backpropagation and of the smaller batch. `runs`: by
    variant the curves."""
    from benchmarks.partial import quality

    loss = common_loss([*runs[RIVAL], *runs[quality.SMALLER]])
    mine, rival = (
        [float(steps_to(curve, loss) or curve[-1][0]) for curve in runs[name]] for name in (RIVAL, quality.SMALLER)
    )
    return loss, mine, rival


def time_ratios(measured: Mapping[str, Any], steps: Mapping[str, float]) -> dict[str, dict[str, list[float]]]:
    """Job line -> optimizer -> by link, in order, the time to the loss over the smaller batch's. `steps`: by optimizer
    the ratio of steps."""
    return {
        how: {
            name: [step_ratio(measured, link, how) * ratio for link in links_of(measured)]
            for name, ratio in steps.items()
        }
        for how in (ALONE, SHARED)
    }


def step_ratio(measured: Mapping[str, Any], link: str, how: str) -> float:
    """Seconds of a step over those of the smaller batch."""
    from benchmarks.partial import quality

    return measured[f"{link}, {RIVAL}, {how}"]["seconds"] / measured[f"{link}, {quality.SMALLER}, {how}"]["seconds"]


def links_of(measured: Mapping[str, Any]) -> list[str]:
    return [link or UNLIMITED for link in LINKS if f"{link or UNLIMITED}, {RIVAL}, {ALONE}" in measured]


def by_formula(segments: Sequence[Sequence[int]], whole: int, num_workers: int) -> float:
    """Bytes that a mean worker sends for gradients: each of n contributors 2 (n-1)/n of a segment, and N - n hand-overs
    of it. `segments`: (n, bytes) of each; none: all of `whole` bytes are summed by all."""
    rows = segments or [(num_workers, whole)]
    return sum(size * (2 * (count - 1) + num_workers - count) for count, size in rows if count) / num_workers


def render(facts: Mapping[str, Any], kept: Mapping[str, Any]) -> tuple[Any, dict[str, str]]:
    """The section and its pictures, of what was measured (`measure`) and of the curves that the part on quality
    kept."""
    from benchmarks._common import table
    from benchmarks.partial import quality
    from benchmarks.partial.plot import draw
    from benchmarks.sparse.launch import others_text
    from benchmarks.splitbrain.common import Goal, Section

    curves = kept.get("quality", {}).get("facts", {})
    held = (
        f"each held to {facts['share']:.2f} of a core, so that one that waits leaves nothing to the others"
        if facts["share"] is not None
        else "**not held to a share of the cores, so that one that waits leaves its core to the others**"
    )
    lines = [
        (
            f"{quality.NUM_WORKERS}"
            f" devices behind links of the given rate are processes of one thread, {held}. The network is"
            f" that of `{TASK}` in the section on quality, with {quality.BATCH} examples a step; its rival is"
            f" full backpropagation with the smaller batch of equal cost, {facts['smaller']} examples. With"
            " two jobs, two processes share each device and its link, neither waits for the other, and the"
            " depths of the second begin half the turns later; the time is that until both are done. Seconds"
            " of a step are those of the slowest worker: the median of the turns. The time to the loss is the"
            " seconds of a step times the steps to the loss, relative to that of the smaller batch."
            f" {others_text(facts['others'])}"
        ),
        "",
    ]
    steps, measured = {}, facts["steps"]
    for optimizer in OPTIMIZERS:
        if (runs := curves.get(f"{TASK}, {optimizer}")) is None:
            continue
        loss, mine, rival = steps_by_seed(runs)
        steps[optimizer] = statistics.fmean(mine) / statistics.fmean(rival)
        middle, half = quality.interval([a / b for a, b in zip(mine, rival, strict=True)])
        lines.append(
            f"- {optimizer}: a training loss of {loss:.3f}, the lowest that all runs reach, takes"
            f" {statistics.fmean(mine):.0f} steps, and {statistics.fmean(rival):.0f} with the smaller batch:"
            f" {steps[optimizer]:.3f} times as many (by seed {middle:.3f} ± {half:.3f}, 95 %)."
        )
    ratios = time_ratios(measured, steps)
    bold = lambda ratio: f"**{ratio:.3f}**" if ratio < 1 else f"{ratio:.3f}"
    rows = []
    for number, link in enumerate(links_of(measured)):
        for how in (ALONE, SHARED):
            mine, rival = measured[f"{link}, {RIVAL}, {how}"], measured[f"{link}, {quality.SMALLER}, {how}"]
            took = lambda one: f"{1e3 * one['seconds']:.1f} ({1e3 * one['low']:.1f} to {1e3 * one['high']:.1f})"
            rows.append(
                [
                    link,
                    how,
                    took(rival),
                    took(mine),
                    f"{mine['seconds'] / rival['seconds']:.3f}",
                    *(bold(ratios[how][name][number]) for name in steps),
                ]
            )
    titles = [
        "link",
        "jobs",
        "smaller batch, ms a step (quartiles)",
        "partial",
        "partial over smaller",
        *(f"time to the loss, {name}" for name in steps),
    ]
    lines += ["", *table(titles, rows), ""]
    if steps:
        lines += [_region(measured, ratios), "", f"![Time to the loss by the link's rate]({PICTURE})", ""]
    goals, sent = [], []
    for name, one in facts["bytes"].items():
        off = one["sent"] / one["planned"] - 1
        formula = (
            "" if name == "temporal" else f"{by_formula(one['segments'], one['whole'], quality.NUM_WORKERS) / 1e6:.3f}"
        )
        sent.append([name, formula, f"{one['planned'] / 1e6:.3f}", f"{one['sent'] / 1e6:.3f}", f"{100 * off:+.1f} %"])
        goals.append(Goal(f"bytes of {name} off the plan's", abs(off), MOST_OFF_PLAN, True))
    lines += [
        (
            f"The next table has the bytes that the mean worker sends in a step at {BYTES_LINK}, for the same"
            f" network with widths x {WIDER} ({next(iter(facts['bytes'].values()))['whole'] / 1e6:.2f} MB of"
            " gradients). The formula counts for every segment 2 (n-1)/n of its bytes for each of its n"
            " contributors, and N - n hand-overs of the sum. *On the wire* is what left the worker's network"
            " device, with headers, acknowledgements and the loss."
        ),
        "",
        *table(["", "by the formula, MB", "planned, MB", "on the wire, MB", "wire over plan"], sent),
        "",
    ]
    picture = {PICTURE: draw(links_of(measured), ratios)} if steps else {}
    return Section("Where it pays", lines, goals), picture


def _region(measured: Mapping[str, Any], ratios: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """In words, where it is sooner."""
    links = links_of(measured)
    parts = []
    for how, by_name in ratios.items():
        for name, values in by_name.items():
            inside = [link for link, value in zip(links, values, strict=True) if value < 1]
            parts.append(f"{name}, {how}: {', '.join(inside) if inside else 'nowhere'}")
    return f"Sooner with partial backpropagation: {'; '.join(parts)}."
