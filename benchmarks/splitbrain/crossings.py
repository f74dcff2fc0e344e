"""Group communication: what gather, turns and modulo hold, send and hide, for a dense head of 4096 x 4096 in one group
of eight."""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import splitjax
from benchmarks._common import table
from benchmarks.splitbrain import hlo
from benchmarks.splitbrain.common import (
    MEMORY_SCHEDULER,
    NUM_DEVICES,
    Goal,
    Runner,
    Section,
    busy,
    have_tpu_compiler,
    mib,
    quartiles_of_ratios,
    ratio_of_medians,
    take_turns,
)
from benchmarks.state import TOPOLOGY, tpu_mesh
from splitjax.mesh import MeshShape
from splitjax.plan import PurposeKind

_CROSSINGS = frozenset(
    {PurposeKind.ENTER_COLUMNS, PurposeKind.RETURN_COLUMNS, PurposeKind.ENTER_ROWS, PurposeKind.LEAVE_COLUMNS}
)

KINDS = ("gather", "turns", "modulo")
MESH = {"data": 1, "model": NUM_DEVICES}
INPUTS, FEATURES, WIDTH, CLASSES = 64, 512, 4096, 16
EXAMPLES = 256  # a worker
MOST_TEMPORARIES, MOST_TIME, TOLERANCE = 0.4, 1.05, 0.02

WHOLE = splitjax.Rule(name="whole", path="front**", shard=[])
COLUMNS = splitjax.Rule(name="columns", kind="dense", shard=[{"out": "model"}], ties="hard")
RULES = splitjax.RuleSet(name="head", rules=(WHOLE, COLUMNS), replicated_batch="all")


@dataclasses.dataclass(frozen=True)
class Measured:
    """One group communication, compiled. Bytes are what a worker sends a step; `hidden` and `moved` of the TPU's
    schedule."""

    kind: str
    default_temporaries: int  # CPU, XLA's own scheduler
    temporaries: int  # CPU, scheduler for memory
    tpu_peak: int
    predicted_activations: int
    counts: dict[str, int]
    sent: dict[str, int]
    planned: dict[str, int]
    transfers: tuple[tuple[hlo.Transfer, int, str], ...]  # on the TPU: with bytes a step, and the scope


def loss(params: Any, batch: Any) -> jax.Array:
    x = jnp.tanh(batch["x"] @ params["front"])
    for name in ("dense1", "dense2"):
        x = jax.nn.relu(x @ params[name])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["logits"], batch["y"]).mean()


def step_of(kind: str, mesh: Any) -> Any:
    def step(state, batch):
        value, grads = splitjax.value_and_grad(loss)(state, batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, state, grads), value

    return splitjax.parallelize(step, mesh=mesh, rules=RULES, group_comm=kind)


def shapes(examples: int = EXAMPLES) -> tuple[Any, Any]:
    sizes = {
        "front": (INPUTS, FEATURES),
        "dense1": (FEATURES, WIDTH),
        "dense2": (WIDTH, WIDTH),
        "logits": (WIDTH, CLASSES),
    }
    whole = examples * NUM_DEVICES
    return ({name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()},
            {"x": jax.ShapeDtypeStruct((whole, INPUTS), jnp.float32), "y": jax.ShapeDtypeStruct((whole,), jnp.int32)})  # fmt: skip  # noqa: E501


def formula_bytes(kind: str = "gather", examples: int = EXAMPLES, workers: int = NUM_DEVICES) -> dict[str, int]:
    """What a worker sends a step, float32: the crossing, and the features that the next layers gather (SplitBrain). In
    turns the crossing is a broadcast and a sum to one worker, each as an all-reduce: twice the bytes."""
    crossing = 2 * (workers - 1) * examples * FEATURES * 4
    return {
        "crossing": crossing * (2 if kind == "turns" else 1),
        "features": 2 * 2 * (workers - 1) * examples * WIDTH * 4,
    }


def kind_of(op_name: str) -> str:
    """What a collective of this model is for, by its scope."""
    if "splitjax:enter:dense1" in op_name:
        return "crossing"
    if "splitjax:enter:" in op_name or "splitjax:product:" in op_name:
        return "features"
    return "rest"


