"""Makes data, model, optimizer and steps from the options of `splitjax train`."""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import splitjax
from splitjax import data, models
from splitjax.cli import _session
from splitjax.cli._options import parse_roles
from splitjax.cli._train_options import DataOptions, LayoutOptions, ModelOptions, OptimizerOptions, TrainingOptions
from splitjax.errors import DataError, SplitjaxError
from splitjax.runtime.training.placing import batch_layout
from splitjax.sync.costs.schemes import ByRows

# Models of small images: three channels of 32x32 pixels.
_IMAGE_SIZE, _CHANNELS = 32, 3
_IMAGE_SHAPE = (_IMAGE_SIZE, _IMAGE_SIZE, _CHANNELS)


@dataclasses.dataclass(frozen=True)
class Workload:
    """Holds a model and the data that it trains on."""

    model: models.ModelSpec | models.OwnStep
    dataset: data.Dataset


def workload(model: ModelOptions, options: DataOptions, seed: int, first_process: bool) -> Workload:
    """Returns the model and its data: those of `options`, or what a model of another package brings along.

    **Arguments:** `model`: which, with its options. `options`: what to train on. `seed`: decides which digits are for
    testing. `first_process`: whether this process checks the files.

    Raises `DataError` for data that are missing, damaged, or no match for the model; `ModelError` for options that the
    model lacks, and what `splitjax.models.make_model` raises.
    """
    if model.model in models.NAMES:
        kind = DataKind(model.model, models.reads(model.model), model.model == "mlp")
        dataset = load(options, kind, seed, first_process)
        spec = build_model(model, options, dataset)
        return Workload(spec, with_negatives(dataset, spec))
    made = models.make_model(model.model, place="--model", **model.factory_options())
    if made.dataset is not None:
        return Workload(made, _brought(made.dataset, made.name, seed))
    if isinstance(made, models.OwnStep):
        raise DataError(
            f"{made.name} brings no data",
            place="--model",
            remedy="give OwnStep(dataset=...) a function of a seed that returns a splitjax.data.Dataset",
        )
    dataset = load(options, DataKind(made.name, made.reads, made.input_shape != _IMAGE_SHAPE), seed, first_process)
    return Workload(made, _fitting(made, dataset))


def _brought(dataset: Callable[[int], data.Dataset], name: str, seed: int) -> data.Dataset:
    """Calls what makes a model's own data. Raises `DataError` where that fails, or gives no data set."""
    try:
        made = dataset(seed)
    except SplitjaxError:
        raise
    except Exception as error:  # whatever a stranger's function raises
        raise DataError(
            f"the model's data cannot be made: {type(error).__name__}: {error}",
            value=name,
            place="--model, dataset",
            remedy="call the model's dataset(seed) by hand to see where",
        ) from error
    if not isinstance(made, data.Dataset):
        raise DataError(
            f"the model's dataset(seed) returns {type(made).__name__}",
            value=name,
            place="--model, dataset",
            remedy="return splitjax.data.Dataset(name, train={...}, test={...}, class_names=(...))",
        )
    return made


def _fitting(spec: models.ModelSpec, dataset: data.Dataset) -> data.Dataset:
    """Returns the `dataset`. Raises `DataError` where its examples have not the shapes that the model reads."""
    batch = next(dataset.train_batches(1))
    for name, wanted in spec.inputs.items():
        shape = tuple(batch[name].shape[1:]) if name in batch else None
        if shape != tuple(wanted.shape) and spec.reads != "text":
            raise DataError(
                f"{spec.name} reads {name!r} of shape {tuple(wanted.shape)}",
                value=shape,
                place=f"--data, {dataset.name}",
                remedy="choose other data, or let the model bring its own: from_linen(..., dataset=...)",
            )
    return dataset


@dataclasses.dataclass(frozen=True)
class DataKind:
    """Says what data a model takes: its `name`, what it `reads`, and whether it takes images as they are stored
    (`is_flat`), and not as 32x32 pixels in three channels."""

    name: str
    reads: str
    is_flat: bool


