"""A worker process of the part `overflow_time` of `python -m benchmarks sparse`, which starts it: exchanges the rows of
many steps under each rule of room, with fallbacks, and observes steps again where the rule says so."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def _work(settings: dict[str, Any]) -> None:
    import jax
    from jax.sharding import Mesh

    from benchmarks.sparse.launch import Team

    team = Team(settings)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    team.finish({"tables": {name: _measure(name, settings, team, mesh) for name in settings["tables"]}})


def _measure(name: str, settings: dict[str, Any], team: Any, mesh: Any) -> dict[str, Any]:
    from benchmarks.sparse import data, overflow
    from splitjax.planning.observing import OBSERVED_STEPS

    workload = data.named(name, pathlib.Path(settings["data_dir"]))
    steps = workload.sets(range(OBSERVED_STEPS + settings["steps"]), mesh.size)
    exchange = _Exchange(workload, mesh)
    runs = [Run(rule, exchange, steps[:OBSERVED_STEPS], team.together) for rule in overflow.rules()]
    if not (team.folder / "begin").exists():
        team.begin()
    unseen = steps[OBSERVED_STEPS:]
    for first in range(0, len(unseen), settings["block"]):
        turn = first // settings["block"] % len(runs)
        for one in runs[turn:] + runs[:turn]:
            team.together()
            one.block(unseen[first : first + settings["block"]])
    for one in runs:
        team.say(f"{workload.name}, {one.rule.name}: {one.fallbacks} fallbacks, {len(one.building)} programs built")
    found = {
        one.rule.name: {"blocks": one.blocks, "building": one.building, "fallbacks": one.fallbacks} for one in runs
    }
    return {"name": workload.name, "rules": found}


class _Exchange:
    """Compiles and runs exchanges of a `workload`'s rows between the workers of a `mesh`."""

    def __init__(self, workload: Any, mesh: Any) -> None:
        import jax

        from benchmarks.sparse.ways import SPEC

        self.workload, self.mesh = workload, mesh
        self.lookups = workload.ids(0, 0, mesh.size).size
        self._room = min(self.lookups, workload.num_rows)  # as `from_lookups` gives them
        self._sharding = jax.sharding.NamedSharding(mesh, SPEC)
        mine = [place for place, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]
        self._mine = mine
        # Of all steps the same: what rows hold changes nothing in how they are exchanged.
        self._values = self._place([np.ones((self._room, workload.width), np.float32)] * len(mine))
        self.gathered: Callable[..., Any] = self.program(None)

    def _place(self, parts: Sequence[Any]) -> Any:
        import jax

        stacked = np.stack(parts)
        return jax.make_array_from_process_local_data(self._sharding, stacked, (self.mesh.size, *stacked.shape[1:]))

    def arguments(self, step: Sequence[Any]) -> tuple[Any, Any, Any]:
        """What programs take of a step's sets: ids, values, counts."""
        ids = [
            np.pad(step[place], (0, self._room - step[place].size), constant_values=self.workload.num_rows)
            for place in self._mine
        ]
        return self._place(ids), self._values, self._place([np.int32(step[place].size) for place in self._mine])

    def program(self, capacities: Any | None) -> Callable[..., Any]:
        """Compiles an exchange within `capacities`, with its fallback; None: all rows are gathered, as of a step that
        is observed. It returns the sum of all rows, and whether it fell back."""
        import jax.numpy as jnp

        from benchmarks.sparse.ways import compiled
        from splitjax import sync
        from splitjax.sync.synchronising import gather_all

        def worker(ids: Any, values: Any, counts: Any) -> Any:
            local = sync.RowSparse(ids[0], values[0], counts[0], self.workload.num_rows)
            total = lambda rows: jnp.where((rows.ids < rows.num_rows)[:, None], rows.values, 0).sum()
            if capacities is None:
                return total(gather_all(local, "data"))[None], jnp.zeros((1,), bool)
            found, stats = sync.synchronise(sync.RowExchange(), local, "data", capacities, total)
            return found[None], stats.fell_back[None]

        nothing = np.empty(0, np.int32)
        return compiled(worker, self.mesh, self.arguments([nothing] * self.mesh.size))[0]


class Run:
    """Follows a rule through the steps of a run.

    **Attributes:**

    - `rule`: of how much room there is, and of when steps are observed again.
    - `blocks`: seconds of each block of steps, without what was built in it. `building`: seconds of each program that
      was built anew.
    - `fallbacks`: steps that fell back.
    """

    def __init__(self, rule: Any, exchange: Any, observed: Sequence[Any], together: Callable[[], None]) -> None:
        self.rule, self.blocks, self.building, self.fallbacks = rule, [], [], 0
        self._exchange, self._together = exchange, together
        self._samples = [list(step) for step in observed]
        self._observed = len(observed)
        self._since = self._looked = self._to_observe = 0
        self._program = exchange.program(self._capacities())
        together()  # who is compiled first would wait in the exchange for the others, and not for long
        self._run(self._program, observed[0])

    def _capacities(self) -> Any:
        from splitjax import sync

        workload = self._exchange.workload
        seen = sync.measure(self._samples, workload.num_rows, workload.width)
        return self.rule.plan(dataclasses.replace(seen, lookups=self._exchange.lookups))

    def _run(self, program: Any, step: Sequence[Any]) -> bool:
        """Runs a step, checks its sum, and says whether it fell back."""
        total, fell_back = program(*self._exchange.arguments(step))
        expected = self._exchange.workload.width * sum(ids.size for ids in step)
        for shard in total.addressable_shards:
            np.testing.assert_allclose(np.asarray(shard.data), expected, rtol=1e-5)
        return any(bool(np.asarray(shard.data)[0]) for shard in fell_back.addressable_shards)

    def block(self, steps: Sequence[Sequence[Any]]) -> None:
        """Takes some steps, and what follows from them."""
        building = 0.0
        started = time.perf_counter()
        for step in steps:
            if self._to_observe:
                self._run(self._exchange.gathered, step)
                self._samples.append(list(step))
                self._to_observe -= 1
                if not self._to_observe:
                    building += self._build()
                continue
            if self._run(self._program, step):
                self.fallbacks, self._since = self.fallbacks + 1, self._since + 1
            self._looked += 1
            if self._looked % self.rule.checked == 0:
                self._to_observe = self._observed if self._since >= self.rule.most else 0
                self._since = 0 if self.rule.since_look else self._since
        self.blocks.append(time.perf_counter() - started - building)

    def _build(self) -> float:
        """Chooses capacities anew and compiles their program. Returns the seconds, until all have theirs."""
        started = time.perf_counter()
        self._program = self._exchange.program(self._capacities())
        self._since = self._looked = 0
        self._together()
        self.building.append(time.perf_counter() - started)
        return self.building[-1]


if __name__ == "__main__":
    import splitjax

    splitjax.initialize()
    _work(json.loads(sys.argv[1]))
