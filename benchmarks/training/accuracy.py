"""Test accuracy on real data, split and on one device: runs of `splitjax train`, a process each, read from their
metrics files."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

SPLIT, ONE = "data=2,model=4", "data=1"
SEEDS = (0, 1, 2)
LEAST_DIGITS = 0.98
COMMON_STEPS = 20  # whose losses are compared between the split and the one device
DIGITS = (
    "--model",
    "vgg11",
    "--width",
    "0.25",
    "--head-features",
    "512",
    "--data",
    "digits",
    "--epochs",
    "20",
    "--augment",
    "--warmup-steps",
    "40",
)
CIFAR = (
    "--model",
    "vgg11",
    "--width",
    "0.25",
    "--head-features",
    "256",
    "--data",
    "cifar10",
    "--epochs",
    "12",
    "--augment",
    "--warmup-steps",
    "40",
)
DEEP = (
    "--model",
    "vgg16",
    "--width",
    "0.25",
    "--head-features",
    "512",
    "--data",
    "digits",
    "--epochs",
    "20",
    "--augment",
    "--warmup-steps",
    "40",
    "--learning-rate",
    "5e-4",
)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training: test accuracy at its end, the loss of every step, seconds of the process."""

    accuracy: float
    losses: list[float]
    seconds: float


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section on accuracy."""
    seeds, short = (SEEDS[:1], ("--epochs", "1")) if quick else (SEEDS, ())
    cifar = (*CIFAR, "--data-dir", str(data_dir))
    digits = [_train((*DIGITS, *short), SPLIT, seed) for seed in seeds]
    deep = [_train((*DEEP, *short), SPLIT, seeds[0])]
    split, one = [], []
    for seed in seeds:  # in turns, so that both meet the same neighbours
        split.append(_train((*cifar, *short), SPLIT, seed))
        one.append(_train((*cifar, *short), ONE, seed))
    from splitjax.data import load_cifar10, load_digits

    images = load_cifar10(data_dir)
    return _report(digits, deep, split, one, (images.num_train, images.num_test, load_digits().num_test))


def _train(options: tuple[str, ...], mesh: str, seed: int) -> Run:
    """A run of the command. Raises `RuntimeError` with its last words where it fails."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        metrics = pathlib.Path(folder) / "metrics.jsonl"
        command = [
            sys.executable,
            "-m",
            "splitjax.cli",
            "train",
            *options,
            "--mesh",
            mesh,
            "--seed",
            str(seed),
            "--metrics",
            str(metrics),
            "--platform",
            "cpu",
        ]
        # it makes the devices that its mesh needs
        environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**environment, "JAX_PLATFORMS": "cpu"}
        )
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(command)} ended with exit status {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
            )
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    run = Run(rows[-1]["eval_accuracy"], [row["loss"] for row in rows], time.perf_counter() - started)
    print(
        f"{_option(options, '--model')} on {_option(options, '--data')}, mesh {mesh}, seed {seed}: {run.accuracy:.2%}"
        f" after {len(rows)} steps, {run.seconds:.0f} s",
        flush=True,
    )
    return run


def _option(options: tuple[str, ...], name: str) -> str:
    return options[options.index(name) + 1]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two samples of accuracies. `difference` of their means; `standard_error` of it; `p`: of Welch's test,
    two-sided."""

    difference: float
    standard_error: float
    p: float


def compare(first: list[float], second: list[float]) -> Comparison:
    """Welch's test of equal means (Welch 1947), for samples of at least two."""
    from scipy import stats  # scikit-learn, which the digits come from, needs it too

    error = math.sqrt(statistics.variance(first) / len(first) + statistics.variance(second) / len(second))
    difference = statistics.fmean(first) - statistics.fmean(second)
    if not error:
        return Comparison(difference, 0.0, 1.0 if not difference else 0.0)
    return Comparison(difference, error, float(stats.ttest_ind(first, second, equal_var=False).pvalue))


