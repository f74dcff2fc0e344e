"""The models that are trained for many steps, with their data and optimizers."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optax

from splitjax import data, models

RULES = ("splitbrain", "megatron", "fsdp", "data_parallel")
TEXT_FILE = "wikitext2_valid.txt"
# What is read without a --data-dir: this project's own prose.
_OWN_TEXT = pathlib.Path(__file__).resolve().parents[2] / "CHANGELOG.md"


@dataclasses.dataclass(frozen=True)
class Dtype:
    """What is computed in, and what parameters and optimizer state are kept in."""

    name: str
    compute: str
    params: str


DTYPES = {
    "float64": Dtype("float64", "float64", "float64"),
    "float32": Dtype("float32", "float32", "float32"),
    "bf16": Dtype("bf16", "bfloat16", "float32"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to train.

    **Attributes:**

    - `name`, `title`: of files, and for readers.
    - `spec`: dtype -> the model.
    - `optimizer`: number of steps -> the optimizer.
    - `dataset`: folder of data -> the data set.
    - `rules`: the shipped rule sets that apply.
    - `batch_size`: of the global batch.
    """

    name: str
    title: str
    spec: Callable[[Dtype], models.ModelSpec]
    optimizer: Callable[[int], optax.GradientTransformation]
    dataset: Callable[[pathlib.Path | None], data.Dataset]
    rules: tuple[str, ...] = RULES
    batch_size: int = 16

    def batches(self, num_steps: int, seed: int, folder: pathlib.Path | None) -> list[dict[str, np.ndarray]]:
        """The training batches, epoch after epoch."""
        dataset = self.dataset(folder)
        epochs = (dataset.train_batches(self.batch_size, seed=seed, epoch=epoch) for epoch in itertools.count())
        every: Iterator[Any] = itertools.chain.from_iterable(epochs)
        return [
            {name: np.asarray(value) for name, value in batch.items()} for batch in itertools.islice(every, num_steps)
        ]


def _dtypes(dtype: Dtype) -> dict[str, Any]:
    return {"dtype": dtype.compute, "param_dtype": dtype.params}


def _demo(dtype: Dtype) -> models.ModelSpec:
    return models.build("vgg11", width=1 / 16, head_features=(64, 64), **_dtypes(dtype))


def _resnet(dtype: Dtype) -> models.ModelSpec:
    """Of three stages of one block: that of `resnet18`, shallower, as the name settles the stages."""
    spec = models.build("resnet18", width=1 / 16, image_size=8, **_dtypes(dtype))
    config = dataclasses.replace(spec.config, stage_sizes=(1, 1, 1))
    return dataclasses.replace(spec, config=config, module=models.LinenResNet(config))


def _transformer(dtype: Dtype) -> models.ModelSpec:
    sizes = {"vocab_size": 256, "max_len": 17, "d_model": 32, "num_heads": 4, "num_layers": 2}
    return models.build("transformer", dropout=0.1, **sizes, **_dtypes(dtype))


def _lstm(dtype: Dtype) -> models.ModelSpec:
    sizes = {"vocab_size": 1024, "max_len": 16, "embedding_width": 32, "hidden_width": 32, "negatives": 32}
    return models.build("lstm", dropout=0.1, **sizes, **_dtypes(dtype))


def _adam(num_steps: int) -> optax.GradientTransformation:
    """The demo's: warming up for a tenth of the steps, then falling along a cosine."""
    return optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, max(1, num_steps // 10), max(2, num_steps)))


def _momentum(num_steps: int) -> optax.GradientTransformation:
    return optax.sgd(
        optax.warmup_cosine_decay_schedule(0.0, 0.05, max(1, num_steps // 10), max(2, num_steps)), momentum=0.9
    )


def _adagrad(num_steps: int) -> optax.GradientTransformation:
    """The optimizer of the paper of the LSTM, whose update leaves rows without gradient alone."""
    return optax.chain(optax.clip_by_global_norm(5.0), optax.adagrad(0.2))


def _digits(image_size: int) -> Callable[[pathlib.Path | None], data.Dataset]:
    return lambda folder: data.load_digits(image_size=image_size)


def _text(vocab_size: int, num_negatives: int = 0) -> Callable[[pathlib.Path | None], data.Dataset]:
    def load(folder: pathlib.Path | None) -> data.Dataset:
        file = _OWN_TEXT if folder is None else folder / TEXT_FILE
        dataset = data.load_text(file, seq_len=16, vocab_size=vocab_size)
        if not num_negatives:
            return dataset
        return dataclasses.replace(
            dataset, draws={"negatives": data.Negatives(data.LogUniform(vocab_size), num_negatives)}
        )

    return load


CASES = (
    Case("demo", "the demo's VGG-11", _demo, _adam, _digits(32), batch_size=8),
    Case("resnet", "a ResNet with batch norm", _resnet, _momentum, _digits(8)),
    Case("transformer", "a Transformer with dropout", _transformer, _adam, _text(256)),
    Case("lstm", "the LSTM with a sampled softmax", _lstm, _adagrad, _text(1024, 32), (*RULES, "embedding_owner")),
)
