"""Whether 200 steps of training under every rule set have the losses and the parameters of one device.

    python -m benchmarks curves --data-dir DIR                  everything, its page and its pictures
    python -m benchmarks curves --data-dir DIR --only resnet    one model; the page keeps what it has of the others
    python -m benchmarks curves --quick                         a few steps of the demo's model, printed only
    python -m benchmarks curves --page                          measures nothing: the page again, from what was kept

The whole takes about half an hour on two cores.

`--data-dir`: the folder of wikitext2_valid.txt; the text models of --quick read this project's own prose without it.
Images are scikit-learn's digits. What was measured is kept beside the page (curves.json).

In float64 every loss and every parameter is compared. In float32 and bf16 rounding moves one device's own run as well,
so the loss curves are compared with those of runs on one device whose sums are taken in other orders.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks._common import RESULTS, virtual_devices, write_page
from benchmarks.curves.cases import CASES, DTYPES, TEXT_FILE, Case, Dtype
from benchmarks.curves.compare import equality, parts_at
from benchmarks.curves.runs import Run, Training

TOLERANCE = 1e-9
# Of the tolerance: how far other orders of its sums may move one device's own run in float64.
STEADY = 0.25
NUM_STEPS, NUM_CONTROLS = 200, 8
NUM_SEEDS = 50  # that are tried for one in which one device is steady
NAME = "curves"


def main(argv: list[str] | None = None) -> int:
    """Trains the chosen models; returns 1 where a run misses."""
    from benchmarks.curves import page

    options = _options(argv)
    if not options.page:
        virtual_devices()
    kept = {"header": "", "results": {}} if options.printed and not options.keep else read(options.output)
    for key, result in () if options.page else _measure(options):
        print(*page.lines_of(key, result), sep="\n", flush=True)
        if options.keep:
            seeds = kept.setdefault("other_seeds", {}).setdefault(key, {})
            seeds[str(result["seed"])] = page.ratios(result)
        else:
            kept["results"][key] = result
        if options.keep or not options.printed:
            kept["header"] = kept["header"] if options.keep else _header()
            options.output.mkdir(parents=True, exist_ok=True)
            (options.output / f"{NAME}.json").write_text(json.dumps(kept) + "\n", encoding="utf-8")
    goals = page.goals(kept["results"])
    print(f"{sum(goals.values())} of {len(goals)} runs have the numbers of one device")
    if options.keep or not options.printed:
        lines = page.page(kept["header"], kept["results"], kept.get("other_seeds", {}))
        print("wrote", write_page(NAME, lines, options.output))
        for name, picture in page.pictures(kept["results"]).items():
            (options.output / f"{NAME}-{name}.svg").write_text(picture, encoding="utf-8")
    return 0 if all(goals.values()) else 1


def read(folder: pathlib.Path) -> dict[str, Any]:
    """What was measured before: the header of the page, and results by model and dtype (`"resnet/bf16"`)."""
    file = folder / f"{NAME}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {"header": "", "results": {}}


def _options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(NAME, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=pathlib.Path, help=f"folder of {TEXT_FILE}")
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES], default=[], help="models")
    parser.add_argument("--rules", nargs="*", default=[], help="rule sets; what they come to is printed only")
    parser.add_argument("--dtypes", nargs="*", choices=tuple(DTYPES), default=[])
    parser.add_argument("--steps", type=int, help=f"other than {NUM_STEPS}; what they come to is printed only")
    parser.add_argument("--seed", type=int, help="first seed, other than 0; what it comes to is printed only")
    parser.add_argument(
        "--keep", action="store_true", help="with --seed: put the ratios of that seed on the page, beside seed 0"
    )
    parser.add_argument(
        "--quick", action="store_true", help="ten steps of the demo's model under splitbrain, printed only"
    )
    parser.add_argument("--page", action="store_true", help="only the page and its pictures, from what was kept")
    parser.add_argument(
        "--output", type=pathlib.Path, default=RESULTS, help="folder of the page instead of benchmarks/results"
    )
    options = parser.parse_args(argv)
    if options.quick:
        options.only, options.rules = options.only or ["demo"], options.rules or ["splitbrain"]
        options.steps = options.steps or 10
    elif options.data_dir is None and not options.page:
        parser.error(f"--data-dir is the folder of {TEXT_FILE}")
    if options.keep and (not options.seed or options.rules or options.steps or "float64" in options.dtypes):
        parser.error("--keep goes with a --seed other than 0, all rule sets and steps, and --dtypes float32 or bf16")
    options.printed = bool(options.rules or options.steps or options.seed)
    return options


def _measure(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    import jax

    for case in CASES:
        for name, dtype in DTYPES.items():
            if (options.only and case.name not in options.only) or (options.dtypes and name not in options.dtypes):
                continue
            rules = [rule for rule in case.rules if not options.rules or rule in options.rules]
            arguments = case, dtype, rules, options.steps or NUM_STEPS, options.seed or 0, options.data_dir
            with jax.enable_x64(name == "float64"):
                yield f"{case.name}/{name}", exact(*arguments) if name == "float64" else rounded(*arguments)
            jax.clear_caches()


def exact(
    case: Case, dtype: Dtype, rules: list[str], num_steps: int, seed: int, folder: pathlib.Path | None
) -> dict[str, Any]:
    """In float64: how far losses and parameters of every run are from one device's. The seed is the first, from `seed`
    on, in which one device itself is steady."""
    training = Training(case, dtype, num_steps, folder)
    for draw in range(seed, seed + NUM_SEEDS):
        training.start(draw)
        want, again = training.one_device(), training.reordered(0)
        control = equality(again.losses, again.arrays, want.losses, want.arrays)
        if control.within(STEADY * TOLERANCE):
            break
    else:
        raise RuntimeError(f"one-device runs of {case.name} in {dtype.name} part in all of {NUM_SEEDS} seeds")
    check_trains(case.name, want.losses)
    runs = {}
    for rule in rules:
        got = training.under(rule)
        compared = equality(got.losses, got.arrays, want.losses, want.arrays)
        runs[rule] = {**dataclasses.asdict(compared), "num_sharded": got.num_sharded, "seconds": round(got.seconds, 1)}
    return {
        "seed": draw, "first": want.losses[0], "last": want.losses[-1], "tolerance": TOLERANCE,
        "control": dataclasses.asdict(control), "runs": runs,
    }  # fmt: skip


def rounded(
    case: Case, dtype: Dtype, rules: list[str], num_steps: int, seed: int, folder: pathlib.Path | None
) -> dict[str, Any]:
    """In float32 or bf16: the loss curves of one device, of one device with its sums in other orders, of one device
    with a slightly wrong update, and under the rule sets. In float32 the seed is the first, from `seed` on, in which no
    ReLU on its edge makes one-device runs part."""
    training = Training(case, dtype, num_steps, folder)
    for draw in range(seed, seed + NUM_SEEDS):
        training.start(draw)
        controls = [training.one_device()]
        while steady := dtype.name != "float32" or _together(controls):
            if len(controls) > NUM_CONTROLS:
                break
            controls.append(training.reordered(len(controls)))
        if steady:
            break
    else:
        raise RuntimeError(f"one-device runs of {case.name} in {dtype.name} part in all of {NUM_SEEDS} seeds")
    check_trains(case.name, controls[0].losses)
    runs = {rule: training.under(rule) for rule in rules}
    return {
        "seed": draw,
        "one_device": [_digits(control.losses) for control in controls],
        "wrong": _digits(training.wrong().losses),
        "runs": {
            rule: {"losses": _digits(got.losses), "num_sharded": got.num_sharded, "seconds": round(got.seconds, 1)}
            for rule, got in runs.items()
        },
    }


def _together(controls: list[Run]) -> bool:
    losses = np.stack([control.losses for control in controls])
    return parts_at(losses) == losses.shape[1]


def check_trains(name: str, losses: np.ndarray) -> None:
    """Raises `RuntimeError` for a run that diverges or does not move: it would compare well with any other like it."""
    if not np.isfinite(losses).all() or len(set(losses.tolist())) == 1:
        raise RuntimeError(f"{name} does not train on one device: losses {losses}")


def _digits(losses: np.ndarray) -> list[float]:
    """Nine digits, which give a float32 back."""
    return [float(f"{loss:.9g}") for loss in losses]


def _header() -> str:
    from benchmarks import machine

    return machine.header(machine.this_machine(), "python -m benchmarks curves --data-dir DIR")


if __name__ == "__main__":
    sys.exit(main())
