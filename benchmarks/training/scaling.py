"""Two one-core worker processes against one, on real data: examples a second over an unlimited, a 1 Gb/s and a 200 Mb/s
link.

`splitjax launch` starts the two, with one XLA thread each; each is pinned to a core of its own. They stay for all
rounds, and every way to train has its turn in each: "one worker" is the first process alone while the other sleeps.
Batches come through the input pipeline (read, cropped, flipped, standardised), which runs on the worker's one core too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

NUM_WORKERS = 2
MODEL, WIDTH, HEAD, EXAMPLES = "vgg11", 1.0, 4096, 128  # examples of a worker
ROUNDS, STEPS = 5, 1
SLOW_ROUNDS = 3  # behind a rate limit
LINKS = {"unlimited (loopback)": None, "1 Gb/s": "1gbit", "200 Mb/s": "200mbit"}
LEAST_SPEEDUP = 1.9
SINGLE, DATA, APART = "one worker", "data parallel", "two workers that send nothing"
# Way to train -> mesh and options of `parallelize`.
WAYS = {
    DATA: ({"data": 2, "model": 1}, {"rules": "data_parallel"}),
    "splitbrain, gather": ({"data": 1, "model": 2}, {"rules": "splitbrain", "group_comm": "gather"}),
    "splitbrain, modulo": ({"data": 1, "model": 2}, {"rules": "splitbrain", "group_comm": "modulo"}),
}
SPLITS = tuple(way for way in WAYS if way != DATA)


@dataclasses.dataclass(frozen=True)
class Link:
    """What was measured over one link. `seconds`: of a step, by way and round, of the slower worker; `cpu`: its
    processor time, the median of workers and rounds, which neighbours on the machine hardly change; `sent`: bytes a
    step and worker, by way, from the network device (None on the loopback, where both share it); `planned`: as the plan
    predicts; `others`: cores by round."""

    seconds: dict[str, list[float]]
    cpu: dict[str, float]
    sent: dict[str, float | None]
    planned: dict[str, int]
    others: list[float]
    parameters: int


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section on weak scaling."""
    from benchmarks.splitbrain.common import Section

    if len(os.sched_getaffinity(0)) < NUM_WORKERS:
        return Section("Weak scaling", [f"This machine has no {NUM_WORKERS} cores to give.", ""], [])
    width, head, examples, steps = (0.25, 512, 16, 1) if quick else (WIDTH, HEAD, EXAMPLES, STEPS)
    settings = {
        "model": MODEL,
        "width": width,
        "head": head,
        "examples": examples,
        "steps": steps,
        "data_dir": str(data_dir),
    }
    found, refused = {}, []
    for link, bandwidth in LINKS.items():
        rounds = 1 if quick else ROUNDS if bandwidth is None else SLOW_ROUNDS
        try:
            found[link] = _measure(bandwidth, {**settings, "rounds": rounds})
        except RuntimeError as error:
            if bandwidth is None:  # networks of their own need root; two processes do not
                raise
            refused.append(f"{link}: {error}")
            print(refused[-1], file=sys.stderr)
    return _report(found, refused, settings)


def _measure(bandwidth: str | None, settings: dict[str, Any]) -> Link:
    from benchmarks.training.common import Meter
    from splitjax.errors import LaunchError
    from splitjax.runtime.launch import launch

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [sys.executable, "-m", "benchmarks.training.scaling", json.dumps({**settings, "folder": name})]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        try:
            run = launch.start(
                launch.LaunchConfig(NUM_WORKERS, threads=1, bandwidth=bandwidth), command, environment=environment
            )
        except LaunchError as error:
            raise RuntimeError(error.message) from error
        others, meter = [], None
        while (outcome := run.wait(0.05)) is None:  # a file a round, so that the load of others is known by round
            if meter is None and (folder / "begin").exists():
                meter = Meter(*(worker.pid for worker in run.workers))
            if meter is not None and (folder / f"round{len(others)}").exists():
                # a worker that failed has no processor time to read
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    others.append(meter.others())
        if outcome.status:
            raise RuntimeError(f"the run ended with exit status {outcome.status}")
        workers = [json.loads((folder / f"worker{rank}.json").read_text()) for rank in range(NUM_WORKERS)]
    rounds = len(workers[0]["turns"][SINGLE])
    others += [math.inf] * (rounds - len(others))  # not known: counted as disturbed
    seconds = {
        way: [
            max(worker["turns"][way][number]["seconds"] for worker in workers if worker["turns"].get(way))
            for number in range(rounds)
        ]
        for way in workers[0]["turns"]
    }
    cpu = {
        way: statistics.median(turn["cpu"] for worker in workers for turn in worker["turns"][way]) for way in seconds
    }
    sent = {
        way: None
        if bandwidth is None
        else statistics.median(turn["sent"] for worker in workers for turn in worker["turns"][way])
        for way in WAYS
    }
    return Link(seconds, cpu, sent, workers[0]["planned"], others, workers[0]["parameters"])


