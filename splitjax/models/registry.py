"""Makes models by name: `build("vgg16", num_classes=10)` gives a `ModelSpec`, whatever the library.

A name and options go in; a `ModelSpec` comes out, which tells what the model reads and makes its parameters. What the
registry needs to know of a family stands in its config (`ModelConfig`), so a further family is a row of `_FAMILIES`.
Models of other packages come by `register_model`, or by reference: `make_model("package.module:factory")`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast, overload

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from splitjax._registry import NamedRegistry, is_reference, load_reference, near
from splitjax.models._common import ModelConfig, ModelError
from splitjax.models.convnext import ConvNeXtConfig, LinenConvNeXt, NnxConvNeXt
from splitjax.models.deepfm import DeepFMConfig, LinenDeepFM, NnxDeepFM
from splitjax.models.dlrm import DLRMConfig, LinenDLRM, NnxDLRM
from splitjax.models.efficientnet import EfficientNetConfig, LinenEfficientNet, NnxEfficientNet
from splitjax.models.lstm import LinenLSTM, LSTMConfig, NnxLSTM
from splitjax.models.mlp import LinenMLP, MLPConfig, NnxMLP
from splitjax.models.mobilenet import LinenMobileNet, MobileNetConfig, NnxMobileNet
from splitjax.models.own import ModelFactory, OwnStep, call_factory
from splitjax.models.resnet import LinenResNet, NnxResNet, ResNetConfig
from splitjax.models.spec import ModelSpec, Reads
from splitjax.models.transformer import LinenTransformer, NnxTransformer, TransformerConfig
from splitjax.models.vgg import LinenVGG, NnxVGG, VGGConfig

_Value = TypeVar("_Value")
_Factory = TypeVar("_Factory", bound=ModelFactory)


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


def reads(name: str) -> Reads:
    """Returns what splitjax's models of this `name` are for, without building one. Raises `ModelError` for an unknown
    one."""
    return _choose(name, _FAMILIES, "model", "splitjax.models.reads").reads


def build(name: str, *, library: str = "linen", num_classes: int | None = None, **options: Any) -> ModelSpec:
    """Builds a model by its name.

    **Arguments:**

    - `name`: `"vgg11"`, `"vgg16"`, `"resnet18"`, `"resnet50"`, `"mobilenet_v2"`, `"mobilenet_v3_large"`,
      `"mobilenet_v3_small"`, `"efficientnet_b0"`, `"convnext_tiny"`, `"mlp"`, `"transformer"`, `"lstm"`, `"deepfm"` or
      `"dlrm"`; or a name that `register_model` or an installed package has added.
    - `library`: `"linen"` or `"nnx"`.
    - `num_classes`: width of the last layer, default 10; for models of text the same as their `vocab_size`; those of
      clicks have none.
    - `options`: the fields of the model's config, such as `VGGConfig` or `LSTMConfig`. `dtype` and `param_dtype` may be
      names, such as `"bfloat16"`. A registered model takes what its factory takes.

    Raises `ModelError` for an unknown name, library or option, for options that contradict each other, and for a
    registered model that is a whole training step (`OwnStep`, see `make_model`).
    """
    if name in _FAMILIES or not MODELS.knows(name):
        return _shipped(name, library=library, num_classes=num_classes, **options)
    options = options if num_classes is None else {"num_classes": num_classes, **options}
    model = make_model(name, library=library, **options)
    if isinstance(model, OwnStep):
        raise ModelError(
            "this model is a whole training step and no Flax module",
            value=name,
            place=f"splitjax.models.build({name!r})",
            remedy="take its init_fn and train_step from splitjax.models.make_model",
        )
    return model


def make_model(which: str, *, library: str = "linen", place: str = "", **options: Any) -> ModelSpec | OwnStep:
    """Makes a model by name or by reference.

    **Arguments:**

    - `which`: a name that `build` takes, or `package.module:factory`, where the factory is called with `options`.
    - `library`: `"linen"` or `"nnx"`; handed to a factory that has such an argument.
    - `place`: what an error names as its place.
    - `options`: as of `build`, or the factory's own.

    **Returns:** a `ModelSpec`, or an `OwnStep` where the factory gives a whole training step.

    Raises `ModelError` for a name, a module or an attribute that there is not, for options that the model lacks, for a
    factory that fails, and for one that returns something else; `ExtensionError` for an installed package that declares
    the name and cannot be loaded.
    """
    place = place or f"splitjax.models.make_model({which!r})"
    if is_reference(which):
        return call_factory(which, load_reference(which, place=place, error=ModelError), library, options, place)
    if which in _FAMILIES:
        return _shipped(which, library=library, **options)
    return call_factory(which, MODELS.find(which, place=place), library, options, place)


@overload
def register_model(name: str, factory: _Factory) -> _Factory: ...
@overload
def register_model(name: str, factory: None = None) -> Callable[[_Factory], _Factory]: ...
def register_model(name: str, factory: Any = None) -> Any:
    """Makes a model known by its `name`: `build(name)`, `--model name`; also as a decorator, `@register_model("mine")`.

    `factory` is called with options as keywords, and returns a `ModelSpec` (`from_linen`, `from_nnx`) or an `OwnStep`.
    Raises `ModelError` for a name that is taken, and for what cannot be called.
    """

    def add(given: Any) -> Any:
        if not callable(given):
            raise ModelError(
                "a model is made by a function of its options",
                value=given,
                place=_REGISTER,
                remedy="pass the function itself",
            )
        MODELS.add(name, cast(ModelFactory, given), same=_same_function)
        return given

    return add if factory is None else add(factory)


def _same_function(known: Any, again: Any) -> bool:
    """Tells whether a function is one that is known, of a module that was loaded again."""
    names = [(getattr(it, "__module__", None), getattr(it, "__qualname__", id(it))) for it in (known, again)]
    return names[0] == names[1] and "<lambda>" not in str(names[0][1])


def _accept(name: str, loaded: Any) -> None:
    """Registers the factory that an entry point called `name` has loaded, where importing it did not."""
    if not callable(loaded):
        raise TypeError(f"it names {loaded!r}, which cannot be called")
    MODELS.add(name, cast(ModelFactory, loaded))


_REGISTER = "splitjax.models.register_model"
MODELS: NamedRegistry[ModelFactory] = NamedRegistry(
    "model", group="splitjax.models", error=ModelError, register=_REGISTER, accept=_accept
)


def _shipped(name: str, *, library: str = "linen", num_classes: int | None = None, **options: Any) -> ModelSpec:
    """Builds one of splitjax's own models, as `build` says."""
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
    if library == "linen":
        return ModelSpec(name, library, config, family.linen(config), family.reads)
    maker = lambda config, rngs: family.nnx(config, rngs=rngs)
    return ModelSpec(name, library, config, None, family.reads, maker)


for _name in _FAMILIES:
    MODELS.add(_name, functools.partial(_shipped, _name))


def _choose(key: object, table: Mapping[str, _Value], what: str, place: str) -> _Value:
    """Returns `table[key]`, or raises `ModelError` with what there is to choose from."""
    if not isinstance(key, str) or key not in table:
        raise ModelError(
            f"there is no such {what}{near(key, list(table))}",
            value=key,
            place=place,
            remedy=f"choose one of {', '.join(map(repr, table))}",
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
