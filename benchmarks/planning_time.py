"""How long tracing and planning take, for VGG-16 and for a Transformer of 32 layers and 7 billion parameters.

    python -m benchmarks planning_time [--repeats 5]

Nothing is compiled and no parameter exists: the step is planned from shapes, as `step.plan` does it, on eight virtual
devices. The parts are JAX's own trace of the step, the graph of its dims, and everything that makes the plan of it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import splitjax
from benchmarks._common import table, virtual_devices
from splitjax.compile import entry
from splitjax.models import build, make_step

MESH = {"data": 2, "model": 4}
LIMITS = {"vgg16": 1.0, "transformer-7b": 10.0}  # seconds
_PARTS = {"trace": "_trace", "graph": "build_graph", "plan": "_plan"}


@dataclasses.dataclass(frozen=True)
class Planned:
    """Seconds that one plan took: of processor time, in all and by part, and by the clock."""

    model: str
    rules: str
    num_params: int
    seconds: float
    parts: dict[str, float]
    wall_seconds: float

    @property
    def ok(self) -> bool:
        return self.seconds <= LIMITS[self.model]


class Attention(nn.Module):
    """Causal self-attention with rotary positions, without biases."""

    width: int
    num_heads: int

    @nn.compact
    def __call__(self, x):
        heads = (self.num_heads, self.width // self.num_heads)
        q, k, v = (nn.DenseGeneral(heads, use_bias=False, name=name)(x) for name in ("query", "key", "value"))
        q, k = _rotated(q), _rotated(k)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * heads[1] ** -0.5
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, jnp.finfo(scores.dtype).min), axis=-1)
        x = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
        return nn.DenseGeneral(self.width, axis=(-2, -1), use_bias=False, name="out")(x)


class GatedTransformer(nn.Module):
    """A decoder of the LLaMA kind (Touvron et al., arXiv 2302.13971): RMS norm, rotary positions, gated MLPs."""

    vocab: int = 32000
    width: int = 4096
    num_heads: int = 32
    hidden: int = 11008
    num_layers: int = 32

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(self.vocab, self.width, name="embed")(ids)
        for number in range(self.num_layers):
            h = nn.RMSNorm(name=f"norm{number}a")(x)
            x = x + Attention(self.width, self.num_heads, name=f"attention{number}")(h)
            h = nn.RMSNorm(name=f"norm{number}b")(x)
            gate = nn.silu(nn.Dense(self.hidden, use_bias=False, name=f"gate{number}")(h))
            h = gate * nn.Dense(self.hidden, use_bias=False, name=f"up{number}")(h)
            x = x + nn.Dense(self.width, use_bias=False, name=f"down{number}")(h)
        return nn.Dense(self.vocab, use_bias=False, name="logits")(nn.RMSNorm(name="norm")(x))


def _rotated(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None, :], jnp.sin(angles)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def vgg16() -> tuple[Callable, Any, Any]:
    """The shipped VGG-16 with its head of 4096, SGD with momentum: step, state and batch as shapes."""
    spec = build("vgg16")
    init, step, _ = make_step(spec, optax.sgd(0.1, momentum=0.9), value_and_grad=splitjax.value_and_grad)
    return step, jax.eval_shape(init, jax.random.key(0)), spec.example(64)


def transformer() -> tuple[Callable, Any, Any]:
    """The 7-billion-parameter Transformer, clipping and AdamW: step, state and batch as shapes."""
    model, tx = GatedTransformer(), optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))

    def init(key):
        params = model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return {"params": params, "opt": tx.init(params)}

    def step(state, batch):
        def loss_fn(params):
            logits = model.apply({"params": params}, batch["tokens"][:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return step, jax.eval_shape(init, jax.random.key(0)), {"tokens": jax.ShapeDtypeStruct((16, 2049), jnp.int32)}


def measure(model: str, rules: str, repeats: int) -> Planned:
    """The median of `repeats` plans, each of a new step in a process where JAX has traced nothing of it."""
    make = {"vgg16": vgg16, "transformer-7b": transformer}[model]
    samples = []
    for _ in range(repeats):
        jax.clear_caches()
        step, state, batch = make()
        jax.clear_caches()  # the shapes of the state came from a trace of the model
        parallel = splitjax.parallelize(step, mesh=MESH, rules=rules)
        parallel.mesh  # noqa: B018  JAX's backend starts here, once a process
        with _timed() as parts:
            clock, started = time.perf_counter(), time.thread_time()
            parallel.plan(state, batch)
            samples.append((time.thread_time() - started, dict(parts), time.perf_counter() - clock))
    num_params = sum(leaf.size for leaf in jax.tree.leaves(state["params"]))
    seconds, parts, _ = sorted(samples, key=lambda sample: sample[0])[len(samples) // 2]
    return Planned(model, rules, num_params, seconds, parts, statistics.median(wall for _, _, wall in samples))


@contextlib.contextmanager
def _timed() -> Iterator[dict[str, float]]:
    """Times the parts of the pipeline while a plan is made."""
    seconds = dict.fromkeys(_PARTS, 0.0)
    kept = {name: getattr(entry, name) for name in _PARTS.values()}

    def timed(part, function):
        def call(*args, **kwargs):
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.thread_time() - started

        return call

    for part, name in _PARTS.items():
        setattr(entry, name, timed(part, kept[name]))
    try:
        yield seconds
    finally:
        for name, function in kept.items():
            setattr(entry, name, function)


def measure_all(repeats: int = 3) -> list[Planned]:
    found = []
    for model, rules in (
        ("vgg16", "splitbrain"),
        ("vgg16", "data_parallel"),
        ("transformer-7b", "megatron"),
        ("transformer-7b", "splitbrain"),
    ):
        found.append(measure(model, rules, repeats))
        print(_line(found[-1]), flush=True)
    return found


def section(found: list[Planned]) -> list[str]:
    """The part of a result page."""
    rows = [
        [p.model, f"{p.num_params:,}", p.rules, f"**{p.seconds:.2f} s**", *(f"{p.parts[part]:.2f}" for part in _PARTS),
         f"{LIMITS[p.model]:.0f} s", f"{p.wall_seconds:.2f} s"]
        for p in found
    ]  # fmt: skip
    return [
        (
            "From shapes alone, on a mesh of data=2 x model=4. *Trace* is JAX's own trace of the step (forward and"
            " backward), *graph* the analysis of its dims, *plan* rules, constraints and predictions. Medians of"
            " processor time, all in one thread; by the clock on a machine that other programs kept busy it took what"
            " the last column says."
        ),
        "",
        *table(["model", "parameters", "rules", "trace and plan", *_PARTS, "limit", "by the clock"], rows),
    ]


def _line(p: Planned) -> str:
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in p.parts.items())
    return (
        f"{'pass' if p.ok else 'MISS'} {p.model:15} {p.rules:13} {p.seconds:6.2f} s ({parts}; by the clock"
        f" {p.wall_seconds:.2f}); {p.num_params:,} parameters"
    )


def main(argv: list[str] | None = None) -> int:
    """Prints the times; returns 1 where one is beyond its limit."""
    virtual_devices()
    parser = argparse.ArgumentParser(
        "planning_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    found = measure_all(parser.parse_args(argv).repeats)
    return 0 if all(p.ok for p in found) else 1


if __name__ == "__main__":
    sys.exit(main())
