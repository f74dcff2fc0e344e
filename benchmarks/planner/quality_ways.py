"""The layouts that `auto` is held against, and what runs a model under any of them."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from splitjax.machines.calibration import Calibration

AUTO, XLA_ALONE, AS_MAXTEXT = "auto", "XLA from the batch alone", "as MaxText lays it out"
AGAIN = "best baseline, again"  # the same program, built a second time
# By name the rule set and the mesh of a layout for two devices, and for eight.
BASELINES: Mapping[str, tuple[str, Mapping[int, dict[str, int]]]] = {
    "data parallel": ("data_parallel", {2: {"data": 2}, 8: {"data": 8}}),
    "fully sharded": ("fsdp", {2: {"fsdp": 2}, 8: {"fsdp": 8}}),
    "Megatron": ("megatron", {2: {"data": 1, "model": 2}, 8: {"data": 2, "model": 4}}),
    "SplitBrain": ("splitbrain", {2: {"data": 1, "model": 2}, 8: {"data": 2, "model": 4}}),
    AS_MAXTEXT: ("transformer", {2: {"fsdp": 2}, 8: {"fsdp": 4, "tensor": 2}}),
}
MODELS = ("mlp", "vgg16", "transformer", "llama", "scanned", "lstm", "deepfm")
BATCH = 64  # examples of the global batch
TURN_SECONDS, LEAST_STEPS, MOST_STEPS = 0.4, 2, 20
BEYOND = 1.5  # times the best baseline: who takes longer than that in the first rounds does not run in the others


@dataclasses.dataclass(frozen=True)
class Model:
    """A model that is trained: `step`, what makes its state of a key, and its batch as shapes."""

    step: Callable[[Any, Any], Any]
    init: Callable[[Any], Any]
    batch: Any


def model_of(name: str) -> Model:
    """The model of a name of `MODELS`, with its optimizer."""
    import jax
    import optax

    import splitjax
    from benchmarks.planner.steps import SIZES, own_init, own_step
    from splitjax.models import build, make_step

    if name not in SIZES:
        step, (_, batch) = own_step(name, BATCH)
        return Model(step, own_init(name), batch)
    kind, options = SIZES[name]
    spec = build(kind, **options)
    optimizer = optax.adagrad(0.1) if kind in ("deepfm", "lstm") else optax.sgd(0.01, momentum=0.9)
    init, step, _ = make_step(spec, optimizer, value_and_grad=splitjax.value_and_grad)
    return Model(
        step, init, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), spec.example(BATCH))
    )


def parallel_of(
    model: Model, way: str, num_devices: int, calibration: Calibration | None = None, **options: Any
) -> Any:
    """The parallel step of a model. `way`: `auto`, or a name of `BASELINES`. `calibration`: what `auto` knows of the
    machine. `options`: further ones of `parallelize`."""
    import splitjax

    if way == AUTO:
        return splitjax.parallelize(model.step, mesh="auto", rules="auto", target=calibration, **options)
    rules, meshes = BASELINES[way]
    return splitjax.parallelize(model.step, mesh=meshes[num_devices], rules=rules, **options)


def contenders(turns: Mapping[str, Sequence[float]]) -> list[str]:
    """The layouts that stay in the contest: `auto`, and those that may be the best. `turns`: by layout the seconds of a
    step in the first rounds."""
    medians = {way: statistics.median(seconds) for way, seconds in turns.items()}
    least = medians[best_of(turns)]
    return [way for way in medians if way == AUTO or medians[way] <= BEYOND * least]


def best_of(turns: Mapping[str, Sequence[float]]) -> str:
    """The baseline whose median is the least. `turns`: by layout the seconds of a step in each round."""
    return min((way for way in BASELINES if way in turns), key=lambda way: statistics.median(turns[way]))


def steps_of_turn(seconds: float) -> int:
    """How many steps a turn has, where the quickest layout takes that many seconds a step: enough for `TURN_SECONDS`.
    Turns of two steps of 20 ms differed by a third."""
    return min(max(math.ceil(TURN_SECONDS / seconds), LEAST_STEPS), MOST_STEPS)


class Runner:
    """Runs a model under one layout, a step a call; it holds the state. `parallel`: a parallel step; None for plain
    `jax.jit` whose batch is split over all devices and whose state begins whole, everything else left to XLA."""

    def __init__(self, model: Model, parallel: Any | None) -> None:
        import jax

        key, values = jax.random.key(0), _filled(model.batch)
        if parallel is None:
            self._step, shardings, state = _plain(model, key)
        else:
            self._step = parallel
            state = parallel.init(model.init, key, example=(model.batch,))
            shardings = parallel.shardings(state, model.batch)[1]
        self._state = state
        self._batch = jax.tree.map(
            lambda value, sharding: jax.make_array_from_callback(value.shape, sharding, lambda index: value[index]),
            values,
            shardings,
        )

    def __call__(self) -> float:
        """Runs a step, and returns its loss."""
        import jax

        self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready(self._state)
        return float(metrics["loss"])


def _plain(model: Model, key: Any) -> tuple[Any, Any, Any]:
    import jax
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, P())
    state = jax.jit(model.init, out_shardings=whole)(key)
    rows = jax.tree.map(lambda leaf: NamedSharding(mesh, P("data")) if leaf.shape else whole, model.batch)
    return jax.jit(model.step, donate_argnums=0), rows, state


def _filled(shapes: Any) -> Any:
    """A batch of these shapes, the same in every process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    draw = np.random.default_rng(0)

    def filled(leaf: Any) -> Any:
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return draw.integers(0, 10, leaf.shape).astype(leaf.dtype)
        return draw.normal(size=leaf.shape).astype(leaf.dtype)

    return jax.tree.map(filled, shapes)
