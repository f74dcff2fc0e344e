"""A process of two: calibrates both and the link between them, lets `auto` choose by that, and times it beside other
layouts. `benchmarks.planner.quality` starts it, several times: the first start calibrates and finds out who can win,
the others go on with those.

    python -m benchmarks.planner.quality_worker SETTINGS

SETTINGS is JSON: the models, the folder where starts keep the calibration, which rounds these are, behind how many
rounds layouts leave, what the first start found of each model, and whether the calibration is a quick one."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any

from benchmarks.planner.quality_ways import AGAIN, AUTO, BASELINES, XLA_ALONE, best_of, contenders, steps_of_turn


def main(settings: dict[str, Any]) -> int:
    import jax

    import splitjax  # joins the run  # noqa: F401
    from benchmarks.sparse.launch import Team
    from splitjax.machines.calibration import Calibration
    from splitjax.measure.calibrating import calibrate

    team = Team(settings)
    file = pathlib.Path(settings["kept"]) / f"calibration{team.rank}.json"
    if file.exists():
        calibration = Calibration.load(file)
    else:
        calibration = calibrate("wall", quick=settings["quick"])
        calibration.save(file)
    team.begin()
    found = {}
    for name in settings["models"]:
        contest = Contest(name, team, calibration, settings["found"].get(name))
        contest.run(*settings["rounds"], settings["qualifying"])
        found[name] = contest.answer()
        del contest  # and the states that it holds
        jax.clear_caches()
    team.finish({"models": found, "links": [dataclasses.asdict(each) for each in calibration.collectives]})
    return 0


class Contest:
    """Times a model under layouts that take turns. `found`: what the first start told of it: `ways`, `again`, `steps`;
    None in that start, which has all layouts and predicts those that can be."""

    def __init__(self, name: str, team: Any, calibration: Any, found: dict[str, Any] | None) -> None:
        import jax

        from benchmarks.planner.quality_ways import model_of

        self._name, self._team, self._calibration = name, team, calibration
        self._model = model_of(name)
        self._state = jax.eval_shape(self._model.init, jax.random.key(0))
        self._runners: dict[str, Any] = {}
        self._turns: dict[str, list[Any]] = {}
        self._refused: dict[str, str] = {}
        self._losses: dict[str, list[float]] = {}
        self._predicted: dict[str, float] = {}
        self._chosen: dict[str, Any] = {}
        self._is_first = found is None
        self._again = "" if found is None else found["again"]
        self._ways = [AUTO, *BASELINES, XLA_ALONE] if found is None else found["ways"]
        for way in self._ways:
            self._open(way)
        self._ways = [way for way in self._ways if way in self._runners]
        if found is None:
            quickest = min(team.turn(lambda _, run=run: run(), 1)["seconds"] for run in self._runners.values())
            self._steps = team.decide(functools.partial(steps_of_turn, quickest))
        else:
            self._steps = found["steps"]

    def run(self, begin: int, end: int, qualifying: int) -> None:
        """The rounds from `begin` to before `end`. Each has an order of its own, drawn by its number. In the first
        start those that cannot win leave behind round `qualifying`, and the best baseline comes in a second time, built
        anew: what differs between the two is noise."""
        import numpy as np

        for number in range(begin, end):
            if self._is_first and number == qualifying:
                seconds = {way: [one["seconds"] for one in self._turns[way]] for way in self._ways}
                self._ways = self._team.decide(functools.partial(contenders, seconds))
                self._again = self._team.decide(functools.partial(best_of, seconds))
                self._open(AGAIN)
                self._ways.append(AGAIN)
            for position in np.random.default_rng(number).permutation(len(self._ways)):
                way = self._ways[position]
                run = self._runners[way]
                run()  # finds caches and memory as another layout left them
                self._turns[way].append(self._team.turn(lambda _, run=run: run(), self._steps))

    def answer(self) -> dict[str, Any]:
        """What this process found, as JSON; `turns` by layout, each as `Team.turn` gives it."""
        return {
            "turns": self._turns, "refused": self._refused, "chosen": self._chosen, "losses": self._losses,
            "predicted": self._predicted, "steps": self._steps, "again": self._again, "ways": self._ways,
        }  # fmt: skip

    def _open(self, way: str) -> None:
        """Compiles the model under a layout, and makes its state. A layout that is refused has no runner."""
        from benchmarks.planner.quality_ways import Runner, parallel_of
        from splitjax.errors import SplitjaxError

        name = self._again if way == AGAIN else way
        try:
            parallel = None
            if name != XLA_ALONE:
                parallel = parallel_of(self._model, name, self._team.count, self._calibration)
            runner = Runner(self._model, parallel)
            # The second step has what the first one left: where XLA lays the state out, it compiles again.
            self._losses[way] = [runner() for _ in range(3)]
        except SplitjaxError as error:
            self._refused[way] = str(error).splitlines()[0]
            return
        self._runners[way], self._turns[way] = runner, []
        if self._is_first and parallel is not None and way != AGAIN:
            batch = self._model.batch
            self._predicted[way] = parallel.time(self._state, batch, on=self._calibration).seconds
        if way == AUTO:
            choice = parallel.choice
            self._chosen = {
                "rules": choice.best.name, "mesh": str(choice.mesh),
                "layers": {each.name: each.chosen for each in choice.variables},
                "predicted": choice.best.program_seconds or choice.best.seconds,
            }  # fmt: skip
        if self._is_first:
            self._team.say(f"{self._name}, {way}: loss {self._losses[way][-1]:.4f}")


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
