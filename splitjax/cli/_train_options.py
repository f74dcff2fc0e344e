"""The options of `splitjax train`, in groups; a TOML file may give them too."""

from __future__ import annotations

import dataclasses
import pathlib
import tomllib
from collections.abc import Sequence
from typing import Any, Literal

from splitjax.cli._options import (
    DEFAULT_MODEL,
    GroupComm,
    MeshText,
    ModelName,
    ModelOption,
    OptionValueError,
    RoleTexts,
    parse_model_options,
)
from splitjax.cli.line.reading import config_file, near
from splitjax.codec.toml_text import parse_toml

Optimizer = Literal["adam", "adamw", "sgd", "momentum", "adafactor", "adagrad"]


@dataclasses.dataclass(frozen=True)
class DataOptions:
    """Choose what to train on."""

    data: Literal["cifar10", "digits", "idx", "text", "criteo"] = "digits"
    """digits: scikit-learn's, which it brings along; cifar10: its binary or Python files; idx: files like MNIST's;
    text: plain text; criteo: clicks, Criteo's lines or .npz."""
    data_dir: pathlib.Path | None = None
    """Folder (or file) of the data. Without one CIFAR-10 and MNIST are downloaded into the user's cache."""
    batch_size: int = 64
    """Examples in the global batch."""
    augment: bool = False
    """Random crops and, where the data allow it, flips."""
    seq_len: int = 128
    """Text: words (or characters) that an example predicts."""
    vocab_size: int | None = None
    """Text: keep this many of the most frequent words; all if not given."""
    text_level: Literal["word", "char"] = "word"
    """Text: what a token is."""
    rows: int = 32_768
    """Criteo's lines: how many ids each categorical field is hashed into."""


