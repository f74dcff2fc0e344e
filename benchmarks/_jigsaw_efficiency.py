"""Efficiency: what packing iterations of partial backpropagation finishes more than gang scheduling in the same order, over traces, loads and orders."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from benchmarks import _jigsaw_common as common
from splitjax.schedule import simulate

GAIN, SHARE, STRETCH = 1.28, 0.80, 1.28
EXPOSED = (0.0, 0.15)


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section of the page."""
    from benchmarks._common import table
    from benchmarks._splitbrain_common import Goal, Section

    rows, goals, gains, over = [], [], {}, {}
    for trace in common.TRACES[:: 4 if quick else 1]:
        sizes = {exposed: common.sizes(trace, data_dir, exposed=exposed) for exposed in EXPOSED}
        for load in (1.5,) if quick else (0.7, 1.0, 1.5):
            seeds = range(3 if load == 1.5 and not quick else 1)
            shares = []
            for order in common.ORDERS:
                found: dict[tuple[float, str], list[common.Outcome]] = {}
                completion = []
                for seed in seeds:
                    jobs = common.draw(sizes[0.0], trace, load, seed, quick)
                    base = simulate(jobs, common.CLUSTER, f"gang-{order}")  # the same with exposed communication: an iteration takes as long
                    if not base.busy_part.rate:
                        continue
                    completion.append(base.avg_jct)
                    for exposed in EXPOSED:
                        drawn = jobs if not exposed else common.draw(sizes[exposed], trace, load, seed, quick)
                        for policy in ("jigsaw", "interleave") if exposed and load == 1.5 else ("jigsaw",):
                            one = common.outcome(drawn, common.named(policy, order), base)
                            found.setdefault((exposed, policy), []).append(one)
                if not found:
                    continue
                row = [trace, f"{load}", order]
                for exposed in EXPOSED:
                    mine = found[exposed, "jigsaw"]
                    row += [_mean(one.efficiency for one in mine), _mean(one.bound for one in mine), _mean(one.attainable for one in mine), _mean(one.cost for one in mine)]
                rivals = found.get((0.15, "interleave"))
                row.append(_mean(one.efficiency for one in rivals) if rivals else "")
                row.append(f"{np.mean([one.result.avg_jct for one in found[0.0, 'jigsaw']]) / np.mean(completion):.2f}")
                rows.append(row)
                print("  ".join(map(str, row)), flush=True)
                shares += [one.share for one in found[0.0, "jigsaw"]]
                if load == 1.5:
                    gains[trace, order] = float(np.mean([one.efficiency for one in found[0.0, "jigsaw"]]))
                    over[trace, order] = float(np.mean([a.efficiency / b.efficiency for a, b in zip(found[0.15, "jigsaw"], rivals)]))
            if load == 1.5 and shares:
                goals.append(Goal(f"efficiency, {trace}, load 1.5: least share of the bound's gain over orders and seeds", min(shares), SHARE, False, ".2f"))
    goals = [
        *(Goal(f"efficiency, ee9e8c, load 1.5: iterations against gang {order.upper()}", gains["ee9e8c", order], GAIN, False) for order in ("srtf", "las")), *goals,
        *(Goal(f"stretch, ee9e8c, load 1.5, 15 % exposed: against interleaving without partial backpropagation, {order.upper()}", over["ee9e8c", order], STRETCH, False)
          for order in common.ORDERS),
    ]  # fmt: skip
    lines = [
        f"{common.CLUSTER} devices. Jobs drawn from each trace (`6c71a0` and `all` 4,000, `4+ GPUs` 3,000, 103959 2,000, ee9e8c and 7f04ca 1,500, Muri's as many as they have), Poisson arrivals, "
        "load met exactly, means of 3 seeds at load 1.5, one seed below. Models of 32 equal layers, backward twice the forward pass; Philly tells no iteration times: "
        "0.2, 0.35, 0.5, 0.7 and 0.9 s in turn. Restarts take 30 s. Iterations, bound, there, cost: over the busy part, relative to gang scheduling in the same order. "
        "*Bound*: perfect packing of the iterations finished. *There*: perfect packing of the jobs present at each moment, none faster than alone, which is less where "
        "they ask for little more than the devices. *Full*: the same packing without partial backpropagation (`interleave`). JCT: mean completion time relative to gang.", "",
        *table(["trace", "load", "order", "iterations", "bound", "there", "cost", "iterations, 15 % exposed", "bound", "there", "cost", "full, 15 % exposed", "JCT"], rows),
    ]  # fmt: skip
    return Section("Efficiency: iterations finished per device-second", lines, goals)


def _mean(values: Any) -> str:
    return f"{np.mean(list(values)):.3f}"
