"""What memory partial backpropagation takes of each device over a whole step, against an ordinary step: nothing runs,
and nothing is timed.

An ordinary step is one program. With programs of the workers' own (`execution="program"`) a step is three: `before`,
the worker's own, which is as small as its depth, and `after`, which adds up and updates. What is there while one of
them runs counts too: the state, and what the others hand on.
"""

from __future__ import annotations

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.partial.saved import EXAMPLES, NETWORKS, Network, model_of

WORKERS = 4
QUICK = Network("ResNet-18, narrow", "resnet18", {"width": 0.25}, (4,), examples=8)
LEAST = {"ResNet-18": 0.13, "ResNet-101": 0.23}  # the published prototype's savings, with batches of 64


@dataclasses.dataclass(frozen=True)
class Held:
    """Bytes that one device holds at most.

    - `ordinary`: in an ordinary step.
    - `own`: by slot, shallow ones first, while the worker's own program runs.
    - `update`: while sums are added up and the state is updated.
    - `state`, `gradients`: of these, the state, and what a worker hands on at full depth.
    """

    ordinary: int
    own: tuple[int, ...]
    update: int
    state: int
    gradients: int

    @property
    def by_slot(self) -> tuple[int, ...]:
        """The most that each slot holds over the step."""
        return tuple(max(own, self.update) for own in self.own)

    @property
    def mean(self) -> float:
        """The same of the mean worker."""
        return statistics.fmean(self.by_slot)


def measure(network: Network, workers: int) -> Held:
    """Compiles an ordinary step of a network and one with partial backpropagation, and reads what XLA says."""
    import jax

    import splitjax
    from splitjax.lower.partial.workers import peak_bytes

    spec, init, train_step, _ = model_of(network)
    batch = spec.example(network.examples * workers)
    options: dict[str, Any] = {"mesh": {"data": workers}, "rules": "data_parallel"}
    whole = splitjax.parallelize(train_step, **options)
    state = whole.abstract_state(init, jax.random.key(0), example=(batch,))
    ordinary = peak_bytes(whole.lower(state, batch).compile().memory_analysis())
    backprop = splitjax.PartialBackprop(execution="program", rotate=False, statistics="local")
    step = splitjax.parallelize(train_step, **options, backprop=backprop)
    parts = step.lower(step.abstract_state(init, jax.random.key(0), example=(batch,)), batch).compile().parts
    read = {name: part.memory_analysis() for name, part in parts.items()}
    num_bytes = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    state_bytes, own_batch = num_bytes(state), num_bytes(batch) // workers
    return held(read, ordinary, state_bytes, own_batch, workers)


def held(read: Mapping[str, Any], ordinary: int, state: int, batch: int, workers: int) -> Held:
    """What a device holds, by XLA's figures of the programs (`read`). `state`, `batch`: bytes of a device, which are
    there all the time."""
    from splitjax.lower.partial.workers import peak_bytes

    slots = [read[f"worker {slot}"] for slot in range(workers)]
    # A worker's operands are the state's own arrays, and what `before` has computed.
    there = state + batch + read["before"].output_size_in_bytes
    own = tuple(there + peak_bytes(slot) - slot.argument_size_in_bytes for slot in slots)
    return Held(ordinary, own, batch + peak_bytes(read["after"]), state, slots[-1].output_size_in_bytes)


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section on memory."""
    networks = (QUICK,) if quick else tuple(one for one in NETWORKS if not one.cut_by_measured)
    return report({network.name: measure(network, WORKERS) for network in networks})


def report(found: Mapping[str, Held]) -> Any:
    """What was read, as a section, and as facts."""
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section, mib

    rows = [
        [
            name,
            *map(mib, (one.state, one.gradients, one.ordinary)),
            " ".join(map(mib, one.own)),
            mib(one.update),
            mib(max(one.by_slot)),
            mib(round(one.mean)),
            f"**{1 - one.mean / one.ordinary:.1%}**",
        ]
        for name, one in found.items()
    ]
    lines = [
        (
            f"{WORKERS} workers of one device each, depths linear, {EXAMPLES} examples of 32 x 32 on each worker if not"
            " said otherwise, SGD with momentum, float32. MiB that a device holds at most, by XLA's figures of compiled"
            " programs: arguments, temporaries, and results that are not written over arguments. *An ordinary step* is"
            " one program. With partial backpropagation a worker runs a program of its own, as small as its depth, and"
            " then one that adds up and updates; while the first runs, the whole state is there too, the optimizer's"
            " part included, which it does not read. *Mean*: over the workers, each by the larger of its two. A worker"
            " saves activations alone: where gradients are most of what a step holds beside its state, as in VGG-16 on"
            " small images, whose dense layers have most parameters, the update needs the summed gradients beside each"
            " worker's own, and little is saved. With `rotate=True` every device meets every depth and has to fit the"
            " deepest."
        ),
        "",
        *table(
            [
                "network", "state", "gradients", "an ordinary step", "workers' programs, by depth", "update",
                "deepest worker", "mean worker", "less than an ordinary step",
            ],
            rows,
        ),
    ]  # fmt: skip
    goals = [
        Goal(f"{name}: memory of the mean worker, less than an ordinary step's", 1 - found[name].mean
             / found[name].ordinary, least, False)
        for name, least in LEAST.items() if name in found
    ]  # fmt: skip
    return Section("Memory against an ordinary step", lines, goals), {
        name: dataclasses.asdict(one) for name, one in found.items()
    }
