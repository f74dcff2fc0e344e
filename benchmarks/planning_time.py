"""How long tracing and planning take, and predicting again after a layer's layout changed, for VGG-16 and for a
Transformer of 32 layers and 7 billion parameters. It is the gate that keeps planning time from creeping up.

    python -m benchmarks planning_time [--repeats 3] [--changes 1000]

Nothing is compiled and no parameter exists: the step is planned from shapes, as `step.plan` does it, on eight virtual
devices. The exit status is 1 where a time is beyond its limit. Every predicted change is compared with a full
prediction.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import pathlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import splitjax
from benchmarks._changes import dims_by_class, draw_change, predicted_differently
from benchmarks._common import table, virtual_devices, write_stored
from benchmarks.machine import header, this_machine
from splitjax import PartialBackprop
from splitjax.compile.building import begin
from splitjax.compile.entry import Recipe
from splitjax.models import build, make_step
from splitjax.plan import Spec
from splitjax.planning.draft import Draft, KnownTables
from splitjax.planning.passes import with_tables
from splitjax.planning.predict import StepPrediction, predict
from splitjax.step.arguments import bind
from splitjax.step.traced import trace_step
from splitjax.sync.costs.schemes import ByRows
from splitjax.trace.tracer import build_graph

MESH = {"data": 2, "model": 4}
# Seconds of processor time: to trace and plan, to predict a layout that is decided, to predict a change of a layer's.
LIMITS = {
    "vgg16": {"plan": 0.25, "full": 0.020, "change": 0.002},
    "transformer-7b": {"plan": 2.2, "full": 0.200, "change": 0.020},
}
PARTS = ("trace", "graph", "passes", "prediction")
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Planned:
    """Seconds that planning a step took: of processor time, in all, by part, and for a change of its layout; and by the
    clock."""

    model: str
    rules: str
    num_params: int
    seconds: float
    parts: dict[str, float]
    change_seconds: float
    slowest_change_seconds: float
    num_changes: int
    wall_seconds: float
    has_options: bool = False

    @property
    def figures(self) -> dict[str, float]:
        """Returns the seconds that `LIMITS` bounds."""
        return {"plan": self.seconds, "full": self.parts["prediction"], "change": self.slowest_change_seconds}

    @property
    def limits(self) -> dict[str, float]:
        """Returns the limits by figure. Planning with options prepares more than that of a plain step, of which alone
        the limit is."""
        limits = LIMITS[self.model]
        return {figure: limit for figure, limit in limits.items() if figure != "plan" or not self.has_options}

    @property
    def ok(self) -> bool:
        """Tells whether no figure is beyond its limit."""
        return self.within(1.0)

    def within(self, factor: float) -> bool:
        """Tells whether no figure is beyond `factor` times its limit."""
        return all(self.figures[figure] <= factor * limit for figure, limit in self.limits.items())


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


def measure(
    model: str, rules: str, repeats: int, num_changes: int, options: Mapping[str, Any] | None = None
) -> Planned:
    """Plans `repeats` times, with these further `options`, each a new step in a process where JAX has traced nothing of
    it, and then predicts `num_changes` drawn changes of its layout, one after the other. Raises `AssertionError` where
    a change is predicted differently from the whole step."""
    make = {"vgg16": vgg16, "transformer-7b": transformer}[model]
    plans, walls, stages = [], [], []
    for _ in range(repeats):
        step, state, batch = make()
        parallel = splitjax.parallelize(step, mesh=MESH, rules=rules, **(options or {}))
        parallel.mesh  # noqa: B018  JAX's backend starts here, once a process
        jax.clear_caches()  # the shapes of the state came from a trace of the model
        clock = time.perf_counter()
        plans.append(_seconds(functools.partial(parallel.plan, state, batch))[0])
        walls.append(time.perf_counter() - clock)
        jax.clear_caches()
        draft, seconds = _stages(parallel._recipe, parallel.mesh, (state, batch))
        stages.append(seconds)
    changes = _change_seconds(draft, num_changes)
    return Planned(
        model,
        ", ".join([rules, *(options or {})]),
        num_params=sum(leaf.size for leaf in jax.tree.leaves(state["params"])),
        seconds=statistics.median(plans),
        parts={part: statistics.median(seconds[part] for seconds in stages) for part in PARTS},
        change_seconds=statistics.median(changes),
        slowest_change_seconds=max(changes),
        num_changes=num_changes,
        wall_seconds=statistics.median(walls),
        has_options=bool(options),
    )


def _stages(recipe: Recipe, mesh: jax.sharding.Mesh, arguments: tuple[Any, ...]) -> tuple[Draft, dict[str, float]]:
    """Goes through the stages of a plan. Returns the draft that is predicted, and the seconds of each stage."""
    bound = bind(recipe.fn, recipe.options, arguments)
    tracing, traced = _seconds(lambda: trace_step(recipe, bound))
    graph, _ = _seconds(lambda: build_graph(traced.jaxpr, bound.arguments, traced.matched))
    passes, draft = _seconds(lambda: with_tables(begin(recipe, mesh, traced), KnownTables()))
    full, _ = _seconds(lambda: predict(draft))
    return draft, {"trace": tracing - graph, "graph": graph, "passes": passes, "prediction": full}


def _change_seconds(draft: Draft, num_changes: int) -> list[float]:
    """Returns the seconds that each of `num_changes` drawn changes of the layout of `draft` took to predict."""
    prediction, draws = StepPrediction.of(draft), random.Random(0)
    classes, seconds = dims_by_class(draft.graph), []

    for number in range(num_changes):
        specs = draw_change(prediction.dense, classes, draws)
        took, prediction = _seconds(functools.partial(_changed, prediction, specs))
        seconds.append(took)
        differing = predicted_differently(prediction)
        assert not differing, f"change {number}, {specs}: {', '.join(differing)} are not those of the full prediction"
    return seconds


def _changed(prediction: StepPrediction, specs: Mapping[str, Spec]) -> StepPrediction:
    """Predicts a step again whose leaves are split by `specs`, with all that is derived when it is asked for."""
    changed = prediction.changed(prediction.laid_out(specs))
    assert changed.memory.state_bytes >= 0 and isinstance(changed.collectives, tuple)
    assert isinstance(changed.syncs, tuple) and (changed.partial is None) == (changed.draft.partial is None)
    return changed


def _seconds(function: Callable[[], Result]) -> tuple[float, Result]:
    """Calls `function`. Returns the seconds of processor time that it took, and what it returned."""
    started = time.thread_time()
    result = function()
    return time.thread_time() - started, result


def measure_all(repeats: int = 3, num_changes: int = 1000) -> list[Planned]:
    """Measures every model under two rule sets, and prints a line for each. The arguments are those of `measure`."""
    planned = []
    in_part = {"backprop": PartialBackprop()}
    by_rows = {"sync": ByRows("row_exchange", lazy=True)}  # its AdamW changes rows that no step reads
    for model, rules, options in (
        ("vgg16", "splitbrain", {}),
        ("vgg16", "data_parallel", {}),
        ("vgg16", "splitbrain", in_part),
        ("transformer-7b", "megatron", {}),
        ("transformer-7b", "splitbrain", {}),
        ("transformer-7b", "megatron", by_rows),
    ):
        planned.append(measure(model, rules, repeats, num_changes, options))
        print(_line(planned[-1]), flush=True)
    return planned


def section(planned: list[Planned]) -> list[str]:
    """Returns the lines of a result page."""
    rows = [
        [p.model, f"{p.num_params:,}", p.rules, *(_with_limit(p, figure) for figure in ("plan", "full", "change")),
         _ms(p.change_seconds), *(_ms(p.parts[part]) for part in PARTS[:-1]), f"{p.wall_seconds:.2f} s"]
        for p in planned
    ]  # fmt: skip
    return [
        (
            "From shapes alone, on a mesh of data=2 x model=4, with the limit after each figure. *Trace and plan* is"
            " all of `step.plan`; *full prediction* its last part, the collectives and the memory of the layout that"
            " was decided; *a change* the same after the layout of a layer changed: the slowest and the median of"
            f" {planned[0].num_changes:,} drawn changes, each on top of those before it, and equal in every field to a"
            " full prediction; with *backprop* these include the segments of partial backpropagation, with *sync* the"
            " rows of tables (there is no limit on their *trace and plan*). *Trace* is JAX's own trace of the step"
            " (forward and backward), *graph* the analysis of"
            " its dims, *passes* the rules, constraints and other decisions; they are timed apart from *trace and"
            " plan*, on a trace of their own. Processor time, medians of all plans, all in one thread; *by the clock*"
            " is trace and plan on a machine that other programs may have kept busy."
        ),
        "",
        *table(
            ["model", "parameters", "rules", "trace and plan", "full prediction", "a change, at most", "a change",
             *PARTS[:-1], "by the clock"],
            rows,
        ),
    ]  # fmt: skip


def _with_limit(p: Planned, figure: str) -> str:
    if figure not in p.limits:
        return _ms(p.figures[figure])
    limit = p.limits[figure]
    mark = "" if p.figures[figure] <= limit else " (missed)"
    return f"**{_ms(p.figures[figure])}** of {_ms(limit)}{mark}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.2f} ms"


def _line(p: Planned) -> str:
    figures = "; ".join(f"{figure} {_ms(p.figures[figure])} of {_ms(limit)}" for figure, limit in p.limits.items())
    parts = ", ".join(f"{part} {_ms(seconds)}" for part, seconds in p.parts.items())
    return f"{'pass' if p.ok else 'MISS'} {p.model:15} {p.rules:13} {figures} ({parts}); {p.num_params:,} parameters"


def main(argv: list[str] | None = None) -> int:
    """Prints the times and writes the page; returns 1 where one is beyond its limit."""
    virtual_devices()
    parser = argparse.ArgumentParser(
        "planning_time", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3, help="plans of each model")
    parser.add_argument("--changes", type=int, default=1000, help="changes of a layout that are predicted")
    parser.add_argument("--quick", action="store_true", help="one plan, five changes; no limit is held, printed only")
    parser.add_argument("--output", type=pathlib.Path, help="folder of the page, instead of benchmarks/results")
    options = parser.parse_args(argv)
    repeats, changes = (1, 5) if options.quick else (options.repeats, options.changes)
    planned = measure_all(repeats, changes)
    command = f"python -m benchmarks planning_time --repeats {repeats} --changes {changes}"
    stored = {"header": header(this_machine(), command), "planned": [dataclasses.asdict(p) for p in planned]}
    if options.output or not options.quick:
        print("wrote", write_stored("planning_time", stored, page_lines, options.output))
    return 0 if options.quick or all(p.ok for p in planned) else 1


def page_lines(stored: Mapping[str, Any]) -> list[str]:
    """Returns the page of what `planning_time.json` holds."""
    planned = [Planned(**fields) for fields in stored["planned"]]
    return ["# Planning time", "", stored["header"], "", *section(planned)]


if __name__ == "__main__":
    sys.exit(main())
