"""What partial backpropagation saves each worker: flops, processor time, memory, bytes of gradients.

A worker's programs (`execution="program"`) are compiled for every depth and run alone on one device, one after the
other. Flops are those of the lowered program; memory is what the compiled one needs (arguments, temporaries, results).
Processor time is taken in turns through all programs, so that what disturbs this machine for a while disturbs all of
them alike.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

EXAMPLES = 64  # a worker, as in the published prototype's profile
CLOSE = 1.05  # of the ideal device time
# the published prototype's figures (FACTS: 4 workers, batches of 64)
LEAST_MEMORY = {"ResNet-18": 0.13, "ResNet-101": 0.23}
TURNS = 3
CONVOLUTIONS = (2, 4)  # positions along a side


@dataclasses.dataclass(frozen=True)
class Network:
    """`examples`: of a worker. `timed`: its processor time is measured, too (seconds a step on one core).
    `cut_by_measured`: depths from the times that `step.advise` measures."""

    name: str
    model: str
    options: dict[str, Any]
    workers: tuple[int, ...]
    examples: int = EXAMPLES
    timed: bool = True
    cut_by_measured: bool = False


NETWORKS = (
    Network("ResNet-18", "resnet18", {}, (4, 8)),
    Network("VGG-16", "vgg16", {}, (4, 8)),
    Network("VGG-16, cut by measured times", "vgg16", {}, (4, 8), cut_by_measured=True),
    # The same without positions fewer than the window's, over which XLA's CPU compiler has no fast kernel: a quarter of
    # the examples is as many positions.
    Network("VGG-16, 16 examples of 64 x 64", "vgg16", {"image_size": 64}, (4, 8), examples=EXAMPLES // 4),
    Network("ResNet-101", "resnet50", {"stage_sizes": (3, 4, 23, 3)}, (4,), timed=False),
)


def section(quick: bool, data_dir: pathlib.Path) -> Any:
    """The section on savings."""
    networks = (Network("ResNet-18, narrow", "resnet18", {"width": 0.25}, (4,), examples=8),) if quick else NETWORKS
    convolutions = _seconds([_convolution(size) for size in CONVOLUTIONS])
    return _report(
        [(network, workers, _measure(network, workers)) for network in networks for workers in network.workers],
        convolutions,
    )


@dataclasses.dataclass(frozen=True)
class Depth:
    """One slot's programs. `peak_bytes`: of its own program; `seconds`: of one turn of it, 0 where it was not
    measured."""

    share: float  # of the backward pass, as planned
    flops: float
    peak_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Found:
    """Of one network and number of workers. `forward_*`: of the forward pass alone. `update_bytes`: peak of the program
    that adds up and updates."""

    depths: tuple[Depth, ...]
    forward_flops: float
    forward_seconds: float
    full_bytes: int  # peak of a worker's program at full depth
    update_bytes: int
    sent_bytes: int  # mean of a worker
    full_sent_bytes: int
    planned_time: float


def model_of(network: Network) -> tuple[Any, Any, Any, Any]:
    """The network's specification, and `init`, the training step and the evaluation of it."""
    import optax

    import splitjax
    from splitjax.models import build, make_step
    from splitjax.models.resnet import LinenResNet

    spec = build(
        network.model,
        num_classes=10,
        **{name: value for name, value in network.options.items() if name != "stage_sizes"},
    )
    if "stage_sizes" in network.options:  # a deeper one of the family
        config = dataclasses.replace(spec.config, stage_sizes=network.options["stage_sizes"])
        spec = dataclasses.replace(spec, config=config, module=LinenResNet(config))
    return spec, *make_step(spec, optax.sgd(0.01, momentum=0.9), value_and_grad=splitjax.value_and_grad)


