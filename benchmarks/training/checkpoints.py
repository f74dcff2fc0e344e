"""What asynchronous checkpoints cost: a hundred steps with one save among them against a hundred steps without."""

from __future__ import annotations

import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Mapping
from typing import Any

MODEL, WIDTH, HEAD, EXAMPLES = "vgg11", 0.25, 2048, 64
ROUNDS, INTERVAL = 5, 100
MOST_COST = 0.05
WITH, WITHOUT = "with a save", "without"


class InTheMiddle:
    """Saves at multiples of the interval; what the loop saves at its end is left out, since a round is no end of a
    run."""

    def __init__(self, checkpoints: Any, interval: int) -> None:
        self.blocked: list[float] = []
        self.last_step, self.returned_unix_seconds = 0, 0.0
        self._checkpoints, self._interval = checkpoints, interval

    def save(
        self, step: int, state: Any, extra: Mapping[str, Any], metrics: Mapping[str, float], *, wait: bool = False
    ) -> bool:
        if step % self._interval:
            return False
        started = time.perf_counter()
        saved = self._checkpoints.save(step, state, extra, metrics)
        self.blocked.append(time.perf_counter() - started)
        self.last_step, self.returned_unix_seconds = step, time.time()
        return saved


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section on asynchronous checkpoints."""
    from benchmarks.training.common import ONE_THREAD, run_child

    settings = {"data_dir": str(data_dir), "rounds": 1 if quick else ROUNDS, "interval": 10 if quick else INTERVAL}
    return _report(run_child("training.checkpoints", settings, ONE_THREAD), settings)


def _report(found: dict[str, Any], settings: dict[str, Any]) -> Any:
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section, mib, quartiles_of_ratios, ratio_of_medians
    from benchmarks.training.common import ONE_THREAD_WORDS, quiet_rounds

    used, note = quiet_rounds(found["others"])
    saving, plain = ([found[name][number] for number in used] for name in (WITH, WITHOUT))
    steps, ratio = settings["interval"], ratio_of_medians(plain, saving)
    rows = [
        [
            WITH,
            f"{statistics.median(saving):.2f}",
            f"{steps * EXAMPLES / statistics.median(saving):.1f}",
            f"**{ratio:.3f}** ({quartiles_of_ratios(plain, saving)})",
        ],
        [WITHOUT, f"{statistics.median(plain):.2f}", f"{steps * EXAMPLES / statistics.median(plain):.1f}", "1"],
    ]
    blocked, write = [found["blocked"][number] for number in used], [found["written"][number] for number in used]
    lines = [
        (
            f"{MODEL.upper()} (width {WIDTH:g}, head of {HEAD}) with Adam: {mib(found['state_bytes'])} MiB of state;"
            f" {EXAMPLES} examples a step of the CIFAR-10 sample, one device, in the loop of `splitjax train`. The"
            f" device is one core and the host's threads have the other (`{ONE_THREAD_WORDS}`), as in the section on"
            f" input. {len(used)} of {len(found['others'])} rounds, each of {steps} steps with one save in their middle"
            f" and {steps} steps without, in turns; the time includes waiting, at the end of the {steps} steps, until"
            f" the checkpoint is complete, so that nothing of its cost is left out. {note}"
        ),
        "",
        *table([f"{steps} steps", "seconds", "examples/s", "throughput over without (quartiles of rounds)"], rows),
        "",
        (
            f"A save keeps the loop for {1e3 * statistics.median(blocked):.0f} ms (longest {1e3 * max(blocked):.0f} ms;"
            f" the first of the process {1e3 * found['first_blocked']:.0f} ms), that is"
            f" {statistics.median(blocked) / (statistics.median(plain) / steps):.2f} steps; its checkpoint is complete,"
            f" digests, `fsync` and rename included, {statistics.median(write):.2f} s after that. For comparison, a"
            f" save that waits for all this: {found['synchronous']:.2f} s."
        ),
        "",
    ]
    return Section(
        "Asynchronous checkpoints",
        lines,
        [
            Goal(f"throughput lost to checkpoints every {steps} steps", 1 - ratio, MOST_COST, True, ".2%"),
            Goal(
                "a save's blocking time over an interval",
                statistics.median(blocked) / statistics.median(plain),
                MOST_COST,
                True,
                ".2%",
            ),
        ],
    )


def _measure(settings: dict[str, Any]) -> dict[str, Any]:
    import jax
    import optax

    from benchmarks.training.common import Meter, ready, training_step
    from splitjax.data import load_cifar10, prefetch
    from splitjax.models import build
    from splitjax.runtime.checkpoint import CheckpointOptions, Checkpoints, integrity
    from splitjax.runtime.training.ledger import Ledger
    from splitjax.runtime.training.loop import LoopOptions, train

    dataset = load_cifar10(pathlib.Path(settings["data_dir"]))
    step, init = training_step(build(MODEL, width=WIDTH, head_features=HEAD), {"data": 1}, optax.adam(1e-4))
    state, placement = ready(step, init, dataset, EXAMPLES)
    found: dict[str, Any] = {
        WITH: [],
        WITHOUT: [],
        "written": [],
        "others": [],
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
    }
    interval, done, meter = settings["interval"], settings["interval"] // 2, Meter()
    stream = dataset.train_stream(EXAMPLES, rows=placement.rows, augment=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(CheckpointOptions(pathlib.Path(folder))) as checkpoints,
        prefetch(stream, placement) as batches,
    ):
        saves = InTheMiddle(checkpoints, interval)
        for number in range(settings["rounds"] + 1):
            meter.others()
            for name in (WITH, WITHOUT) if number % 2 else (WITHOUT, WITH):
                started = time.perf_counter()
                outcome = train(
                    step,
                    state,
                    batches,
                    LoopOptions(done + interval, EXAMPLES, checkpoint_every=interval),
                    first_step=done + 1,
                    ledger=Ledger(None),
                    checkpoints=saves if name == WITH else None,
                )
                if name == WITH:
                    checkpoints.wait()
                seconds = time.perf_counter() - started
                state, done = outcome.state, done + interval
                if number:  # the first compiles, and imports what saving needs
                    found[name].append(seconds)
                if number and name == WITH:  # sealing is the last thing before the checkpoint gets its name
                    sealed = (pathlib.Path(folder) / str(saves.last_step) / integrity.MANIFEST).stat().st_mtime
                    found["written"].append(max(0.0, sealed - saves.returned_unix_seconds))
            if number:
                found["others"].append(meter.others())
                print(
                    f"round {number}: with {found[WITH][-1]:.2f} s, without {found[WITHOUT][-1]:.2f} s, blocked"
                    f" {1e3 * saves.blocked[-1]:.0f} ms, complete {found['written'][-1]:.2f} s later; others"
                    f" {found['others'][-1]:.2f} cores",
                    flush=True,
                )
        started = time.perf_counter()
        checkpoints.save(done + interval, state, {}, {}, wait=True)
        found["synchronous"] = time.perf_counter() - started
    found["first_blocked"], *found["blocked"] = saves.blocked
    return found


def _main() -> None:
    from benchmarks.training.common import child_arguments

    settings, result = child_arguments()
    result.write_text(json.dumps(_measure(settings)))


if __name__ == "__main__":
    _main()
