"""What the compiler of TPUs says of the layouts that `auto` would take, before one is taken.

    python -m benchmarks planner --only compiled [--quick]

`mesh="auto", rules="auto", remat="auto", compile_best=3` for 64 chips of a TPU v5e (`tpu:v5e:8x8`) with a budget of a
chip: the layouts that are predicted to be fastest and fit by the upper bound of their memory are compiled by libtpu,
without a TPU, until one of them fits, and what it sends beyond its plan does not make it slower than the next one is
predicted to be. Seconds are of the wall, of one compilation each; the search before takes as long as on the page of
searches.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from benchmarks._common import table, virtual_devices, write_stored
from benchmarks.machine import header, this_machine
from benchmarks.planner.search import MODELS, QUICK, TARGET, Searched

PAGE = "planner_compiled"
MOST, BUDGET = 3, "15GiB"
# Its layers would be compiled one by one.
_LEFT_OUT = ("LLaMA-7B, unrolled",)


def measure(model: Searched) -> dict[str, Any]:
    """Lets `auto` choose for a model with the compiler's word, and without, and says what was compiled."""
    import splitjax
    from splitjax.errors import BudgetError

    taken = {}
    for most in (0, MOST):
        step, state, batch = model.make()
        decorated = splitjax.parallelize(
            step, mesh="auto", rules="auto", remat="auto", target=TARGET, memory_budget=BUDGET, compile_best=most
        )
        try:
            decorated.plan(state, batch)
        except BudgetError as error:
            return {"model": model.name, "candidates": 0, "compiled": [], "why_none": str(error).splitlines()[0]}
        taken[most] = decorated.choice
    choice = taken[MOST]
    rows = []
    for each in sorted(choice.compiled, key=lambda each: each.program_seconds):
        found = each.compiled
        rows.append(
            {
                "mesh": str(each.mesh), "rules": each.name, "predicted_ms": 1e3 * each.program_seconds,
                "bound_bytes": each.bound_bytes, "needed_bytes": found.needed_bytes, "fits": found.fits,
                "sent_bytes": found.sent_bytes, "planned_bytes": found.planned_bytes,
                "more_ms": 1e3 * found.more_seconds, "seconds": found.compile_seconds,
                "is_taken": each.is_as(choice.best),
            }
        )  # fmt: skip
    return {
        "model": model.name, "candidates": len(choice.candidates), "compiled": rows,
        "is_changed": not choice.best.is_as(taken[0].best),
    }  # fmt: skip


def lines_of(stored: Mapping[str, Any]) -> list[str]:
    """The lines of the page."""
    mib = lambda count: "refused" if count is None else f"{count / 2**20:,.1f}"
    left_out = ", ".join(_LEFT_OUT)
    lines = [
        "# What the compiler says of a layout before it is taken", "",
        *(__doc__ or "").split("\n\n", 2)[2].strip().splitlines(), "",
        f"The budget is {BUDGET} a chip. {left_out}, is left out: its layers would be compiled one by one.",
        "", stored["header"], "",
    ]  # fmt: skip
    for each in stored["models"]:
        if not each["compiled"]:
            lines += [f"## {each['model']}", "", f"Nothing was compiled: {each['why_none']}", ""]
            continue
        changed = (
            "another layout is taken than without" if each["is_changed"] else "the same layout is taken as without"
        )
        lines += [
            f"## {each['model']}", "",
            f"{len(each['compiled'])} of {each['candidates']} candidates compiled; {changed} the compiler's"
            " word.", "",
            *table(
                ["mesh", "rules", "predicted, ms", "at most, MiB", "compiled, MiB", "fits", "planned to send, MiB",
                 "sends, MiB", "longer by, ms", "compiling, s", "taken"],
                [
                    [
                        row["mesh"], row["rules"], f"{row['predicted_ms']:.4g}", mib(row["bound_bytes"]),
                        mib(row["needed_bytes"]), "yes" if row["fits"] else "no", mib(row["planned_bytes"]),
                        mib(row["sent_bytes"]), f"{row['more_ms']:.3g}", f"{row['seconds']:.1f}",
                        "yes" if row["is_taken"] else "no",
                    ]
                    for row in each["compiled"]
                ],
            ), "",
        ]  # fmt: skip
    return lines


def main(quick: bool, output: pathlib.Path | None) -> int:
    """Compiles, and writes the page; without `output` of a whole run only. Returns 1 where a layout is taken that does
    not fit as compiled."""
    virtual_devices()
    found = []
    for model in QUICK if quick else [each for each in MODELS if each.name not in _LEFT_OUT]:
        found.append(measure(model))
        print(f"{model.name}: {len(found[-1]['compiled'])} compiled", flush=True)
    command = "python -m benchmarks planner --only compiled" + (" --quick" if quick else "")
    content = {"header": header(this_machine(), command), "models": found}
    if output or not quick:
        print("wrote", write_stored(PAGE, content, lines_of, output))
    return int(not all(row["fits"] for each in found for row in each["compiled"] if row["is_taken"]))