def measure(kind: str, tpu: bool) -> Measured:
    step, arguments = step_of(kind, MESH), shapes()
    lowered, plan = step.lower(*arguments), step.plan(*arguments)
    default, compiled = lowered.compile(), lowered.compile(compiler_options=MEMORY_SCHEDULER)
    counts, sent, planned = collections.Counter(), collections.Counter(), collections.Counter()
    for one in hlo.collectives(compiled, MeshShape.of(MESH)):
        counts[one.op] += one.trips
        sent[kind_of(one.op_name)] += one.bytes
    for one in plan.collectives:
        planned[
            "crossing"
            if one.purpose.kind in _CROSSINGS
            else "features"
            if one.op in ("all_gather", "reduce_scatter")
            else "rest"
        ] += one.bytes
    peak, transfers = 0, ()
    if tpu:
        on_tpu = step_of(kind, tpu_mesh(MESH)).lower(*arguments).compile()
        peak = on_tpu.memory_analysis().peak_memory_in_bytes
        found = {one.name: one for one in hlo.collectives(on_tpu, MeshShape.of(MESH))}
        total = collections.Counter()
        for one in hlo.collectives(on_tpu, MeshShape.of(MESH)):
            total[one.name] += one.bytes
        transfers = tuple(
            (one, total[one.name], kind_of(found[one.name].op_name))
            for one in hlo.transfers(on_tpu)
            if one.name in found
        )
    return Measured(
        kind,
        default.memory_analysis().temp_size_in_bytes,
        compiled.memory_analysis().temp_size_in_bytes,
        peak,
        plan.memory.activation_bytes,
        dict(counts),
        dict(sent),
        dict(planned),
        transfers,
    )


def hidden_share(transfers: tuple[tuple[hlo.Transfer, int, str], ...], kind: str | None = None) -> float:
    """The share of bytes whose transfer has a product between its start and its end."""
    mine = [(one, count) for one, count, what in transfers if kind in (None, what)]
    return sum(count for one, count in mine if one.overlaps) / max(1, sum(count for _, count in mine))


def section(quick: bool = False) -> Section:
    """The section on memory, bytes and overlap."""
    tpu = have_tpu_compiler()
    found = []
    for kind in KINDS[::2] if quick else KINDS:
        started = time.perf_counter()
        found.append(measure(kind, tpu))
        one = found[-1]
        print(
            f"{kind}: temporaries {mib(one.temporaries)} MiB (default scheduler {mib(one.default_temporaries)}), TPU"
            f" peak {mib(one.tpu_peak)}, predicted activations {mib(one.predicted_activations)}, {one.counts}, sent"
            f" {one.sent}, planned {one.planned}, hidden {hidden_share(one.transfers):.0%} (of the crossing"
            f" {hidden_share(one.transfers, 'crossing'):.0%}), {time.perf_counter() - started:.0f} s",
            flush=True,
        )
    by_kind = {one.kind: one for one in found}
    gather, modulo = by_kind["gather"], by_kind["modulo"]
    goals = [
        Goal(
            "temporaries of modulo over gather's (CPU, scheduler for memory)",
            modulo.temporaries / gather.temporaries,
            MOST_TEMPORARIES,
            True,
        ),
        Goal(
            "temporaries of modulo over gather's (CPU, XLA's own scheduler)",
            modulo.default_temporaries / gather.default_temporaries,
            MOST_TEMPORARIES,
            True,
        ),
    ]
    for one in found:
        expected = formula_bytes(one.kind)
        for what in expected:
            goals.append(
                Goal(
                    f"bytes of {one.kind}, {what}: off the formula",
                    abs(one.sent.get(what, 0) / expected[what] - 1),
                    TOLERANCE,
                    True,
                    ".2%",
                )
            )
    return Section(
        "Group communication", [*_memory_lines(found), *_bytes_lines(found), *_schedule_lines(found, tpu)], goals
    )


def _memory_lines(found: list[Measured]) -> list[str]:
    base = found[0]
    rows = [
        [
            one.kind,
            mib(one.temporaries),
            f"**{one.temporaries / base.temporaries:.2f}**",
            mib(one.default_temporaries),
            f"{one.default_temporaries / base.default_temporaries:.2f}",
            mib(one.tpu_peak) if one.tpu_peak else "",
            mib(one.predicted_activations),
        ]
        for one in found
    ]
    return [
        (
            "The model is a replicated layer, followed by dense layers"
            f" {FEATURES}-{WIDTH}-{WIDTH}-{CLASSES}, split by columns over one"
            f" group of eight; {EXAMPLES} examples a worker. Temporaries per device as compiled, MiB, beside what the"
            " plan predicts for activations."
        ),
        "",
        *table(
            [
                "",
                "CPU, scheduler for memory",
                "over gather's",
                "CPU, XLA's own",
                "over gather's",
                "TPU peak (with state)",
                "predicted activations",
            ],
            rows,
        ),
        "",
    ]


