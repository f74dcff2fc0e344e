"""The training steps of the cells, from splitjax's models and two Transformers written here, as shapes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import splitjax
from benchmarks.planner.cells import Cell, layout_of
from benchmarks.planner.scanned import scanned_logits, scanned_params, state_init, token_step
from benchmarks.planner.targets import mesh_of
from benchmarks.planning_time import GatedTransformer
from splitjax.models import build, make_step

_CLICKS = {"field_sizes": (20_000, 3_000, 8_000, 500), "num_dense": 4, "embedding_width": 32}
# Small enough to compile in seconds, large enough that arrays and not scalars make up the memory.
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "mlp": ("mlp", {"features": (1024, 512, 512), "input_shape": (28, 28, 1), "dropout": 0.1}),
    "vgg16": ("vgg16", {"width": 1 / 4, "head_features": 1024}),
    "vgg16_bn": ("vgg16", {"width": 1 / 4, "head_features": 512, "batch_norm": True}),
    "resnet18": ("resnet18", {"width": 1 / 2, "image_size": 32}),
    "convnext": ("convnext_tiny", {
        "width": 1 / 3, "stage_sizes": (1, 2), "stage_channels": (96, 192), "image_size": 32,
    }),
    "transformer": ("transformer", {
        "vocab_size": 1024, "max_len": 64, "d_model": 256, "num_heads": 8, "num_layers": 3,
    }),
    "lstm": ("lstm", {"vocab_size": 4096, "max_len": 16, "embedding_width": 64, "hidden_width": 128, "negatives": 16}),
    "deepfm": ("deepfm", {**_CLICKS, "features": (512, 256)}),
    "dlrm": ("dlrm", {**_CLICKS, "bottom_features": (128, 32), "features": (512, 256)}),
}  # fmt: skip


def made(cell: Cell) -> tuple[Any, tuple[Any, ...]]:
    """The parallel step of a cell, and its arguments as shapes."""
    if cell.target.startswith("tpu"):
        from benchmarks.planner.large import made_large

        step, arguments = made_large(cell.model, cell.batch)
    elif cell.model in SIZES:
        name, options = SIZES[cell.model]
        spec = build(name, **options)
        optimizer = optax.adagrad(0.1) if name in ("deepfm", "dlrm", "lstm") else optax.adam(1e-3)
        if name.startswith("vgg"):
            optimizer = optax.sgd(0.1, momentum=0.9)
        init, step, _ = make_step(spec, optimizer, value_and_grad=splitjax.value_and_grad)
        arguments = jax.eval_shape(init, jax.random.key(0)), spec.example(cell.batch)
    else:
        step, arguments = own_step(cell.model, cell.batch)
    rules, mesh, shard_state = layout_of(cell)
    return splitjax.parallelize(step, mesh=mesh_of(cell.target, mesh), rules=rules, shard_state=shard_state), arguments


def own_step(name: str, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """The step of a Transformer of this benchmark, and its arguments as shapes."""
    init_params, logits_of = _own_model(name)
    return token_step(logits_of, init_params, batch, 64)


def own_init(name: str) -> Any:
    """What makes the state of such a step of a key."""
    return state_init(_own_model(name)[0])


def _own_model(name: str) -> tuple[Any, Any]:
    """What makes parameters of a key, and logits of them and of ids."""
    if name == "llama":
        model = GatedTransformer(vocab=1024, width=256, num_heads=8, hidden=704, num_layers=3)
        init_params = lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return init_params, lambda params, ids: model.apply({"params": params}, ids)
    config = {"vocab": 1024, "width": 256, "heads": 8, "layers": 6, "length": 64}
    logits_of = functools.partial(scanned_logits, heads=config["heads"], keeps=name.removeprefix("scanned"))
    return functools.partial(scanned_params, **config), logits_of
