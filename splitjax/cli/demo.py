"""`splitjax demo`: train a VGG on real images on 8 virtual devices, then say what was laid out where and what it
saved."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from splitjax.cli import _session
from splitjax.cli._options import DEFAULT_MODEL, CommandOptions, MeshText, check_positive, parse_mesh
from splitjax.cli._output import print_value, write_json
from splitjax.cli._waiting import waiting
from splitjax.errors import DataError
from splitjax.mesh import MeshShape

if TYPE_CHECKING:
    from splitjax.cli._memory import MemoryUse
    from splitjax.data import Dataset


@dataclasses.dataclass(frozen=True)
class Demo(CommandOptions):
    """Train a small VGG on real images, sharded over virtual devices of this machine; takes about two minutes."""

    data: Literal["digits", "cifar10"] = "digits"
    """Images: scikit-learn's handwritten digits, which it brings along, or CIFAR-10 from --data-dir."""
    data_dir: pathlib.Path | None = None
    """Folder with CIFAR-10's binary files (cifar-10-batches-bin)."""
    model: Literal["vgg11", "vgg16"] = DEFAULT_MODEL
    """Which model."""
    width: float = 0.25
    """Multiplies the channels of every convolution."""
    head_features: int = 2048
    """Width of the two dense layers before the last."""
    mesh: MeshText = "data=2,model=4"
    """Mesh axes and their sizes: here 2 groups of 4 workers."""
    rules: str = "splitbrain"
    """A shipped rule set (splitbrain, splitbrain_fsdp, megatron, transformer, fsdp, embedding_owner, data_parallel) or
    the path of a TOML file."""
    shard_state: bool = False
    """Also split optimizer state and gradients of parameters that stay whole."""
    epochs: int = 8
    """How often to go through the training images."""
    steps: int | None = None
    """Stop after this many steps, whatever --epochs says."""
    batch_size: int = 64
    """Examples in the global batch."""
    learning_rate: float = 1e-3
    """Highest learning rate of Adam; it warms up and decays to zero."""
    seed: int = 0
    """Decides the parameters, the order of the images and which are for testing."""
    platform: Literal["cpu", "auto"] = "cpu"
    """cpu: virtual devices on this machine's processor; auto: what JAX finds."""
    output_dir: pathlib.Path = pathlib.Path("splitjax-demo")
    """Folder for the plot and the plan."""

    def run(self, console: Console) -> int:
        """Runs the command, printing on the `console`, and returns the exit status."""
        begin = time.monotonic()
        check_positive(
            epochs=self.epochs, steps=self.steps, batch_size=self.batch_size, learning_rate=self.learning_rate
        )
        mesh = parse_mesh(self.mesh)
        _session.start(mesh.num_devices, platform=self.platform)
        dataset = self.load()
        output_dir = make_folder(self.output_dir)
        console.print(
            f"{self.model} (width {self.width:g}, head {self.head_features}) on {dataset.name}:"
            f" {dataset.train['label'].shape[0]} images to train, {dataset.test['label'].shape[0]} to test;"
            f" mesh {mesh}, rules {self.rules}",
            highlight=False,
            soft_wrap=True,
        )
        trained = train(self, dataset, mesh, console)
        console.print(
            f"test accuracy {trained.test_accuracy:.2%} after {len(trained.losses)} steps; the step was compiled "
            f"{trained.num_compiles} time{'s' * (trained.num_compiles != 1)}",
            style="bold",
            highlight=False,
        )
        print_value(trained.plan, console)

        from splitjax.cli._memory import comparison
        from splitjax.cli._plot import write_plot

        with waiting("compiling the step of data parallelism too, to compare its memory"):
            uses = compare_memory(trained, mesh)
        print_value(comparison(*uses), console)
        trained.plan.save(output_dir / "plan.json")
        title = f"{self.model} on {dataset.name}, {mesh}: test accuracy {trained.test_accuracy:.2%}"
        if write_plot(output_dir / "demo.png", trained.losses, trained.accuracies, uses, title):
            console.print(f"plot: {output_dir / 'demo.png'}", highlight=False)
        else:
            console.print("no plot: matplotlib is not installed (pip install 'splitjax[demo]')")
        console.print(f"plan: {output_dir / 'plan.json'}", highlight=False)
        seconds = time.monotonic() - begin
        write_json(self.json, demo_json(self, trained, uses, seconds), console)
        console.print(f"total {seconds:.0f} s", highlight=False)
        return 0

    def load(self) -> Dataset:
        """Returns the images. Raises `DataError` for images that cannot be found or read."""
        from splitjax import data

        if self.data == "digits":
            return data.load_digits(seed=self.seed)
        if self.data_dir is None:
            raise DataError(
                "CIFAR-10 is read from a folder",
                place="--data-dir",
                remedy="download and unpack its binary version, and give the folder: --data-dir cifar-10-batches-bin",
            )
        return data.load_cifar10(self.data_dir)

    def batches(self, dataset: Dataset) -> Iterator[dict[str, Any]]:
        """Returns the training batches of the `dataset`, epoch after epoch, as many as `num_steps` says."""
        epochs = (dataset.train_batches(self.batch_size, seed=self.seed, epoch=epoch) for epoch in itertools.count())
        return itertools.islice(itertools.chain.from_iterable(epochs), self.num_steps(dataset))

    def test_batches(self, dataset: Dataset) -> Iterator[dict[str, Any]]:
        """Returns the batches of the `dataset`'s test images, as numpy arrays."""
        return dataset.test_batches(self.batch_size)

    def num_steps(self, dataset: Dataset) -> int:
        """Returns the number of steps over the `dataset`. Raises `DataError` where the images do not fill one batch."""
        num_images = dataset.train["label"].shape[0]
        if num_images < self.batch_size:
            raise DataError(
                f"{num_images} training images do not fill one batch",
                value=self.batch_size,
                place="--batch-size",
                remedy=f"give a batch size of at most {num_images}",
            )
        steps = self.epochs * (num_images // self.batch_size)
        return steps if self.steps is None else min(steps, self.steps)


@dataclasses.dataclass(frozen=True)
class Trained:
    """Holds what training left behind.

    - `init`: the init_fn and its key.
    - `train_step`: the undecorated step; `parallel_step`: the decorated one.
    - `batch_shapes`: of a batch, by name.
    - `plan`: of the decorated step.
    - `losses`, `accuracies`: of every step.
    - `test_accuracy`: of all test images, 0 to 1.
    - `num_compiles`: how often the step was compiled.
    """

    init: tuple[Any, Any]
    train_step: Any
    parallel_step: Any
    batch_shapes: Any
    plan: Any
    losses: tuple[float, ...]
    accuracies: tuple[float, ...]
    test_accuracy: float
    num_compiles: int


def train(options: Demo, dataset: Dataset, mesh: MeshShape, console: Console) -> Trained:
    """Trains and tests a model: the loop that a user would write around a decorated step.

    **Arguments:** `options`: of the command. `dataset`: the images. `mesh`: axes and sizes. `console`: where progress
    is shown.
    """
    import jax
    import optax

    import splitjax
    from splitjax import models
    from splitjax.runtime.training.progress import TrainingProgress

    num_steps = options.num_steps(dataset)
    rate = optax.warmup_cosine_decay_schedule(0.0, options.learning_rate, max(1, num_steps // 10), max(2, num_steps))
    spec = models.build(
        options.model, num_classes=dataset.num_classes, width=options.width, head_features=options.head_features
    )
    init_fn, train_step, eval_step = models.make_step(spec, optax.adam(rate), value_and_grad=splitjax.value_and_grad)
    parallel_step = splitjax.parallelize(
        train_step, mesh=dict(mesh.axes), rules=options.rules, shard_state=options.shard_state
    )
    evaluate = parallel_step.like(eval_step)

    key = jax.random.key(options.seed)
    batch_shapes = spec.example(options.batch_size)
    with waiting(f"planning the step of {options.model} and making its state, sharded"):
        state = parallel_step.init(init_fn, key, example=(batch_shapes,))
        plan = parallel_step.plan(state, batch_shapes)
    losses, accuracies = [], []
    live = Console(stderr=True)
    with TrainingProgress(console, num_steps, options.batch_size, live=live) as progress:
        for batch in options.batches(dataset):
            state, metrics = parallel_step(state, batch)
            losses.append(float(metrics["loss"]))
            accuracies.append(float(metrics["accuracy"]))
            progress.update(losses[-1], accuracies[-1])
    with waiting("compiling the test, and testing"):
        num_correct = sum(float(evaluate(state, batch)["correct"]) for batch in options.test_batches(dataset))
    return Trained(
        (init_fn, key),
        train_step,
        parallel_step,
        batch_shapes,
        plan,
        tuple(losses),
        tuple(accuracies),
        num_correct / dataset.test["label"].shape[0],
        len(parallel_step.compiles),
    )


def demo_json(options: Demo, trained: Trained, uses: Sequence[MemoryUse], seconds: float) -> dict[str, Any]:
    """Returns what the demo found as `--json` writes it: `trained` under the `options`, the memory of two ways to train
    (`uses`), and the `seconds` that all took."""
    return {
        "model": options.model,
        "data": options.data,
        "mesh": options.mesh,
        "rules": options.rules,
        "test_accuracy": trained.test_accuracy,
        "losses": trained.losses,
        "accuracies": trained.accuracies,
        "num_compiles": trained.num_compiles,
        "memory": [dataclasses.asdict(use) for use in uses],
        "seconds": seconds,
    }


def compare_memory(trained: Trained, mesh: MeshShape) -> tuple[MemoryUse, MemoryUse]:
    """Returns the bytes per device of the step of `trained` under data parallelism and as it ran, on as many devices as
    the `mesh` has."""
    import splitjax
    from splitjax.cli._memory import measure

    baseline = splitjax.parallelize(trained.train_step, mesh={"data": mesh.num_devices}, rules="data_parallel")
    return (
        measure("data parallel", baseline, trained.init, trained.batch_shapes),
        measure(trained.plan.rules, trained.parallel_step, trained.init, trained.batch_shapes),
    )


def make_folder(path: pathlib.Path) -> pathlib.Path:
    """Makes the folder `path` where it does not exist, and returns it. Raises `DataError` where it cannot be made."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the output folder cannot be made: {error.strerror or error}",
            value=str(path),
            place="--output-dir",
            remedy="give a folder that may be written to",
        ) from error
    return path