def _measure(network: Network, workers: int) -> Found:
    import jax

    import splitjax
    from splitjax.lower.partial.workers import peak_bytes
    from splitjax.plan import DENSE_GRADIENTS

    spec, init, train_step, eval_step = model_of(network)
    backprop = splitjax.PartialBackprop(execution="program", rotate=False, statistics="local")
    batch = spec.example(network.examples * workers)
    if network.cut_by_measured:
        backprop = dataclasses.replace(backprop, measured=_measured_times(network.model, network.examples))
    step = splitjax.parallelize(train_step, mesh={"data": workers}, rules="data_parallel", backprop=backprop)
    state = step.abstract_state(init, jax.random.key(0), example=(batch,))
    plan = step.plan(state, batch)
    lowered = step.lower(state, batch)
    parts = {slot: lowered.parts[f"worker {slot}"] for slot in range(workers)}
    compiled = {slot: part.compile() for slot, part in parts.items()}
    update = lowered.parts["after"].compile()
    one = spec.example(network.examples)
    forward = jax.jit(lambda state, batch: eval_step(state, batch)["loss"]).lower(
        jax.eval_shape(init, jax.random.key(0)), one
    )
    timed = (
        [_run(forward.compile(), forward), *(_run(compiled[slot], parts[slot]) for slot in range(workers))]
        if network.timed
        else []
    )
    forward_seconds, *seconds = _seconds(timed) if timed else [0.0] * (workers + 1)
    shares = [sum(segment.backward for segment in plan.partial.segments[first:]) for first in plan.partial.first]
    depths = tuple(
        Depth(
            shares[slot],
            parts[slot].cost_analysis()["flops"],
            peak_bytes(compiled[slot].memory_analysis()),
            seconds[slot],
        )
        for slot in range(workers)
    )
    over = lambda found: sum(
        collective.bytes for collective in found.collectives if collective.purpose.kind in DENSE_GRADIENTS
    )
    whole = splitjax.parallelize(train_step, mesh={"data": workers}, rules="data_parallel").plan(state, batch)
    return Found(
        depths,
        forward.cost_analysis()["flops"],
        forward_seconds,
        depths[-1].peak_bytes,
        peak_bytes(update.memory_analysis()),
        over(plan),
        over(whole),
        plan.partial.device_time,
    )


@functools.cache
def _measured_times(model: str, examples: int) -> Any:
    """By layer, of a worker's examples: they are the same for every number of workers, so two are enough."""
    import jax
    import optax

    import splitjax
    from splitjax.models import build, make_step
    from splitjax.sync import Link

    spec = build(model, num_classes=10)
    init, train_step, _ = make_step(spec, optax.sgd(0.01, momentum=0.9), value_and_grad=splitjax.value_and_grad)
    backprop = splitjax.PartialBackprop(execution="program", rotate=False, statistics="local")
    step = splitjax.parallelize(train_step, mesh={"data": 2}, rules="data_parallel")
    batch = jax.tree.map(lambda one: jax.numpy.zeros(one.shape, one.dtype), spec.example(2 * examples))
    state = step.init(init, jax.random.key(0), example=(batch,))
    return step.advise(state, [batch], backprop, link=Link(1e-4, 125e6)).measured


def _run(compiled: Any, lowered: Any) -> Callable[[], Any]:
    """Runs a program on one device; its operands are zeros (whole numbers too: class 0)."""
    import jax
    import jax.numpy as jnp

    args, kwargs = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), lowered.in_avals)
    shardings, _ = compiled.input_shardings
    given = jax.tree.map(jax.device_put, tuple(args), tuple(shardings))
    return lambda: jax.block_until_ready(compiled(*given, **kwargs))


def _seconds(programs: Sequence[Callable[[], Any]]) -> list[float]:
    """Processor seconds of each, the median of some turns through all of them."""
    for program in programs:
        program()
    turns: list[list[float]] = [[] for _ in programs]
    for _ in range(TURNS):
        for program, found in zip(programs, turns, strict=True):
            started = time.process_time()
            program()
            found.append(time.process_time() - started)
    return [statistics.median(found) for found in turns]


