"""Whether input is ever the bottleneck: steps on real data, read and changed while they run, against the same step on
one resident batch."""

from __future__ import annotations

import itertools
import json
import pathlib
import statistics
import time
from typing import Any

MODEL, WIDTH, HEAD, EXAMPLES = "vgg11", 0.5, 1024, 64
ROUNDS, STEPS = 15, 8
PIPELINE_BATCHES = 200
MOST_SLOWER = 1.03
REAL, RESIDENT = "real data", "one resident batch"


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section on input."""
    from benchmarks.training.common import ONE_THREAD, run_child

    settings = {
        "data_dir": str(data_dir),
        "rounds": 2 if quick else ROUNDS,
        "steps": 4 if quick else STEPS,
        "batches": 20 if quick else PIPELINE_BATCHES,
    }
    return _report(run_child("training.input", settings, ONE_THREAD), settings)


def _report(found: dict[str, Any], settings: dict[str, Any]) -> Any:
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section, quartiles_of_ratios, ratio_of_medians
    from benchmarks.training.common import ONE_THREAD_WORDS, quiet_rounds

    used, note = quiet_rounds(found["others"])
    real, resident, waited = ([found[name][number] for number in used] for name in (REAL, RESIDENT, "waited"))
    ratio = ratio_of_medians(real, resident)
    rate = EXAMPLES / statistics.median(real)
    rows = [
        [
            REAL,
            f"{1e3 * statistics.median(real):.1f}",
            f"{rate:.0f}",
            f"**{ratio:.3f}** (quartiles of rounds {quartiles_of_ratios(real, resident)})",
            f"{1e3 * statistics.median(waited):.2f} ({statistics.median(waited) / statistics.median(real):.2%})",
        ],
        [
            RESIDENT,
            f"{1e3 * statistics.median(resident):.1f}",
            f"{EXAMPLES / statistics.median(resident):.0f}",
            "1",
            "",
        ],
    ]
    alone = found["pipeline_examples_per_second"]
    lines = [
        (
            f"{MODEL.upper()} (width {WIDTH:g}, head of {HEAD}), {EXAMPLES} examples a step, one device, SGD with"
            " momentum, in the loop of `splitjax train` (`runtime.training.loop.train`, `data.prefetch`). Real data:"
            " the CIFAR-10 sample, rows read from its files, cropped, flipped, standardised and placed by the input"
            " thread. The device is one core of this machine and the host's threads have the other"
            f" (`{ONE_THREAD_WORDS}`), as an accelerator leaves the host's cores to its input. {len(used)} of"
            f" {len(found['others'])} rounds of {settings['steps']} steps each, in turns. {note}"
        ),
        "",
        *table(["", "step, ms", "examples/s", "over resident", "loop waited for input, ms a step"], rows),
        "",
        (
            f"The input pipeline alone, on one core: {alone:,.0f} examples/s, {alone / rate:.0f} times what this step"
            f" takes. Where it has to share the device's core, it costs {rate / alone:.2%} of a step."
        ),
        "",
    ]
    return Section(
        "Input",
        lines,
        [
            Goal("step with real data over the same step on resident data", ratio, MOST_SLOWER, True),
            Goal(
                "share of a step that the loop waited for input",
                statistics.median(waited) / statistics.median(real),
                MOST_SLOWER - 1,
                True,
                ".2%",
            ),
        ],
    )


def _measure(settings: dict[str, Any]) -> dict[str, Any]:
    import optax

    from benchmarks.training.common import Meter, ready, training_step
    from splitjax.data import load_cifar10, prefetch
    from splitjax.models import build
    from splitjax.runtime.training.ledger import Ledger
    from splitjax.runtime.training.loop import LoopOptions, train

    dataset = load_cifar10(pathlib.Path(settings["data_dir"]))
    step, init = training_step(
        build(MODEL, width=WIDTH, head_features=HEAD), {"data": 1}, optax.sgd(0.01, momentum=0.9)
    )
    state, placement = ready(step, init, dataset, EXAMPLES)

    def stream():
        return dataset.train_stream(EXAMPLES, rows=placement.rows, augment=True)

    position, one = next(stream())
    found: dict[str, Any] = {REAL: [], RESIDENT: [], "waited": [], "others": []}
    with prefetch(stream(), placement) as batches:
        sources = {REAL: batches, RESIDENT: itertools.repeat((position, placement(one)))}
        done, steps, meter = 0, settings["steps"], Meter()
        for number in range(settings["rounds"] + 1):
            meter.others()
            for name in (REAL, RESIDENT) if number % 2 else (RESIDENT, REAL):
                waited, started = batches.wait_seconds, time.perf_counter()
                outcome = train(
                    step,
                    state,
                    sources[name],
                    LoopOptions(done + steps, EXAMPLES),
                    first_step=done + 1,
                    ledger=Ledger(None),
                )
                state, done, seconds = outcome.state, done + steps, time.perf_counter() - started
                if number:  # the first compiles
                    found[name].append(seconds / steps)
                    if name == REAL:
                        found["waited"].append((batches.wait_seconds - waited) / steps)
            if number:
                found["others"].append(meter.others())
                print(
                    f"round {number}: real {1e3 * found[REAL][-1]:.1f} ms, resident {1e3 * found[RESIDENT][-1]:.1f} ms,"
                    f" waited {1e3 * found['waited'][-1]:.2f} ms; others {found['others'][-1]:.2f} cores",
                    flush=True,
                )
    source = stream()
    placement(next(source)[1])
    started = time.perf_counter()
    for _, batch in itertools.islice(source, settings["batches"]):
        placement(batch)
    found["pipeline_examples_per_second"] = EXAMPLES * settings["batches"] / (time.perf_counter() - started)
    return found


def _main() -> None:
    from benchmarks.training.common import child_arguments

    settings, result = child_arguments()
    result.write_text(json.dumps(_measure(settings)))


if __name__ == "__main__":
    _main()
