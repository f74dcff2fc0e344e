"""Whether every way to cross, every size of a group and every rule set trains with the numbers of one device: float64,
20 steps."""

from __future__ import annotations

import sys
import time

import jax

from benchmarks import numbers
from benchmarks._common import table
from benchmarks.splitbrain.common import NUM_DEVICES, Goal, Section
from splitjax.errors import UnavailableError

MODEL = "vgg16"  # as narrow as in `benchmarks.numbers`, with its dropout
EXAMPLES = 64  # divides into turns of eight for each of eight workers
GROUPS = (1, 2, 4, 8)
KINDS = ("gather", "turns", "modulo")


def cases(quick: bool = False) -> list[tuple[str, int, dict]]:
    """(rules, K, options): all ways to cross under splitbrain, and the other rule sets as they come."""
    groups = GROUPS[-1:] if quick else GROUPS
    found = [("splitbrain", group, {"group_comm": kind}) for group in groups for kind in KINDS]
    found += [
        ("splitbrain", group, {"group_comm": kind, "shard_state": True}) for group in groups for kind in KINDS[::2]
    ]
    return found + [(rules, group, {}) for rules in ("data_parallel", "megatron", "fsdp") for group in groups]


def section(quick: bool = False) -> Section:
    """The section on numbers."""
    check = next(check for check in numbers.CHECKS if check.name == "float64")
    rows, goals = [], []
    with jax.enable_x64(True):
        batches = list(numbers._batches(MODEL, check, 0, EXAMPLES))
        want = numbers._run_linen(MODEL, check, batches, None)
        if len(set(want.losses)) == 1:
            raise RuntimeError(f"{MODEL} does not train on one device: losses {want.losses}")
        for rules, group, options in cases(quick):
            started = time.perf_counter()
            mesh = {"data": NUM_DEVICES // group, "model": group}
            try:
                got = numbers._run_linen(MODEL, check, batches, rules, mesh=mesh, **options)
            except UnavailableError:
                continue
            loss, state, worst = numbers._distances(got, want)
            what = ", ".join(
                [options.get("group_comm", "auto"), *(["sharded state"] if options.get("shard_state") else [])]
            )
            rows.append([rules, str(group), what, f"{loss:.0e}", f"{state:.0e}", f"`{worst}`", str(got.num_sharded)])
            goals.append(
                Goal(
                    f"{rules} K={group}, {what}: farthest from one device",
                    max(loss, state),
                    check.tolerance,
                    True,
                    ".0e",
                )
            )
            print(goals[-1], f"{time.perf_counter() - started:.0f} s", flush=True)
            jax.clear_caches()
    lines = [
        (
            f"A narrow VGG-16 (`benchmarks/numbers.py`) with dropout, {check.num_steps} steps of clipped SGD with"
            f" momentum in float64 on {EXAMPLES} images, against `jax.jit` on one device from the same numbers: the"
            " largest absolute difference of any loss, and of any parameter behind the last step."
        ),
        "",
        *table(["rules", "K", "group communication", "losses", "parameters", "farthest", "parameters split"], rows),
        "",
    ]
    worst = max(goals, key=lambda goal: goal.value)
    return Section(
        "Numbers", lines, [worst] if all(goal.ok for goal in goals) else [goal for goal in goals if not goal.ok]
    )


if __name__ == "__main__":
    sys.exit("run python -m benchmarks splitbrain --only numbers")