def speedups(link: Link, way: str) -> list[float]:
    """Examples a second of the workers over those of one, by round."""
    return [NUM_WORKERS * single / both for single, both in zip(link.seconds[SINGLE], link.seconds[way], strict=True)]


def _report(found: dict[str, Link], refused: list[str], settings: dict[str, Any]) -> Any:
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section, mib
    from benchmarks.training.common import quiet_rounds

    examples, steps = settings["examples"], settings["steps"]
    goals, lines = [], []
    for name, link in found.items():
        used, note = quiet_rounds(link.others)
        rows, middle = [], {}
        for way in (SINGLE, APART, *WAYS):
            ratios = [speedups(link, way)[number] for number in used] if way != SINGLE else [1.0]
            middle[way] = statistics.median(ratios)
            taken = statistics.median(link.seconds[way][number] for number in used)
            num = examples * (1 if way == SINGLE else NUM_WORKERS)
            planned = link.planned.get(way)
            sent = link.sent.get(way)
            rows.append(
                [
                    way,
                    f"{1e3 * taken:.0f}",
                    f"{num / taken:.1f}",
                    f"**{middle[way]:.2f}**",
                    f"{min(ratios):.2f} to {max(ratios):.2f}",
                    f"{1e3 * link.cpu[way]:.0f}",
                    "" if planned is None else mib(planned),
                    "" if sent is None else f"{mib(sent)} ({sent / planned - 1:+.1%})",
                ]
            )
        titles = [
            "",
            "step, ms",
            "examples/s",
            "over one worker",
            "range",
            "processor time of a worker, ms",
            "MiB a worker sends a step: planned",
            "really sent",
        ]
        lines += [
            f"### Link: {name}",
            "",
            f"{len(used)} of {len(link.others)} rounds; medians, and the range of ratios. {note}",
            "",
            *table(titles, rows),
            "",
        ]
        best = max(SPLITS, key=middle.get)
        if name == next(iter(LINKS)):
            goals.append(
                Goal(f"speedup of two one-core workers, {best}, link {name}", middle[best], LEAST_SPEEDUP, False, ".2f")
            )
            goals.append(
                Goal(
                    f"the same over two workers that send nothing ({middle[APART]:.2f})",
                    middle[best] / middle[APART],
                    LEAST_SPEEDUP / NUM_WORKERS,
                    False,
                    ".3f",
                )
            )
        goals.append(Goal(f"{best} over data parallel, link {name}", middle[best] / middle[DATA], 1.0, False, ".2f"))
    parameters = next(iter(found.values())).parameters if found else 0
    head = [
        (
            f"{MODEL.upper()} (width {settings['width']:g}, head of {settings['head']}; {parameters / 1e6:.1f} million"
            " parameters) on the CIFAR-10 sample through the input pipeline (read, cropped, flipped, standardised,"
            f" prefetched), SGD with momentum, {examples} examples a worker: `splitjax launch -n {NUM_WORKERS}"
            " --threads 1`, each worker pinned to one core, where its input thread and gloo's threads run too. One"
            f" worker: the first of them alone, with its {examples} examples a step, under `jax.jit`, while the other"
            " sleeps. Two workers that send nothing: each of them doing just that at the same time, which is what two"
            f" busy cores of this machine can give. {steps} steps of every way a round, begun by both at the same time,"
            " order changing from round to round. MiB really sent: from the worker's network device, with TCP's"
            " headers and acknowledgements; over the loopback both share one."
        ),
        "",
    ]
    return Section("Weak scaling of two one-core processes", [*head, *lines, *(f"{text}\n" for text in refused)], goals)


# The process of a worker.


