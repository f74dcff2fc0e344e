"""The steps that run on one accelerator: models of sizes that keep it busy, and what makes them.

Whether a cell is held out follows from its name alone, as in `benchmarks.planner.cells`: nothing was fitted to those
that are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import splitjax
from benchmarks.planner.cells import is_held_out
from benchmarks.planner.scanned import scanned_logits, scanned_params
from splitjax.models import build, make_step

# Model, its options, and the batches that it runs with.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "mlp": ("mlp", {"features": (8192, 8192, 8192), "input_shape": (32, 32, 3)}, (1024,)),
    "vgg16": ("vgg16", {"image_size": 64}, (256,)),
    "resnet50": ("resnet50", {"image_size": 64}, (64,)),
    "transformer": (
        "transformer",
        {"vocab_size": 32_768, "max_len": 512, "d_model": 1024, "num_heads": 16, "num_layers": 8},
        (8,),
    ),
    "lstm": (
        "lstm",
        {"vocab_size": 100_000, "max_len": 20, "embedding_width": 512, "hidden_width": 2048, "negatives": 4096},
        (256,),
    ),
    "deepfm": (
        "deepfm",
        {
            "field_sizes": (1_000_000, 300_000, 100_000, 30_000),
            "num_dense": 13,
            "embedding_width": 128,
            "features": (2048, 1024),
        },
        (32_768,),
    ),
}
# A decoder whose blocks run in `jax.lax.scan`: what the backward pass keeps of a block, and in what it computes.
SCANNED: dict[str, tuple[str, str]] = {
    "scanned": ("", "float32"),
    "scanned_remat": ("_remat", "float32"),
    "scanned_dots_bf16": ("_dots", "bfloat16"),
    "scanned_bf16": ("", "bfloat16"),
}
SCANNED_SIZE = {"vocab": 32_768, "width": 2048, "heads": 16, "layers": 8, "length": 512}
SCANNED_BATCHES = (8,)


@dataclasses.dataclass(frozen=True)
class Cell:
    """One combination: `model` of `MODELS` or `SCANNED`, `batch` the examples of a step."""

    model: str
    batch: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.batch}"

    @property
    def is_held_out(self) -> bool:
        """Whether the cell is held out: by a hash of its name, so that nobody chooses."""
        return is_held_out(self.name)

    @classmethod
    def parse(cls, name: str) -> Cell:
        model, batch = name.split("/")
        return cls(model, int(batch))


@dataclasses.dataclass(frozen=True)
class Made:
    """A cell's step. `plain`: as a user wrote it, with `jax.value_and_grad`. `parallel`: splitjax's, on one device.
    `init`: makes the state of a key. `batch`: shapes and dtypes of a batch."""

    plain: Callable[..., Any]
    parallel: Any
    init: Callable[[Any], Any]
    batch: Any


def every_cell() -> list[Cell]:
    named = {name: batches for name, (_, _, batches) in MODELS.items()} | dict.fromkeys(SCANNED, SCANNED_BATCHES)
    return [Cell(name, batch) for name, batches in named.items() for batch in batches]


def made(cell: Cell, quick: bool = False, mesh: Any = None) -> Made:
    """Makes the step of a cell. `quick`: a far smaller model, to try the benchmark out on a CPU. `mesh`: of one device,
    instead of this machine's first."""
    if cell.model in SCANNED:
        parts = functools.partial(_scanned, cell.model, cell.batch, quick)
    else:
        parts = functools.partial(_shipped, cell.model, cell.batch, quick)
    init, plain, batch = parts(jax.value_and_grad)
    _, step, _ = parts(splitjax.value_and_grad)
    return Made(plain, splitjax.parallelize(step, mesh=mesh or {"data": 1}, rules="data_parallel"), init, batch)


def _shipped(model: str, batch: int, quick: bool, differentiate: Any) -> tuple[Any, Any, Any]:
    from benchmarks.planner.steps import SIZES

    name, options, _ = MODELS[model]
    if quick:
        name, options = SIZES.get(model, ("resnet18", {"width": 1 / 4, "image_size": 32}))
    spec = build(name, **options)
    optimizer = optax.adagrad(0.1) if name in ("deepfm", "lstm") else optax.sgd(0.01, momentum=0.9)
    init, step, _ = make_step(spec, optimizer, value_and_grad=differentiate)
    return init, step, spec.example(batch)


def _scanned(model: str, batch: int, quick: bool, differentiate: Any) -> tuple[Any, Any, Any]:
    keeps, dtype = SCANNED[model]
    size = {"vocab": 256, "width": 64, "heads": 2, "layers": 2, "length": 16} if quick else SCANNED_SIZE
    tx = optax.adamw(3e-4)

    def init(key: Any) -> Any:
        params = scanned_params(key, **size)
        return {"params": params, "opt": tx.init(params)}

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
            logits = scanned_logits(params, batch["tokens"][:, :-1], heads=size["heads"], keeps=keeps)
            logits = logits.astype(jnp.float32)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

        loss, grads = differentiate(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return init, step, {"tokens": jax.ShapeDtypeStruct((batch, size["length"] + 1), jnp.int32)}
