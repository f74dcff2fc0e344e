"""Memory and flops of SplitBrain against data parallelism, per device as XLA compiled them, each part credited; and the
step's time.

VGG-16 with a head of 4096, SGD with momentum, float32, eight devices in groups of K, compiled from shapes.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from benchmarks._common import table
from benchmarks.splitbrain import hlo
from benchmarks.splitbrain.common import (
    MEMORY_SCHEDULER,
    NUM_DEVICES,
    Goal,
    Runner,
    Section,
    busy,
    compiled_bytes,
    have_tpu_compiler,
    less,
    mib,
    planned,
    quartiles_of_ratios,
    ratio_of_medians,
    take_turns,
)
from benchmarks.state import HEAD_TEXT, HEADS, TOPOLOGY, tpu_mesh
from splitjax.errors import UnavailableError
from splitjax.models import build

EXAMPLES = (8, 32)  # a device
LEAST = {"state": 0.68, ("cpu", 8): 0.75, ("cpu", 32): 0.70, "tpu": 0.55, "fsdp": 0.75}
LEAST_STORED = {("cpu", 8): 0.80, ("cpu", 32): 0.70, ("tpu", 8): 0.55, ("tpu", 32): 0.55}
MOST_FLOPS, LEAST_THROUGHPUT = 1.15, 0.9
SPLITS = ("splitbrain", "splitbrain_fsdp")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to train: what is credited with what."""

    rules: str
    group: int = 1
    group_comm: str = "gather"
    shard_state: bool = False
    combined: bool = True  # whether XLA may put all-reduces together into one, and so all gradients into one buffer

    @property
    def name(self) -> str:
        split = f"split K={self.group}, {self.group_comm}"
        text = {
            "data_parallel": "data parallel",
            "splitbrain": split,
            "splitbrain_fsdp": f"{split}, convolutions stored in parts",
        }.get(self.rules, self.rules)
        text += ", sharded state" if self.shard_state else ""
        return text + ("" if self.combined else ", all-reduces apart")

    @property
    def options(self) -> dict[str, Any]:
        comm = {"group_comm": self.group_comm} if self.rules in SPLITS and self.group > 1 else {}
        return {"rules": self.rules, **comm, **({"shard_state": True} if self.shard_state else {})}

    @property
    def mesh(self) -> dict[str, int]:
        return {"data": NUM_DEVICES // self.group, "model": self.group}


BASE = Variant("data_parallel")
APART = Variant("data_parallel", combined=False)
FSDP = Variant("fsdp")
# Convolutions are stored in parts over axes of which one has to hold several groups, so that K is at most 4 here.
STORED = Variant("splitbrain_fsdp", 4, shard_state=True)


@dataclasses.dataclass(frozen=True)
class Measured:
    """One variant compiled for one target. `flops`: of one device; 0 where not counted. `predicted`: the plan's
    peak. `sent_bytes`: of one device in a step, as planned."""

    variant: Variant
    head: str
    examples: int  # a device
    target: str
    state_bytes: int
    # CPU: arguments, temporaries, results that are not written over arguments; TPU: `peak_memory_in_bytes`
    total_bytes: int
    temporary_bytes: int
    placed_bytes: int  # as `total_bytes` on the CPU; on a TPU that leaves out what lies in the cores' own memory (VMEM)
    predicted: int
    sent_bytes: int
    flops: int
    seconds: float


def variants(groups: Sequence[int]) -> list[Variant]:
    """Data parallelism first, as XLA compiles it and with its all-reduces apart; those with convolutions in parts and
    fsdp last."""
    found = [BASE, APART, dataclasses.replace(BASE, shard_state=True)]
    for group in groups:
        for comm in ("gather", "modulo") if group > 1 else ("gather",):
            found += [Variant("splitbrain", group, comm), Variant("splitbrain", group, comm, shard_state=True)]
    return [*found, dataclasses.replace(STORED, shard_state=False), STORED, FSDP]


def measure(variant: Variant, head: str, examples: int, target: str) -> Measured | None:
    """Compiles a variant; None where this version lacks an option of it."""
    started = time.perf_counter()
    mesh = tpu_mesh(variant.mesh) if target == "tpu" else variant.mesh
    try:
        step, state, batch, _ = planned(build("vgg16", **HEADS[head]), mesh, examples * NUM_DEVICES, **variant.options)
    except UnavailableError as error:
        print(f"left out: {variant.name}: {error.message}", flush=True)
        return None
    compiled = step.lower(state, batch).compile(compiler_options=_compiler_options(target, variant.combined))
    sizes, plan = compiled.memory_analysis(), step.plan(state, batch)
    placed = compiled_bytes(compiled)
    total = placed if target == "cpu" else sizes.peak_memory_in_bytes
    return Measured(
        variant,
        head,
        examples,
        target,
        plan.memory.state_bytes,
        total,
        sizes.temp_size_in_bytes,
        placed,
        plan.memory.peak_bytes,
        sum(each.bytes for each in plan.collectives),
        hlo.flops(compiled) if target == "cpu" else 0,
        time.perf_counter() - started,
    )


def _compiler_options(target: str, combined: bool) -> dict[str, Any] | None:
    if target == "tpu":
        return None if combined else {"xla_jf_crs_combiner_threshold_in_bytes": 0}
    return {**MEMORY_SCHEDULER, **({} if combined else {"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})}


def chosen(group: int, head: str, examples: int, **options: Any) -> str:
    """The group communication that `auto` takes."""
    step, state, batch, _ = planned(
        build("vgg16", **HEADS[head]), {"data": NUM_DEVICES // group, "model": group}, examples * NUM_DEVICES, **options
    )
    return step.plan(state, batch).group_comm


def section(
    quick: bool = False, heads: Sequence[str] = tuple(HEADS), targets: Sequence[str] = ("cpu", "tpu")
) -> Section:
    """The section on memory and flops."""
    lines, goals = [_INTRODUCTION, ""], []
    if "tpu" in targets and not have_tpu_compiler():
        targets = [target for target in targets if target != "tpu"]
        lines += ["No libtpu here (`pip install 'splitjax[tpu]'`): compiled for the CPU alone.", ""]
    for head in heads:
        for examples in EXAMPLES[:1] if quick or head != "cifar" else EXAMPLES:
            for target in targets[:1] if quick or head != "cifar" else targets:
                groups = (8,) if quick or head != "cifar" or target == "tpu" else (1, 2, 4, 8)
                found = []
                for variant in variants(groups):
                    one = measure(variant, head, examples, target)
                    if one is not None:
                        found.append(one)
                        print(_line(one, found[0]), flush=True)
                auto = chosen(8, head, examples)
                lines += _table(head, examples, target, found, auto)
                if head == "cifar":
                    goals += _goals(found, auto)
    return Section("Memory", lines, goals)


_INTRODUCTION = (
    "VGG-16 with a dense head of 4096, SGD with momentum, float32, on eight devices (data = 8 / K, model = K),"
    " compiled from shapes. *Whole*, for virtual CPU devices with"
    " `--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED` on both sides: arguments, temporaries, and"
    " results that are not written over arguments. XLA puts all all-reduces of data parallelism together into one,"
    " which needs one buffer for all gradients; *all-reduces apart* is the same step with that pass turned off"
    " (`xla_disable_hlo_passes=cpu-all-reduce-combiner`; on TPUs `xla_jf_crs_combiner_threshold_in_bytes=0`)."
    " Everything is compared with both: the first is the fairer, as a user can turn the pass off. *HBM*, for a TPU"
    f" {TOPOLOGY} ahead of time: arguments, temporaries and results as above, which is what has to fit beside other"
    " programs and larger batches. `peak_memory_in_bytes` counts buffers in the cores' own memory (VMEM, 128 MiB) as"
    " well, which the compiler fills because it is free: it stands last."
    " Flops are those of the dots and convolutions of one device, with loop bodies counted as often"
    " as they run."
    " The published figure is up to 67 % less (arXiv 2112.15317), with convolutions whole on every worker."
    " *Convolutions stored in parts* is the rule set `splitbrain_fsdp`: each weight of a convolution lies in parts"
    " over all devices and is gathered in the forward and again in the backward pass, and its gradient is summed into"
    " parts. That sends half as many bytes again for these weights as an all-reduce of their gradients does. *Sent* is"
    " what a device sends in a step by the plan: less memory is paid for with it."
)


def _goals(found: list[Measured], auto: str) -> list[Goal]:
    named = {one.variant: one for one in found}
    base, apart = named[BASE], named[APART]
    where = f"{base.target}, {base.examples} examples a device"
    goals = []
    best = named.get(Variant("splitbrain", 8, auto, shard_state=True))
    if best is not None:
        least = LEAST[base.target] if base.target == "tpu" else LEAST[base.target, base.examples]
        for title, other in (("all-reduces apart", apart), ("XLA's default", base)):
            what = f"less memory than data parallel, {title}: {best.variant.name} ({where})"
            goals.append(Goal(what, less(best.placed_bytes, other.placed_bytes), least, False, ".1%"))
        if base.target == "cpu":
            what = f"less state, {best.variant.name} ({where})"
            goals.append(Goal(what, less(best.state_bytes, base.state_bytes), LEAST["state"], False, ".1%"))
    if STORED in named:
        what = f"less memory than data parallel, all-reduces apart: {STORED.name} ({where})"
        least = LEAST_STORED[base.target, base.examples]
        goals.append(Goal(what, less(named[STORED].placed_bytes, apart.placed_bytes), least, False, ".1%"))
    if base.target == "tpu":
        what = f"less memory than data parallel, all-reduces apart: fsdp ({where})"
        goals.append(Goal(what, less(named[FSDP].placed_bytes, apart.placed_bytes), LEAST["fsdp"], False, ".1%"))
    else:
        worst = max((one for one in found if one.variant.rules in SPLITS), key=lambda one: one.flops)
        what = f"flops over data parallelism's, {worst.variant.name} ({where}; the most of all splits)"
        goals.append(Goal(what, worst.flops / base.flops, MOST_FLOPS, True))
    return goals


def _line(one: Measured, base: Measured) -> str:
    flops = f", flops {one.flops / base.flops:.3f}x" if one.flops else ""
    return (
        f"{one.head} {one.examples} examples {one.target} {one.variant.name}: {mib(one.total_bytes)} MiB"
        f" ({one.total_bytes / base.total_bytes - 1:+.1%}), state {mib(one.state_bytes)}"
        f" ({one.state_bytes / base.state_bytes - 1:+.1%}), temporaries {mib(one.temporary_bytes)}, placed"
        f" {mib(one.placed_bytes)}{flops}, {one.seconds:.0f} s"
    )


def _table(head: str, examples: int, target: str, found: list[Measured], auto: str) -> list[str]:
    named = {one.variant: one for one in found}
    base, apart, rows = named[BASE], named[APART], []
    for one in found:
        is_auto = one.variant.rules == "splitbrain" and one.variant.group == 8 and one.variant.group_comm == auto
        rows.append(
            [
                one.variant.name + (" (what `auto` takes)" if is_auto else ""),
                mib(one.state_bytes),
                f"{one.state_bytes / base.state_bytes - 1:+.1%}",
                mib(one.temporary_bytes),
                mib(one.placed_bytes),
                f"**{one.placed_bytes / apart.placed_bytes - 1:+.1%}**",
                f"{one.placed_bytes / base.placed_bytes - 1:+.1%}",
                f"{one.flops / base.flops:.3f}" if target == "cpu" else mib(one.total_bytes),
                mib(one.predicted),
                mib(one.sent_bytes),
            ]
        )
    titles = [
        "",
        "state, MiB",
        "state over data parallel's",
        "temporaries, MiB",
        "whole, MiB" if target == "cpu" else "HBM, MiB",
        "over all-reduces apart",
        "over XLA's default",
        "flops, x" if target == "cpu" else "peak with VMEM, MiB",
        "predicted peak, MiB",
        "sent in a step, planned, MiB",
    ]
    return [f"### {HEAD_TEXT[head]}, {examples} examples a device, {target}", "", *table(titles, rows), ""]


# The step's time, on devices that share this machine's cores: what all of them do together.

SPEED_VARIANTS = (
    BASE,
    *(Variant("splitbrain", 8, comm, shard) for shard in (False, True) for comm in ("gather", "modulo")),
    STORED,
)


def speed_section(quick: bool = False, rounds: int = 7, examples: int = 8) -> Section:
    """The section on the step's time."""
    spec, rng = build("vgg16"), np.random.default_rng(0)
    calls, names = {}, []
    started = time.perf_counter()
    for variant in SPEED_VARIANTS[:3] if quick else SPEED_VARIANTS:
        try:
            step, state, batch, init = planned(spec, variant.mesh, examples * NUM_DEVICES, **variant.options)
        except UnavailableError:
            continue
        images = {
            "image": rng.normal(size=batch["image"].shape).astype(np.float32),
            "label": rng.integers(0, 10, batch["label"].shape).astype(np.int32),
        }
        calls[variant.name] = Runner(step, step.init(init, jax.random.key(0), example=(batch,)), images)
        names.append(variant)
    load = busy()
    seconds = take_turns(calls, 3 if quick else rounds)
    rows, goals = [], []
    for variant in names:
        mine, base = seconds[variant.name], seconds[BASE.name]
        speed = 1 / ratio_of_medians(mine, base)
        rows.append(
            [variant.name, f"{1e3 * float(np.median(mine)):.0f}", f"**{speed:.3f}**", quartiles_of_ratios(base, mine)]
        )
        if variant.rules in SPLITS:
            goals.append(Goal(f"throughput over data parallelism's, {variant.name}", speed, LEAST_THROUGHPUT, False))
        print(*rows[-1], flush=True)
    lines = [
        (
            f"VGG-16 as above, {examples} examples a device, on eight virtual devices that share the cores of this"
            f" machine ({load} before): medians of {len(mine)} steps each, taking turns,"
            f" {time.perf_counter() - started:.0f} s in all. Throughput is data parallelism's median step over the"
            " variant's; in brackets the quartiles of the rounds."
        ),
        "",
        *table(["", "step, ms", "throughput, x", "quartiles"], rows),
        "",
    ]
    return Section("The step's time", lines, goals)


if __name__ == "__main__":
    sys.exit("run python -m benchmarks splitbrain --only memory")
