"""Training steps sharded by hand, as one writes them with `jax.jit`, `NamedSharding` and `with_sharding_constraint`:
what the overhead benchmark compares splitjax with.

Every model takes `pin(where, x)`, which is where the hand-written version constrains activations; the version that
splitjax is given pins nothing. Where a place has no spec, nothing is constrained there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

MESH = {"data": 2, "model": 4}
WORKERS = ("data", "model")
Pin = Callable[[str, jax.Array], jax.Array]


def no_pin(where: str, x: jax.Array) -> jax.Array:
    return x


class VGG(nn.Module):
    """Columns A of VGG's table, narrow: 8 convolutions, then a head of two hidden layers."""

    channels: tuple[int, ...] = (16, 32, 64, 64)
    hidden: int = 512
    num_classes: int = 10
    pin: Pin = no_pin

    @nn.compact
    def __call__(self, x):
        for stage, channels in enumerate(self.channels, start=1):
            for layer in ("a", "b"):
                x = nn.relu(nn.Conv(channels, (3, 3), name=f"conv{stage}{layer}")(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = x.reshape((x.shape[0], -1))
        x = self.pin("crossing", x)
        for number in (1, 2):
            x = self.pin("into columns", x)
            dense = nn.Dense(self.hidden, dot_general=self.product("product of columns"), name=f"dense{number}")
            x = nn.relu(self.pin("out of columns", dense(x)))
        x = self.pin("into rows", x)
        x = nn.Dense(self.num_classes, dot_general=self.product("product of rows"), name="logits")(x)
        return self.pin("out of rows", x)

    def product(self, where: str) -> Callable:
        """A `dot_general` whose result is pinned, before a layer adds its bias."""
        return lambda *args, **options: self.pin(where, jax.lax.dot_general(*args, **options))


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    width: int
    num_heads: int
    pin: Pin

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm(name="norm1")(x)
        heads = (self.num_heads, self.width // self.num_heads)
        q, k, v = (nn.DenseGeneral(heads, name=name)(h) for name in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / heads[1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
        h = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + self.pin("block", nn.DenseGeneral(self.width, axis=(-2, -1), name="out")(h))
        h = nn.gelu(nn.Dense(4 * self.width, name="up")(nn.LayerNorm(name="norm2")(x)))
        return x + self.pin("block", nn.Dense(self.width, name="down")(h))


class Transformer(nn.Module):
    """A small decoder."""

    vocab: int = 512
    width: int = 128
    num_heads: int = 8
    num_layers: int = 3
    pin: Pin = no_pin

    @nn.compact
    def __call__(self, ids):
        x = nn.Embed(self.vocab, self.width, name="embed")(ids)
        for number in range(self.num_layers):
            x = Block(self.width, self.num_heads, self.pin, name=f"block{number}")(x)
        return nn.Dense(self.vocab, use_bias=False, name="logits")(nn.LayerNorm(name="norm")(x))


def make_step(model: nn.Module, tx: optax.GradientTransformation, value_and_grad: Callable) -> Callable:
    """`step(state, batch) -> (state, {"loss": ...})`, for images with a label each and for tokens with one a
    position."""

    def train_step(state, batch):
        def loss_fn(params):
            logits = model.apply({"params": params}, batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

        loss, grads = value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    return train_step


def make_init(model: nn.Module, tx: optax.GradientTransformation, batch: Any) -> Callable:
    def init(key):
        params = model.init(key, batch["x"][:1])["params"]
        return {"params": params, "opt": tx.init(params)}

    return init


@dataclasses.dataclass(frozen=True)
class ByHand:
    """A model with the sharding that its author would write: a spec for every parameter (its momentum follows), one for
    the batch, and constraints on activations by place (`style` says which). `rules` is splitjax's name for it."""

    name: str
    rules: str
    style: str
    model: nn.Module
    batch: dict[str, np.ndarray]
    batch_axes: dict[str, tuple[str, ...] | str]  # of `x` and of `y`
    spec: Callable[[str], P]
    pins: dict[str, P]

    def jitted(self, mesh: jax.sharding.Mesh, tx: optax.GradientTransformation) -> tuple[Any, Any, Any]:
        """The jitted step, the state's shardings, the batch's."""

        def pin(where, x):
            return (
                jax.lax.with_sharding_constraint(x, NamedSharding(mesh, self.pins[where])) if where in self.pins else x
            )

        step = make_step(self.model.clone(pin=pin), tx, jax.value_and_grad)
        shapes = jax.eval_shape(make_init(self.model, tx, self.batch), jax.random.key(0))
        paths = jax.tree_util.tree_map_with_path(
            lambda path, _: jax.tree_util.keystr(path, simple=True, separator="/"), shapes
        )
        state = jax.tree.map(lambda path: NamedSharding(mesh, self.spec(path)), paths)
        batch = {name: NamedSharding(mesh, P(axes)) for name, axes in self.batch_axes.items()}
        return jax.jit(step, in_shardings=(state, batch), out_shardings=(state, None), donate_argnums=0), state, batch


def _images(size: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"x": rng.normal(size=(size, 32, 32, 3)).astype(np.float32), "y": rng.integers(0, 10, size).astype(np.int32)}


def _tokens(size: int = 16, length: int = 64) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.integers(0, 512, (size, length)).astype(np.int32) for name in ("x", "y")}


def _vgg_split(path: str) -> P:
    """Dense layers by columns, the last (10 classes do not divide) by rows; convolutions whole."""
    if "dense" in path:
        return P(None, "model") if path.endswith("kernel") else P("model")
    return P("model", None) if path.endswith("logits/kernel") else P()


def _megatron(path: str) -> P:
    """Figure 3 of Megatron-LM: columns, then rows; embedding and logits by vocabulary."""
    if path.endswith("embed/embedding"):
        return P("model", None)
    if path.endswith("logits/kernel"):
        return P(None, "model")
    for name in ("query", "key", "value"):
        if f"/{name}/" in path:
            return P(None, "model", None) if path.endswith("kernel") else P("model", None)
    if "/up/" in path:
        return P(None, "model") if path.endswith("kernel") else P("model")
    if path.endswith("/out/kernel"):
        return P("model", None, None)
    return P("model", None) if path.endswith("/down/kernel") else P()


# Labels meet only what comes out of the split layers, whose examples are over `data` alone.
_ALL, _SPLIT, _DATA = {"x": WORKERS, "y": WORKERS}, {"x": WORKERS, "y": "data"}, {"x": "data", "y": "data"}
_INTO = {"into columns": P("data", None), "into rows": P("data", "model")}
CASES = (
    ByHand("vgg", "data_parallel", "batch and state alone", VGG(), _images(), _ALL, lambda path: P(), {}),
    ByHand(
        "vgg",
        "splitbrain",
        "each dense layer's input, the last one's product",
        VGG(),
        _images(),
        _SPLIT,
        _vgg_split,
        {**_INTO, "product of rows": P("data", None)},
    ),
    ByHand(
        "vgg",
        "splitbrain",
        "each dense layer's input and product",
        VGG(),
        _images(),
        _SPLIT,
        _vgg_split,
        {**_INTO, "product of columns": P("data", "model"), "product of rows": P("data", None)},
    ),
    ByHand(
        "vgg",
        "splitbrain",
        "each dense layer's input and output",
        VGG(),
        _images(),
        _SPLIT,
        _vgg_split,
        {**_INTO, "out of columns": P("data", "model"), "out of rows": P("data", None)},
    ),
    ByHand(
        "vgg", "splitbrain", "the crossing alone", VGG(), _images(), _ALL, _vgg_split, {"crossing": P("data", None)}
    ),
    ByHand("transformer", "megatron", "batch and state alone", Transformer(), _tokens(), _DATA, _megatron, {}),
)
