"""A process of two: calibrates both and the link between them, lets `auto` choose by that, and times it beside other
layouts. `benchmarks.planner.quality` starts it.

    python -m benchmarks.planner.quality_worker SETTINGS

SETTINGS is JSON: the models, how many rounds of how many steps, and whether the calibration is a quick one."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from typing import Any


def main(settings: dict[str, Any]) -> int:
    import jax

    import splitjax  # joins the run  # noqa: F401
    from benchmarks.sparse.launch import Team
    from splitjax.measure.calibrating import calibrate

    team = Team(settings)
    calibration = calibrate("wall", quick=settings["quick"])
    team.begin()
    found = {}
    for name in settings["models"]:
        found[name] = contest(name, settings, team, calibration)
        jax.clear_caches()
    team.finish({"models": found, "links": [dataclasses.asdict(each) for each in calibration.collectives]})
    return 0


def contest(name: str, settings: dict[str, Any], team: Any, calibration: Any) -> dict[str, Any]:
    """Times a model under all layouts in turns, and predicts those that can be by the `calibration`. The order moves on
    by one each round; behind the first few rounds those that cannot win leave."""
    import jax

    from benchmarks.planner.quality_ways import AUTO, BASELINES, XLA_ALONE, Runner, contenders, model_of, parallel_of
    from splitjax.errors import SplitjaxError

    model = model_of(name)
    state = jax.eval_shape(model.init, jax.random.key(0))
    runners: dict[str, Runner] = {}
    refused, chosen, losses, predicted = {}, {}, {}, {}
    for way in (AUTO, *BASELINES, XLA_ALONE):
        try:
            parallel = None if way == XLA_ALONE else parallel_of(model, way, team.count, calibration)
            runners[way] = Runner(model, parallel)
            # The second step has what the first one left: where XLA lays the state out, it compiles again.
            losses[way] = [runners[way]() for _ in range(3)]
        except SplitjaxError as error:
            refused[way] = str(error).splitlines()[0]
            continue
        if parallel is not None:
            predicted[way] = parallel.time(state, model.batch, on=calibration).seconds
        if way == AUTO:
            choice = parallel.choice
            chosen = {
                "rules": choice.best.name, "mesh": str(choice.mesh),
                "predicted": choice.best.program_seconds or choice.best.seconds,
            }  # fmt: skip
        team.say(f"{name}, {way}: loss {losses[way][-1]:.4f}")
    turns: dict[str, list[Any]] = {way: [] for way in runners}
    ways = tuple(runners)
    for number in range(settings["rounds"]):
        if number == settings["qualifying"]:
            first = {way: [one["seconds"] for one in turns[way]] for way in ways}
            ways = tuple(team.decide(functools.partial(contenders, first)))
        shift = number % len(ways)
        for way in ways[shift:] + ways[:shift]:
            turns[way].append(team.turn(lambda _, way=way: runners[way](), settings["steps"]))
    return {"turns": turns, "refused": refused, "chosen": chosen, "losses": losses, "predicted": predicted}


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