def load(options: DataOptions, kind: DataKind, seed: int, first_process: bool) -> data.Dataset:
    """Returns the data set of `options`. Raises `DataError` for data that are missing, damaged, or no match for the
    model.

    **Arguments:** `options`: what to train on. `kind`: what the model takes. `seed`: decides which digits are for
    testing. `first_process`: whether this process checks the files.
    """
    reads, is_flat = kind.reads, kind.is_flat
    if reads != {"text": "text", "criteo": "clicks"}.get(options.data, "images"):
        raise DataError(
            f"{kind.name} reads {reads}",
            value=options.data,
            place="--data",
            remedy="train a transformer or lstm on text, deepfm or dlrm on criteo, and the other models on images",
        )
    if options.data == "digits":
        image_size, channels = (None, 1) if is_flat else (_IMAGE_SIZE, _CHANNELS)
        return data.load_digits(seed=seed, image_size=image_size, channels=channels)
    if reads != "images":
        if options.data_dir is None:
            raise DataError(
                f"{options.data} is read from a file or folder",
                place="--data-dir",
                remedy=f"give it: --data-dir {'corpus.txt' if reads == 'text' else 'train.txt'}",
            )
        if reads == "clicks":
            return data.load_criteo(options.data_dir, rows=options.rows)
        return data.load_text(
            options.data_dir, seq_len=options.seq_len, vocab_size=options.vocab_size, level=options.text_level
        )
    folder = options.data_dir
    if folder is None:
        folder = data.fetch("mnist" if options.data == "idx" else options.data, data_cache())
    if options.data == "cifar10":
        return data.load_cifar10(folder, verify=first_process)
    shape = {} if is_flat else {"image_size": _IMAGE_SIZE, "channels": _CHANNELS}
    return data.load_idx(folder, verify=first_process, **shape)


def data_cache() -> pathlib.Path:
    """Returns the folder where downloaded data are kept."""
    return _session.cache_dir().parent / "data"


def build_model(options: ModelOptions, data_options: DataOptions, dataset: data.Dataset) -> models.ModelSpec:
    """Returns the model of `options` for the `dataset`, text in lines as long as `data_options` say. Raises
    `ModelError` for options that the model lacks."""
    given, reads = options.build_options(), models.reads(options.model)
    if reads == "clicks":
        sizes = {"field_sizes": dataset.field_sizes, "num_dense": dataset.train["values"].shape[1]}
        return models.build(options.model, **sizes, **given)
    if reads == "text":
        given["max_len"] = data_options.seq_len
    elif options.model == "mlp":
        given["input_shape"] = tuple(dataset.train["image"].shape[1:])
    return models.build(options.model, num_classes=dataset.num_classes, **given)


def with_negatives(dataset: data.Dataset, spec: models.ModelSpec) -> data.Dataset:
    """Returns the `dataset`, whose training batches bring the words that a sampled softmax compares with where the
    model `spec` has such a softmax."""
    if not spec.num_negatives:
        return dataset
    # Words of a vocabulary go by falling frequency.
    return dataclasses.replace(
        dataset, draws={"negatives": data.Negatives(data.LogUniform(spec.num_classes), spec.num_negatives)}
    )


