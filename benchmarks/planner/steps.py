"""The training steps of the cells, from splitjax's models and two Transformers written here, as shapes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

import splitjax
from benchmarks.planner.cells import LAYOUTS, Cell
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
    if cell.model in SIZES:
        name, options = SIZES[cell.model]
        spec = build(name, **options)
        optimizer = optax.adagrad(0.1) if name in ("deepfm", "dlrm", "lstm") else optax.adam(1e-3)
        if name.startswith("vgg"):
            optimizer = optax.sgd(0.1, momentum=0.9)
        init, step, _ = make_step(spec, optimizer, value_and_grad=splitjax.value_and_grad)
        arguments = jax.eval_shape(init, jax.random.key(0)), spec.example(cell.batch)
    else:
        step, arguments = own_step(cell.model, cell.batch)
    rules, mesh, shard_state = LAYOUTS[cell.layout]
    return splitjax.parallelize(step, mesh=mesh_of(cell.target, mesh), rules=rules, shard_state=shard_state), arguments


def own_step(name: str, batch: int) -> tuple[Any, tuple[Any, ...]]:
    """The step of a Transformer of this benchmark, and its arguments as shapes."""
    tx, _, logits_of = _own_model(name)

    def step(state: Any, batch: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            logits = logits_of(params, batch["tokens"][:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean()

        loss, grads = splitjax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return step, (
        jax.eval_shape(own_init(name), jax.random.key(0)),
        {"tokens": jax.ShapeDtypeStruct((batch, 65), jnp.int32)},
    )


def own_init(name: str) -> Any:
    """What makes the state of such a step of a key."""
    tx, init_params, _ = _own_model(name)

    def init(key: Any) -> Any:
        params = init_params(key)
        return {"params": params, "opt": tx.init(params)}

    return init


def _own_model(name: str) -> tuple[Any, Any, Any]:
    """The optimizer, what makes parameters of a key, and logits of them and of ids."""
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    if name == "llama":
        model = GatedTransformer(vocab=1024, width=256, num_heads=8, hidden=704, num_layers=3)
        init_params = lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return tx, init_params, lambda params, ids: model.apply({"params": params}, ids)
    config = {"vocab": 1024, "width": 256, "heads": 8, "layers": 6, "length": 64}
    logits_of = functools.partial(scanned_logits, heads=config["heads"], keeps=name.removeprefix("scanned"))
    return tx, functools.partial(scanned_params, **config), logits_of


def scanned_params(key: Any, vocab: int, width: int, heads: int, layers: int, length: int) -> Any:
    """Parameters of a decoder whose blocks are stacked, as f32[layers, ...]."""
    shapes = {
        "q": (width, heads, width // heads), "k": (width, heads, width // heads), "v": (width, heads, width // heads),
        "o": (heads, width // heads, width), "up": (width, 4 * width), "down": (4 * width, width),
    }  # fmt: skip
    keys = iter(jax.random.split(key, len(shapes) + 3))
    blocks = {name: 0.02 * jax.random.normal(next(keys), (layers, *shape)) for name, shape in shapes.items()}
    blocks |= {"scale1": jnp.ones((layers, width)), "scale2": jnp.ones((layers, width))}
    return {
        "embed": 0.02 * jax.random.normal(next(keys), (vocab, width)),
        "positions": 0.02 * jax.random.normal(next(keys), (length, width)),
        "blocks": blocks,
        "logits": 0.02 * jax.random.normal(next(keys), (width, vocab)),
    }


def scanned_logits(params: Any, ids: Any, heads: int, keeps: str) -> Any:
    """Logits [B, T, vocab] of such a decoder for ids i32[B, T]; its blocks run in `jax.lax.scan`.

    `keeps`: what the backward pass finds of a block: "" all of it, "_remat" what goes in, "_dots" the products of
    weights too."""

    def norm(x: Any, scale: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    def block(x: Any, p: Any) -> tuple[Any, None]:
        h = norm(x, p["scale1"])
        q, k, v = (jnp.einsum("btd,dhk->bthk", h, p[n]) for n in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        visible = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
        x = x + jnp.einsum("bthk,hkd->btd", jnp.einsum("bhqk,bkhd->bqhd", weights, v), p["o"])
        h = jax.nn.gelu(norm(x, p["scale2"]) @ p["up"])
        return x + h @ p["down"], None

    policies = {"_remat": None, "_dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable}
    if keeps in policies:
        block = jax.checkpoint(block, policy=policies[keeps])
    x = params["embed"][ids] + params["positions"]
    x, _ = jax.lax.scan(block, x, params["blocks"])
    return x @ params["logits"]