def _convolution(size: int) -> Callable[[], Any]:
    """Runs one of VGG-16's last convolutions over so many positions along each side."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    data, weight = jnp.zeros((EXAMPLES, size, size, 512)), jnp.zeros((3, 3, 512, 512))
    program = jax.jit(
        lambda data, weight: lax.conv_general_dilated(
            data, weight, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
    )
    return lambda: jax.block_until_ready(program(data, weight))


def _report(results: list[tuple[Network, int, Found]], convolutions: Sequence[float]) -> Any:
    from benchmarks._common import table
    from benchmarks.splitbrain.common import Goal, Section, mib

    rows, slots, goals = [], [], []
    for network, workers, found in results:
        name = f"{network.name}, {workers} workers"
        flops, ideal_flops = _device_time([one.flops for one in found.depths], found.forward_flops)
        seconds, ideal_seconds = (
            _device_time([one.seconds for one in found.depths], found.forward_seconds) if network.timed else (0.0, 0.0)
        )
        mean = statistics.fmean(max(one.peak_bytes, found.update_bytes) for one in found.depths)
        saved = 1 - mean / max(found.full_bytes, found.update_bytes)
        ratio = (found.depths[-1].flops - found.forward_flops) / found.forward_flops
        rows.append(
            [
                network.name,
                str(workers),
                f"1:{ratio:.2f}",
                f"{flops:.3f}",
                f"{ideal_flops:.3f}",
                f"{seconds:.3f}" if network.timed else "",
                f"{ideal_seconds:.3f}" if network.timed else "",
                f"{mib(found.full_bytes)}",
                f"{mib(round(mean))}",
                f"{100 * saved:.1f} %",
                f"{found.full_sent_bytes / 1e6:.1f}",
                f"{found.sent_bytes / 1e6:.1f}",
            ]
        )
        slots += [
            [
                name,
                str(slot),
                f"{100 * one.share:.1f} %",
                f"{(one.flops - found.forward_flops) / (found.depths[-1].flops - found.forward_flops):.3f}",
                f"{1e3 * one.seconds:.0f}" if network.timed else "",
                f"{mib(one.peak_bytes)}",
            ]
            for slot, one in enumerate(found.depths)
        ]
        if not network.cut_by_measured:  # whose shares are not those of flops
            goals.append(Goal(f"{name}: device time by flops over the ideal", flops / ideal_flops, CLOSE, True))
        if network.timed:
            goals.append(
                Goal(f"{name}: device time by processor seconds over the ideal", seconds / ideal_seconds, CLOSE, True)
            )
        if network.name in LEAST_MEMORY and workers == 4:
            goals.append(
                Goal(f"{name}: peak memory of the mean worker, less", saved, LEAST_MEMORY[network.name], False)
            )
    lines = [
        (
            f"Depths are linear, each worker has {EXAMPLES} examples of 32 x 32 if not said otherwise, and"
            " the optimizer is SGD with momentum, in float32. *Device time* is that of all workers over that"
            " of full backpropagation. *Ideal* is the same for depths that could be cut anywhere: (f + b"
            " (N+1)/(2N)) / (f + b), with the measured times f of the forward and b of the backward pass."
            f" Processor seconds"
            " are those of one device, without the update. Cuts are placed by predicted times, or by those that"
            " `step.advise` measures (`PartialBackprop(measured=...)`)."
            " Memory is that of a worker's largest program alone, of which the update is one, against its program at"
            " full depth; what is held beside it is in the section on memory. The mean is over the depths."
            f" With `rotate=True` every device meets every depth and"
            " has to fit the deepest (the column before it). "
            "The last three convolutions of VGG-16 have windows of 3 x 3 over 2 x 2 positions, for which"
            f" XLA's CPU compiler has no fast kernel: each takes {convolutions[0]:.3f} s forward, against"
            f" {convolutions[1]:.3f} s for four times the work over 4 x 4 positions. They are most of its"
            " processor time and can be cut in few places; that is why there are rows with images of 64 x 64."
            " *MB sent* are the gradients of a mean worker as planned, with the sums that are handed to those"
            " who did not compute them (reports hold the plan against the compiled program)."
        ),
        "",
        *table(
            [
                "network",
                "workers",
                "forward:backward",
                "device time, flops",
                "ideal",
                "device time, seconds",
                "ideal",
                "peak at full depth, MiB",
                "peak of the mean worker, MiB",
                "less",
                "MB sent, full",
                "MB sent, partial",
            ],
            rows,
        ),
        "",
        "Every depth:",
        "",
        *table(
            ["network", "slot", "of the backward pass, planned", "of its flops", "processor time, ms", "peak, MiB"],
            slots,
        ),
        "",
    ]
    facts = {f"{network.name}, {workers}": dataclasses.asdict(found) for network, workers, found in results}
    return Section("What it saves", lines, goals), facts


def _device_time(depths: list[float], forward: float) -> tuple[float, float]:
    """Of all workers over that of full backpropagation, and the ideal; `depths`: with the forward pass, the last is
    full."""
    workers, full = len(depths), depths[-1]
    backward = full - forward
    return statistics.fmean(depths) / full, (forward + backward * (workers + 1) / (2 * workers)) / full
