"""The page of the loss curves, from what was measured: what passes, the tables, the pictures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks._common import table
from benchmarks.curves.cases import CASES, DTYPES
from benchmarks.curves.compare import AHEAD, PARTED, ROUNDINGS, Equality, Within, parts_at, spread, within
from benchmarks.curves.plot import draw
from benchmarks.curves.runs import MESH, WRONG

Results = Mapping[str, Mapping[str, Any]]  # by model and dtype
MESH_TEXT = " x ".join(f"{axis}={size}" for axis, size in MESH.items())
_DTYPES = tuple(name for name in DTYPES if name != "float64")


def judged(result: Mapping[str, Any]) -> dict[str, Equality | Within]:
    """What the run under each rule set comes to."""
    if "tolerance" in result:
        return {rules: _equality(run) for rules, run in result["runs"].items()}
    return {
        rules: within(np.array(run["losses"]), np.array(result["one_device"])) for rules, run in result["runs"].items()
    }


def goals(results: Results) -> dict[str, bool]:
    """By model, dtype and rule set, whether the run has the numbers of one device."""
    found = {}
    for key, result in results.items():
        for rules, outcome in judged(result).items():
            found[f"{key}/{rules}"] = outcome.ok if isinstance(outcome, Within) else outcome.within(result["tolerance"])
    return found


def lines_of(key: str, result: Mapping[str, Any]) -> list[str]:
    """A model in one dtype, for the terminal."""
    if "tolerance" in result:
        control = f"loss {result['control']['loss']:.1e} state {result['control']['state']:.1e}"
    else:
        wrong = within(np.array(result["wrong"]), np.array(result["one_device"]))
        allowed = spread(np.array(result["one_device"]))
        control = f"spread {allowed[0]:.1e} to {allowed[-1]:.1e}; "
        control += f"{WRONG:g} of the update is outside at {wrong.first_outside}"
    lines = [f"     {key:20} one device      {control} (seed {result['seed']})"]
    met = goals({key: result})
    for rules, outcome in judged(result).items():
        verdict, run = "pass" if met[f"{key}/{rules}"] else "MISS", result["runs"][rules]
        if isinstance(outcome, Equality):
            what = f"loss {outcome.loss:.1e} state {outcome.state:.1e} ({outcome.worst})"
        else:
            share = f"{outcome.distance:.1e} of {outcome.spread:.1e}"
            what = f"{outcome.ratio:.2f} of the spread at step {outcome.step} ({share})"
        lines.append(f"{verdict} {key:20} {rules:15} {run['seconds']:6.1f} s {run['num_sharded']:3} sharded  {what}")
    return lines


def pictures(results: Results) -> dict[str, str]:
    """By model, an SVG; for those that have both narrow dtypes."""
    drawn = {}
    for case in CASES:
        curves = {dtype: results[f"{case.name}/{dtype}"] for dtype in _DTYPES if f"{case.name}/{dtype}" in results}
        if len(curves) == len(_DTYPES):
            by_dtype = {
                dtype: (
                    np.array(result["one_device"]),
                    {rules: np.array(run["losses"]) for rules, run in result["runs"].items()},
                )
                for dtype, result in curves.items()
            }
            drawn[case.name] = draw(f"{case.title[0].upper()}{case.title[1:]}, {MESH_TEXT}", by_dtype)
    return drawn


def ratios(result: Mapping[str, Any]) -> dict[str, float]:
    """By rule set the largest distance of its run, as a multiple of the spread at that step."""
    return {rules: round(outcome.ratio, 3) for rules, outcome in judged(result).items() if isinstance(outcome, Within)}


def held_out(result: Mapping[str, Any]) -> float:
    """The largest distance of any one-device run from the others, as a multiple of the spread of these."""
    controls = np.array(result["one_device"])
    return max(within(run, np.delete(controls, k, 0)).ratio for k, run in enumerate(controls))


def page(
    header: str, results: Results, other_seeds: Mapping[str, Mapping[str, Mapping[str, float]]] | None = None
) -> list[str]:
    """The whole page. `other_seeds`: by cell and seed, the `ratios` of further runs."""
    met = goals(results)
    curves = [one for one in results.values() if "one_device" in one]
    num_steps = len(curves[0]["one_device"][0]) if curves else 0
    num_orders = len(curves[0]["one_device"]) - 1 if curves else 0
    return [
        "# Loss curves: the same as on one device, beyond one step",
        "",
        f"**{sum(met.values())} of {len(met)} runs have the numbers of one device.**",
        "",
        header.rstrip(),
        "",
        f"Narrow models on real data, {num_steps} steps each, on a mesh of {MESH_TEXT} (8 virtual devices) and on one "
        "device, from the same first parameters on the same batches: "
        + "; ".join(f"`{case.name}`: {case.title}" for case in CASES)
        + ". Images are scikit-learn's "
        "digits, text is the validation text of WikiText-2. Each step is a call of the decorated step. Sizes and "
        "optimizers are in `benchmarks/curves/cases.py`.",
        "",
        "*One device with its sums in other orders* is the same step, traced, with the terms of every matrix product, "
        "convolution and sum permuted at random along the dims that are summed over "
        "(`benchmarks/curves/reorder.py`). Terms and random bits are the same; only rounding differs.",
        "",
        *_exact_section(results),
        *_rounded_section(results, num_orders),
        *_other_seeds(other_seeds or {}),
        *_missed(results),
    ]


def _exact_section(results: Results) -> list[str]:
    found = {name: result for name, result in _by_case(results, "float64").items()}
    if not found:
        return []
    tolerance = next(iter(found.values()))["tolerance"]
    skipped = [f"{name} (seed {result['seed']})" for name, result in found.items() if result["seed"]]
    lines = [
        f"## float64: every loss and every parameter to {tolerance:.0e}",
        "",
        "Differences are absolute, and relative where the value is larger than 1. Seed 0, save where one device with "
        f"its sums in another order moves by more than a quarter of the bound (a ReLU on its edge): "
        f"{', '.join(skipped) or 'none'}.",
        "",
    ]
    rules = _rules(found)
    for title, field in (("Losses", "loss"), ("Parameters and batch statistics after the last step", "state")):
        rows = [
            [name, f"{result['control'][field]:.0e}", *(_exact_text(result, rule, field) for rule in rules)]
            for name, result in found.items()
        ]
        lines += [
            f"{title}, the largest difference of any:",
            "",
            *table(["model", "one device, another order", *rules], rows),
            "",
        ]
    return lines


def _exact_text(result: Mapping[str, Any], rules: str, field: str) -> str:
    if rules not in result["runs"]:
        return ""
    value = result["runs"][rules][field]
    return f"{value:.0e}" if value <= result["tolerance"] else f"**{value:.0e}**"


def _rounded_section(results: Results, num_orders: int) -> list[str]:
    if not any(_by_case(results, dtype) for dtype in _DTYPES):
        return []
    skipped = [
        f"{name} (seed {result['seed']})" for name, result in _by_case(results, "float32").items() if result["seed"]
    ]
    lines = [
        "## float32 and bf16: within the spread of one-device runs",
        "",
        f"For each model {num_orders + 1} one-device runs: the step as it is, and its sums in {num_orders} other "
        "orders. The *spread* at a step is how far the two furthest of them are apart at any step up to it and the "
        f"next {AHEAD} (and at least {ROUNDINGS} units in the last place of the loss). A run passes if at every step "
        "its loss is no further from the nearest of them than that. The rule was settled on other seeds than those of "
        "this page, and is the same for all.",
        "",
        f"The next {AHEAD}: in bf16 distances grow twentyfold a step at first, from a sum that rounds to the "
        "neighbouring value, and which run has the first such sum is chance.",
        "",
        "In float32 seeds are the first, from 0 on, in which one-device runs never part by more than "
        f"{PARTED:g}, relative where the loss is larger than 1. Where a ReLU stands on its edge, rounding decides "
        "which way it falls, and from then on runs part on one device as well. "
        f"Not seed 0: {', '.join(skipped) or 'none'}.",
        "",
        "bf16 computes in bfloat16 and keeps parameters and optimizer state in float32.",
        "",
    ]
    for dtype in _DTYPES:
        found = _by_case(results, dtype)
        if not found:
            continue
        rules = _rules(found)
        rows = []
        for name, result in found.items():
            outcomes = judged(result)
            rows.append([name, *(_rounded_text(outcomes.get(rule)) for rule in rules), f"{held_out(result):.2f}"])
        lines += [
            f"### {dtype}",
            "",
            "The largest distance of a run, as a multiple of the spread at that step (up to 1 is within). Last, for "
            "comparison: each one-device run, held against the spread of the others.",
            "",
        ]
        lines += [*table(["model", *rules, "one device's own, each held out"], rows), ""]
        lines += ["What they are compared with, in nats:", "", *_spreads(found), ""]
    every = [
        (f"{key} under {rules}", outcome)
        for key, result in results.items()
        for rules, outcome in judged(result).items()
        if isinstance(outcome, Within)
    ]
    name, outcome = max(every, key=lambda pair: pair[1].ratio)
    lines += [
        f"The worst case is {name}: at step {outcome.step} it is {outcome.distance:.2g} nats from the nearest "
        f"one-device run, where the spread is {outcome.spread:.2g}.",
        "",
    ]
    for case in CASES:
        if all(f"{case.name}/{dtype}" in results for dtype in _DTYPES):
            lines += [f"![Loss curves of {case.title}](curves-{case.name}.svg)", ""]
    return lines


def _other_seeds(other_seeds: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    if not other_seeds:
        return []
    rules = list(dict.fromkeys(rule for seeds in other_seeds.values() for run in seeds.values() for rule in run))
    rows = [
        [key, seed, *(f"{run[rule]:.2f}" if rule in run else "" for rule in rules)]
        for key, seeds in other_seeds.items()
        for seed, run in sorted(seeds.items(), key=lambda pair: int(pair[0]))
    ]
    within_spread = [ratio <= 1 for seeds in other_seeds.values() for run in seeds.values() for ratio in run.values()]
    return [
        "### Other seeds",
        "",
        "The same ratios where data and first parameters are drawn from another seed; "
        f"{sum(within_spread)} of {len(within_spread)} runs are within. "
        "`python -m benchmarks curves --data-dir DIR --only MODEL --dtypes DTYPE --seed SEED --keep`",
        "",
        *table(["cell", "seed", *rules], rows),
        "",
    ]


def _spreads(found: Results) -> list[str]:
    rows = []
    for name, result in found.items():
        controls, wrong = (
            np.array(result["one_device"]),
            within(np.array(result["wrong"]), np.array(result["one_device"])),
        )
        allowed = spread(controls)
        apart = parts_at(controls)
        rows.append([
            name, f"{controls[0][0]:.3f}", f"{controls[0][-1]:.3f}", "never" if apart == len(allowed) else f"{apart}",
            *(f"{allowed[step]:.0e}" for step in _places(len(allowed))),
            "never" if wrong.first_outside is None else f"{wrong.first_outside}",
        ])  # fmt: skip
    places = _places(len(allowed))
    titles = [
        "model",
        "first loss",
        "last loss",
        f"step at which one-device runs are {PARTED:g} apart",
        *(f"spread at step {step}" for step in places),
    ]
    return table([*titles, f"first step outside, of a run whose updates are {WRONG - 1:.0%} too large"], rows)


def _places(num_steps: int) -> tuple[int, ...]:
    return 0, num_steps // 20, num_steps // 4, num_steps - 1


def _rounded_text(outcome: Any) -> str:
    if outcome is None:
        return ""
    return f"{outcome.ratio:.2f}" if outcome.ok else f"**{outcome.ratio:.2f}**"


def _missed(results: Results) -> list[str]:
    met = goals(results)
    lines = [line for key, result in results.items() for line in lines_of(key, result) if line.startswith("MISS")]
    return ["## What misses", "", *(f"- {line}" for line in lines)] if not all(met.values()) else []


def _by_case(results: Results, dtype: str) -> dict[str, Mapping[str, Any]]:
    return {case.name: results[f"{case.name}/{dtype}"] for case in CASES if f"{case.name}/{dtype}" in results}


def _rules(found: Results) -> list[str]:
    return list(dict.fromkeys(rules for result in found.values() for rules in result["runs"]))


def _equality(run: Mapping[str, Any]) -> Equality:
    return Equality(run["loss"], run["state"], run["worst"])