@dataclasses.dataclass(frozen=True)
class ModelOptions:
    """Choose what to train. An option that the model lacks is an error."""

    model: ModelName = DEFAULT_MODEL
    """Which model: vgg11, vgg16, resnet18, resnet50, mobilenet_v2, mobilenet_v3_large, mobilenet_v3_small,
    efficientnet_b0, convnext_tiny, mlp, transformer, lstm, deepfm, dlrm; a name that an installed package declares; or
    package.module:factory, imported from the current folder too."""
    model_option: ModelOption = ()
    """Options of the model, such as num_layers=2, for its factory."""
    width: float | None = None
    """VGG, ResNet, MobileNet, EfficientNet, ConvNeXt: multiplies the channels of every convolution."""
    depth: float | None = None
    """MobileNet, EfficientNet: multiplies the number of blocks of each stage."""
    head_features: int | None = None
    """VGG: width of the two dense layers before the last; MobileNet: channels before the last layer."""
    features: tuple[int, ...] | None = None
    """MLP: widths of the hidden layers; DeepFM: of its deep network; DLRM: of the one over the dot products."""
    bottom_features: tuple[int, ...] | None = None
    """DLRM: widths of the hidden layers over the numbers."""
    embedding_width: int | None = None
    """LSTM, DeepFM, DLRM: width of the rows of their tables."""
    hidden_width: int | None = None
    """LSTM: width of its layers."""
    negatives: int | None = None
    """LSTM: words drawn for each example, which its positions share, for the sampled softmax."""
    bptt: int | None = None
    """LSTM: its state starts anew every so many words, which divide --seq-len; only with each example if not given."""
    num_layers: int | None = None
    """Transformer: number of blocks; LSTM: of layers."""
    d_model: int | None = None
    """Transformer: width of the residual stream."""
    num_heads: int | None = None
    """Transformer: attention heads."""
    dropout: float | None = None
    """Rate of dropout, for models that have it."""
    drop_path: float | None = None
    """EfficientNet, ConvNeXt: stochastic depth, the rate at which examples skip a block."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """What is computed in; parameters and optimizer state are float32 either way."""

    def build_options(self) -> dict[str, Any]:
        """The fields that were given, as `splitjax.models.build` takes them."""
        return {**self._given(), "dtype": self.precision, **parse_model_options(self.model_option)}

    def factory_options(self) -> dict[str, Any]:
        """The options that were given, for a factory of another package, which has no precision unless it is asked
        for."""
        precision = {} if self.precision == "float32" else {"dtype": self.precision}
        return {**self._given(), **precision, **parse_model_options(self.model_option)}

    def _given(self) -> dict[str, Any]:
        outside = ("model", "model_option", "precision")
        names = [field.name for field in dataclasses.fields(self) if field.name not in outside]
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


@dataclasses.dataclass(frozen=True)
class OptimizerOptions:
    """Choose how to train."""

    optimizer: Optimizer = "adamw"
    """Which optimizer. Tables are updated row by row by sgd and adagrad alone."""
    learning_rate: float = 1e-3
    """Highest learning rate."""
    schedule: Literal["constant", "cosine", "linear", "step"] = "cosine"
    """How it falls: to zero along a cosine or a line, or to a tenth at a half and a hundredth at three quarters of all
    steps."""
    warmup_steps: int = 0
    """Steps in which it rises from zero first."""
    weight_decay: float = 0.0
    """Pulls kernels and embeddings (not biases, not norms) to zero: decoupled (AdamW) under adamw, added to the
    gradient elsewhere."""
    clip_norm: float | None = None
    """Scale gradients down to this global norm."""
    label_smoothing: float = 0.0
    """Share of the target that all classes get."""
    microbatches: int = 1
    """Accumulate the gradient over so many parts of the batch: less memory, same numbers."""


@dataclasses.dataclass(frozen=True)
class LayoutOptions:
    """Choose where arrays lie."""

    mesh: MeshText | None = None
    """Mesh axes and their sizes, as data=2,model=4; all devices on data if not given."""
    role: RoleTexts = ()
    """What a mesh axis is for whose name does not tell it, as x=tensor: data, storage, tensor, expert, sequence or
    stage."""
    rules: str = "splitbrain"
    """A shipped rule set (splitbrain, splitbrain_fsdp, megatron, transformer, fsdp, embedding_owner, data_parallel),
    one that an installed package declares, the path of a TOML file, or package.module:RULES."""
    group_comm: GroupComm = "auto"
    """How examples cross from whole into split layers."""
    shard_state: bool = False
    """Also split optimizer state and gradients of parameters that stay whole."""
    uneven: Literal["error", "pad"] = "error"
    """pad: store parameters whose sizes do not divide with zeros behind them, and split them like others; checkpoints
    have the sizes of the model."""
    sync: str = "dense"
    """How gradients of tables with row lookups are exchanged: dense, all_gather, recursive_doubling, blocks,
    parameter_server, hierarchical, zen, row_exchange, or a scheme that an installed package declares; auto chooses by
    what the first steps touch and how fast the links are."""
    lazy: bool = False
    """Update only the rows with a gradient where the optimizer would change others too (momentum, Adam): other numbers,
    less work."""
    wire_dtype: Literal["bfloat16"] | None = None
    """Send the rows' values rounded to this, and keep what that takes away for the next time (with --sync
    row_exchange): other numbers."""
    platform: Literal["auto", "cpu"] = "auto"
    """auto: what JAX finds; cpu: this machine's processor, with virtual devices for the mesh."""


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """Choose how long to train, and what is kept."""

    epochs: int = 10
    """How often to go through the training examples."""
    steps: int | None = None
    """Train this many steps, whatever --epochs says."""
    seed: int = 0
    """Decides the parameters, the order of the examples, dropout and augmentation."""
    evaluate_every: int | None = None
    """Steps between two tests; once an epoch if not given."""
    checkpoint_dir: pathlib.Path | None = None
    """Folder for checkpoints. One that holds this run's is resumed from."""
    checkpoint_every: int | None = None
    """Steps between two checkpoints; once an epoch if not given."""
    keep_last: int = 3
    """How many of the newest checkpoints are kept."""
    keep_best: int = 1
    """How many of those with the lowest loss are kept beside them."""
    bad_numbers: Literal["stop", "skip", "rollback"] = "stop"
    """What to do when loss or gradients are not finite, or the loss jumps: stop before that is saved; skip the batch;
    or roll back to the newest checkpoint and go on with the next batch."""
    spike_factor: float | None = None
    """A loss above so many times the median of the last 32 is such a jump; none is if not given."""
    max_setbacks: int = 10
    """Stop when so many batches were skipped, or checkpoints gone back to, before."""
    allow_nonfinite: bool = False
    """Go on when the loss is not a number."""


