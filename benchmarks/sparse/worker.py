"""A worker process of `python -m benchmarks sparse`, which starts it: every way of synchronising the tables it is asked
about, in turns."""

from __future__ import annotations

import json
import pathlib
import sys
from typing import Any

SLOW_SECONDS = 2.0  # a step of this length is taken once a turn, and in every other turn
# short steps are taken often, so that who begins a turn later than others hardly counts
TURN_SECONDS, MOST_STEPS = 0.3, 40
PROFILED, MEASURED = 3, 4  # steps: capacities come from the first, what is timed are others


def _work(settings: dict[str, Any]) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from benchmarks.sparse.launch import Team

    team = Team(settings)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    answer: dict[str, Any] = {"workloads": {}}
    for number, name in enumerate(settings["workloads"]):
        answer["workloads"][name] = _measure(name, settings, team, mesh, number == 0)
    team.finish(answer)


def _measure(name: str, settings: dict[str, Any], team: Any, mesh: Any, is_first: bool) -> dict[str, Any]:
    from benchmarks.sparse import data, ways
    from splitjax import sync

    workload = data.named(name, pathlib.Path(settings["data_dir"]))
    profiled = sync.measure(workload.sets(range(PROFILED), mesh.size), workload.num_rows, workload.width)
    batches = ways.make_batches(workload, mesh, range(PROFILED, PROFILED + MEASURED))
    chosen = _choice(profiled, mesh) if settings["choose"] else None
    schemes = dict(chosen[1]) if chosen else dict.fromkeys(settings["ways"])
    made, fitted, runs, steps = {}, {}, {}, {}
    for label, scheme in schemes.items():
        one = ways.scheme_way(scheme, batches, profiled) if scheme else ways.make_way(label, batches, profiled)
        team.together()  # who is compiled first would wait in the exchange for the others, and not for long
        fitted[label] = [one.check(step) for step in range(1 if label == ways.DENSE else MEASURED)]
        made[label], runs[label] = one, one.run
        first = _slowest(team, team.turn(one.run, 1)["seconds"])
        steps[label] = steps_of(first, settings["steps"])
        team.say(f"{workload.name}, {label}: {1e3 * first:.0f} ms a step, all fitted: {all(fitted[label])}")
        if settings["transfer"] and first <= SLOW_SECONDS:
            alone = _alone(label)
            runs[alone], steps[alone] = ways.transfer(one.messages, mesh), steps[label]
            runs[alone](0)
    if is_first:
        team.begin()
    turns: dict[str, list[Any]] = {label: [] for label in runs}
    order = list(runs)
    for number in range(settings["rounds"]):
        for label in order[number % len(order) :] + order[: number % len(order)]:
            if steps[label] > 1 or settings["steps"] == 1 or number % 2 == 0:
                turns[label].append(team.turn(runs[label], steps[label]))
    sparsity = batches.sparsity
    found = {
        label: {
            "turns": turns[label],
            "alone": turns.get(_alone(label), []),
            "predicted": one.predicted,
            "formula": one.formula,
            "fitted": fitted[label],
        }
        for label, one in made.items()
    }
    choice = None if chosen is None else chosen[0]
    return {
        "ways": found,
        "choice": choice,
        "name": workload.name,
        "what": workload.what,
        "num_rows": workload.num_rows,
        "width": workload.width,
        "rows": sparsity.rows,
        "union": sparsity.union(mesh.size),
        "density": sparsity.density,
        "bound": sparsity.bound_bytes(),
    }


def steps_of(seconds: float, least: int) -> int:
    """Steps of a turn, from the seconds of one; `least` is 1 in a quick run."""
    if seconds > SLOW_SECONDS or least == 1:
        return 1
    return max(least, min(round(TURN_SECONDS / seconds), MOST_STEPS))


def _alone(label: str) -> str:
    return f"{label}: messages alone"


def _slowest(team: Any, seconds: float) -> float:
    """The same number in all processes."""
    import numpy as np
    from jax.experimental import multihost_utils

    return float(np.max(multihost_utils.process_allgather(np.float32(seconds)))) if team.count > 1 else seconds


def _choice(profiled: Any, mesh: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What `auto` chooses for a table, and every scheme that it chose from, as it would run, by label."""
    from benchmarks.sparse.ways import label_of
    from splitjax.sync.choose import choose
    from splitjax.sync.link import measure_link

    link = measure_link(mesh, ("data",))
    choice = choose(profiled, link)
    schemes = {label_of(one.scheme): one.scheme for one in choice.table}
    assert len(schemes) == len(choice.table), "two schemes of one name"
    predicted = {label_of(one.scheme): one.seconds for one in choice.table}
    facts = {
        "chosen": label_of(choice.scheme),
        "predicted": predicted,
        "latency": link.latency_seconds,
        "rate": link.bytes_per_second,
        "reason": choice.reason,
    }
    return facts, schemes


if __name__ == "__main__":
    import splitjax

    splitjax.initialize()
    _work(json.loads(sys.argv[1]))
