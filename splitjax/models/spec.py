"""What is known of a Flax model: what it reads, how its parameters are made, what it brings along.

A Flax module goes into `from_linen`, or what makes one into `from_nnx`; a `ModelSpec` comes out, of which `make_step`
makes a training step, as it does of splitjax's own models.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from splitjax.models._common import ModelConfig, ModelError

if TYPE_CHECKING:
    from splitjax.data.dataset import Dataset

Reads: TypeAlias = Literal["images", "text", "clicks"]


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Holds a model with its options, in one of the two Flax libraries.

    **Attributes:**

    - `name`: as given to `build`.
    - `library`: `"linen"` or `"nnx"`.
    - `config`: the options; a frozen dataclass of the model's family, such as `VGGConfig`.
    - `module`: the Linen module; None for NNX.
    - `reads`: the model's subject: images, the next word of a text, or whether somebody clicks on what was shown.
    - `maker`: makes the NNX module from the config and its random streams; None for Linen.
    - `dataset`: seed -> a `splitjax.data.Dataset` that the model brings along; None for those of `splitjax.data`.
    """

    name: str
    library: str
    config: ModelConfig
    module: nn.Module | None = None
    reads: Reads = "images"
    maker: Callable[[ModelConfig, nnx.Rngs], nnx.Module] | None = dataclasses.field(default=None, compare=False)
    dataset: Callable[[int], Dataset] | None = dataclasses.field(default=None, compare=False)

    @property
    def inputs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The batch entries that the model reads, in its arguments' order: the shape of one example, without the
        example dim."""
        return self.config.inputs

    @property
    def input_name(self) -> str:
        """The first of `inputs`: `"image"`, `"tokens"` or `"ids"`."""
        return next(iter(self.inputs))

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example of it, without the example dim."""
        return self.inputs[self.input_name].shape

    @property
    def num_negatives(self) -> int:
        """Words that a training batch brings drawn for each example, for a softmax that is sampled in training; 0 for
        others."""
        return self.config.num_negatives

    @property
    def num_classes(self) -> int:
        """Number of classes that the model tells apart; 2 for clicks, the size of the vocabulary for text."""
        return self.config.num_classes

    @property
    def has_batch_stats(self) -> bool:
        """True where training updates running statistics (batch norm)."""
        return self.config.has_batch_stats

    @property
    def has_dropout(self) -> bool:
        """True where training draws random bits: for dropout, or for stochastic depth."""
        return self.config.has_dropout

    def example(self, batch_size: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of a training batch of `batch_size` examples: enough to plan a step without data.

        Images: `{"image": f32[B, *shape], "label": i32[B]}`; text: `{"tokens": i32[B, max_len]}`, for the LSTM
        `{"tokens": i32[B, max_len + 1], "negatives": i32[B, negatives]}`; clicks:
        `{"ids": i32[B, F], "values": f32[B, D], "label": i32[B]}`.
        """
        batch = {name: jax.ShapeDtypeStruct((batch_size, *it.shape), it.dtype) for name, it in self.inputs.items()}
        if self.reads != "text":
            batch["label"] = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
        if self.num_negatives:
            (max_len,) = self.input_shape
            batch["tokens"] = jax.ShapeDtypeStruct((batch_size, max_len + 1), jnp.int32)
            batch["negatives"] = jax.ShapeDtypeStruct((batch_size, self.num_negatives), jnp.int32)
        return batch

    def init(self, key: jax.Array) -> dict[str, Any]:
        """Makes fresh Linen variables from a PRNG key: `{"params": ...}`, and `"batch_stats"` where there is batch
        norm.

        Raises `ModelError` for an NNX model.
        """
        module = self._linen("init")
        # Under jit the compiler drops the forward pass that Linen runs to learn the shapes.
        return jax.jit(module.init)(key, *(jnp.zeros((1, *it.shape), it.dtype) for it in self.inputs.values()))

    def apply(self, variables: dict[str, Any], *inputs: jax.Array, train: bool = False, **options: Any) -> Any:
        """Runs the Linen model, as its `module.apply`: `options` are `rngs`, `mutable` and the like.

        With `variables` as of `init`, and `train` while it is trained: the arrays of `inputs`, [B, ...] each -> [B,
        num_classes] logits ([B, T, vocab_size] for tokens, [B] for clicks). Raises `ModelError` for an NNX model.
        """
        return self._linen("apply").apply(variables, *inputs, train=train, **options)

    def make(self, rngs: nnx.Rngs) -> nnx.Module:
        """Makes a fresh NNX module, which is called as `module(inputs, train=False)`, with the streams of `rngs`.

        Raises `ModelError` for a Linen model.
        """
        if self.maker is None:
            raise ModelError(
                "this is a Linen model: its parameters are made by init(key)",
                value=self.name,
                place="ModelSpec.make",
                remedy=f'call init(key), or build({self.name!r}, library="nnx")',
            )
        return self.maker(self.config, rngs)

    def num_params(self) -> int:
        """Counts the trainable values, without making them."""
        key = jax.eval_shape(jax.random.key, 0)  # a concrete one would start a backend
        if self.library == "linen":
            params = jax.eval_shape(self.init, key)["params"]
        else:
            params = nnx.state(nnx.eval_shape(lambda key: self.make(nnx.Rngs(key)), key), nnx.Param)
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))

    def _linen(self, method: str) -> nn.Module:
        if self.module is None:
            raise ModelError(
                "this is an NNX model: it holds its own parameters",
                value=self.name,
                place=f"ModelSpec.{method}",
                remedy=f'call make(rngs), or build({self.name!r}, library="linen")',
            )
        return self.module


@dataclasses.dataclass(frozen=True)
class GivenConfig:
    """Holds what a `ModelConfig` tells, given outright and not by the options of a family."""

    inputs: dict[str, jax.ShapeDtypeStruct] = dataclasses.field(hash=False)
    num_classes: int
    num_negatives: int = 0
    has_batch_stats: bool = False
    has_dropout: bool = False


def from_linen(
    name: str,
    module: nn.Module,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    num_classes: int,
    reads: Reads = "images",
    has_batch_stats: bool = False,
    has_dropout: bool = False,
    dataset: Callable[[int], Dataset] | None = None,
) -> ModelSpec:
    """Describes a Linen module of your own, so that whatever takes a model of splitjax takes it too.

    **Arguments:**

    - `name`: what messages call it.
    - `module`: called as `module(*inputs, train=False)`, it gives logits: [B, num_classes]; of text
      [B, T, num_classes]; of clicks [B].
    - `inputs`: the batch entries that it reads, in its arguments' order: the shape of one example, without the example
      dim. Images: `{"image": f32[H, W, C]}`, text: `{"tokens": i32[T]}`, clicks: `{"ids": i32[F], "values": f32[D]}`.
    - `num_classes`: how many classes it tells apart; of text, the size of the vocabulary; of clicks, 2.
    - `reads`: `"images"`, `"text"` or `"clicks"`; decides the loss.
    - `has_batch_stats`: whether it has a collection `"batch_stats"`. `has_dropout`: whether it draws from the stream
      `"dropout"`.
    - `dataset`: seed -> the `splitjax.data.Dataset` to train it on; None for one that is chosen with `--data`.

    Raises `ModelError` for what is no module or reads nothing.
    """
    if not isinstance(module, nn.Module):
        raise _unfit("from_linen", "a Linen model is a flax.linen.Module", module, "pass an instance of the module")
    config = _given("from_linen", name, inputs, num_classes, has_batch_stats, has_dropout)
    return ModelSpec(name, "linen", config, module, reads, dataset=dataset)


def from_nnx(
    name: str,
    maker: Callable[[nnx.Rngs], nnx.Module],
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    *,
    num_classes: int,
    reads: Reads = "images",
    has_batch_stats: bool = False,
    has_dropout: bool = False,
) -> ModelSpec:
    """Describes an NNX module of your own: `maker(rngs)` makes it.

    The other arguments are those of `from_linen`: `name`, `inputs`, `num_classes`, `reads`, `has_batch_stats` and
    `has_dropout`.

    Raises `ModelError` for a maker that cannot be called, or a model that reads nothing.
    """
    if not callable(maker):
        raise _unfit("from_nnx", "an NNX model is made by a function of its rngs", maker, "pass lambda rngs: Net(rngs)")
    config = _given("from_nnx", name, inputs, num_classes, has_batch_stats, has_dropout)
    return ModelSpec(name, "nnx", config, None, reads, lambda _, rngs: maker(rngs))


def _given(
    place: str, name: str, inputs: Mapping[str, Any], num_classes: int, has_batch_stats: bool, has_dropout: bool
) -> GivenConfig:
    if not isinstance(name, str) or not name:
        raise _unfit(place, "a model needs a name", name, "pass some text")
    entries = list(inputs.values()) if isinstance(inputs, Mapping) else []
    if not entries or not all(hasattr(entry, "shape") and hasattr(entry, "dtype") for entry in entries):
        raise _unfit(
            place,
            "a model reads at least one entry of a batch, of a shape and a dtype",
            inputs,
            'pass {"image": jax.ShapeDtypeStruct((32, 32, 3), "float32")}',
        )
    shapes = {entry: jax.ShapeDtypeStruct(it.shape, it.dtype) for entry, it in inputs.items()}
    return GivenConfig(shapes, num_classes, 0, has_batch_stats, has_dropout)


def _unfit(place: str, message: str, value: Any, remedy: str) -> ModelError:
    return ModelError(message, value=value, place=f"splitjax.models.{place}", remedy=remedy)
