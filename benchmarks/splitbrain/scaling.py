"""Two real one-core workers against one: examples a second of data parallelism and of the split, in the same run.

The two are processes of `jax.distributed` with gloo, one thread each, each on a core of its own. They stay for all
rounds, and take what to run from their input line by line, so that "one worker" is the same process training alone
while the other waits. They keep the memory of steps, as workers of `splitjax launch` do.

What an exchange takes of a core is taken from the step, whatever overlaps with it. So the collectives of one split run
alone, too: their processor time, beside the time of two workers that send nothing, is a bound on the speedup.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, TextIO

from splitjax.runtime.launch.kept_memory import kept_memory

FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
MODEL, EXAMPLES = "vgg11", 16  # a worker
NUM_WORKERS = 2
ROUNDS, STEPS = 5, 6  # undisturbed rounds
MOST_ROUNDS = 9
LEAST_SPEEDUP = 1.95
LEAST_OR_BOUND = 1.90, 0.98  # a speedup, or a share of the bound
MOST_OTHERS = 0.5  # cores that others keep busy, before a round is called disturbed
SINGLE, DATA = "one worker", "data parallel"
APART = "two workers that send nothing"  # each the step of one: what two cores of this machine can give
EXCHANGE_OF = "split, gather"  # the way whose collectives run alone, too
EXCHANGE = f"the collectives of {EXCHANGE_OF}, alone"
# Way to train -> options of `parallelize`. The mesh is written as data x model.
WAYS = {
    DATA: ({"data": 2, "model": 1}, {"rules": "data_parallel"}),
    "split, gather": ({"data": 1, "model": 2}, {"rules": "splitbrain", "group_comm": "gather"}),
    "split, modulo": ({"data": 1, "model": 2}, {"rules": "splitbrain", "group_comm": "modulo"}),
    "split, gather, sharded state": (
        {"data": 1, "model": 2},
        {"rules": "splitbrain", "group_comm": "gather", "shard_state": True},
    ),
}


@dataclasses.dataclass(frozen=True)
class Round:
    """One round, everything by way.

    - `seconds`: of a step, of the slower worker: the median. `cpu_seconds`: processor time of a step, all threads of
      the worker that takes more: the mean.
    - `others`: how busy others kept the machine meanwhile, cores. `load`: the load average before.
    """

    seconds: dict[str, float]
    cpu_seconds: dict[str, float]
    others: float
    load: float


def section(quick: bool = False) -> Any:
    """The section on two workers against one."""
    from benchmarks.splitbrain.common import Section

    if len(os.sched_getaffinity(0)) < NUM_WORKERS:
        return Section("Scaling", [f"This machine has no {NUM_WORKERS} cores to give.", ""], [])
    rounds, steps = (2, 2) if quick else (ROUNDS, STEPS)
    with tempfile.TemporaryDirectory() as folder:
        workers = [
            _Worker(number, pathlib.Path(folder), address)
            for address in [_free_address()]
            for number in range(NUM_WORKERS)
        ]
        try:
            ways = _agree([worker.read() for worker in workers])
            found = []
            while sum(one.others <= MOST_OTHERS for one in found) < rounds and len(found) < (
                rounds if quick else MOST_ROUNDS
            ):
                found.append(_round(workers, ways, steps, len(found)))
        finally:
            for worker in workers:
                worker.stop()
    return _report(found, ways, steps)


class _Worker:
    """One process, with its errors in a file."""

    def __init__(self, number: int, folder: pathlib.Path, address: str) -> None:
        core = sorted(os.sched_getaffinity(0))[number]
        self.log = folder / f"worker{number}.log"
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "benchmarks.splitbrain.scaling",
                    "--worker",
                    str(number),
                    "--address",
                    address,
                    "--core",
                    str(core),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                bufsize=1,
                env={**os.environ, **kept_memory(os.environ), "XLA_FLAGS": FLAGS, "JAX_PLATFORMS": "cpu"},
            )

    def ask(self, way: str, steps: int) -> None:
        self.process.stdin.write(json.dumps([way, steps]) + "\n")

    def read(self) -> Any:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended (exit status {self.process.wait()}):\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    def cpu_seconds(self) -> float:
        """Of all its threads so far."""
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()


def _agree(known: list[dict[str, str]]) -> dict[str, str]:
    """What the workers can run: way -> why not, or an empty text."""
    return {way: next((one[way] for one in known if one[way]), "") for way in known[0]}


def _round(workers: list[_Worker], ways: dict[str, str], steps: int, number: int) -> Round:
    """Every way once; who begins changes from round to round."""
    able = [way for way in (*ways, APART) if not ways.get(way)]
    load, before, started = (
        os.getloadavg()[0],
        _busy_seconds() - sum(worker.cpu_seconds() for worker in workers),
        time.perf_counter(),
    )
    seconds, cpu_seconds = {}, {}
    for way in able[number % len(able) :] + able[: number % len(able)]:
        asked = workers[:1] if way == SINGLE else workers
        for worker in asked:
            worker.ask(SINGLE if way == APART else way, steps)
        answers = [worker.read() for worker in asked]
        seconds[way] = statistics.median(max(pair) for pair in zip(*(times for times, _ in answers), strict=True))
        cpu_seconds[way] = max(cpu for _, cpu in answers)
    others = (_busy_seconds() - sum(worker.cpu_seconds() for worker in workers) - before) / (
        time.perf_counter() - started
    )
    found = Round(seconds, cpu_seconds, max(0.0, others), load)
    print(
        f"round {number + 1}: "
        + ", ".join(f"{way} {1e3 * taken:.0f} ms" for way, taken in seconds.items())
        + f"; load average {load:.1f} before, others kept {found.others:.2f} cores busy"
        + (" (DISTURBED)" if found.others > MOST_OTHERS else ""),
        flush=True,
    )
    return found


def _busy_seconds() -> float:
    """CPU time that this machine has spent on anything, all cores together."""
    fields = [int(one) for one in pathlib.Path("/proc/stat").read_text().splitlines()[0].split()[1:]]
    return (sum(fields[:3]) + sum(fields[5:8])) / os.sysconf("SC_CLK_TCK")


def speedups(found: list[Round], way: str, workers: int = NUM_WORKERS) -> list[float]:
    """Examples a second of `workers` over those of one, by round."""
    return [workers * one.seconds[SINGLE] / one.seconds[way] for one in found]


def bounds(found: list[Round], workers: int = NUM_WORKERS) -> list[float]:
    """The speedup by round that the exchange leaves: each worker computes for as long as one of `workers` that send
    nothing, and its core is busy with the exchange besides, for as long as the collectives alone keep it busy."""
    return [workers * one.seconds[SINGLE] / (one.seconds[APART] + one.cpu_seconds[EXCHANGE]) for one in found]


def _report(found: list[Round], ways: dict[str, str], steps: int) -> Any:
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section

    quiet = [one for one in found if one.others <= MOST_OTHERS]
    used = quiet or found
    rows, goals = [], []
    middle = {}
    for way, why in (*((way, why) for way, why in ways.items() if way != EXCHANGE), (APART, "")):
        if why:
            rows.append([way, why, "", "", "", ""])
            continue
        ratios = [1.0] * len(used) if way == SINGLE else speedups(used, way)
        middle[way] = statistics.median(ratios)
        examples = EXAMPLES * (1 if way == SINGLE else NUM_WORKERS)
        taken = statistics.median(one.seconds[way] for one in used)
        rows.append(
            [
                way,
                f"{1e3 * taken:.0f}",
                f"{1e3 * statistics.median(one.cpu_seconds[way] for one in used):.0f}",
                f"{examples / taken:.1f}",
                f"**{middle[way]:.2f}**",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        )
    splits = {way: value for way, value in middle.items() if way not in (SINGLE, DATA, APART)}
    if splits:
        best = max(splits, key=splits.get)
        goals.append(Goal(f"speedup of two workers, {best}", splits[best], LEAST_SPEEDUP, False, ".2f"))
        goals.append(
            Goal(
                f"{best} over two workers that send nothing",
                splits[best] / middle[APART],
                LEAST_SPEEDUP / NUM_WORKERS,
                False,
                ".2f",
            )
        )
        if DATA in middle:
            goals.append(
                Goal(f"speedup of {best} over data parallelism's", splits[best] / middle[DATA], 1.0, False, ".2f")
            )
    bound = None
    if EXCHANGE in ways and not ways[EXCHANGE]:
        bound = statistics.median(bounds(used))
        taken, cpu = (
            f"{1e3 * statistics.median(getattr(one, name)[EXCHANGE] for one in used):.0f}"
            for name in ("seconds", "cpu_seconds")
        )
        rows.append([EXCHANGE, taken, cpu, "", "", ""])
        low, high = min(bounds(used)), max(bounds(used))
        rows.append(["bound that this exchange leaves", "", "", "", f"**{bound:.2f}**", f"{low:.2f} to {high:.2f}"])
    if bound is not None and EXCHANGE_OF in middle:
        least, share = LEAST_OR_BOUND
        nearer = max(middle[EXCHANGE_OF] / least, middle[EXCHANGE_OF] / bound / share)
        what = f"speedup of two workers, {EXCHANGE_OF}, over {least:.2f} or {share:.2f} of the bound, whichever is less"
        goals.append(Goal(what, nearer, 1.0, False, ".3f"))
    disturbed = len(found) - len(quiet)
    note = f"{disturbed} of {len(found)} rounds had others keep more than {MOST_OTHERS:g} cores busy" + (
        " and are left out." if quiet and disturbed else "."
    )
    if not quiet:
        note = (
            f"**Every round was disturbed: others kept {statistics.median(one.others for one in found):.1f} cores busy."
            " Run this on an idle machine.**"
        )
    lines = [
        f"VGG-11 with a head of 4096, CIFAR-10 shapes, SGD with momentum, {EXAMPLES} examples a worker: two processes"
        " (`jax.distributed`, gloo over loopback), one "
        f'thread each (`XLA_FLAGS="{FLAGS}"`), each pinned to its core, against the first of them alone under'
        f" `jax.jit`. Workers keep the memory of steps, as those of `splitjax launch` do. {len(found)} rounds, in each"
        f" the median of {steps} steps of every way; medians of {len(used)} rounds, and their range. {note} Load"
        f" averages before the rounds: {', '.join(f'{one.load:.1f}' for one in found)} (ours among them). Processor"
        " time is that of all threads of a worker. What an exchange takes of a worker's core is missing there for"
        f" computing, so the collectives of *{EXCHANGE_OF}* are also run by themselves, as many and as large as the"
        " plan says, without anything to compute. The *bound* is the speedup of two workers that compute for as long"
        " as two that send nothing, and are busy with these collectives besides.",
        "",
        *table(["", "step, ms", "processor time, ms", "examples/s", "over one worker", "range"], rows),
        "",
    ]
    return Section("Scaling: two workers against one", lines, goals)


def _free_address() -> str:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return f"localhost:{one.getsockname()[1]}"


# The process of a worker.


def _work(number: int, address: str, answers: TextIO) -> None:
    import jax
    import numpy as np

    from splitjax.models import build

    jax.distributed.initialize(address, NUM_WORKERS, number)
    spec, rng = build(MODEL), np.random.default_rng(0)
    batch = {name: (rng.normal(size=one.shape) if name == "image" else rng.integers(0, 10, one.shape)).astype(one.dtype)
             for name, one in spec.example(EXAMPLES * NUM_WORKERS).items()}  # fmt: skip
    runners, known = {}, {}
    for way in (SINGLE, *WAYS, EXCHANGE):
        try:
            runners[way] = (
                _alone(spec, batch)
                if way == SINGLE
                else _exchange(spec, *WAYS[EXCHANGE_OF])
                if way == EXCHANGE
                else _together(spec, batch, *WAYS[way])
            )
            for _ in range(2):  # compiled and warm; nobody waits for the single worker
                jax.block_until_ready(runners[way]())
            known[way] = ""
        except Exception as error:  # one way that fails leaves the others to be measured, and its reason on the page
            known[way] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            print(f"{way}: {error!r}", file=sys.stderr)
    answers.write(json.dumps(known) + "\n")
    for line in sys.stdin:
        way, steps = json.loads(line)
        jax.block_until_ready(runners[way]())  # both are here
        seconds, cpu_before = [], time.process_time()
        for _ in range(steps):
            started = time.perf_counter()
            jax.block_until_ready(runners[way]())
            seconds.append(time.perf_counter() - started)
        answers.write(json.dumps([seconds, (time.process_time() - cpu_before) / steps]) + "\n")


def _alone(spec: Any, batch: Any) -> Any:
    import jax
    import optax

    from benchmarks.splitbrain.common import Runner
    from splitjax.models import make_step

    init, step, _ = make_step(spec, optax.sgd(0.01, momentum=0.9), value_and_grad=jax.value_and_grad)
    return Runner(
        jax.jit(step, donate_argnums=0),
        jax.jit(init)(jax.random.key(0)),
        jax.tree.map(lambda x: jax.numpy.asarray(x[:EXAMPLES]), batch),
    )


def _together(spec: Any, batch: Any, mesh: dict[str, int], options: dict[str, Any]) -> Any:
    """A step over both processes. Each has the whole batch and gives what the plan puts on its device: of images its
    own examples, of labels those of its group."""
    import jax

    from benchmarks.splitbrain.common import Runner, planned

    step, state, shapes, init = planned(spec, mesh, EXAMPLES * NUM_WORKERS, **options)
    plan = step.plan(state, shapes)
    own = {
        name: jax.make_array_from_callback(
            value.shape, jax.NamedSharding(step.mesh, plan.spec(f"batch/{name}")), value.__getitem__
        )
        for name, value in batch.items()
    }
    return Runner(step, step.init(init, jax.random.key(0), example=(shapes,)), own)


def _exchange(spec: Any, mesh: dict[str, int], options: dict[str, Any]) -> Any:
    """The collectives that the plan of a step lists, of arrays of their sizes, and nothing besides."""
    import jax
    from jax import lax
    from jax import numpy as jnp

    from benchmarks.splitbrain.common import planned

    step, state, shapes, _ = planned(spec, mesh, EXAMPLES * NUM_WORKERS, **options)
    axes = tuple(mesh)
    joined, sizes = [], []
    for each in step.plan(state, shapes).collectives:
        count = max(1, each.bytes // 4)  # values that a device sends
        if each.op == "all_reduce":  # 2 (N - 1) / N of an array
            joined.append(lambda x, axis: lax.psum(x, axis))
            sizes.append((count * NUM_WORKERS // (2 * (NUM_WORKERS - 1)), each.axis))
        elif each.op == "all_gather":  # its own part to each of the others
            joined.append(lambda x, axis: lax.all_gather(x, axis, tiled=True))
            sizes.append((max(1, count // (NUM_WORKERS - 1)), each.axis))
        elif each.op == "reduce_scatter":
            joined.append(lambda x, axis: lax.psum_scatter(x, axis, tiled=True))
            sizes.append((max(1, count // (NUM_WORKERS - 1)) * NUM_WORKERS, each.axis))
        else:
            raise NotImplementedError(f"the exchange has a collective of the kind {each.op}")

    def exchange(arrays: list[Any]) -> list[Any]:
        return [send(x, tuple(axis.split("+"))) for send, x, (_, axis) in zip(joined, arrays, sizes, strict=True)]

    whole = jax.P(axes)
    arrays = [
        jax.make_array_from_callback(
            (count * NUM_WORKERS,), jax.NamedSharding(step.mesh, whole), lambda place, count=count: jnp.ones(count)
        )
        for count, _ in sizes
    ]
    program = jax.jit(
        jax.shard_map(exchange, mesh=step.mesh, in_specs=([whole] * len(sizes),), out_specs=[whole] * len(sizes),
                      check_vma=False)
    )  # fmt: skip
    return lambda: program(arrays)


def _main() -> None:
    parser = argparse.ArgumentParser(
        description="A worker of the benchmark; python -m benchmarks splitbrain --only scaling starts it."
    )
    parser.add_argument("--worker", type=int, required=True)
    parser.add_argument("--address", required=True)
    parser.add_argument("--core", type=int, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})  # before JAX starts its threads
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what others print is no answer
    _work(options.worker, options.address, answers)


if __name__ == "__main__":
    _main()