def schedule(options: OptimizerOptions, num_steps: int) -> optax.Schedule:
    """Returns the learning rate as a function of the step number, counted from 0, for a run of `num_steps` with
    `options`."""
    rate, after = options.learning_rate, max(1, num_steps - options.warmup_steps)
    falling = {
        "constant": lambda: optax.constant_schedule(rate),
        "cosine": lambda: optax.cosine_decay_schedule(rate, after),
        "linear": lambda: optax.linear_schedule(rate, 0.0, after),
        "step": lambda: optax.piecewise_constant_schedule(rate, {after // 2: 0.1, after * 3 // 4: 0.1}),
    }[options.schedule]()
    if not options.warmup_steps:
        return falling
    rising = optax.linear_schedule(0.0, rate, options.warmup_steps)
    return optax.join_schedules([rising, falling], [options.warmup_steps])


def optimizer(options: OptimizerOptions, rate: optax.Schedule) -> optax.GradientTransformation:
    """Returns what `options` ask for, with the learning `rate`: clipping, then decay, then the optimizer itself."""

    def decays(params):
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)  # not biases, not the scales of norms

    decay = options.weight_decay
    parts = [] if options.clip_norm is None else [optax.clip_by_global_norm(options.clip_norm)]
    if decay and options.optimizer not in ("adamw",):
        parts.append(optax.add_decayed_weights(decay, mask=decays))
    parts.append(
        {
            "adam": lambda: optax.adam(rate),
            "adamw": lambda: optax.adamw(rate, weight_decay=decay, mask=decays),
            "sgd": lambda: optax.sgd(rate),
            "momentum": lambda: optax.sgd(rate, momentum=0.9),
            "adafactor": lambda: optax.adafactor(rate),
            "adagrad": lambda: optax.adagrad(rate),
        }[options.optimizer]()
    )
    return optax.chain(*parts) if len(parts) > 1 else parts[0]


def learning_rates(rate: optax.Schedule, num_steps: int) -> np.ndarray:
    """Returns the learning `rate` of each of `num_steps` steps, f32[num_steps], for the metrics."""
    return np.asarray(jax.jit(jax.vmap(rate))(jnp.arange(num_steps)), np.float32)


@dataclasses.dataclass(frozen=True)
class Steps:
    """Holds the decorated steps of a run.

    - `init_fn`: `init_fn(key)` is the state that training begins with.
    - `train_step`, `eval_step`: decorated, `step(state, batch)`; no `eval_step` for a model that brings none.
    - `example`: the shapes of a training batch, by name.
    - `reads`: what the model reads: images, text or clicks.
    """

    init_fn: Callable[[Any], Any]
    train_step: Any
    eval_step: Any | None
    example: Mapping[str, jax.ShapeDtypeStruct]
    reads: str


def make_steps(
    spec: models.ModelSpec | models.OwnStep,
    dataset: data.Dataset,
    batch_size: int,
    mesh: Mapping[str, int] | None,
    layout: LayoutOptions,
    options: OptimizerOptions,
    rate: optax.Schedule,
) -> Steps:
    """Returns the decorated steps of a model.

    **Arguments:**

    - `spec`: the model.
    - `dataset`: what it trains on; the shapes of its arrays are looked at.
    - `batch_size`: examples in the global batch.
    - `mesh`: sizes of the mesh axes; None for a single device.
    - `layout`: rules, and how examples and table rows are exchanged.
    - `options`: of the optimizer; `rate`: its learning rate.
    """
    init_fn, train_step, eval_step = _undecorated(spec, options, rate)
    step = splitjax.parallelize(
        train_step,
        mesh=mesh,
        rules=layout.rules,
        roles=parse_roles(layout.role),
        group_comm=layout.group_comm,
        shard_state=layout.shard_state,
        uneven=layout.uneven,
        sync=ByRows(layout.sync, lazy=layout.lazy, wire_dtype=layout.wire_dtype),
    )
    batch = next(dataset.train_batches(1))
    example = {name: jax.ShapeDtypeStruct((batch_size, *array.shape[1:]), array.dtype) for name, array in batch.items()}
    judge = None if eval_step is None else step.like(eval_step)
    return Steps(init_fn, step, judge, example, spec.reads if isinstance(spec, models.ModelSpec) else "")


def _undecorated(
    spec: models.ModelSpec | models.OwnStep, options: OptimizerOptions, rate: optax.Schedule
) -> tuple[Callable[[Any], Any], Callable[..., Any], Callable[..., Any] | None]:
    """Returns what makes a state, trains it and evaluates it, as the model brings it or as `models.make_step` makes
    it."""
    if isinstance(spec, models.OwnStep):
        return spec.init_fn, spec.train_step, spec.eval_step
    boundary = functools.partial(splitjax.value_and_grad, microbatches=options.microbatches)
    return models.make_step(
        spec, optimizer(options, rate), label_smoothing=options.label_smoothing, value_and_grad=boundary
    )


def check_optimizer(model: models.ModelSpec | models.OwnStep, options: OptimizerOptions) -> None:
    """Raises `ModelError` for an option of `options` that is not the usual one where the `model` brings its own
    step."""
    if isinstance(model, models.ModelSpec):
        return
    usual = OptimizerOptions()
    for field in dataclasses.fields(options):
        if getattr(options, field.name) != getattr(usual, field.name):
            raise models.ModelError(
                f"{model.name} brings its own optimizer",
                value=getattr(options, field.name),
                place=f"--{field.name.replace('_', '-')}",
                remedy="leave it out, or give the factory an option for it: --model-option KEY=VALUE",
            )


class Evaluation:
    """Evaluates a model on the whole test split, each process reading its own rows. Call it with a state for `{"loss":
    ..., "accuracy": ...}`, of text `"perplexity"` too (e to the loss), of clicks `"auc"` (where the split holds both
    clicks and others).

    **Arguments:** `steps`: the decorated steps, with an `eval_step`. `dataset`: whose test split. `state_shapes`: the
    state, as shapes. `batch_size`: examples in the global batch.
    """

    def __init__(self, steps: Steps, dataset: data.Dataset, state_shapes: Any, batch_size: int):
        mask = jax.ShapeDtypeStruct((batch_size,), jnp.float32)
        self._step: Any = steps.eval_step
        self._dataset, self._batch_size, self._reads = dataset, batch_size, steps.reads
        example = {name: shape for name, shape in steps.example.items() if name not in dataset.draws}
        self._placement = batch_layout(steps.eval_step, state_shapes, {**example, "mask": mask})

    def __call__(self, state: Any) -> dict[str, float]:
        num = self._dataset.num_test
        totals: dict[str, float] = {}
        scores: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        batches = self._dataset.test_batches(self._batch_size, rows=self._placement.rows)
        for number, batch in enumerate(batches):
            weight = min(self._batch_size, num - number * self._batch_size)
            placed = self._placement(batch)
            results = self._step(state, placed)
            for name in ("loss", "accuracy"):
                if name in results:
                    totals.setdefault(name, 0.0)
                    totals[name] += weight * float(results[name])
            if self._reads == "clicks":
                scores.append(_everywhere(results["logits"])[:weight])
                labels.append(_everywhere(placed["label"])[:weight])
        means = {name: total / num for name, total in totals.items()}
        if self._reads == "text":
            means["perplexity"] = float(np.exp(np.minimum(means["loss"], 700)))
        if scores and 0 < np.concatenate(labels).sum() < num:
            means["auc"] = models.area_under_curve(np.concatenate(scores), np.concatenate(labels))
        return means


def _everywhere(array: jax.Array) -> np.ndarray:
    """Returns all of an `array`, of which other processes may hold parts."""
    return np.asarray(array if array.is_fully_addressable else multihost_utils.process_allgather(array, tiled=True))


def num_steps(options: TrainingOptions, dataset: data.Dataset, batch_size: int) -> tuple[int, int]:
    """Returns the numbers of all steps of a run and of the steps an epoch, by `options`, in batches of `batch_size`
    examples of the `dataset`. Raises `DataError` where the examples do not fill one batch."""
    an_epoch = dataset.num_train // batch_size
    if not an_epoch:
        raise DataError(
            f"{dataset.num_train} training examples do not fill one batch",
            value=batch_size,
            place="--batch-size",
            remedy=f"give a batch size of at most {dataset.num_train}",
        )
    return (options.epochs * an_epoch if options.steps is None else options.steps), an_epoch


def devices_per_process(num_devices: int | None, num_processes: int) -> int:
    """Returns how many virtual devices each of `num_processes` processes needs for a mesh of `num_devices`; 1 for no
    mesh (None)."""
    return 1 if num_devices is None else max(1, math.ceil(num_devices / num_processes))
