"""The training steps of the corpus, made through splitjax's public interface alone: an earlier or a later checkout has
it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from benchmarks.corpus.cells import BRANCHES, FULL, MESHES, PROGRAMS, WITH_TABLES, Cell, Unit

NUM_EXAMPLES = 32  # of a batch: one for each of eight workers and four microbatches

# As small as a model of its kind can be: every kind of layer is there, dense weights are large enough for fsdp to split
# (1024 values), and heads and channels divide by the axes.
_BLOCKS = {"width": 1 / 8, "depth": 0.1, "image_size": 8}
_CLICKS = {"field_sizes": (96, 32, 128), "num_dense": 2, "embedding_width": 8}
SIZES: dict[str, dict[str, Any]] = {
    "mlp": {"features": 32, "input_shape": (8, 8, 1), "dropout": 0.2},
    "transformer": {"vocab_size": 64, "max_len": 8, "d_model": 32, "num_heads": 4, "num_layers": 1, "dropout": 0.2},
    "lstm": {"vocab_size": 64, "max_len": 8, "embedding_width": 16, "hidden_width": 16, "negatives": 4},
    "deepfm": {**_CLICKS, "features": 16},
    "dlrm": {**_CLICKS, "bottom_features": 16, "features": 16},
    "vgg11": {"width": 1 / 16, "head_features": 32, "batch_norm": True},
    "vgg16": {"width": 1 / 16, "head_features": 32, "dropout": 0.2},
    "resnet18": {"width": 1 / 8, "image_size": 8},
    "resnet50": {"width": 1 / 8, "image_size": 8},
    "mobilenet_v2": {**_BLOCKS, "head_features": 64},
    "mobilenet_v3_large": {**_BLOCKS, "head_features": 64},
    "mobilenet_v3_small": {**_BLOCKS, "head_features": 64},
    "efficientnet_b0": {**_BLOCKS, "drop_path": 0.2},
    "convnext_tiny": {
        "width": 1 / 12,
        "stage_sizes": (1, 2),
        "stage_channels": (96, 192),
        "image_size": 16,
        "drop_path": 0.2,
    },
}
# Two of its stages show what all of them do; `build` fixes their number by the model's name.
_STAGES = {"resnet18": (1, 1), "resnet50": (1, 1)}

# Room for rows, with which the program that follows the observed steps is compiled without running them.
_CAPACITIES = {
    "all_gather": {"local": 24, "union": 64},
    "row_exchange": {"local": 24, "union": 64, "push": 12, "pull": 24, "codes": 24, "code_bits": 8},
    "zen": {"local": 24, "union": 64, "push": 12, "pull": 24},
    "owner_sharded": {"local": 24, "push": 12, "pull": 24},
}


@dataclasses.dataclass(frozen=True)
class Ready:
    """A unit's training step, and shapes to plan it with. `parallelize`: that of its library."""

    parallelize: Callable[..., Any]
    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    has_batch_norm: bool


def ready(unit: Unit) -> Ready:
    """The step of a unit with the shapes of its arguments; nothing is computed."""
    import jax
    import optax

    import splitjax
    from splitjax import models

    spec = spec_of(unit)
    # Of tables only an update that leaves rows without gradient alone lets rows be exchanged: not Adam's.
    optimizer = optax.adagrad(0.1) if unit.model in WITH_TABLES else optax.adam(1e-3)
    number, key = int(unit.microbatches), jax.eval_shape(jax.random.key, 0)
    options = {"microbatches": number} if number > 1 else {}
    if unit.library == "linen":
        boundary = functools.partial(splitjax.value_and_grad, **options)
        init, step, _ = models.make_step(spec, optimizer, value_and_grad=boundary)
        return Ready(
            splitjax.parallelize, step, (jax.eval_shape(init, key), spec.example(NUM_EXAMPLES)), spec.has_batch_stats
        )
    from flax import nnx

    import splitjax.nnx

    boundary = functools.partial(splitjax.nnx.value_and_grad, **options)
    init, step, _ = models.make_nnx_step(spec, optimizer, value_and_grad=boundary)
    arguments = (*nnx.eval_shape(init, key), spec.example(NUM_EXAMPLES))
    return Ready(splitjax.nnx.parallelize, step, arguments, spec.has_batch_stats)


def spec_of(unit: Unit) -> Any:
    """The model of a unit, a `splitjax.models.ModelSpec`."""
    from splitjax import models

    spec = models.build(unit.model, library=unit.library, **SIZES[unit.model])
    if unit.model not in _STAGES:
        return spec
    config = dataclasses.replace(spec.config, stage_sizes=_STAGES[unit.model])
    return dataclasses.replace(spec, config=config, module=None if spec.module is None else type(spec.module)(config))


def parallel(cell: Cell, made: Ready) -> Any:
    """The cell's parallel step."""
    return made.parallelize(made.step, **_options(cell, made))


def _options(cell: Cell, made: Ready) -> dict[str, Any]:
    options: dict[str, Any] = {
        "mesh": MESHES[cell.mesh],
        "rules": cell.rules,
        "sync": cell.sync,
        "group_comm": cell.group_comm,
    }
    options["shard_state"] = cell.state == "sharded"
    if cell.partial != FULL:
        options["backprop"] = _backprop(cell, made)
    return options


def _backprop(cell: Cell, made: Ready) -> Any:
    """Two depths among the workers, as every further one is a further copy of the backward pass to compile."""
    import splitjax

    num_workers = (
        2 if cell.rules in ("splitbrain", "megatron") else 8
    )  # groups that split a layer differentiate it together
    depths = (0.5,) * (num_workers // 2) + (1.0,) * (num_workers // 2)
    statistics = "local" if made.has_batch_norm else "global"
    execution = {BRANCHES: "branch", PROGRAMS: "program"}[cell.partial]
    return splitjax.PartialBackprop(depths=depths, execution=execution, statistics=statistics)


def decided(cell: Cell, made: Ready, plan: Any) -> Any | None:
    """The step that follows the observed ones, where a plan has tables whose rows are exchanged: it is pinned to the
    plan with fixed capacities. None for another plan."""
    if all(table.scheme == "dense" for table in plan.syncs):
        return None
    pinned = tuple(dataclasses.replace(table, capacities=_CAPACITIES.get(table.scheme, {})) for table in plan.syncs)
    return made.parallelize(made.step, **_options(cell, made), plan=dataclasses.replace(plan, syncs=pinned))