@dataclasses.dataclass(frozen=True)
class WatchOptions:
    """Choose what is written down."""

    metrics: pathlib.Path | None = None
    """File with a line of JSON for every step."""
    csv: pathlib.Path | None = None
    """The same as a table."""
    tensorboard: pathlib.Path | None = None
    """Folder for TensorBoard, if it is installed."""
    wandb: str | None = None
    """Project of Weights & Biases, if it is installed; the run is kept with the checkpoints."""
    profile: pathlib.Path | None = None
    """Folder for a trace of a few steps, for XProf or Perfetto."""
    profile_steps: int = 3
    """How many steps the trace has."""


GROUPS = {
    "data": DataOptions,
    "model": ModelOptions,
    "optimizer": OptimizerOptions,
    "layout": LayoutOptions,
    "training": TrainingOptions,
    "watch": WatchOptions,
}


def expand_config(arguments: Sequence[str]) -> list[str]:
    """Returns the `arguments` of `train` with those of its `--config FILE` in front, but for options that `arguments`
    name too: the command line has the last word.

    Raises `OptionValueError` for a file that is missing or not TOML, and for a key that is no option.
    """
    file, rest = config_file(arguments)
    if file is None:
        return rest
    said = {word.partition("=")[0].replace("_", "-") for word in rest}
    given: list[str] = []
    for name, value in _read(file).items():
        words = _as_arguments(name, value, file)
        # Words of both would come together where an option takes several.
        given += words if words and words[0] not in said else []
    return [*given, *rest]


def _read(file: pathlib.Path) -> dict[str, Any]:
    """Option name -> value, from keys at the top or in tables named after the groups."""
    try:
        tables = parse_toml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise OptionValueError(
            f"the file of options cannot be read: {getattr(error, 'strerror', None) or error}",
            value=str(file),
            place="--config",
            remedy="give a TOML file with options as keys, such as batch_size = 64",
        ) from error
    settings: dict[str, Any] = {}
    for key, value in tables.items():
        inner = value if isinstance(value, dict) and key in GROUPS else {key: value}
        for name, setting in inner.items():
            _check_name(name, file)
            settings[name] = setting
    return settings


def _fields() -> dict[str, dataclasses.Field]:
    return {field.name: field for group in GROUPS.values() for field in dataclasses.fields(group)}


def _check_name(name: str, file: pathlib.Path) -> None:
    known = _fields()
    if name not in known:
        raise OptionValueError(
            "the file names an option that train does not have" + near(name, known),
            value=name,
            place=str(file),
            remedy="see splitjax train --help; names are written with underscores",
        )


def _as_arguments(name: str, value: Any, file: pathlib.Path) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    field = _fields()[name]
    if field.type == "bool":
        if not isinstance(value, bool):
            raise OptionValueError(
                f"{name} is true or false", value=value, place=str(file), remedy=f"write {name} = true"
            )
        return [flag] if value else []
    if isinstance(value, list):
        return [flag, *map(str, value)]
    if isinstance(value, (bool, dict)):
        raise OptionValueError(
            f"{name} takes another kind of value", value=value, place=str(file), remedy="see splitjax train --help"
        )
    return [flag, str(value)]
