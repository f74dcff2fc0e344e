"""Makes models by name: `build("vgg16", num_classes=10)` gives a `ModelSpec`, whatever the library.

A name and options go in; a `ModelSpec` comes out, which tells what the model reads and makes its parameters. What the
registry needs to know of a family stands in its config (`ModelConfig`), so a further family is a row of `_FAMILIES`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from splitjax.models._common import ModelConfig, ModelError
from splitjax.models.convnext import ConvNeXtConfig, LinenConvNeXt, NnxConvNeXt
from splitjax.models.deepfm import DeepFMConfig, LinenDeepFM, NnxDeepFM
from splitjax.models.dlrm import DLRMConfig, LinenDLRM, NnxDLRM
from splitjax.models.efficientnet import EfficientNetConfig, LinenEfficientNet, NnxEfficientNet
from splitjax.models.lstm import LinenLSTM, LSTMConfig, NnxLSTM
from splitjax.models.mlp import LinenMLP, MLPConfig, NnxMLP
from splitjax.models.mobilenet import LinenMobileNet, MobileNetConfig, NnxMobileNet
from splitjax.models.resnet import LinenResNet, NnxResNet, ResNetConfig
from splitjax.models.transformer import LinenTransformer, NnxTransformer, TransformerConfig
from splitjax.models.vgg import LinenVGG, NnxVGG, VGGConfig

Reads: TypeAlias = Literal["images", "text", "clicks"]
_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True)
class _Family:
    """Holds what a name stands for.

    - `config`: the frozen dataclass of options; its instances are `ModelConfig`s.
    - `linen`, `nnx`: make the model from a config; the second takes `rngs` too.
    - `fixed`: (option, value) pairs that the name settles.
    - `reads`: what the model is for.
    """

    config: type
    linen: Callable[..., nn.Module]
    nnx: Callable[..., nnx.Module]
    fixed: tuple[tuple[str, Any], ...] = ()
    reads: Reads = "images"

    @property
    def options(self) -> tuple[str, ...]:
        """The options that `build` takes."""
        fixed = {name for name, _ in self.fixed}
        return tuple(field.name for field in dataclasses.fields(self.config) if field.name not in fixed)


_FAMILIES: dict[str, _Family] = {
    "vgg11": _Family(VGGConfig, LinenVGG, NnxVGG, (("letter", "A"),)),
    "vgg16": _Family(VGGConfig, LinenVGG, NnxVGG, (("letter", "D"),)),
    "resnet18": _Family(ResNetConfig, LinenResNet, NnxResNet, (("stage_sizes", (2, 2, 2, 2)), ("bottleneck", False))),
    "resnet50": _Family(ResNetConfig, LinenResNet, NnxResNet, (("stage_sizes", (3, 4, 6, 3)), ("bottleneck", True))),
    "mobilenet_v2": _Family(MobileNetConfig, LinenMobileNet, NnxMobileNet, (("version", "v2"),)),
    "mobilenet_v3_large": _Family(MobileNetConfig, LinenMobileNet, NnxMobileNet, (("version", "v3_large"),)),
    "mobilenet_v3_small": _Family(MobileNetConfig, LinenMobileNet, NnxMobileNet, (("version", "v3_small"),)),
    "efficientnet_b0": _Family(EfficientNetConfig, LinenEfficientNet, NnxEfficientNet),
    "convnext_tiny": _Family(ConvNeXtConfig, LinenConvNeXt, NnxConvNeXt),
    "mlp": _Family(MLPConfig, LinenMLP, NnxMLP),
    "transformer": _Family(TransformerConfig, LinenTransformer, NnxTransformer, reads="text"),
    "lstm": _Family(LSTMConfig, LinenLSTM, NnxLSTM, reads="text"),
    "deepfm": _Family(DeepFMConfig, LinenDeepFM, NnxDeepFM, reads="clicks"),
    "dlrm": _Family(DLRMConfig, LinenDLRM, NnxDLRM, reads="clicks"),
}

NAMES: tuple[str, ...] = tuple(_FAMILIES)
LIBRARIES: tuple[str, ...] = ("linen", "nnx")


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """Holds a model with its options, in one of the two Flax libraries.

    **Attributes:**

    - `name`: as given to `build`.
    - `library`: `"linen"` or `"nnx"`.
    - `config`: the options; a frozen dataclass of the model's family, such as `VGGConfig`.
    - `module`: the Linen module; None for NNX.
    """

    name: str
    library: str
    config: ModelConfig
    module: nn.Module | None = None

    @property
    def reads(self) -> Reads:
        """The model's subject: images, the next word of a text, or whether somebody clicks on what was shown."""
        return _FAMILIES[self.name].reads

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
        if self.library != "nnx":
            raise ModelError(
                "this is a Linen model: its parameters are made by init(key)",
                value=self.name,
                place="ModelSpec.make",
                remedy=f'call init(key), or build({self.name!r}, library="nnx")',
            )
        return _FAMILIES[self.name].nnx(self.config, rngs=rngs)

    def num_params(self) -> int:
        """Counts the trainable values, without making them."""
        if self.library == "linen":
            params = jax.eval_shape(self.init, jax.random.key(0))["params"]
        else:
            params = nnx.state(nnx.eval_shape(lambda: self.make(nnx.Rngs(0))), nnx.Param)
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


