"""Calls of a step that hardly computes: how long they take, and how much longer than those of an earlier checkout.

A process that runs this module's `serve` times calls whenever it is asked to, with the splitjax that it has imported;
`compare` asks two of them in turn, so that other work on the machine meets both checkouts. Only what splitjax has had
since before its second restructuring is used here, as earlier checkouts are measured by this module, too.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks._common import table, virtual_devices

HERE = pathlib.Path(__file__).resolve().parents[1]
MOST_MORE_SECONDS = 2e-6
KINDS = {"added": "splitjax's call less the jitted function's, neighbours", "alone": "splitjax's part alone"}
_NUM_WARM = 50


@dataclasses.dataclass
class Tiny:
    """A step that hardly computes, over a state with the structure of VGG-16's under SGD with momentum, all arrays
    tiny.

    - `step`: the step. `inner`: the jitted function that it calls.
    - `states`: one for the calls of each. `batch`: of all calls.
    """

    step: Any
    inner: Any
    states: list[Any]
    batch: Any

    @classmethod
    def on(cls, mesh: Mapping[str, int]) -> Tiny:
        """Returns such a step on a `mesh`, compiled."""
        import jax
        import jax.numpy as jnp
        import optax

        import splitjax
        from splitjax.models import build, make_step

        init, _, _ = make_step(build("vgg16"), optax.sgd(0.1, momentum=0.9))
        shapes = jax.eval_shape(init, jax.random.key(0))
        arrays = {name: jax.tree.map(lambda leaf: jnp.ones(8), shapes[name]) for name in ("params", "opt")}

        def tiny(state, batch):
            return state, batch.sum()

        step: Any = splitjax.parallelize(tiny, mesh=dict(mesh), rules="data_parallel")
        over_all = jax.sharding.PartitionSpec(step.mesh.axis_names)
        batch = jax.device_put(jnp.ones(8), jax.sharding.NamedSharding(step.mesh, over_all))
        states = [step.place(arrays, example=(batch,)) for _ in range(2)]
        states[0], _ = step(states[0], batch)
        return cls(step, step._programs.last.jitted, states, batch)

    @property
    def num_leaves(self) -> int:
        """The number of arrays of the state."""
        import jax

        return len(jax.tree.leaves(self.states[0]))

    def pairs(self, num_calls: int) -> list[tuple[float, float]]:
        """Returns the seconds until a call of the step and one of its jitted function returned, `num_calls` times: both
        in turn, who begins changing from pair to pair."""
        calls, pairs = (self.step, self.inner), []
        for number in range(num_calls + _NUM_WARM):
            taken = [0.0, 0.0]
            for which in ((0, 1), (1, 0))[number % 2]:
                started = time.perf_counter()
                self.states[which], total = calls[which](self.states[which], self.batch)
                taken[which] = time.perf_counter() - started
                total.block_until_ready()
            if number >= _NUM_WARM:
                pairs.append((taken[0], taken[1]))
        return pairs

    def alone(self, num_calls: int) -> float:
        """Returns the median seconds of a call whose jitted function returns at once."""
        state, batch, programs = self.states[0], self.batch, self.step._programs
        entry, result, seconds = programs.last, (self.states[0], self.batch), []
        programs.last = dataclasses.replace(entry, jitted=lambda *args: result)
        for _ in range(num_calls):
            started = time.perf_counter()
            self.step(state, batch)
            seconds.append(time.perf_counter() - started)
        programs.last = entry
        return statistics.median(seconds)


@dataclasses.dataclass(frozen=True)
class Against:
    """What a call takes under this checkout against an earlier one.

    - `num_devices`: of the step. `kind`: one of `KINDS`.
    - `before`, `after`: seconds by round; a round asks both checkouts, one after the other.
    """

    num_devices: int
    kind: str
    before: tuple[float, ...]
    after: tuple[float, ...]

    @property
    def more(self) -> tuple[float, float, float]:
        """The seconds that a call takes more now: lower quartile, median and upper quartile of the differences."""
        low, middle, high = statistics.quantiles([a - b for a, b in zip(self.after, self.before, strict=True)], n=4)
        return low, middle, high

    @property
    def ok(self) -> bool:
        """Whether that is within the limit."""
        return self.more[1] <= MOST_MORE_SECONDS


def serve(num_devices: int) -> None:
    """Answers every line of the standard input, which names a number of calls, by a line: the seconds of each kind."""
    virtual_devices()
    tiny = Tiny.on({"data": num_devices})
    tiny.pairs(_NUM_WARM)
    print("ready", flush=True)
    for line in sys.stdin:
        added = statistics.median(whole - bare for whole, bare in tiny.pairs(int(line)))
        print(json.dumps({"added": added, "alone": tiny.alone(int(line))}), flush=True)


# In a process of its own: splitjax comes from one checkout, and what is measured from this one.
_SERVE = """
import sys
sys.path.insert(0, sys.argv[1])
import splitjax
sys.path[0] = sys.argv[2]
from benchmarks import _calls
_calls.serve(int(sys.argv[3]))
"""


def compare(earlier: pathlib.Path, num_devices: int, num_rounds: int, num_calls: int) -> list[Against]:
    """Times calls under this checkout and an `earlier` one, a process each, which wait for each other.

    **Arguments:** `num_devices`: of the step. `num_rounds`: how often both are asked, who is first changing from round
    to round; at least two. `num_calls`: of each kind, whenever one is asked."""
    servers = [_server(checkout, num_devices) for checkout in (earlier, HERE)]
    seconds: dict[str, list[list[float]]] = {kind: [[], []] for kind in KINDS}
    try:
        for number in range(num_rounds):
            for which in ((0, 1), (1, 0))[number % 2]:
                answer = json.loads(_asked(servers[which], f"{num_calls}\n"))
                for kind in KINDS:
                    seconds[kind][which].append(answer[kind])
    finally:
        for server in servers:
            server.kill()
            server.communicate()
    return [Against(num_devices, kind, tuple(before), tuple(after)) for kind, (before, after) in seconds.items()]


def _server(checkout: pathlib.Path, num_devices: int) -> subprocess.Popen[str]:
    if not (checkout / "splitjax" / "__init__.py").is_file():
        raise SystemExit(f"{checkout} is no checkout: it holds no splitjax")
    command = [sys.executable, "-P", "-c", _SERVE, str(checkout.resolve()), str(HERE), str(num_devices)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    if _asked(server, "").strip() != "ready":
        raise SystemExit(f"calls could not be timed with the splitjax of {checkout}")
    return server


def _asked(server: subprocess.Popen[str], line: str) -> str:
    """Sends a process a `line`, and returns the next one of its answers; nothing where it has ended."""
    assert server.stdin is not None and server.stdout is not None, "both are pipes"
    server.stdin.write(line)
    server.stdin.flush()
    return server.stdout.readline()


def line_of(one: Against) -> str:
    """Returns what was measured, in a line."""
    micro = [f"{1e6 * statistics.median(seconds):.1f}" for seconds in (one.before, one.after)]
    low, more, high = (f"{1e6 * seconds:+.2f}" for seconds in one.more)
    return (
        f"{'pass' if one.ok else 'MISS'} {one.kind} on {one.num_devices} devices, microseconds: {micro[0]} before,"
        f" {micro[1]} now; more: {more} [{low}, {high}]"
    )


def page_lines(stored: Mapping[str, Any]) -> list[str]:
    """Returns the page of what `calls.json` holds."""
    measured = [
        Against(**{**one, "before": tuple(one["before"]), "after": tuple(one["after"])}) for one in stored["calls"]
    ]
    rows = [[str(one.num_devices), KINDS[one.kind], *_figures(one), "yes" if one.ok else "**no**"] for one in measured]
    return [
        "# What a call adds, against an earlier commit",
        "",
        stored["header"],
        "",
        f"Before: commit {stored['before_commit']}.",
        "",
        (
            "Microseconds of a call of a step that hardly computes, over a state with the structure of VGG-16's"
            " (parameters and momentum). Each commit has a process of its own; both time"
            f" {stored['num_calls']:,} calls of each kind when it is their turn, {len(measured[0].after)} times, and"
            " who is first changes every time. *Before* and *now* are medians of these rounds, *more* is the median"
            " of the differences within a round, beside it their quartiles. Splitjax's part alone is a call with a"
            " function in place of the jitted one that returns at once. Passes: at most"
            f" {1e6 * MOST_MORE_SECONDS:.0f} microseconds more."
        ),
        "",
        *table(["devices", "what", "before", "now", "more", "quartiles", "passes"], rows),
    ]


def _figures(one: Against) -> Sequence[str]:
    low, more, high = (f"{1e6 * seconds:+.2f}" for seconds in one.more)
    before, after = (f"{1e6 * statistics.median(seconds):.1f}" for seconds in (one.before, one.after))
    return before, after, f"**{more}**", f"{low} to {high}"
