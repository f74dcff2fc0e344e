"""How long `step.verify` takes, and what it finds, for VGG-16 and for a Transformer of 12 layers and 124 million
parameters.

    python -m benchmarks verify                  both models under four rule sets (about ten minutes on two busy cores),
    and its page
    python -m benchmarks verify --models vgg16 --rules megatron
    python -m benchmarks verify --found          the depthwise convolution whose gradient XLA's partitioner got wrong,
    alone

Every verification runs in a process of its own, on eight virtual devices as data=2 x model=4, from shapes alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks._common import table, virtual_devices, write_stored

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "vgg16": ("vgg16", {}),
    "transformer-12": (
        "transformer",
        {
            "vocab_size": 50257,
            "max_len": 1024,
            "num_layers": 12,
            "d_model": 768,
            "num_heads": 12,
            "dropout": 0.1,
            "tied": True,
        },
    ),
}
RULES = ("splitbrain", "megatron", "fsdp", "data_parallel")
LIMIT_SECONDS = 60.0
MESH = {"data": 2, "model": 4}
BATCH_SIZE = 64
FOUND = "depthwise"


@dataclasses.dataclass(frozen=True)
class Verified:
    """One verification: `plan_seconds` before it, its own `seconds` by the clock and `processor_seconds`, the process's
    largest resident memory, and
    what it says."""

    model: str
    rules: str
    num_params: int
    plan_seconds: float
    seconds: float
    processor_seconds: float
    peak_mebibytes: int
    num_values: int
    largest_relative: float
    ok: bool
    finding: str


def main(argv: list[str] | None = None) -> int:
    """Verifies the chosen models; returns 1 where one differs from one device, or takes longer than a minute."""
    virtual_devices()
    parser = argparse.ArgumentParser(
        "verify", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--rules", nargs="*", choices=RULES, default=list(RULES))
    parser.add_argument("--found", action="store_true", help="look at the depthwise convolution alone")
    parser.add_argument("--quick", action="store_true", help="two steps, no limit, printed only (or to --output)")
    parser.add_argument(
        "--output", type=pathlib.Path, help="folder of the page; a whole run writes to benchmarks/results"
    )
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.one:
        print(json.dumps(dataclasses.asdict(_verified(*args.one))))
        return 0
    chosen = [] if args.found else [(model, rules) for model in args.models for rules in args.rules]
    if args.quick:
        chosen = chosen[:1]
    whole = not args.quick and not args.found and args.models == list(MODELS) and args.rules == list(RULES)
    found = []
    for model, rules in [*chosen, *([(FOUND, "megatron")] if args.found or args.quick or whole else [])]:
        found.append(_apart(model, rules))
        print(_line(found[-1]), flush=True)
    if whole or args.output:
        from benchmarks import machine

        header = machine.header(machine.this_machine(), "python -m benchmarks verify").rstrip()
        stored = {"header": header, "verified": [dataclasses.asdict(one) for one in found]}
        print("wrote", write_stored("verify", stored, page_lines, args.output))
    limit = float("inf") if args.quick else LIMIT_SECONDS
    return int(any(one.seconds > limit or not one.ok for one in found if one.model != FOUND))


def _apart(model: str, rules: str) -> Verified:
    """The verification, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks", "verify", "--one", model, rules]
    done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return Verified(**json.loads(done.stdout.splitlines()[-1]))


def _verified(model: str, rules: str) -> Verified:
    step, arguments, num_params = _depthwise(rules) if model == FOUND else _shipped(model, rules)
    started = time.perf_counter()
    step.plan(*arguments)
    planned = time.perf_counter() - started
    started, worked = time.perf_counter(), time.process_time()
    verification = step.verify(*arguments)
    seconds, worked = time.perf_counter() - started, time.process_time() - worked
    (run,) = verification.runs
    return Verified(
        model,
        rules,
        num_params,
        planned,
        seconds,
        worked,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        len(run.values),
        max(one.relative for one in run.values),
        verification.ok,
        "; ".join(one.text for one in verification.findings),
    )