def largest_difference(split: list[Run], one: list[Run], num_steps: int) -> float:
    """The largest relative difference of two runs' losses over their first steps, over all seeds."""
    return max(
        abs(a - b) / b
        for x, y in zip(split, one, strict=True)
        for a, b in zip(x.losses[:num_steps], y.losses[:num_steps], strict=True)
    )


def _report(digits: list[Run], deep: list[Run], split: list[Run], one: list[Run], sizes: tuple[int, int, int]) -> Any:
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    num_train, num_test, num_digits = sizes
    rows = [
        [
            what,
            mesh,
            ", ".join(f"{run.accuracy:.2%}" for run in runs),
            f"**{_mean(runs):.2%}**",
            f"{_spread(runs):.2%}",
            str(len(runs[0].losses)),
            f"{statistics.fmean(run.seconds for run in runs):.0f}",
        ]
        for what, mesh, runs in (
            ("digits, VGG-11", SPLIT, digits),
            ("digits, VGG-16", SPLIT, deep),
            ("CIFAR-10 sample, VGG-11", SPLIT, split),
            ("CIFAR-10 sample, VGG-11", ONE, one),
        )
    ]
    goals = [
        Goal(
            "digits, VGG-11: lowest test accuracy of all seeds",
            min(run.accuracy for run in digits),
            LEAST_DIGITS,
            False,
            ".2%",
        ),
        Goal("digits, VGG-16: test accuracy", deep[0].accuracy, LEAST_DIGITS, False, ".2%"),
    ]
    said = ""
    if len(split) > 1:
        found = compare([run.accuracy for run in split], [run.accuracy for run in one])
        said = (
            f" On the CIFAR-10 sample the split's mean is {100 * found.difference:+.2f} percentage points from the one"
            f" device's, with a standard error of {100 * found.standard_error:.2f} (of the seeds alone: that there are"
            f" {num_test} test images adds {100 * math.sqrt(_mean(one) * (1 - _mean(one)) / num_test):.1f} to each"
            f" single accuracy); Welch's test of equal means gives p = {found.p:.2f}."
        )
        goals.append(
            Goal(
                "CIFAR-10 sample, split against one device: p of the difference of mean accuracies",
                found.p,
                0.05,
                False,
                ".2f",
            )
        )
    first, later = largest_difference(split, one, 1), largest_difference(split, one, COMMON_STEPS)
    goals.append(
        Goal("CIFAR-10 sample: loss of the first step, split against one device, relative", first, 1e-5, True, ".1e")
    )
    lines = [
        (
            f"`splitjax train` on 8 virtual devices (`--mesh {SPLIT}`, rules `splitbrain`) and on one (`--mesh {ONE}`),"
            " batches of 64, AdamW, cosine schedule; test accuracy at the end of the run (no choice of the best"
            f" epoch), on {num_digits} digits and {num_test} images. Options: digits `{' '.join(DIGITS)}` and"
            f" `{' '.join(DEEP)}`; CIFAR-10 `{' '.join(CIFAR)}`. There are {num_train:,} training images (all of"
            " CIFAR-10: 50,000): what matters is that both meshes reach the same."
        ),
        "",
        *table(
            [
                "",
                "mesh",
                f"test accuracy, seeds {', '.join(map(str, SEEDS))}",
                "mean",
                "standard deviation",
                "steps",
                "seconds a run",
            ],
            rows,
        ),
        "",
        (
            "With one seed both start from the same parameters and see the same batches: their losses differ by at"
            f" most {first:.1e} (relative) at the first step and {later:.1e} over the first {COMMON_STEPS}; afterwards"
            f" rounding grows as it does between any two orders of summation.{said}"
        ),
        "",
    ]
    return Section("Accuracy on real data", lines, goals)


def _mean(runs: list[Run]) -> float:
    return statistics.fmean(run.accuracy for run in runs)


def _spread(runs: list[Run]) -> float:
    return statistics.stdev(run.accuracy for run in runs) if len(runs) > 1 else 0.0