def reads(name: str) -> Reads:
    """Returns what the models of this `name` are for, without building one. Raises `ModelError` for an unknown one."""
    return _choose(name, _FAMILIES, "model", "splitjax.models.reads").reads


def build(name: str, *, library: str = "linen", num_classes: int | None = None, **options: Any) -> ModelSpec:
    """Builds a model by its name.

    **Arguments:**

    - `name`: `"vgg11"`, `"vgg16"`, `"resnet18"`, `"resnet50"`, `"mobilenet_v2"`, `"mobilenet_v3_large"`,
      `"mobilenet_v3_small"`, `"efficientnet_b0"`, `"convnext_tiny"`, `"mlp"`, `"transformer"`, `"lstm"`, `"deepfm"` or
      `"dlrm"`.
    - `library`: `"linen"` or `"nnx"`.
    - `num_classes`: width of the last layer, default 10; for models of text the same as their `vocab_size`; those of
      clicks have none.
    - `options`: the fields of the model's config, such as `VGGConfig` or `LSTMConfig`. `dtype` and `param_dtype` may be
      names, such as `"bfloat16"`.

    Raises `ModelError` for an unknown name, library or option, and for options that contradict each other.
    """
    place = f"splitjax.models.build({name!r})"
    family = _choose(name, _FAMILIES, "model", "splitjax.models.build")
    _choose(library, dict.fromkeys(LIBRARIES), "library", place)
    for option in options:
        _choose(option, dict.fromkeys(family.options), "option", place)
    for option in ("dtype", "param_dtype"):
        if option in options:
            options[option] = _as_dtype(options[option], option, place)
    if num_classes is not None:
        if family.reads == "text":
            if options.setdefault("vocab_size", num_classes) != num_classes:
                raise ModelError(
                    "for a model of text num_classes and vocab_size are the same, and these differ",
                    value=(num_classes, options["vocab_size"]),
                    place=place,
                    remedy="pass vocab_size alone",
                )
        else:
            _choose("num_classes", dict.fromkeys(family.options), "option", place)
            options["num_classes"] = num_classes
    config: ModelConfig = family.config(**dict(family.fixed), **options)
    return ModelSpec(name, library, config, family.linen(config) if library == "linen" else None)


def _choose(key: object, table: Mapping[str, _Value], what: str, place: str) -> _Value:
    """Returns `table[key]`, or raises `ModelError` with what there is to choose from."""
    if not isinstance(key, str) or key not in table:
        raise ModelError(
            f"no such {what}", value=key, place=place, remedy=f"choose one of {', '.join(map(repr, table))}"
        )
    return table[key]


def _as_dtype(value: Any, option: str, place: str) -> jnp.dtype:
    """Returns the floating-point type that `value` names, or raises `ModelError` that names the option."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        raise ModelError(
            f"{option} must be a floating-point type",
            value=value,
            place=f"{place}, option {option!r}",
            remedy='pass "float32" or "bfloat16", or the type jnp.bfloat16',
        )
    return dtype