def _shipped(name: str, rules: str) -> tuple[Any, tuple, int]:
    import jax
    import optax

    import splitjax
    from splitjax import models

    model, options = MODELS[name]
    spec = models.build(model, **options)
    init_fn, train_step, _ = models.make_step(spec, optax.adam(1e-3), value_and_grad=splitjax.value_and_grad)
    step = splitjax.parallelize(train_step, mesh=MESH, rules=rules)
    state = jax.eval_shape(init_fn, jax.eval_shape(lambda: jax.random.key(0)))
    return step, (state, spec.example(BATCH_SIZE)), spec.num_params()


def _depthwise(rules: str) -> tuple[Any, tuple, int]:
    """A depthwise convolution before a dense layer that is split by columns, whose gradient under plain `jax.jit` is
    four times what it should be."""
    import jax
    import jax.numpy as jnp
    import optax

    import splitjax

    def loss_fn(params, batch):
        x = jax.lax.conv_general_dilated(
            batch["image"],
            params["kernel"],
            (1, 1),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=64,
        )
        logits = jax.nn.relu(x).mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    @splitjax.parallelize(mesh=MESH, rules=rules)
    def step(params, batch):
        loss, grads = splitjax.value_and_grad(loss_fn)(params, batch)
        return optax.apply_updates(params, jax.tree.map(lambda one: -0.1 * one, grads)), loss

    shape = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.float32)
    batch = {"image": shape(16, 16, 16, 64), "label": jax.ShapeDtypeStruct((16,), jnp.int32)}
    return step, ({"kernel": shape(3, 3, 1, 64), "head": shape(64, 16)}, batch), 3 * 3 * 64 + 64 * 16


def _line(one: Verified) -> str:
    verdict = "the numbers of one device" if one.ok else one.finding or "other numbers than one device"
    seconds = f"{one.seconds:.1f} s ({one.processor_seconds:.1f} s of processor time)"
    return f"{one.model} {one.rules}: {seconds}, {one.peak_mebibytes} MiB, {verdict}"


_TITLES = (
    "model",
    "rules",
    "parameters",
    "plan (s)",
    "verify (s)",
    "processor time (s)",
    "memory (MiB)",
    "values compared",
    "largest relative difference",
    "verdict",
)


def _row(one: Verified) -> tuple[str, ...]:
    seconds = [f"{value:.1f}" for value in (one.plan_seconds, one.seconds, one.processor_seconds)]
    rest = f"{one.peak_mebibytes:,}", f"{one.num_values}", f"{one.largest_relative:.1e}"
    return (one.model, one.rules, f"{one.num_params:,}", *seconds, *rest, "same" if one.ok else "differs")


def page_lines(stored: Mapping[str, Any]) -> list[str]:
    """Returns the page of what `verify.json` holds."""
    found = [Verified(**fields) for fields in stored["verified"]]
    lines = [
        "# Verification",
        "",
        stored["header"],
        "",
        (
            "`step.verify(state, batch)` of shipped models with Adam, 64 examples, on eight virtual CPU devices as"
            " data=2 x"
        ),
        (
            "model=4: each step under its plan against the same step on one device, in float64, at the smallest sizes"
            " that divide"
        ),
        (
            "as the given ones do. Each in a process of its own, from shapes alone; memory is the process's largest"
            " resident set,"
        ),
        "JAX and its compiler included.",
        "",
        (
            f"Limit: {LIMIT_SECONDS:.0f} seconds each, by the clock. Processor time is that of all threads: where it"
            " is the"
        ),
        "smaller, other work had the machine's cores.",
        "",
        *table(_TITLES, map(_row, found)),
        "",
        "`depthwise` is a depthwise convolution before a dense layer that is split by columns, which XLA's partitioner",
        "differentiates wrongly under plain `jax.jit` (jax 0.10.2 and 0.12.0.1).",
    ]
    for one in found:
        if one.model == FOUND:
            here = one.finding.replace(f"{pathlib.Path(__file__).resolve().parents[1]}/", "")
            lines.append(f"Found there: {here}." if here else "Here its numbers are those of one device.")
    return lines


if __name__ == "__main__":
    sys.exit(main())