def _bytes_lines(found: list[Measured]) -> list[str]:
    rows = []
    for one in found:
        expected = formula_bytes(one.kind)
        for what in ("crossing", "features", "rest"):
            compiled = one.sent.get(what, 0)
            rows.append(
                [
                    one.kind,
                    what,
                    mib(expected[what]) if what in expected else "",
                    mib(one.planned.get(what, 0)),
                    mib(compiled),
                ]
            )
        rows.append(
            [one.kind, "collectives", "", "", ", ".join(f"{count} {op}" for op, count in sorted(one.counts.items()))]
        )
    return [
        (
            "MiB that a worker sends a step, by formula (2(K-1)Bd for the crossing, 2(K-1)Bh for each gathered layer, 4"
            " bytes a value; turns send the crossing twice), by plan, and as compiled for CPU. The rest: gradients of"
            " the replicated layer, the loss over split classes."
        ),
        "",
        *table(["", "what", "formula", "plan", "compiled"], rows),
        "",
    ]


def _schedule_lines(found: list[Measured], tpu: bool) -> list[str]:
    if not tpu:
        return ["No libtpu here: no schedule to look at.", ""]
    rows = []
    for one in found:
        pairs = [transfer for transfer, _, _ in one.transfers if transfer.asynchronous]
        inside = (
            f"{sum(pair.covered_ops for pair in pairs)} operations,"
            f" {sum(pair.covered_flops for pair in pairs) / 1e6:.0f} Mflop"
            if pairs
            else ""
        )
        rows.append(
            [
                one.kind,
                str(len(one.transfers)),
                str(len(pairs)),
                inside,
                *(f"{hidden_share(one.transfers, what):.0%}" for what in ("crossing", "features")),
                f"**{hidden_share(one.transfers):.0%}**",
            ]
        )
    return [
        (
            f"The schedule for a TPU {TOPOLOGY}: how many transfers are started and awaited apart, what computes in"
            " between (once each), and the share of sent bytes under way during a product. This is what the compiler"
            " arranged, not a measured time; what it writes as one synchronous operation counts as not hidden."
            " Activations that enter a product travel as bfloat16 there: the TPU multiplies so by default."
        ),
        "",
        *table(["", "transfers", "apart", "in between", "crossing hidden", "features hidden", "all hidden"], rows),
        "",
    ]


def speed_section(quick: bool = False, rounds: int = 21, examples: int = 64) -> Section:
    """The section on the time of modulo against gather."""
    lines, goals = [], []
    for count in (examples,) if quick else (examples, EXAMPLES):
        calls = {}
        for kind in KINDS[::2] if quick else KINDS:
            step, (state, batch) = step_of(kind, MESH), shapes(count)
            rng = np.random.default_rng(0)
            values = {
                "x": rng.normal(size=batch["x"].shape).astype(np.float32),
                "y": rng.integers(0, CLASSES, batch["y"].shape).astype(np.int32),
            }
            weights = {
                name: (rng.normal(size=one.shape) / np.sqrt(one.shape[0])).astype(np.float32)
                for name, one in state.items()
            }
            calls[kind] = Runner(step, step.place(weights, example=(batch,)), values)
        load, seconds = busy(), take_turns(calls, 5 if quick else rounds, warm=2)
        rows = [
            [
                kind,
                f"{1e3 * float(np.median(mine)):.0f}",
                f"{ratio_of_medians(mine, seconds['gather']):.3f}",
                quartiles_of_ratios(mine, seconds["gather"]),
            ]
            for kind, mine in seconds.items()
        ]
        goals.append(
            Goal(
                f"step time of modulo over gather's, {count} examples a worker",
                ratio_of_medians(seconds["modulo"], seconds["gather"]),
                MOST_TIME,
                True,
            )
        )
        lines += [
            f"{count} examples a worker ({load} before), medians of {len(seconds['gather'])} steps, taking turns:",
            "",
            *table(["", "step, ms", "over gather's", "quartiles of the rounds"], rows),
            "",
        ]
        print(rows, flush=True)
    lines = [
        (
            "The same head on eight virtual devices that share this machine's cores: compute and the cost of smaller"
            " products, not of a network."
        ),
        "",
        *lines,
    ]
    return Section("Group communication: the step's time", lines, goals)


if __name__ == "__main__":
    sys.exit("run python -m benchmarks splitbrain --only crossings")