class _Turns:
    """The ways to train of this process, all compiled and warm."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import jax
        import optax

        from splitjax.data import load_cifar10
        from splitjax.models import build, make_step

        self.jax, self.examples = jax, settings["examples"]
        self.dataset = load_cifar10(pathlib.Path(settings["data_dir"]))
        spec = build(settings["model"], width=settings["width"], head_features=settings["head"])
        self.parameters, self.optimizer, self.planned = spec.num_params(), optax.sgd(0.01, momentum=0.9), {}
        self.ways = {}
        for way, (mesh, options) in WAYS.items():
            self.ways[way] = self._together(way, spec, mesh, options)
        init, step, _ = make_step(spec, self.optimizer, value_and_grad=jax.value_and_grad)
        device = jax.local_devices()[0]
        state = jax.device_put(jax.jit(init)(jax.random.key(0)), device)
        self.ways[SINGLE] = [
            jax.jit(step, donate_argnums=0),
            state,
            self._batches(self.examples, None, lambda batch: jax.device_put(batch, device)),
        ]
        self._warm(SINGLE)

    def __call__(self, way: str, steps: int) -> dict[str, Any]:
        """Seconds of one of `steps` steps, its processor time, and the bytes that it sent."""
        from splitjax.runtime.network import bytes_sent

        step, state, batches = self.ways[way]
        before, cpu, started = bytes_sent(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            state, metrics = step(state, next(batches)[1])
        self.jax.block_until_ready((state, metrics))
        seconds, after = time.perf_counter() - started, bytes_sent()
        self.ways[way][1] = state
        cpu = time.process_time() - cpu
        return {
            "seconds": seconds / steps,
            "cpu": cpu / steps,
            "sent": None if before is None else (after[0] - before[0]) / steps,
        }

    def _warm(self, way: str) -> None:
        """Twice: the first step compiles, the second shows that the results of one are taken as they are by the
        next."""
        first, second = (self(way, 1)["seconds"] for _ in range(2))
        print(f"{way}: compiled after {first:.1f} s; a step takes {1e3 * second:.0f} ms", flush=True)

    def _together(self, way: str, spec: Any, mesh: dict[str, int], options: dict[str, Any]) -> list[Any]:
        from benchmarks.training.common import ready, training_step

        step, init = training_step(spec, mesh, self.optimizer, **options)
        batch_size = self.examples * NUM_WORKERS
        state, placement = ready(step, init, self.dataset, batch_size)
        made = [step, state, self._batches(batch_size, placement.rows, placement)]
        self.planned[way] = sum(one.bytes for one in step.plan(state, next(made[2])[1]).collectives)
        self.ways[way] = made
        self._warm(way)
        return made

    def _batches(self, batch_size: int, rows: Any, place: Any) -> Any:
        from splitjax.data import prefetch

        return prefetch(self.dataset.train_stream(batch_size, rows=rows, augment=True), place)


def _work(settings: dict[str, Any]) -> None:
    from splitjax.runtime.launch.peers import Peers

    folder, rounds, steps = pathlib.Path(settings["folder"]), settings["rounds"], settings["steps"]
    peers, run = Peers("benchmark"), _Turns(settings)

    def together() -> None:
        peers.agree(peers.new_topic(), None, 900)  # by messages: who waits here sleeps

    order = (SINGLE, APART, *WAYS)
    turns: dict[str, list[Any]] = {way: [] for way in order}
    together()
    if peers.is_first:
        (folder / "begin").touch()
    for number in range(rounds):
        for way in order[number % len(order) :] + order[: number % len(order)]:
            together()
            if way != SINGLE or peers.is_first:
                turns[way].append(run(SINGLE if way == APART else way, steps))
        together()
        if peers.is_first:
            (folder / f"round{number}").touch()
            print(
                f"round {number + 1}: " + ", ".join(f"{way} {1e3 * turns[way][-1]['seconds']:.0f} ms" for way in order),
                flush=True,
            )
    for _, _, batches in run.ways.values():
        batches.close()
    time.sleep(0.5)  # whoever looks at this process's time has to find it alive after the last round
    answer = {"turns": turns, "planned": run.planned, "parameters": run.parameters}
    (folder / f"worker{peers.rank}.json").write_text(json.dumps(answer))
    together()


def _main() -> None:
    rank = int(os.environ["SPLITJAX_PROCESS_ID"])
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})  # before JAX starts its threads
    import splitjax

    splitjax.initialize()
    _work(json.loads(sys.argv[1]))


if __name__ == "__main__":
    _main()
